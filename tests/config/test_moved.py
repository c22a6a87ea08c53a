"""Tools answer to their old names with one line that has the new one."""

import subprocess
import sys

import pytest

from config.cli import REPOSITORY
from config.moved import MOVED, new_name


@pytest.mark.parametrize("name", MOVED)
def test_the_new_name_can_be_run(name: str) -> None:
    new = new_name(f"training.{name}")
    place = REPOSITORY / new.replace(".", "/")
    assert (place / "__main__.py").is_file() or place.with_suffix(".py").is_file()
    assert not list((REPOSITORY / "training").glob(f"{name}*/*.py"))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("training.parity.steps", "tools.parity.steps"),
        ("training.benchmark.overhead", "lab.benchmark.overhead"),
        ("training.parity.defects", "lab.detection.gate"),
        ("tracking.wandb.deliver", "tracking.wandb.sync"),
    ],
)
def test_an_old_name_is_answered_in_one_line(old: str, new: str) -> None:
    command = [sys.executable, "-u", "-m", old, "--config", "x.yaml"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: python -m {old} has moved: use python -m {new}\n"


@pytest.mark.parametrize("name", ["training.checkpoint", "training.profile", "training", "tools.parity", "parity", ""])
def test_what_has_not_moved_has_no_other_name(name: str) -> None:
    assert new_name(name) is None
