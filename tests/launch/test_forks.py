"""Ranks forked from a program that has imported what they need."""

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from config.cli import REPOSITORY

RANKS = """
import json, os, sys, time
import torch
own = [os.environ[name] for name in ("RANK", "WORLD_SIZE", "OWN")]
print(json.dumps([sys.argv[1:], *own, torch.get_num_threads()]))
print("an error", file=sys.stderr)
if "fail" in sys.argv:
    time.sleep(60 * (os.environ["RANK"] == "0"))
    sys.exit(7)
if "hang" in sys.argv:
    time.sleep(60)
"""
PROGRAM = """
import os, subprocess, sys
from pathlib import Path
import torch

import launch.job as job
from launch.forks import Forks

folder = Path(sys.argv[1])
forks = Forks(2, torch.set_num_threads)
os.environ["OWN"] = "set later"
script = str(folder / "ranks.py")
print(job.launch([script, "a b"], processes=2, log=folder / "good.log", forks=forks))
print(job.launch([script, "fail"], processes=2, log=folder / "failed.log", forks=forks))
print(job.launch(["-m", "json.tool", "--help"], processes=2, log=folder / "module.log", forks=forks))
print(job.launch(["missing.py"], processes=2, log=folder / "missing.log", forks=forks))
try:
    job.launch([script, "hang"], processes=2, log=folder / "late.log", forks=forks, seconds=3)
except subprocess.TimeoutExpired:
    print("late")
print("hanging", flush=True)
job.launch([script, "hang"], processes=2, log=folder / "hanging.log", forks=forks)
"""


def _running(place: Path) -> list[int]:
    """Processes that have this log, or one in this folder, open as their output."""
    found = []
    for path in Path("/proc").glob("[0-9]*/fd/1"):
        with suppress(OSError):
            if path.readlink().is_relative_to(place):
                found.append(int(path.parts[2]))
    return found


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_ranks_are_forked_and_none_outlives_its_job(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "ranks.py").write_text(RANKS)
    (tmp_path / "program.py").write_text(PROGRAM)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, str(tmp_path / "program.py"), str(tmp_path)]
    program = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    try:
        assert program.stdout is not None
        lines = [program.stdout.readline().strip() for _ in range(6)]
        assert lines == ["0", "7", "0", "1", "late", "hanging"]
        log = (tmp_path / "good.log").read_text().splitlines()
        assert log[0].endswith("ranks.py a b") and "torch.distributed.run" in log[0]  # how to start it by hand
        ranks = [f'[["a b"], "{rank}", "2", "set later", 1]' for rank in range(2)]
        assert sorted(log[1:]) == sorted([*ranks, "an error", "an error"])
        assert "usage:" in (tmp_path / "module.log").read_text()
        assert "No such file" in (tmp_path / "missing.log").read_text()
        deadline = time.monotonic() + 30
        while len(_running(tmp_path / "hanging.log")) < 2 and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(_running(tmp_path / "hanging.log")) == 2
        program.send_signal(number)
        program.wait(30)
        while _running(tmp_path) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert _running(tmp_path) == []
    finally:
        program.kill()
