"""A lock that a killed build left is removed, one that somebody holds stays, and nobody waits for ever."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from config import op_builds

OP = "deepspeed_shm_comm"


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The lock of a build ten minutes ago."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setattr(op_builds, "_compiling", lambda: False)  # whatever else this machine does
    path = tmp_path / "py311_cpu" / OP / "lock"
    path.parent.mkdir(parents=True)
    path.touch()
    (path.parent / "shm.o").write_bytes(b"half an object")
    for file in path.parent.iterdir():
        age(file, 600)
    return path


def age(file: Path, seconds: float) -> None:
    then = time.time() - seconds
    os.utime(file, (then, then))


def clear(op: str = OP, **given: float) -> list[str]:
    said: list[str] = []
    op_builds.clear_abandoned(op, said.append, **given)
    return said


def test_a_lock_that_nobody_holds_is_removed_and_the_build_kept(lock):
    assert clear() == [f"removed {lock}: the build of {OP} that left it was killed"]
    assert not lock.exists()
    assert (lock.parent / "shm.o").exists()
    assert clear() == []


def test_a_lock_that_a_process_has_open_stays(lock):
    program = f"held = open({str(lock)!r}); print(flush=True); input()"
    holder = subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        holder.stdout.readline()
        assert clear() == [f"waiting for {lock}: process {holder.pid} builds {OP}"]
        assert lock.exists()
    finally:
        holder.kill()
        holder.communicate()
    assert clear() == [f"removed {lock}: the build of {OP} that left it was killed"]


def test_the_build_of_another_op_is_left_alone(lock):
    assert clear("fused_adam") == []
    assert lock.exists()


def test_a_build_of_a_moment_ago_is_given_time(lock):
    """It may be another container's, whose processes cannot be seen."""
    age(lock.parent / "shm.o", 0)
    began = time.monotonic()
    said = clear(young_seconds=2.0)
    assert 1.5 < time.monotonic() - began < 30
    assert said[0].endswith("it is removed when its build is 2 s old")
    assert said[1].startswith("removed")
    assert not lock.exists()


def test_a_lock_on_a_shared_file_system_may_be_another_machines(lock, monkeypatch):
    monkeypatch.setattr(op_builds, "mount_of", lambda path: {"mount": "/", "filesystem": "nfs4"})
    assert clear() == [
        f"waiting for {lock}: another process builds {OP}; if none does, on any machine, remove that file"
    ]
    assert lock.exists()


def test_a_lock_may_be_that_of_another_user_who_compiles(lock, monkeypatch):
    monkeypatch.setattr(op_builds, "_compiling", lambda: True)
    monkeypatch.setattr(op_builds, "_open_files", lambda: ({}, True))
    assert clear()[0].startswith(f"waiting for {lock}: another process builds")
    assert lock.exists()


def test_no_folder_is_no_lock_and_none_is_made(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "none"))
    assert clear() == []
    assert not (tmp_path / "none").exists()


def test_ranks_that_come_together_do_not_take_each_others_new_locks(lock):
    """Each clears and then builds under a lock, as torch does; every build must find its lock in place at its end."""
    program = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from config import op_builds\n"
        "op_builds._compiling = lambda: False\n"
        "lock = Path(sys.argv[1])\n"
        "op_builds.clear_abandoned(lock.parent.name, lambda line: None, young_seconds=0.0)\n"
        "try:\n"
        "    descriptor = os.open(lock, os.O_CREAT | os.O_EXCL)\n"
        "except FileExistsError:\n"
        "    sys.exit(0)\n"
        "time.sleep(0.5)\n"
        "assert os.fstat(descriptor).st_nlink, 'somebody removed the lock of a build that went on'\n"
        "lock.unlink()\n"
    )
    ranks = [subprocess.Popen([sys.executable, "-c", program, str(lock)], cwd=Path.cwd()) for _ in range(6)]
    assert [rank.wait(60) for rank in ranks] == [0] * 6
