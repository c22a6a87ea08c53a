"""Processes killed at any time: of a supervised job, and of a preparation at every phase; the next start goes on."""

import os
import re
import time
from pathlib import Path

import pytest

from config.cli import CONFIG_ERROR, LOST
from tests.support.jobs import kills
from tests.support.jobs.dying_preparation import PHASES
from tests.support.jobs.forked import Job
from tests.support.jobs.launches import command, finish, start

KILLS = os.environ.get("KILLS", "10")


@pytest.mark.machines
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun"])
def test_kills_at_random_cost_steps_and_nothing_else(tmp_path: Path, launcher: str) -> None:
    assert kills.main(["--kills", KILLS, "--seed", "2", "--launcher", launcher, "--folder", str(tmp_path)]) == 0


WITHIN_SECONDS = 40.0
"""The limit from the start of the job to the end of its last rank; up to 15 s of it follow the death."""


@pytest.mark.machines
@pytest.mark.parametrize(("who", "phase"), [(who, phase) for who, phases in PHASES.items() for phase in phases])
def test_a_kill_while_the_data_are_prepared_ends_the_job(tmp_path: Path, who: str, phase: str) -> None:
    given = command("python", tmp_path, "it", "run.steps=3", "data.workers=2", "evaluate.every_steps=0")
    given[1:2] = ["-m", "tests.support.jobs.dying_preparation", f"{who}:{phase}:{tmp_path}/mark"]
    started = time.monotonic()
    job = start(given, ranks=2)
    assert isinstance(job, Job)
    try:
        output, _ = job.communicate(timeout=WITHIN_SECONDS)
    finally:
        job.kill()
    print(f"\n{who} killed at {phase}: all had ended {time.monotonic() - started:.0f} s after the start")
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in output, output
    if who == "worker":
        assert CONFIG_ERROR in job.exit_codes and set(job.exit_codes) <= {CONFIG_ERROR, LOST}, output
        advice = "data.workers=2: a worker process was killed by SIGKILL while tokenizing"
        assert any(advice in line and "Use fewer workers" in line for line in errors), output
    else:
        assert sorted(job.exit_codes) == [-9, LOST], output
        (line,) = errors
        named = re.match(r"error: rank (\d) \(pid \d+ on .*\) was killed by SIGKILL", line)
        assert named is not None and job.exit_codes[int(named[1])] == -9, output
    finish(command("python", tmp_path, "it", "run.steps=3", "evaluate.every_steps=0"), ranks=2)
    assert not list((tmp_path / "cache").glob("*.partial-*"))
