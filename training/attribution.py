"""Find the rank, module and tensor that made a step not finite, before its gradients are discarded.

The reduced gradients name every parameter with non-finite values, but they are the same on every rank. So the step is
run again, on the same samples with the same random numbers, and each rank inspects its own modules: the first one, in
forward order, with a non-finite output from finite inputs, or else the first, in backward order, with such a gradient.
Among ranks that share sequences or matrices, the one in which it began is named.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from data.batches.loader import Batch
from precision.findings import MOST_FINDINGS, Description, Finding, check_parameters, describe
from precision.nonfinite import Inspector
from training.engine import Engine
from training.engine.gradients import reduced_gradient
from training.engine.health import Outcome
from training.engine.rng import generators, restore_generators


def attribute(engine: Engine, batch: Batch, outcome: Outcome, *, step: int) -> list[tuple[int, Finding]]:
    """(rank, finding), first causes first; without any, as after an overflow in the reduction, the parameters with a
    non-finite reduced gradient, under rank 0. A collective between backward and step; discard the gradients afterwards.
    """
    reduced = [(name, _reduced(engine, parameter)) for name, parameter in engine.model.named_parameters()]
    engine.discard_gradients()
    device = engine.world.device
    after = generators(device)
    restore_generators(outcome.generators, device)
    local = check_parameters((name, _held(parameter)) for name, parameter in engine.model.named_parameters())
    with Inspector(engine.model) as inspector:
        engine.forward_backward(batch, step=step, on_loss=inspector.check_loss)
    # A bad weight is found again in the module that uses it; under ZeRO-3 even on ranks that do not hold it.
    local += [finding for finding in inspector.findings if finding.tensor != "parameter"]
    restore_generators(after, device)
    found = [
        (rank, finding) for rank, findings in enumerate(engine.world.gather_objects(local)) for finding in findings
    ]
    shared = engine.world.sequence or engine.world.tensor or engine.world.experts
    if found and shared is not None:
        found = _without_consequences(found, engine.model, ranks=shared.size)
    if found:
        return sorted(found, key=lambda item: item[1].order)
    bad = [(name, described) for name, described in reduced if described is not None]
    return [
        (0, Finding(name, "gradient", *described, order, seen="the gradient reduced over all ranks"))
        for order, (name, described) in enumerate(bad[:MOST_FINDINGS])
    ]


def _reduced(engine: Engine, parameter: nn.Parameter) -> Description | None:
    """`describe` of a parameter's reduced gradient, gathered and dropped: all of them need not fit. A collective."""
    gradient = reduced_gradient(parameter, engine.stage)
    return None if gradient is None else describe(gradient)


def _held(parameter: Any) -> torch.Tensor:
    """A parameter in full or, at ZeRO-3, this rank's partition without its padding, which is never written."""
    if not hasattr(parameter, "ds_tensor"):
        return parameter.data
    part = parameter.ds_tensor.data.view(-1)
    return part[: max(parameter.ds_numel - parameter.ds_zero_partition_rank * len(part), 0)]


def _without_consequences(
    found: list[tuple[int, Finding]], model: nn.Module, *, ranks: int
) -> list[tuple[int, Finding]]:
    """Drop findings that reached a rank from the other `ranks` of its group: in each micro-batch, passes having the
    same order on all ranks, only those of the rank with the earliest finding stay."""
    ended, begun = {name: at for at, name in enumerate(_ends(model, ""))}, dict(model.named_modules())
    last = len(ended)
    first_in_backward = {name: last - at for at, name in enumerate(begun)}

    def when(finding: Finding) -> tuple[bool, int]:
        owner = finding.module if finding.module in begun else finding.module.rpartition(".")[0]
        if finding.tensor == "gradient":
            return True, first_in_backward.get(owner, -1)  # the loss's own comes before those of all modules
        return False, ended.get(owner, last)

    first: dict[tuple[int, int], tuple[tuple[bool, int], int]] = {}
    for rank, finding in found:
        if finding.tensor != "parameter":
            key = rank // ranks, finding.micro_batch
            first[key] = min(first.get(key, (when(finding), rank)), (when(finding), rank))
    return [
        (rank, finding)
        for rank, finding in found
        if finding.tensor == "parameter" or first[rank // ranks, finding.micro_batch][1] == rank
    ]


def _ends(module: nn.Module, name: str) -> Iterator[str]:
    """Names of all modules in the order in which their forward passes end."""
    for child_name, child in module.named_children():
        yield from _ends(child, f"{name}.{child_name}" if name else child_name)
    yield name
