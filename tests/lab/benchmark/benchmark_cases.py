"""Benchmarks of a few steps, and the functions that run inside the processes of test_benchmark.py."""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import deepspeed
import torch.distributed as dist

from config.cli import REPOSITORY
from lab.benchmark import command
from lab.benchmark.overhead import llama_parts, resolve_llama
from lab.benchmark.split import COLLECTIVES, Stages, time_deepspeed
from lab.benchmark.telemetry import CHECKS, WARM_UP_BLOCKS, Kind, time_pairs
from tests.support.jobs.launches import SMALL
from tests.support.models.small_run import batch_of, engine_of, resolve
from tracking.compare.surviving import read_events
from training.distributed import World

RECIPE = str(REPOSITORY / "config/recipes/benchmark.yaml")


def benchmarked(
    folder: Path, names: str, *given: str, stage: int = 2, compute: str = "fp32", code: int = command.ALL_HOLD
) -> dict[str, Any]:
    """The report of eight timed steps of these contestants on two processes. given: options and overrides."""
    options = ["--rounds", "1", "--steps", "8", "--warm-up", "2", "--processes", "2", "--out", str(folder)]
    precision = [f"deepspeed.config=ds_configs/zero{stage}_{compute}.json", f"precision.compute={compute}"]
    ended = command.main(["--config", RECIPE, *options, "--contestants", names, *SMALL, *precision, *given])
    found = json.loads((folder / "benchmark.json").read_text())
    assert ended == code, found["contestants"]
    return found


@contextmanager
def watched(stages: Stages) -> Iterator[None]:
    """The collectives and DeepSpeed's engines of this process, watched inside and as before outside."""
    owners = [(dist, name) for name in COLLECTIVES]
    owners += [(deepspeed.DeepSpeedEngine, name) for name in ("forward", "backward", "step")]
    before = [(owner, name, getattr(owner, name)) for owner, name in owners]
    before.append((deepspeed.comm.comm.cdb, "all_gather_function", dist.all_gather_into_tensor))
    time_deepspeed(stages)
    # a process group that is joined later, as in a job, finds this by itself
    deepspeed.comm.comm.cdb.all_gather_function = dist.all_gather_into_tensor
    try:
        yield
    finally:
        for owner, name, function in before:
            setattr(owner, name, function)


def steps_of_an_engine(world: World, *, warm_up: int, steps: int) -> tuple[dict[str, Any], int]:
    """Stages of Mantissa's engine at ZeRO-2 in FP32, and its number of parameters."""
    resolved = resolve(world, stage=2, compute="fp32", micro=2)
    with engine_of(world, resolved) as engine:
        parameters = sum(parameter.numel() for parameter in engine.model.parameters())
        stages = Stages(world.device, warm_up=warm_up, steps=steps)
        with watched(stages):
            for step in range(1, steps + 1):
                outcome = engine.forward_backward(batch_of(world, 2, seed=step), step=step)
                engine.step(engine.health(outcome), 0.01)
                stages.step_done()
    return stages.result(), parameters


def optional_work(world: World, *, pairs: int) -> dict[str, dict[str, Any]]:
    """For each kind of work: the seconds' shape, how often it and the others were done, and the newest checkpoint."""
    found: dict[str, dict[str, Any]] = {}
    arguments = ["--config", str(REPOSITORY / "config/recipes/demo.yaml"), "precision.compute=fp32"]
    resolved = resolve_llama([*arguments, "telemetry.every_steps=1", *CHECKS], 1e5)
    moving = dataclasses.replace(resolved.config.optimizer, learning_rate=1e-3)  # so far that a stale copy is seen
    resolved = dataclasses.replace(resolved, config=dataclasses.replace(resolved.config, optimizer=moving))
    with llama_parts(resolved, world) as parts:
        path, before = parts.checkpoints.folder.parent / "events.jsonl", Counter[str]()
        kinds: tuple[Kind, ...] = ("checks", "adam", "observation", "save", "telemetry")
        for of in kinds:  # checks come first: they know how many updates the engine has made
            seconds = time_pairs(parts, pairs=pairs, of=of, steps=2 if of in WARM_UP_BLOCKS else 1)
            made = Counter(event["event"] for event in read_events(path))
            found[of] = {
                "seconds": seconds.shape,
                **{kind: made[kind] - before[kind] for kind in ("step", "telemetry", "precision", "corruption")},
                "saved": [folder.name for folder in parts.checkpoints.folder.glob("step-*")],
            }
            before = made
    return found
