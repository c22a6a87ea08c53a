"""Launchers above a process, which it does not outlive, and locks of builds, which never hold anybody for ever."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from config.cli import REPOSITORY
from config.errors import UserError
from config.machine import op_builds
from config.machine.processes import as_written, launchers, runs, start_ticks
from tests.support.jobs.launches import children
from training.engine.optimizers.adamw import load_cpu_adam

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


OP = "deepspeed_shm_comm"


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The lock of a killed build."""
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    path = tmp_path / "py311_cpu" / OP / "lock"
    path.parent.mkdir(parents=True)
    path.touch()
    (path.parent / "shm.o").write_bytes(b"half an object")
    return path


def clear(op: str = OP) -> list[str]:
    said: list[str] = []
    op_builds.clear_abandoned(op, said.append)
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


def test_a_lock_on_a_shared_file_system_may_be_another_machines(lock, monkeypatch):
    monkeypatch.setattr(op_builds.processes, "mount_of", lambda path: {"mount": "/", "filesystem": "nfs4"})
    assert clear() == [
        f"waiting for {lock}: another process builds {OP}; if none does, on any machine, remove that file"
    ]
    monkeypatch.undo()
    monkeypatch.setattr(op_builds.os, "getuid", lambda: lock.stat().st_uid + 1)  # as for another user, likewise
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(lock.parents[2]))
    assert clear()[0].startswith(f"waiting for {lock}: another process builds {OP}")
    assert lock.exists()


def take(lock: Path, seconds: float) -> subprocess.Popen[str]:
    """A process that builds as torch does, under `alone`: says "begun" once it has the lock."""
    program = (
        "import os, sys, time\n"
        "from pathlib import Path\n"
        "from config.machine import op_builds\n"
        "lock = Path(sys.argv[1])\n"
        "with op_builds.exclusive_build(lock.parent.name, lambda line: print(line, flush=True)):\n"
        "    descriptor = os.open(lock, os.O_CREAT | os.O_EXCL)\n"
        "    print('begun', flush=True)\n"
        f"    time.sleep({seconds})\n"
        "    assert os.fstat(descriptor).st_nlink, 'somebody removed the lock of a build that went on'\n"
        "    lock.unlink()\n"
        "print('ended', flush=True)\n"
    )
    command = [sys.executable, "-c", program, str(lock)]
    return subprocess.Popen(command, cwd=Path.cwd(), stdout=subprocess.PIPE, text=True)


def test_ranks_that_come_together_build_one_after_the_other(lock):
    ranks = [take(lock, 0.3) for _ in range(5)]
    outputs = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * 5
    assert sum("removed" in output for output in outputs) == 1  # the fixture's; every other lock was its builder's
    assert not lock.exists()


def test_what_a_killed_build_of_ours_left_is_removed_at_once(lock):
    lock.unlink()
    first = take(lock, 60)
    assert first.stdout.readline() == "begun\n"
    second = take(lock, 0)
    assert second.stdout.readline() == f"waiting for another process, which builds {OP}\n"
    first.kill()
    first.communicate()
    began = time.monotonic()
    output, _ = second.communicate(timeout=60)
    assert time.monotonic() - began < 20
    assert output.splitlines() == [f"removed {lock}: the build of {OP} that left it was killed", "begun", "ended"]


def test_each_environment_builds_in_a_folder_of_its_own(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCH_EXTENSIONS_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    mine = op_builds.extensions_folder()
    assert mine.parent == tmp_path / ".cache/torch_extensions"
    monkeypatch.setattr(sys, "prefix", "/another/.venv")
    another = op_builds.extensions_folder()
    monkeypatch.setattr(op_builds.metadata, "version", lambda package: "9.9")
    newer = op_builds.extensions_folder()
    assert len({mine, another, newer}) == 3
    op_builds.use_own_folder()
    assert os.environ["TORCH_EXTENSIONS_DIR"] == str(newer)
    monkeypatch.setattr(sys, "prefix", "/a/third")
    assert op_builds.extensions_folder() == newer  # as for every process that this one starts


def test_without_a_compiler_the_line_names_the_setting_and_what_to_install(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path / "ops"))
    with pytest.raises(UserError, match=r"zero_optimization\.offload_optimizer: .*cpu_adam .*apt-get install g\+\+"):
        load_cpu_adam()
