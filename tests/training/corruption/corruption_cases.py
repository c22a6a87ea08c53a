"""Code run inside the processes of test_corruption.py: a few steps of a small run into which a bit is flipped."""

import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.support.models.small_run import masters_of
from tests.support.runs.report_runs import report_of
from tests.training.checkpoint import resume_cases
from tests.training.jobs.step_cost_cases import parts_of
from tracking.compare.surviving import read_events
from tracking.events import describe_event
from tracking.run_dir import RunDir
from training.distributed import World
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


def trained_with_shared_experts(world: World, **options: Any) -> dict[str, Any]:
    """The same of a mixture, of whose experts each of two ranks has half."""
    return trained(world.sharing_experts(2, timeout_minutes=2), **options)


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


def cost_of_checks(world: World, *, overrides: Sequence[str], repeats: int = 20) -> dict[str, float]:
    """[CPU seconds] Medians of what the checks add to a healthy step of the same model, and of the step."""
    shape = (
        "model.config={hidden_size: 512, intermediate_size: 1408, num_hidden_layers: 4, num_attention_heads: 8, "
        "num_key_value_heads: 8, tie_word_embeddings: true}"
    )
    with (
        tempfile.TemporaryDirectory() as folder,
        parts_of(world, Path(folder), overrides=(shape, *overrides), stage=2, compute="bf16", micro=2) as parts,
    ):
        assert parts.checks is not None
        spent: dict[str, list[float]] = {"numbers": [], "before_update": [], "after_update": []}
        for name, times in spent.items():
            setattr(parts.checks, name, _timed(getattr(parts.checks, name), times))
        own, progress = parts.batches.next_step, Progress()

        def longer() -> Any:
            batch = own()
            return replace(batch, input_ids=batch.input_ids.repeat(1, 1, 32), labels=batch.labels.repeat(1, 1, 32))

        parts.batches.next_step = longer  # type: ignore[method-assign]
        steps: list[float] = []
        for _ in range(repeats):
            before = time.process_time()
            progress, _, _ = train_step(parts, progress)
            steps.append(time.process_time() - before)
    return {name: statistics.median(times[2:]) for name, times in {**spent, "step": steps}.items()}


def _timed(function: Any, times: list[float]) -> Any:
    def timed(*args: Any, **kwargs: Any) -> Any:
        before = time.process_time()
        result = function(*args, **kwargs)
        times.append(time.process_time() - before)
        return result

    return timed
