"""Code run inside the processes of test_resume.py: a whole job that is interrupted."""

import gc
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from config.cli import REPOSITORY
from config.command_line import read_command_line
from config.resolved import Resolved
from tests.support.jobs.launches import SMALL
from tests.support.jobs.process_group import ProcessGroup
from tests.support.models.small_run import checksum, masters_of
from tracking.compare.surviving import read_events
from training.build import build
from training.distributed import World
from training.engine import Engine, build_engine
from training.loop import train
from training.session import Session, locked_run_dir, session, start_counts
from training.tasks.task import prepare

STEPS = 10


class Interrupted(Exception):
    """The job stops here, between two micro-batches."""


def job(world: World, *, folder: str, name: str, overrides: list[str], passes: int | None) -> dict[str, Any]:
    """Resume the job and train it to its end, or until its `passes`-th forward pass; its state then."""
    resolved = resolve(folder, name, overrides)

    def engine_of(resolved: Resolved, shape: Any, world: World, drawn: bool) -> Engine:
        """The engine that train.py builds, which draws no weights that a checkpoint replaces."""
        return build_engine(resolved, shape, world, start_counts(resolved))

    with (
        mock.patch("training.session.build_engine", engine_of),
        locked_run_dir(resolved, world),
        session(resolved, world=world, shares=("sequence", "expert")) as opened,
    ):
        if not start_counts(resolved) and resolved.config.model.name_or_path is None:
            assert not any(master.any() for master in masters_of(opened.engine).values())
        return trained(opened, passes)


def trained(opened: Session, passes: int | None, *, observed: bool = True) -> dict[str, Any]:
    """The state in which a session's training ends, or breaks off at the forward pass after `passes`.

    observed: False observes no dtypes in its first step.
    """
    parts, progress = build(opened)
    if not observed:
        parts = replace(parts, first_step=-1)
    begun = 0

    def count(*_: Any) -> None:
        nonlocal begun
        begun += 1
        if passes is not None and begun > passes:
            raise Interrupted

    handle = parts.engine.model.register_forward_pre_hook(count)
    try:
        ending = train(parts, progress)
        looked_at = any(item is parts for item in gc.get_objects())  # which leaves out what is frozen
        assert not looked_at, "each rank looks for garbage in all that was there before the first step"
        parts.stop_watching()
        return {
            "exit_code": ending.exit_code,
            "progress": ending.progress,
            "scaler": parts.engine.scaler_state(),
            "guard": parts.guard.state_dict(),
            "promotions": parts.promotions.state_dict(parts.engine.regions),
            "masters": checksum(masters_of(parts.engine)),
            "moments": checksum(_moments(parts.engine.deepspeed.basic_optimizer)),
            "random": torch.get_rng_state().numpy().tobytes(),
        }
    except Interrupted:
        return {"exit_code": None}
    finally:
        parts.checkpoints.outcomes()  # the saving thread would die with the process
        handle.remove()
        parts.record.close()


def resolve(folder: str, name: str, overrides: list[str]) -> Resolved:
    """The job's config."""
    settings = [
        *("--config", f"{REPOSITORY}/config/recipes/demo.yaml"),
        *(f"run.dir={folder}/runs", f"run.name={name}", f"run.steps={STEPS}", "run.resume=auto"),
        *("schedule.warmup_steps=2", "data.source=text", f"data.path={folder}/text", f"data.cache_dir={folder}/cache"),
        *("data.tokenizer=bytes", "data.sequence_length=32", "data.validation_fraction=0"),
        *(SMALL[-1], "model.config.attention_dropout=0.1", "model.activation_checkpointing=none"),
        *("batch.global_size=8", "batch.micro_size=2", "evaluate.every_steps=0", "checkpoint.every_steps=2"),
        *("tracking.wandb=disabled", "tracking.log_every_steps=1000", "guard.self_check_every=0"),
        *("guard.spike_sigmas=50", "guard.spike_window=16"),
    ]
    return read_command_line([*settings, *overrides])


def _moments(optimizer: Any) -> dict[str, torch.Tensor]:
    return {
        f"{index}/{key}": value
        for index, state in enumerate(optimizer.state.values())
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    }


FP16 = ("precision.compute=fp16", "precision.loss_scale={initial: 256, window: 3, hysteresis: 1}")
OVERFLOW = ("faults=[{kind: inf_gradient, step: 3, rank: 1}]",)
"""Overrides of a job whose third step overflows."""


def task_job(folder: Path, *overrides: str, task: str = "sft", rows: str = "chats") -> list[str]:
    """Overrides of a job that trains the base in `folder` with dropout on a file of rows there."""
    given = [f"task={task}", f"model.name_or_path={folder}/base", f"data.path={folder}/{rows}.jsonl"]
    given += ["model.architecture=null", "model.config={attention_dropout: 0.1}", "data.source=auto"]
    return [*given, "data.tokenizer=model", "data.sequence_length=96", *overrides]


def checkpoint_of(group: ProcessGroup, folder: Path, name: str, overrides: list[str]) -> Path:
    """The last checkpoint of a job of two steps that move far."""
    given = [*overrides, "run.steps=2", "optimizer.learning_rate=0.05", "schedule={name: constant, warmup_steps: 0}"]
    given += ["guard.spike_sigmas=0", "data.workers=1"]
    prepare(resolve(str(folder), name, given).config, progress=False)  # the group could not
    group.run(job, folder=str(folder), name=name, overrides=given, passes=None)
    return folder / "runs" / name / "checkpoints" / "step-2"


def name_of(what: str) -> str:
    """The name of a job's run."""
    return what.replace(" ", "-").replace(",", "")


def ends_as_whole(
    group: ProcessGroup,
    folder: Path,
    what: str,
    overrides: list[str],
    *,
    breaks: tuple[int, ...],
    skipped: list[int] | None = None,
    seconds: float = 180.0,
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Train the job whole, and once more as `{name}-broken`, which breaks off at these forward passes of a start.

    All that both end with is equal. skipped: its steps that are not applied; None: the third if `what` has an overflow.
    Its end on each rank, and its record by step.
    """
    how: dict[str, Any] = {"folder": str(folder), "overrides": overrides, "seconds": seconds}
    name = name_of(what)
    whole = group.run(job, name=name, passes=None, **how)
    for passes in (*breaks, None):
        broken = group.run(job, name=f"{name}-broken", passes=passes, **how)
        assert (broken[0]["exit_code"] is None) == (passes is not None)
    assert sessions_resumed(str(folder), f"{name}-broken") == len(breaks)
    assert [result["exit_code"] for result in whole] == [0] * len(whole)
    assert broken == whole
    record = last_by_step(str(folder), name)
    assert last_by_step(str(folder), f"{name}-broken") == record
    expected = ([3] if "overflow" in what else []) if skipped is None else skipped
    assert [row["step"] for row in record if not row["applied"]] == expected
    return whole, record


def sessions_resumed(folder: str, name: str) -> int:
    """The number of times that the run resumed from a checkpoint."""
    events = read_events(Path(folder) / "runs" / name / "events.jsonl")
    return sum(event["event"] == "run_start" and event["resumed_from"] is not None for event in events)


def last_by_step(folder: str, name: str) -> list[dict[str, Any]]:
    """The recorded fields of each step; the last line of a step counts."""
    keys = ("step", "loss", "grad_norm", "lr", "loss_scale", "applied", "skipped_total", "sample_ids_sha256", "tokens")
    events = read_events(Path(folder) / "runs" / name / "events.jsonl")
    steps = {event["step"]: {key: event[key] for key in keys} for event in events if event["event"] == "step"}
    return [steps[step] for step in sorted(steps)]
