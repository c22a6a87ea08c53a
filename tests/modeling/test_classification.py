"""Metrics of encoders and means of rows equal their definitions, however the examples are cut or packed."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from modeling.objectives.classification import IGNORED, Classification, Regression
from modeling.objectives.label_prediction import labels_of_row
from tests.support.runs.metrics import expected_metrics


def scored(objective: Any, outputs: torch.Tensor, labels: torch.Tensor, cuts: list[int], **inputs: torch.Tensor) -> Any:
    """Loss and metrics, added up over parts of the batch."""
    loss, sums, start = 0.0, torch.zeros(len(objective.sums), dtype=torch.float64), 0
    for end in [*cuts, len(outputs)]:
        part = slice(start, end)
        given = {name: value[part] for name, value in inputs.items()}
        found = objective.score(lambda **_: SimpleNamespace(logits=outputs[part]), given, labels[part])  # noqa: B023
        loss, sums, start = loss + float(found.loss), sums + found.sums, end
    return loss, objective.metrics(sums.tolist(), float((labels != IGNORED).sum()))


@pytest.mark.parametrize("by_token", [False, True])
@pytest.mark.parametrize("labels", [2, 3, 7])
def test_classification(labels: int, by_token: bool) -> None:
    torch.manual_seed(labels)
    shape = (40, 9) if by_token else (40, 1)
    there = torch.randint(labels, shape) if labels < 7 else torch.randint(4, shape)  # three labels never occur
    there[torch.rand(shape) < 0.2] = IGNORED
    outputs = torch.randn(*shape, labels) + 1.2 * torch.nn.functional.one_hot(there.clamp(min=0), labels)
    outputs = outputs if by_token else outputs[:, 0]
    objective = Classification(labels)
    loss, found = scored(objective, outputs, there, [1, 2, 30])
    counts = there.flatten() != IGNORED
    flat, real = outputs.reshape(-1, labels)[counts], there.flatten()[counts]
    expected = expected_metrics("sequence", flat.argmax(-1).tolist(), real.tolist())
    if labels == 2:
        expected["f1"] = f1_of_the_second(flat.argmax(-1).tolist(), real.tolist())
    assert found == pytest.approx(expected, rel=1e-12)
    assert found["accuracy"] > 0.4
    exact = -torch.log_softmax(flat.double(), -1)[torch.arange(len(real)), real].sum()
    assert loss == pytest.approx(float(exact), rel=1e-5)


def f1_of_the_second(predicted: list[int], there: list[int]) -> float:
    right = sum(a == b == 1 for a, b in zip(predicted, there, strict=True))
    precision, recall = right / predicted.count(1), right / there.count(1)
    return 2 * precision * recall / (precision + recall)


@pytest.mark.parametrize("where", [0.0, 300.0, 1e4])
def test_regression(where: float) -> None:
    torch.manual_seed(1)
    there = where + torch.randn(50, 1)
    outputs = there + torch.randn(50, 1)
    labels = torch.zeros(50, 1, dtype=torch.int64)
    labels[7] = IGNORED
    outputs[7] = torch.nan  # a padding row may hold anything
    loss, found = scored(Regression(), outputs, labels, [3, 20], targets=there)
    keep = labels.flatten() != IGNORED
    x, y = outputs[keep].flatten().double().numpy(), there[keep].flatten().double().numpy()
    assert found["pearson"] == pytest.approx(float(np.corrcoef(x, y)[0, 1]), rel=1e-6)
    assert found["rmse"] == pytest.approx(float(np.sqrt(((x - y) ** 2).mean())), rel=1e-6)
    assert loss == pytest.approx(float(((x - y) ** 2).sum()), rel=1e-5)


def test_what_has_no_spread_has_no_correlation() -> None:
    labels = torch.zeros(4, 1, dtype=torch.int64)
    assert scored(Classification(3), torch.tensor([[5.0, 0, 0]] * 4), labels, [])[1]["matthews"] == 0
    assert scored(Regression(), torch.ones(4, 1), labels, [], targets=torch.ones(4, 1))[1]["pearson"] == 0
    assert Classification(3).metrics([0.0] * 9, 0.0) == {"accuracy": 0.0, "macro_f1": 0.0, "matthews": 0.0}
    assert Regression().metrics([0.0] * 6, 0.0) == {"pearson": 0.0, "rmse": 0.0}


@pytest.mark.parametrize("seed", range(5))
def test_a_label_is_of_the_row_it_stands_in(seed: int) -> None:
    draw = random.Random(seed)
    positions, labels, exact = (torch.zeros(3, 20, dtype=torch.int64) for _ in range(3))
    for sequence in range(3):
        start = 0
        while start < 20:
            stop = min(20, start + draw.randint(1, 9))
            learned = [draw.random() < 0.5 for _ in range(start, stop)]
            positions[sequence, start:stop] = torch.arange(stop - start)
            labels[sequence, start:stop] = torch.tensor([draw.randrange(9) if yes else -100 for yes in learned])
            exact[sequence, start:stop] = sum(learned)
            start = stop
    assert torch.equal(labels_of_row(labels, positions), exact)
    laid = labels_of_row(labels.reshape(1, -1), positions.reshape(1, -1))
    assert torch.equal(laid, exact.reshape(1, -1))
    assert torch.equal(labels_of_row(labels, None), (labels != -100).sum(1, keepdim=True).expand(3, 20))
