"""environment.json says what ran where, and holds no secret."""

import json
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from config.cli import REPOSITORY
from config.version import VERSION
from tracking.environment import environment, safe_variables

_SECRET = "hunter2hunter2"


def test_it_tells_versions_machine_and_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", "demo.yaml", "run.steps=5"])
    facts = environment({"world_size": 2, "devices": ["cpu", "cpu"]})
    assert json.loads(json.dumps(facts)) == facts
    assert facts["versions"]["mantissa"] == VERSION
    assert facts["versions"]["torch"] == version("torch") and facts["versions"]["deepspeed"] == version("deepspeed")
    assert facts["cpu"]["usable_cores"] >= 1 and facts["memory_bytes"] > 2**28
    assert facts["command_line"] == ["train.py", "--config", "demo.yaml", "run.steps=5"]
    assert (facts["world_size"], facts["devices"]) == (2, ["cpu", "cpu"])


def test_the_commit_is_that_of_the_code_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["git", "-C", str(REPOSITORY), "rev-parse", "HEAD"]
    head = subprocess.run(command, capture_output=True, text=True, check=False)
    git = environment({})["git"]
    assert (git["commit"] if git else "") == head.stdout.strip()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment({})["git"] is None


def test_only_named_variables_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "HOME_MADE", "SLURM_JWT"):
        monkeypatch.setenv(name, _SECRET)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    facts = environment({})
    assert facts["variables"]["OMP_NUM_THREADS"] == "3" and facts["variables"]["NCCL_DEBUG"] == "INFO"
    assert _SECRET not in json.dumps(facts)


def test_a_login_in_an_allowed_variable_is_hidden() -> None:
    assert safe_variables({"NCCL_NET": f"tcp://me:{_SECRET}@host:1"}) == {"NCCL_NET": "tcp://***@host:1"}
