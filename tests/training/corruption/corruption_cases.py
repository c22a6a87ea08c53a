"""Code run inside the processes of test_corruption.py: a few steps of a small run into which a bit is flipped."""

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.support.models.small_run import masters_of
from tests.support.runs.report_runs import report_of
from tests.training.checkpoint import resume_cases
from tests.training.jobs.step_cost_cases import parts_of
from tracking.compare.surviving import read_events
from tracking.events import describe_event
from tracking.run_dir import RunDir
from training.distributed import World
from training.engine import Engine, build_engine
from training.progress import Progress
from training.step import train_step

HIT = "model.layers.1.mlp.down_proj"


def trained(
    world: World, *, stage: int, compute: str, overrides: Sequence[str], steps: int = 5, save_after: int = 0
) -> dict[str, Any]:
    """Events (on rank 0), verdicts, losses and masters of a run; it ends where the guard says ABORT."""
    with (
        tempfile.TemporaryDirectory() as folder,
        parts_of(world, Path(folder), overrides=tuple(overrides), stage=stage, compute=compute, micro=2) as parts,
    ):
        progress, verdicts, losses, reasons = Progress(), [], [], []
        while progress.step < steps:
            progress, judgement, health = train_step(parts, progress)
            verdicts.append(judgement.verdict.value)
            losses.append(health.loss)
            reasons.append(judgement.reason)
            if judgement.verdict.value == "ABORT":
                break
        parts.record.close()
        events = list(read_events(Path(folder) / "events.jsonl")) if world.is_main else []
        return {
            "corruption": [event for event in events if event["event"] == "corruption"],
            "reexecution": [event for event in events if event["event"] == "reexecution"],
            "verdicts": verdicts,
            "reason": reasons[-1],
            "losses": losses,
            "masters": {name: value.numpy() for name, value in masters_of(parts.engine).items()},
        }


def trained_with_noise(world: World, **options: Any) -> dict[str, Any]:
    """The same where the backward pass of each query's layer rounds its input otherwise every time, as on a GPU."""
    draw = torch.Generator().manual_seed(int.from_bytes(os.urandom(7), "little"))

    def disturb(module: torch.nn.Module, gradients: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        ulp = 2.0**-7 * (torch.rand(gradients[0].shape, generator=draw) - 0.5)
        return ((gradients[0].float() * (1 + ulp)).to(gradients[0].dtype),)

    def built(*given: Any) -> Engine:
        engine = build_engine(*given)
        for name, module in engine.model.named_modules():
            if name.endswith("q_proj"):
                module.register_full_backward_pre_hook(disturb)
        return engine

    with (
        mock.patch("training.corruption.rerun.is_exact", lambda device: False),
        mock.patch("training.session.build_engine", built),
    ):
        return trained(world, **options)


def trained_with_shared_experts(world: World, **options: Any) -> dict[str, Any]:
    """The same of a mixture, of whose experts each of two ranks has half."""
    return trained(world.sharing(expert=2, timeout_minutes=2), **options)


def broken_job(world: World, *, folder: str, overrides: list[str]) -> dict[str, Any]:
    """A whole job on a machine that breaks: how it ends, and what its folder holds."""
    found = resume_cases.job(world, folder=folder, name="broken", overrides=overrides, passes=None)
    run = Path(folder) / "runs" / "broken"
    report, console = "", []
    if world.is_main:
        report = report_of(RunDir(run))
        console = [describe_event(event) for event in read_events(run / "events.jsonl")]
    saved = sorted(int(path.name.removeprefix("step-")) for path in (run / "checkpoints").glob("step-*"))
    return {**found, "report": report, "described": console, "saved": saved}
