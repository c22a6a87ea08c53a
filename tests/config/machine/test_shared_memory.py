"""What killed processes left in /dev/shm is removed at the next start, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from config.cli import REPOSITORY
from config.machine import shared_memory
from config.machine.processes import start_ticks

KILLS_ITS_SESSION = """
import multiprocessing, os, signal, sys
from concurrent.futures import ProcessPoolExecutor
from config.machine.shared_memory import own_semaphores
if __name__ == "__main__":
    with own_semaphores(), ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        pool.submit(os.getpid).result()
        print(flush=True)
        os.killpg(0, signal.SIGKILL)
"""


def semaphores_of(pid: int) -> list[Path]:
    return list(shared_memory.FOLDER.glob(f"sem.mantissa-*-{pid}-*"))


def test_the_semaphores_of_a_killed_session_are_removed_and_a_living_ones_stay(tmp_path: Path) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLS_ITS_SESSION)
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    killed = subprocess.Popen([sys.executable, str(script)], env=environment, start_new_session=True)
    assert killed.wait(timeout=60) == -signal.SIGKILL
    assert len(semaphores_of(killed.pid)) == 5
    name = f"sem.mantissa-{shared_memory._namespace()}-{os.getpid()}-{start_ticks(os.getpid())}-{uuid.uuid4().hex[:8]}"
    mine = shared_memory.FOLDER / name
    mine.touch()
    try:
        with shared_memory.own_semaphores():
            assert semaphores_of(killed.pid) == []
            assert mine.exists()
    finally:
        mine.unlink()


def test_segments_that_nobody_has_mapped_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "FOLDER", tmp_path)
    kept, young, left = (tmp_path / f"deepspeed_allreduce_buffer_{os.getuid()}_h_{port}_0" for port in (1, 2, 3))
    for path in (kept, young, left):
        path.write_bytes(bytes(4096))
    for path in (kept, left):
        os.utime(path, (0, 0))
    program = "import mmap, sys; file = open(sys.argv[1], 'r+b'); held = mmap.mmap(file.fileno(), 0)"
    command = [sys.executable, "-c", f"{program}; print(flush=True); input()", str(kept)]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        holder.stdout.readline()
        shared_memory.remove_left_segments()
        assert kept.exists() and young.exists() and not left.exists()
    finally:
        holder.kill()
        holder.communicate()
