"""What runs inside the processes of tests/training/test_checkpoint.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from config.errors import UserError
from modeling.build import model_config
from tests.training.small_run import SEQUENCE, VOCABULARY, batch_of, engine_of, masters_of, resolve
from training.checkpoint import Checkpoints
from training.distributed import Place
from training.progress import Progress
from training.reference import Reference
from training.step_parity import StepParity

OVERFLOWING = [
    "precision.loss_scale.initial=256",
    "precision.loss_scale.window=2",
    "precision.loss_scale.hysteresis=2",
    "faults=[{kind: inf_gradient, step: 2, rank: 1}]",
    "model.config.attention_dropout=0.1",
]


def trajectory(place: Place, *, stage: int, compute: str, folder: str, first: int, last: int) -> dict[str, Any]:
    """Steps first..last with dropout and an overflow at step 2; resumed from the folder unless first is 1; saved."""
    resolved = resolve(place, stage=stage, compute=compute, overrides=OVERFLOWING)
    rows = []
    with engine_of(place, resolved) as engine:
        checkpoints = Checkpoints(Path(folder), keep=2, identity={"stage": stage}, place=place)
        torch.manual_seed(place.rank)
        progress = Progress()
        if first > 1:
            found = checkpoints.find("auto")
            assert found is not None
            progress, _ = checkpoints.load(found, engine)
            assert progress.step == first - 1
        for step in range(first, last + 1):
            health = engine.health(engine.forward_backward(batch_of(place, 4, seed=step), step=step))
            update = engine.step(health, 0.001)
            progress = progress.after(tokens=128, applied=update.applied)
            rows.append((health.loss, health.grad_norm, update.loss_scale, update.applied))
        saved = checkpoints.save(engine, progress, {})
        return {
            "rows": rows,
            "masters": masters_of(engine),
            "momentum": engine.momentum_norm(),
            "scaler": engine.scaler_state(),
            "progress": progress,
            "saved": saved,
        }


def clipping_after_load(place: Place, *, stage: int, compute: str, folder: str) -> list[dict[str, Any]]:
    """Steps measured against AdamW by hand, on a checkpoint that was saved with another clipping norm."""
    for clipping in ("1.0", "0.01"):
        overrides = [f"optimizer.gradient_clipping={clipping}", "precision.loss_scale.initial=256"]
        resolved = resolve(place, stage=stage, compute=compute, overrides=overrides)
        shape = model_config(resolved.config.model, vocab_size=VOCABULARY, sequence_length=SEQUENCE)
        with engine_of(place, resolved) as engine:
            checkpoints = Checkpoints(Path(folder), keep=2, identity={}, place=place)
            found = checkpoints.find("auto")
            progress = checkpoints.load(found, engine)[0] if found else Progress()
            parity = StepParity(engine, Reference(resolved, shape, place), resolved)
            rows = [parity.step(batch_of(place, 4, seed=seed), applied=progress.applied + seed) for seed in range(2)]
            for row in rows:
                progress = progress.after(tokens=128, applied=row["applied"])
            checkpoints.save(engine, progress, {})
    return rows


def load_with_identity(place: Place, *, folder: str, identity: dict[str, Any]) -> str:
    """The error of loading a checkpoint of another run."""
    resolved = resolve(place, stage=1, compute="fp32", overrides=OVERFLOWING)
    with engine_of(place, resolved) as engine:
        checkpoints = Checkpoints(Path(folder), keep=2, identity=identity, place=place)
        found = checkpoints.find("auto")
        assert found is not None
        try:
            checkpoints.load(found, engine)
        except UserError as error:
            return str(error)
    return ""


def find(place: Place, *, folder: str, resume: str) -> str | None:
    """What `find` chooses, or the error's text."""
    try:
        found = Checkpoints(Path(folder), keep=2, identity={}, place=place).find(resume)
    except UserError as error:
        return f"error: {error}"
    return found.name if found else None
