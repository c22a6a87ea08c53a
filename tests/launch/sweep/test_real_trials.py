"""A sweep of real two-process trials: killed and gone on with, it ends where one that nothing disturbed ends."""

import json
import shutil

import pytest
import yaml

from config.cli import REPOSITORY
from tests.launch.sweep.test_sweep import command, processes_of
from tests.support.jobs import launches
from tests.support.jobs.launches import events


@pytest.mark.slow
def test_killed_by_sigkill_it_takes_its_ranks_with_it_and_goes_on(tmp_path):
    shutil.copytree(REPOSITORY / "data", tmp_path / "text", ignore=shutil.ignore_patterns("__pycache__"))
    given = [*launches.SMALL, f"run.dir={tmp_path}/runs", "run.steps=12", "schedule.warmup_steps=2"]
    given += [f"data.path={tmp_path}/text", f"data.cache_dir={tmp_path}/cache", "precision.compute=fp32"]
    given += ["deepspeed.config=ds_configs/zero2_fp32.json", "batch.global_size=8", "batch.micro_size=2"]
    given += ["evaluate.every_steps=12", "checkpoint.every_steps=2", "tracking.wandb=disabled", "generate.tokens=0"]
    tree = {"config": str(REPOSITORY / "config/recipes/demo.yaml"), "launcher": ["deepspeed", "--num_gpus", 2]}
    tree |= {"fixed": {key: yaml.safe_load(value) for key, value in (item.split("=", 1) for item in given)}}
    commands = {}
    for name in ("unbroken", "killed"):
        path = tmp_path / f"{name}.yaml"
        path.write_text(yaml.safe_dump(tree | {"name": name, "grid": {"optimizer.learning_rate": [0.01]}}))
        commands[name] = command(path)
    launches.finish(commands["unbroken"], seconds=900)
    sweep, run = launches.start(commands["killed"]), "killed/killed-000"
    made = tmp_path / "runs" / run / "events.jsonl"
    launches.wait_until(lambda: made.is_file() and len(events(tmp_path, run, "step")) >= 4, seconds=300)
    sweep.kill()
    sweep.communicate(timeout=300)  # its trial holds the pipe until it has saved and gone
    assert processes_of(tmp_path) == []
    record = json.loads((tmp_path / "runs/killed/trials/000.json").read_text())
    assert (record["status"], record["exit_code"]) == ("stopped", 75)
    launches.finish(commands["killed"], seconds=900)
    starts = events(tmp_path, run, "run_start")
    assert [event["resumed_from"] is not None for event in starts] == [False, True]
    found = [{e["step"]: e["loss"] for e in events(tmp_path, name, "step")} for name in (run, "unbroken/unbroken-000")]
    assert found[0] == found[1] and len(found[0]) == 12
