"""The launchers above a process, by their command lines, and that it does not outlive them."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from config.cli import REPOSITORY
from config.machine.processes import as_written, launchers, runs, start_ticks
from tests.support.jobs.launches import children

STARTS_A_RANK = "import subprocess, sys; sys.exit(subprocess.call([sys.executable, '-c', sys.argv[1]]))"
RANK = """
import json, signal, sys, time
sys.path.insert(0, {repository!r})
from config.machine.processes import launchers
from training.start.process import end_with
above = launchers()
end_with(above)
print(json.dumps([[each.name, each.program, each.pid, each.words] for each in above]), flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("command", "written"),
    [
        (["/a/bin/python3.11", "/a/bin/deepspeed", "--num_gpus", "2"], ["deepspeed", "--num_gpus", "2"]),
        (["/a/bin/python", "-u", "-m", "launch.supervise", "--"], ["/a/bin/python", "-m", "launch.supervise", "--"]),
        (["python3.11", "-m", "launch.supervise", "--"], ["python", "-m", "launch.supervise", "--"]),
        (["python", "-X", "dev", "/a/torchrun", "x.py"], ["torchrun", "x.py"]),
        (["/usr/bin/mpirun", "-n", "2"], ["mpirun", "-n", "2"]),
        (["python"], []),
        ([], []),
    ],
)
def test_a_command_line_as_somebody_would_write_it(command: list[str], written: list[str]) -> None:
    assert as_written(command) == written


def start_under(program: Path) -> tuple[subprocess.Popen[str], int, list[list[object]]]:
    """A process started by `program`; its parent, its own pid, and the launchers it found."""
    program.write_text(STARTS_A_RANK)
    parent = subprocess.Popen(
        [sys.executable, str(program), RANK.format(repository=str(REPOSITORY))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    found = json.loads(parent.stdout.readline())
    (child,) = children(parent.pid)
    return parent, child, found


def test_a_rank_ends_when_its_launcher_is_killed(tmp_path: Path) -> None:
    parent, child, found = start_under(tmp_path / "torchrun")
    try:
        assert [each[:3] for each in found] == [["torchrun", "torchrun", parent.pid]]
        handle = os.pidfd_open(child)
        parent.kill()
        _, errors = parent.communicate(timeout=20)  # the child holds the pipes
        assert f"torchrun (pid {parent.pid}), which started this job, has ended: the run stops" in errors
        os.close(handle)
    finally:
        if runs(child, start_ticks(child)):
            os.kill(child, signal.SIGKILL)


def test_what_a_shell_or_a_test_has_started_stands_under_no_launcher(tmp_path: Path) -> None:
    parent, child, found = start_under(tmp_path / "anything.py")
    try:
        assert found == []
        assert launchers() == []
    finally:
        os.kill(child, signal.SIGKILL)
        parent.communicate()


def test_another_process_of_the_same_number_is_not_it() -> None:
    started = start_ticks(os.getpid())
    assert runs(os.getpid(), started) and not runs(os.getpid(), started - 1)
    assert start_ticks(2**22 + 1) == 0
