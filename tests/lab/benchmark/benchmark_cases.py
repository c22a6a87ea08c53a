"""Benchmarks of a few steps, and the functions that run inside the processes of test_benchmark.py."""

import json
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from config.cli import REPOSITORY
from lab.benchmark import command
from lab.benchmark.overhead import CHECKS, IN_BLOCKS, Work, time_work
from tests.support.jobs.launches import SMALL
from tests.support.models.small_run import resolve
from tests.training.jobs.step_cost_cases import parts_of
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


def optional_work(world: World, *, pairs: int) -> dict[str, dict[str, Any]]:
    """For each kind of work: the seconds' shape, how often it and the others were done, and the newest checkpoint."""
    found: dict[str, dict[str, Any]] = {}
    given: dict[str, Any] = {"stage": 2, "compute": "fp32"}
    overrides = ("telemetry.every_steps=1", "guard.spike_sigmas=0")
    with tempfile.TemporaryDirectory() as name, parts_of(world, Path(name), overrides=overrides, **given) as parts:
        parts = replace(parts, resolved=resolve(world, overrides=[*overrides, *CHECKS], **given))
        path, before = Path(name) / "events.jsonl", Counter[str]()
        works: tuple[Work, ...] = ("checks", "adam", "observation", "save", "telemetry")
        for of in works:  # checks come first: they know how many updates the engine has made
            seconds, saves = time_work(parts, of, pairs=pairs, steps=2 if of in IN_BLOCKS else 1)
            made = Counter(event["event"] for event in read_events(path))
            found[of] = {
                "seconds": seconds.shape,
                **{kind: made[kind] - before[kind] for kind in ("step", "telemetry", "precision", "corruption")},
                "saves": len(saves),
            }
            before = made
    return found
