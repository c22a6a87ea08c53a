"""Sweeps of real two-process trials: killed and gone on with, they end where one that nothing disturbed ends."""

import json
import shutil
import sys
from pathlib import Path

import pytest
import yaml

from config.cli import REPOSITORY
from tests.launch.sweep.test_sweep import processes_of
from tests.support.jobs import launches
from tests.support.jobs.launches import events
from tracking.compare.surviving import read_events

pytestmark = pytest.mark.slow

ONE = {"grid": {"optimizer.learning_rate": [0.01]}}


def sweep_file(folder: Path, name: str, **more) -> Path:
    """A sweep over two learning rates of a small run of twelve steps."""
    fixed = {
        "run.dir": f"{folder}/runs",
        "run.steps": 12,
        "schedule.warmup_steps": 2,
        **{key: yaml.safe_load(value) for key, value in (setting.split("=", 1) for setting in launches.SMALL)},
        "data.path": str(folder / "text"),
        "data.cache_dir": f"{folder}/cache",
        "deepspeed.config": "ds_configs/zero2_fp32.json",
        "precision.compute": "fp32",
        "batch.global_size": 8,
        "batch.micro_size": 2,
        "evaluate.every_steps": 12,
        "checkpoint.every_steps": 2,
        "tracking.wandb": "disabled",
        "generate.tokens": 0,
    }
    tree = {
        "config": str(REPOSITORY / "config/recipes/demo.yaml"),
        "name": name,
        "launcher": ["deepspeed", "--num_gpus", 2],
        "fixed": fixed,
        "grid": {"optimizer.learning_rate": [0.01, 0.003]},
        **more,
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path


def command(path: Path) -> list[str]:
    return [sys.executable, "-m", "launch.sweep", str(path)]


def finish(path: Path, *, code: int = 0) -> str:
    return launches.finish(command(path), exit_code=code, seconds=900)


def wait_for_step(folder: Path, name: str, step: int) -> None:
    path = folder / "runs" / name / "events.jsonl"

    def made() -> bool:
        return path.is_file() and any(e["event"] == "step" and e["step"] >= step for e in read_events(path))

    launches.wait_until(made, seconds=300, why=lambda: f"{name} never came to step {step}")


def results(folder: Path, name: str) -> dict:
    return json.loads((folder / "runs" / name / "results.json").read_text())


def losses(folder: Path, sweep: str, index: int) -> list:
    """The last attempt at each step of a trial."""
    last = {e["step"]: e["loss"] for e in events(folder, f"{sweep}/{sweep}-{index:03d}", "step")}
    return [last[step] for step in sorted(last)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """One folder: the corpus is prepared once."""
    made = tmp_path_factory.mktemp("sweeps")
    shutil.copytree(REPOSITORY / "data", made / "text", ignore=shutil.ignore_patterns("__pycache__"))
    return made


@pytest.fixture(scope="module")
def unbroken(folder):
    """The losses of both trials of a sweep that nothing disturbed."""
    finish(sweep_file(folder, "unbroken"))
    found = results(folder, "unbroken")
    assert [trial["processes"] for trial in found["trials"]] == [2, 2]
    assert found["trials"][0]["validation_loss"] < found["trials"][1]["validation_loss"]
    return [losses(folder, "unbroken", index) for index in (0, 1)]


def test_killed_by_sigkill_it_takes_its_ranks_with_it_and_goes_on(folder, unbroken):
    path = sweep_file(folder, "killed", **ONE)
    sweep = launches.start(command(path))
    wait_for_step(folder, "killed/killed-000", 4)
    sweep.kill()
    sweep.communicate(timeout=300)  # its trial holds the pipe until it has saved and gone
    assert processes_of(folder) == []
    record = json.loads((folder / "runs/killed/trials/000.json").read_text())
    assert (record["status"], record["exit_code"]) == ("stopped", 75)
    finish(path)
    starts = events(folder, "killed/killed-000", "run_start")
    assert [event["resumed_from"] is not None for event in starts] == [False, True]
    assert losses(folder, "killed", 0) == unbroken[0]
