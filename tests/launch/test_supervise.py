"""A job is started again when, and only when, that helps; tests/machines/test_kills.py has real ones."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from config.cli import REPOSITORY
from tests.support.jobs import launches

DIED = {"exit": 1, "steps": 3, "saved": 2}
ASKED_TO_STOP = {"exit": 75, "steps": 3, "end": [75, "asked to stop by SIGTERM or SIGUSR1"]}


def pretended(folder, *plan, options=(), overrides=()):
    """A supervised job that does what `plan` says."""
    job = ["python", f"{REPOSITORY}/tests/support/jobs/pretend_train.py", "--config", "config/recipes/demo.yaml"]
    job += [f"run.dir={folder}", "run.name=it", *overrides]  # the recipe says run.resume: never
    command = [sys.executable, "-m", "launch.supervise", "--wait", "0.1", *options, "--", *job]
    return launches.start(["env", f"PRETEND={json.dumps(plan)}", *command])


def ended(folder, *plan, code, count, seconds=30, **given):
    """The output of a job that ended with this exit code after this many starts."""
    job = pretended(folder, *plan, **given)
    output, _ = job.communicate(timeout=seconds)
    assert job.returncode == code, output
    assert starts(folder) == count
    return output


def starts(folder):
    path = folder / "it" / "starts"
    return len(path.read_text().splitlines()) if path.is_file() else 0


@pytest.mark.parametrize(
    ("told", "code"),
    [
        ({"exit": 0, "steps": 3, "end": [0, ""]}, 0),
        ({"exit": 1, "steps": 3, "end": [0, ""]}, 1),  # done, then failed to write its report
        ({"exit": 2}, 2),
        ({"exit": 1, "steps": 3, "end": [3, "nan"]}, 3),  # torchrun makes 1 of everything
        ({"exit": 1, "steps": 3, "end": [74, "full"]}, 74),
        ({"exit": 1, "steps": 3, "end": [75, "run.max_minutes is up"]}, 75),
    ],
)
def test_what_has_ended_is_not_started_again(tmp_path, told, code):
    ended(tmp_path, told, code=code, count=1)


def test_the_time_is_up_also_when_only_another_rank_noticed(tmp_path):
    """Rank 0, which writes the record, may be a moment behind the rank whose clock ran out first."""
    told = {"exit": 75, "steps": 3, "end": [75, "another rank was asked to stop by SIGTERM or SIGUSR1"]}
    ended(tmp_path, told, overrides=["run.max_minutes=1e-7"], code=75, count=1)


@pytest.mark.parametrize("first", [DIED, ASKED_TO_STOP])
def test_what_died_is_started_again_and_its_end_is_ours(tmp_path, first):
    output = ended(tmp_path, first, {"exit": 1, "steps": 6, "end": [3, "nan"]}, code=3, count=2)
    assert "restart 1 of 5 in 0.1 s" in output
    resumed = [line.split()[-1] for line in (tmp_path / "it" / "starts").read_text().splitlines()]
    assert resumed == ["never", "auto" if first.get("saved") else "never"]


def test_a_job_that_gets_no_further_is_given_up(tmp_path):
    output = ended(tmp_path, DIED, code=1, count=3)
    assert "2 starts in a row did not get beyond step 3: giving up" in output.splitlines()[-1]


def test_restarts_are_bounded_also_when_each_gets_further(tmp_path):
    plan = [{"exit": 1, "steps": step} for step in range(1, 9)]
    output = ended(tmp_path, *plan, options=["--restarts", "3"], code=1, count=4)
    assert "given up after 3 restarts within 60 minutes" in output.splitlines()[-1]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_to_the_supervisor_saves_and_ends_the_run(tmp_path, number):
    """A run without a launcher, and not its helper: wandb's service inherits the RANK that the run gave itself."""
    job = pretended(tmp_path, {**ASKED_TO_STOP, "exit": 1, "helper": True, "wait": True})
    launches.wait_until((tmp_path / "it" / "events.jsonl").is_file)
    time.sleep(0.2)  # until the helper is there
    job.send_signal(number)
    output, _ = job.communicate(timeout=30)
    assert job.returncode == 75, output
    assert starts(tmp_path) == 1
    assert f"{number.name}: the run saves and ends" in output


def test_a_second_signal_kills(tmp_path):
    job = pretended(tmp_path, {"exit": 0, "steps": 3, "wait": True})
    launches.wait_until((tmp_path / "it" / "events.jsonl").is_file)
    time.sleep(0.2)
    pid = int(subprocess.check_output(["pgrep", "-P", str(job.pid)], text=True))
    os.kill(pid, signal.SIGSTOP)  # so that it does not see the first one
    job.send_signal(signal.SIGTERM)
    time.sleep(0.3)
    job.send_signal(signal.SIGTERM)
    output, _ = job.communicate(timeout=30)
    assert job.returncode == 1
    assert "SIGTERM: the job is killed" in output
    assert starts(tmp_path) == 1


def test_a_process_that_outlives_its_launcher_is_ended_before_the_next_start(tmp_path):
    ended(tmp_path, {**DIED, "leave": True}, {"exit": 0, "end": [0, ""]}, code=0, count=2)
    assert not Path(f"/proc/{(tmp_path / 'it' / 'left').read_text()}").exists()


def test_a_rank_that_the_launcher_ends_is_gone_at_once_with_its_children(tmp_path):
    """An orphan that this supervisor adopts and does not reap would keep DeepSpeed's launcher waiting for 30 s."""
    ended(tmp_path, {"exit": 0, "terminate": True, "end": [0, ""]}, code=0, count=1, seconds=90)
    assert float((tmp_path / "it" / "terminated").read_text()) < 15


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--", "torchrun"], "no train.py after --"),
        (["--", "nowhere", "train.py"], "--config FILE is missing; for example"),
        (["--", "nowhere", "train.py", "--config", "config/recipes/demo.yaml"], "cannot start nowhere"),
        (["--", "torchrun", "train.py", "--config", "config/recipes/demo.yaml", "run.stpes=3"], "did you mean"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(arguments, message):
    command = [sys.executable, "-m", "launch.supervise", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ") and message in done.stderr and len(done.stderr.splitlines()) == 1
