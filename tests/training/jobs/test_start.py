"""A job's start and end among others: its port, its run folder, its launcher; and several runs in one process."""

import os
import re
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest

from config.cli import CONFIG_ERROR, PREEMPTED, REPOSITORY
from config.machine.processes import runs, start_ticks
from tests.support.jobs.launches import command, events, finish, start, wait_until


def ranks_of(runner: int) -> dict[int, int]:
    """Pid and start of what the `deepspeed` runner started, its launcher and the ranks."""
    lines = subprocess.check_output(["ps", "-A", "-o", "pid=,ppid="], text=True).splitlines()
    parents = {int(pid): int(parent) for pid, parent in map(str.split, lines)}
    launcher = next(pid for pid, parent in parents.items() if parent == runner)
    return {pid: start_ticks(pid) for pid, parent in parents.items() if parent == launcher or pid == launcher}


def test_a_job_finds_a_free_port_keeps_its_folder_and_ends_with_its_launcher(folder):
    """Started where its port is taken; a second job in the same folder is refused; then the runner is killed."""
    line = command("deepspeed", folder, "lone", "run.steps=100000", "checkpoint.every_steps=0", "generate.tokens=0")
    with socket.create_server(("", 0)) as taken:
        line[line.index("--master_port") + 1] = str(taken.getsockname()[1])
        job = start(line)
        wait_until(
            lambda: (folder / "runs/lone/events.jsonl").exists() and events(folder, "lone", "step"),
            seconds=120,
            why=lambda: job.poll() is not None and job.stdout.read(),
        )
    second = finish(command("python", folder, "lone"), exit_code=CONFIG_ERROR)
    assert re.search(r"error: .*/runs/lone: a job \(pid \d+ on .*\) is still writing this run; stop it", second)
    assert "Traceback" not in second
    processes = ranks_of(job.pid)
    assert len(processes) == 3
    os.kill(job.pid, signal.SIGKILL)
    began = time.monotonic()
    output, _ = job.communicate(timeout=90)  # until the last rank has closed it
    assert time.monotonic() - began < 60
    wait_until(lambda: not any(runs(*process) for process in processes.items()))
    assert f"port {taken_port(line)} is in use; this job's ranks meet at " in output
    assert f"deepspeed (pid {job.pid}), which started this job, has ended: the run stops" in output
    (end,) = events(folder, "lone", "run_end")
    assert end["exit_code"] == PREEMPTED
    assert (folder / "runs/lone/.run_lock").read_text() == ""


def taken_port(line: list[str]) -> str:
    return line[line.index("--master_port") + 1]


def losses(folder: Path, name: str) -> list[tuple[float, float]]:
    return [(event["loss"], event["grad_norm"]) for event in events(folder, name, "step")]


def test_train_can_be_called_again_in_the_same_process(folder):
    line = command("python", folder, "unused", "generate.tokens=0")
    finish([*line, "run.name=alone2", "deepspeed.config=ds_configs/zero2_fp32.json"])
    python, _, *given = line
    finish([python, str(REPOSITORY / "tests/support/jobs/repeated_train.py"), "first2:2,then3:3,again2:2", *given])
    assert len(losses(folder, "alone2")) == 6
    assert losses(folder, "first2") == losses(folder, "again2") == losses(folder, "alone2")
    for step, expected in zip(losses(folder, "then3"), losses(folder, "alone2"), strict=True):
        assert step == pytest.approx(expected, rel=1e-5)
