"""Any process of a supervised job, killed at any time: a short `python -m tests.support.jobs.kills --kills 200`."""

import os
from pathlib import Path

import pytest

from tests.support.jobs import kills

KILLS = os.environ.get("KILLS", "10")


@pytest.mark.machines
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_kills_at_random_cost_steps_and_nothing_else(tmp_path: Path, launcher: str) -> None:
    assert kills.main(["--kills", KILLS, "--seed", "2", "--launcher", launcher, "--folder", str(tmp_path)]) == 0
