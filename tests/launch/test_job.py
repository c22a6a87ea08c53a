"""How jobs start: a launcher by this interpreter's module, since its program cannot start from a path with a space."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from launch.job import by_interpreter
from tests.support.launches import finish

OWN = str(Path(sys.executable).parent)


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
