"""Code run inside the processes of test_tracing.py."""

import os
import random
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.support.models.small_run import batch_of, engine_of, masters_of, resolve, state_of
from tests.training.profile.profiler_cases import Repeated
from tracking.tracing.spans import Tracing
from training.checkpoint.checkpoints import Checkpoints
from training.checkpoint.retention import Retention
from training.distributed import World
from training.progress import Progress

TOKENS = 100
"""Tokens of a global batch of 128 places, without padding."""


class Padded(Repeated):
    """The same batches, in which some tokens are padding."""

    def next_step(self) -> Any:
        """The next one."""
        return replace(super().next_step(), places_of_all=TOKENS)


class Spoiled(RuntimeError):
    """The exception of a broken step in these tests."""


def traced(world: World, *, environment: dict[str, str] | None = None, **arguments: Any) -> dict[str, Any]:
    """`steps_of` under environment variables that are gone afterwards."""
    with patch.dict(os.environ, environment or {}):
        return steps_of(world, **arguments)


def steps_of(
    world: World,
    *,
    endpoint: str | None,
    folder: str,
    steps: int = 3,
    compute: str = "fp32",
    overrides: Sequence[str] = (),
    wait: float = 0.0,
    save: bool = False,
    fail: bool = False,
) -> dict[str, Any]:
    """Steps with or without spans, then an evaluation, and a save if asked for: what happened, seen from outside.

    fail: the last step raises before its forward pass.
    """
    notes: list[str] = []
    random.seed(7)
    resolved = resolve(world, stage=2, compute=compute, micro=2, overrides=overrides)
    with engine_of(world, resolved) as engine:
        batches, progress, rows, seconds = Padded(world, wait), Progress(), [], []
        checkpoints = Checkpoints(Path(folder), keep=Retention(1), identity={}, world=world)
        tracing, targets = None, (engine, batches, checkpoints)
        own = _own_methods(targets)  # of the engine those that faults wrap
        if endpoint is not None:
            facts = {"run": "a test", "rank": world.rank}
            session = world.from_main(os.urandom(8).hex())
            tracing = Tracing(endpoint, facts, session=session, rank=world.rank, note=notes.append)
            tracing.follow(*targets)
        for step in range(1, steps + 1):
            started = time.perf_counter()
            with tracing.step(progress.step + 1, progress.tokens) if tracing else nullcontext():
                batch = batches.next_step()
                health = engine.health(engine.forward_backward(batch, step=step))
                update = engine.step(health, 0.001)
            seconds.append(time.perf_counter() - started)
            progress = progress.after(tokens=batch.tokens, applied=update.applied)
            rows.append([health.loss, update.applied, update.loss_scale])
        engine.evaluate([batch_of(world, 2, seed=99)])
        outcomes = []
        if save:
            checkpoints.start_save(engine, state_of(engine, progress))
            outcomes = checkpoints.outcomes()
        if fail and tracing is not None:
            _fail(tracing, progress)
        closed = time.perf_counter()
        if tracing is not None:
            tracing.close()
        return {
            "rows": rows,
            "seconds": seconds,
            "close_seconds": time.perf_counter() - closed,
            "notes": notes,
            "saves": [str(type(outcome).__name__) for outcome in outcomes],
            "save_seconds": [getattr(outcome, "seconds", None) for outcome in outcomes],
            "left": sorted(_own_methods(targets) ^ own),
            "masters": {name: tensor.double().sum().item() for name, tensor in masters_of(engine).items()},
            "python_random": random.random(),
        }


def _own_methods(targets: tuple[Any, ...]) -> set[tuple[str, int]]:
    """Methods that objects have themselves, by name and identity."""
    return {(name, id(vars(target)[name])) for target in targets for name in _METHODS if name in vars(target)}


_METHODS = ("forward_backward", "health", "step", "evaluate", "next_step", "start_save", "outcomes")


def full_disk(world: World, *, endpoint: str, folder: str) -> dict[str, Any]:
    """A traced save that cannot be written: a file is where the checkpoints' folder has to be."""
    (Path(folder) / "checkpoints").write_text("in the way")
    return traced(world, endpoint=endpoint, folder=f"{folder}/checkpoints", steps=1, save=True)


def _fail(tracing: Tracing, progress: Progress) -> None:
    with suppress(Spoiled), tracing.step(progress.step + 1, progress.tokens), tracing.span("forward_backward"):
        raise Spoiled("what must not leave this machine")
