"""A launcher is started by this interpreter's module, since its program cannot start from a path with a space."""

import shlex
import sys
from pathlib import Path

import pytest

from config.child_jobs import by_interpreter
from config.cli import REPOSITORY
from config.launcher import RankEnv, launch_command
from tests.support.launches import finish

OWN = str(Path(sys.executable).parent)
RANK_0 = RankEnv(rank=0, world_size=2, local_rank=0)


@pytest.mark.parametrize(
    ("given", "started"),
    [
        ("deepspeed --num_gpus 2 train.py", "-m deepspeed.launcher.runner --num_gpus 2 train.py"),
        ("torchrun --standalone train.py", "-m torch.distributed.run --standalone train.py"),
        ("accelerate launch train.py", "-m accelerate.commands.launch train.py"),
    ],
)
def test_a_launcher_of_this_environment_is_started_by_its_interpreter(given: str, started: str) -> None:
    for path in (OWN, f"{OWN}:/usr/bin", "/nowhere"):
        assert by_interpreter(given.split(), path) == [sys.executable, *started.split()]


def test_other_programs_and_those_of_other_environments_stay(tmp_path: Path) -> None:
    other = tmp_path / "deepspeed"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    for command in (["deepspeed", "train.py"], ["python", "train.py"], ["accelerate", "env"], [str(other)], []):
        assert by_interpreter(command, f"{tmp_path}:{OWN}") == command


def test_the_modules_are_there_to_be_started() -> None:
    for launcher in (["deepspeed"], ["torchrun"], ["accelerate", "launch"]):
        interpreter, *module = by_interpreter(launcher, OWN)
        assert interpreter == sys.executable
        assert "usage:" in finish(["python", *module, "--help"]).lower()


def test_the_command_that_resumes_names_train_py_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "executable", "/work/.venv/bin/python")
    expected = ["deepspeed", "--num_gpus", "2", f"{REPOSITORY}/train.py", "a=1"]
    assert shlex.split(launch_command(RANK_0, {}, ["a=1"])) == expected


def test_the_command_that_resumes_can_be_pasted_where_the_path_has_a_space(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/work/.venv/bin/python")
    assert launch_command(RANK_0, {}, ["a=1"]) == "deepspeed --num_gpus 2 train.py a=1"
    monkeypatch.setattr(sys, "executable", "/my work/.venv/bin/python")
    command = launch_command(RANK_0, {}, ["a=1"])
    assert command == "'/my work/.venv/bin/python' -m deepspeed.launcher.runner --num_gpus 2 train.py a=1"
