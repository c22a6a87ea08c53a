"""Find out where a step that is not finite went wrong, before its gradients are forgotten.

Two looks. The reduced gradients name every parameter that is spoiled, but after the reduction every rank sees the same
ruin. So the step is run again, on the same samples with the same random numbers, and each rank watches its own modules:
the first one, in forward order, to put out a value that is not finite from inputs that were, or else the first, in
backward order, to do so with a gradient. Costs about two steps, and nothing while steps are healthy.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from data.loader import Batch
from precision.findings import Finding, check_parameters, describe
from precision.nonfinite import Inspector
from training.engine import Engine
from training.engine.health import Outcome
from training.engine.rng import generators, restore_generators

_MOST_PARAMETERS = 5
"""Spoiled parameters that are named when no rank saw one arise."""


def attribute(engine: Engine, batch: Batch, outcome: Outcome, *, step: int) -> list[tuple[int, Finding]]:
    """(rank, what it found), first causes first; a collective, to be called between backward and step.

    outcome: of the backward pass; has the random numbers that the step began with.
    When no rank sees a value go wrong (the values overflowed in the reduction between them) the parameters with a
    spoiled reduced gradient are named, under rank 0. Afterwards the gradients are the second run's: discard them.
    """
    reduced = [(name, describe(gradient)) for name, gradient in engine.gradients.names_not_finite()]
    engine.discard_quietly()
    device = engine.place.device
    after = generators(device)
    restore_generators(outcome.generators, device)
    local = check_parameters(_held_parameters(engine))
    with Inspector(engine.model) as inspector:
        engine.forward_backward(batch, step=step, on_loss=inspector.check_loss)
    # A bad weight shows again in the module that uses it, under ZeRO-3 also on ranks that do not hold it.
    local += [finding for finding in inspector.findings if finding.tensor != "parameter"]
    restore_generators(after, device)
    found = [
        (rank, finding) for rank, findings in enumerate(engine.place.gather_objects(local)) for finding in findings
    ]
    if found:
        return sorted(found, key=lambda item: item[1].order)
    spoiled = [(name, *described) for name, described in reduced if described is not None]
    return [
        (0, Finding(name, "gradient", kind, count, largest, order, seen="the gradient reduced over all ranks"))
        for order, (name, kind, count, largest) in enumerate(spoiled[:_MOST_PARAMETERS])
    ]


def _held_parameters(engine: Engine) -> Iterator[tuple[str, torch.Tensor]]:
    """What this rank holds of each parameter: all of it, or its partition under ZeRO-3."""
    for name, parameter in engine.model.named_parameters():
        yield name, getattr(parameter, "ds_tensor", parameter).data
