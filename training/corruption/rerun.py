"""Rerun of a step, to tell a transient fault, a persistent one and a genuine numeric event apart.

First each rank computes the micro-batches of the next rank with that rank's random state, then its own again; the
gradients of this last run stay and may be applied. Each run gives an answer: the summed loss, the final state of the
random generators, and checksums of every gradient before and after the reduction.

Where equal inputs give equal bits (`is_exact`), checksums are sums over bits and have to be equal. Elsewhere they are
squared norms, equal within TOLERANCE, which blames no rank for summing in another order, and sees only flips that
change a whole gradient's norm. It is not estimated from repeats: of some hundred gradients, a few agree by chance.
"""

import hashlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from data.batches.loader import Batch
from precision.corruption import Reexecution, judge_reexecution
from training.engine import Engine
from training.engine.flips import bit_sum
from training.engine.health import Outcome
from training.engine.rng import generators, restore_generators
from training.engine.tensors import local_gradient, own_shards, trainable_parameters

TOLERANCE = 0.02
"""[fraction] Tolerance of a loss or a squared norm where sums have no fixed order. With one BF16 ulp of error in the
input of each query projection, squared norms moved by at most 0.7% (Llama, OPT and BERT with 4 blocks)."""
_REST = 2.0**-24
"""[fraction] Share of the total squared norm added to each one compared: the gradient of a key bias, which is zero but
for rounding (1e-11 of the total), moved by up to 17%."""
_PART = 1 << 23
"""[values] Widened to FP64 at a time: 64 MiB."""


def is_exact(device: torch.device) -> bool:
    """Whether equal inputs give equal bits on this device."""
    return device.type == "cpu" or torch.are_deterministic_algorithms_enabled()


@dataclass(frozen=True)
class Answer:
    """Checksums of one rank's results."""

    own: torch.Tensor
    """(2,) int64: bits of the summed loss in FP64, and a hash of the random generators' final state."""
    reduced: torch.Tensor
    """(parameters,) int64: checksums of this rank's part of the reduced gradients."""
    local: torch.Tensor | None
    """(parameters,) int64: checksums of this rank's gradients before the reduction; None if none were taken."""
    finite: bool


class LocalGradients:
    """Checksums of this rank's gradients before they are reduced."""

    def __init__(self, engine: Engine) -> None:
        self._parameters = list(trainable_parameters(engine).values())
        self.sums = torch.zeros(len(self._parameters), dtype=torch.int64, device=engine.world.device)

    @contextmanager
    def signed(self) -> Iterator[None]:
        """Context of a step's passes."""
        with ExitStack() as stack:
            for row, parameter in enumerate(self._parameters):
                stack.callback(parameter.register_hook(partial(self._add, row)).remove)
            yield

    def _add(self, row: int, gradient: torch.Tensor) -> None:
        self.sums[row] = _added(self.sums[row], gradient.detach().reshape(-1))


@dataclass(frozen=True)
class Again:
    outcome: Outcome
    """Outcome of the last run, whose gradients the engine holds."""
    last: Answer
    changed: list[bool]
    """Whether a rank's last answer differs from its first, by rank."""
    parameters: list[str]
    """Names of the parameters with another reduced gradient, in the order of the backward pass."""
    judge: Callable[..., Reexecution]
    """`judge_reexecution`, which still needs `suspicious` and `healthy`."""


@torch.no_grad()
def answer(engine: Engine, outcome: Outcome, local: LocalGradients | None) -> Answer:
    """The answer of the step just computed, before its gradients are used or discarded. No collective."""
    rows = {name: row for row, name in enumerate(trainable_parameters(engine))}
    reduced = torch.zeros(len(rows), dtype=torch.int64, device=engine.world.device)
    for name, parameter, shard in own_shards(engine):
        gradient = local_gradient(parameter, shard, engine.stage)
        if gradient is not None:
            reduced[rows[name]] = _added(reduced[rows[name]], gradient.contiguous().to(reduced.device))
    end = b"".join(state.cpu().numpy().tobytes() for state in generators(engine.world.device).values())
    digest = int.from_bytes(hashlib.sha256(end).digest()[:8], "big", signed=True)
    loss = outcome.loss_sum.detach().view(torch.int64)
    own = torch.stack([loss, torch.tensor(digest, dtype=torch.int64, device=loss.device)])
    return Answer(own, reduced, local.sums if local else None, bool(torch.isfinite(outcome.loss_sum)))


def run_again(engine: Engine, batch: Batch, outcome: Outcome, first: Answer) -> Again:
    """Run the step on the next rank and then here again; the gradients of the latter stay. A collective."""
    world = engine.world
    there: Answer | None = None
    if world.world_size > 1:
        given = world.gather_objects((batch, outcome.generators))
        there, _ = _run(engine, *given[(world.rank + 1) % world.world_size])
    last, final = _run(engine, batch, outcome.generators)
    others: list[bool] | None = None
    if there is not None:
        assert last.local is not None and there.local is not None
        mine = world.gather(torch.cat([last.own, last.local]))
        theirs = world.gather(torch.cat([there.own, there.local]))
        # by rank: whether it and the rank before it gave different answers to its inputs
        others = [bool(_differ(mine[rank], theirs[rank - 1], own=2).any()) for rank in range(len(mine))]
    finite = world.gather_objects((last.finite, there.finite if there is not None else True))
    mine = own = _differ(first.own, last.own, own=2).any()[None]
    if first.local is not None and last.local is not None:
        own = own | _differ(first.local, last.local).any()
    rows = world.gather(torch.cat([own, mine, _differ(first.reduced, last.reduced)]).long()).tolist()
    differing = [any(row[2 + index] for row in rows) for index in range(len(first.reduced))]
    names = [name for name, differs in zip(trainable_parameters(engine), differing, strict=True) if differs]
    changed = [any(row[1:]) for row in rows]
    judge = partial(
        judge_reexecution,
        changed=changed,
        disagreed=others,
        finite=[(own_one, finite[rank - 1][1]) for rank, (own_one, _) in enumerate(finite)],
        named=[bool(row[0]) for row in rows],
        signed=first.local is not None,
    )
    return Again(final, last, changed, names[::-1], judge)


def _run(engine: Engine, batch: Batch, start: Any) -> tuple[Answer, Outcome]:
    engine.discard_gradients()
    restore_generators(start, engine.world.device)
    local = LocalGradients(engine)
    with local.signed():
        outcome = engine.forward_backward(batch, step=batch.position + 1)
    return answer(engine, outcome, local), outcome


def _added(total: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """() int64: a checksum with another gradient added, (n,)."""
    if is_exact(gradient.device):
        return total + bit_sum(gradient)
    squares = total.view(torch.float64)
    for part in gradient.split(
        _PART
    ):  # a copy of an unsharded embedding's gradient may not fit beside the backward pass
        squares = squares + part.double().square().sum()
    return squares.view(torch.int64)


def _differ(a: torch.Tensor, b: torch.Tensor, *, own: int = 0) -> torch.Tensor:
    """(n,) bool: which checksums differ. Two that are not finite are the same. own: number of the first ones that are
    no squared norms."""
    if is_exact(a.device):
        return a != b
    x, y = a.view(torch.float64), b.view(torch.float64)
    rest = _REST * torch.minimum(*(norms[own:].nan_to_num(0.0, 0.0).sum() for norms in (x, y)))
    most = torch.maximum(x.abs(), y.abs())
    most[own:] += rest
    return (a != b) & ~((x - y).abs() <= TOLERANCE * most) & (x.isfinite() | y.isfinite())
