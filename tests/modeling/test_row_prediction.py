"""The mean of each row's mean: which labels share a row, in packed and padded sequences, and laid end to end."""

import random

import pytest
import torch

from modeling.objectives.label_prediction import labels_of_row


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
