"""Plain torch on one process, with which steps of ranks that share something are compared."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch

from config.schema import OptimizerSection
from data.batches.loader import Batch
from modeling.linear_cross_entropy import label_loss_sum
from tests.support.models.small_models import distance
from tests.support.models.small_run import GLOBAL, batch_of, masters_of, take
from tools.parity.oracle.optimizers import optimizer_of
from training.attribution import attribute
from training.distributed import World
from training.engine import Engine
from training.engine.tensors import momentum_norm

EVALUATED = 9
"""Seed of the batch whose loss is evaluated after the steps."""

SPOILED = (
    (1, "nan_activation", "model.layers.0.mlp"),
    (0, "nan_activation", "model.layers.1.self_attn.q_proj"),
    (1, "nan_activation", "model.layers.1.mlp.up_proj"),
    (1, "nan_loss", None),
)
"""Rank, kind and module of the fault of each step; the first three reach ranks that share sequences or matrices."""

LossOf = Callable[[torch.nn.Module, int], torch.Tensor]
"""A model's mean loss over the whole global batch of a seed."""


def mean_label_loss(model: torch.nn.Module, seed: int, mask: str = "uneven") -> torch.Tensor:
    """() of `batch_of` one rank."""
    batch = batch_of(World(0, 1, 0, torch.device("cpu")), GLOBAL, seed=seed, mask=mask)
    logits = model(input_ids=batch.input_ids[0], use_cache=False).logits
    return label_loss_sum(logits, batch.labels[0]) / batch.label_tokens


def plain_steps(
    model: torch.nn.Module, section: OptimizerSection, *, steps: int, lr: float, loss_of: LossOf = mean_label_loss
) -> list[float]:
    """Train `model` in place with torch's AdamW and clipping, step n of seed n at learning rate lr / n.

    Another optimizer than AdamW follows its rule on whole parameters, of a model in FP64. The loss and the gradient
    norm of each step, then the evaluated loss.
    """
    optimizer = optimizer_of(model, section)
    found = []
    for step in range(1, steps + 1):
        loss = loss_of(model, step)
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), section.gradient_clipping or torch.inf)
        found += [float(loss.detach()), float(norm)]
        for group in optimizer.param_groups:
            group["lr"] = lr / step
        optimizer.step()
    return [*found, float(loss_of(model.eval(), EVALUATED).detach())]


def trained(engine: Engine, batch: Callable[..., Batch], *, steps: int, lr: float) -> list[float]:
    """The loss and the gradient norm of each of an engine's steps, on the batches of the same seeds, by `batch`."""
    found = []
    for step in range(1, steps + 1):
        health, update = take(engine, batch(seed=step), step=step, lr=lr / step)
        assert update.applied
        found += [health.loss, health.grad_norm]
    return found


def numbers_and_moves(
    engine: Engine, batch: Callable[..., Batch], *, steps: int, lr: float
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, norms of gradient and momentum, and metrics of an engine's steps, and how far each master moved."""
    start, numbers = masters_of(engine), list[float]()
    for step in range(1, steps + 1):
        health, _ = take(engine, batch(seed=step), step=step, lr=lr / step)
        numbers += [health.loss, health.grad_norm, momentum_norm(engine) or 0.0, *health.metrics.values()]
    return numbers, {name: master - start[name] for name, master in masters_of(engine).items()}


def blamed(engine: Engine, batch: Callable[..., Batch]) -> list[list[tuple[int, str]]]:
    """Ranks and modules that are blamed for each of the steps of SPOILED, none of which changes a master."""
    start, found = masters_of(engine), []
    for step in range(1, len(SPOILED) + 1):
        outcome = engine.forward_backward(mine := batch(seed=step), step=step)
        health = engine.health(outcome)
        assert not health.finite
        found.append([(rank, finding.module) for rank, finding in attribute(engine, mine, outcome, step=step)])
        assert not engine.step(health, 0.01).applied
    assert all(torch.equal(master, start[name]) for name, master in masters_of(engine).items())
    return found


def farthest(found: Sequence[float], expected: Sequence[float]) -> float:
    """The largest relative difference of two rows of numbers."""
    return max(abs(one / other - 1) for one, other in zip(found, expected, strict=True))


def distance_of_updates(
    found: Mapping[str, torch.Tensor], exact: Mapping[str, torch.Tensor], start: Mapping[str, torch.Tensor]
) -> float:
    """||found - exact|| / ||found - start|| over all parameters together, in FP64."""
    off, moved = (sum(float((found[n] - o[n]).double().square().sum()) for n in found) for o in (exact, start))
    return (off / moved) ** 0.5


def require_equal(found: dict[str, Any], exact: dict[str, Any], *, loss_error: float = 0.0) -> None:
    """Assert that a run made the steps of plain torch: losses, norms, tokens where both count them, updated weights.

    loss_error: absolute, of losses that are sums of what cancels.
    """
    for mine, theirs in zip(found["steps"], exact["steps"], strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5, abs=loss_error)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
        assert mine["tokens"] == theirs.get("tokens", mine["tokens"])
    assert found["after"].keys() == exact["after"].keys()
    assert distance(found["after"], exact["after"]) < 1e-5
