"""What runs inside the processes of test_steps.py. Every function is called on every rank."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from modeling.build import model_config
from tests.support.small_run import SEQUENCE, VOCABULARY, batch_of, engine_of, resolve
from training.distributed import World
from training.parity.reference import Reference
from training.parity.steps import StepParity


def measured_steps(
    world: World, *, stage: int, compute: str, steps: int, overrides: Sequence[str] = (), micro: int = 2
) -> list[dict[str, Any]]:
    """Some real steps on random batches, each held against FP32."""
    resolved = resolve(world, stage=stage, compute=compute, micro=micro, overrides=overrides)
    shape = model_config(resolved.config.model, vocab_size=VOCABULARY, sequence_length=SEQUENCE)
    rows, applied = [], 0
    with engine_of(world, resolved) as engine:
        parity = StepParity(engine, Reference(resolved, shape, world), resolved)
        for step in range(1, steps + 1):
            row = parity.step(batch_of(world, micro, seed=step), applied=applied)
            applied += row["applied"]
            rows.append(row)
    return rows
