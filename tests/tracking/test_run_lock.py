"""One job at a time writes a run folder; what a killed one has locked is free."""

import fcntl
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from config.cli import REPOSITORY
from config.errors import UserError
from tracking import run_lock
from tracking.run_lock import LOCK, RunLock, created_and_locked

HOLDER = (
    "import sys; from pathlib import Path; from tracking.run_lock import created_and_locked\n"
    "with created_and_locked(Path(sys.argv[1]), 'demo', fresh=False):\n"
    "    print(flush=True); sys.stdin.read()\n"
)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_lock, "ENDING_SECONDS", 0.3)


@contextmanager
def holder(root: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the run `demo`."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(root)], cwd=REPOSITORY, **pipes)
    try:
        process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("fresh", [False, True])
def test_a_second_job_is_refused_and_changes_nothing(tmp_path, fresh):
    with holder(tmp_path) as process:
        with pytest.raises(UserError) as caught, created_and_locked(tmp_path, "demo", fresh=fresh):
            pass
        text = str(caught.value)
        assert text.startswith(f"{tmp_path}/demo: a job (pid {process.pid} on ")
        assert text.endswith("is still writing this run; stop it or choose another run.name")
        assert [path.name for path in tmp_path.iterdir()] == ["demo"]


def test_a_killed_job_leaves_no_lock(tmp_path):
    with holder(tmp_path) as process:
        process.kill()
        process.wait()
        assert json.loads((tmp_path / "demo" / LOCK).read_text())["pid"] == process.pid
        with created_and_locked(tmp_path, "demo", fresh=False):
            assert json.loads((tmp_path / "demo" / LOCK).read_text())["pid"] == os.getpid()


def test_a_job_that_ends_a_moment_later_is_waited_for(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_lock, "ENDING_SECONDS", 20)
    with holder(tmp_path) as process:
        threading.Timer(0.5, process.kill).start()
        with created_and_locked(tmp_path, "demo", fresh=False):
            pass
    assert capsys.readouterr().err.startswith(f"mantissa: waiting for a job (pid {process.pid} on ")


def test_a_new_run_takes_the_place_of_the_old_one_and_both_are_free_afterwards(tmp_path):
    for _ in range(2):
        with created_and_locked(tmp_path, "demo", fresh=True) as run_dir:
            with pytest.raises(UserError), created_and_locked(tmp_path, "demo", fresh=True):
                pass
            assert run_dir.path == tmp_path / "demo"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo", "demo.1"]
    assert (tmp_path / "demo" / LOCK).read_text() == ""


def leave_from_elsewhere(folder: Path) -> Path:
    folder.mkdir()
    owner = {"host": "left", "pid": 7, "started": 1, "since": "yesterday", "machine": "another", "pid_namespace": "x"}
    (folder / LOCK).write_text(json.dumps(owner))
    return folder / LOCK


def test_on_a_disk_of_this_machine_the_lock_of_another_one_is_old(tmp_path):
    leave_from_elsewhere(tmp_path / "demo")
    lock = RunLock.take(tmp_path / "demo")
    assert lock is not None
    lock.release()


def test_on_a_shared_disk_another_machine_that_does_not_touch_its_lock_is_passed_over(tmp_path, monkeypatch, capsys):
    path = leave_from_elsewhere(tmp_path / "demo")
    monkeypatch.setattr(run_lock.processes, "is_local", lambda path: False)
    monkeypatch.setattr(run_lock, "SILENT_SECONDS", 0.5)
    with path.open("rb") as gone:
        fcntl.flock(gone, fcntl.LOCK_EX)  # as a file server may keep it for a machine that is gone
        lock = RunLock.take(tmp_path / "demo")
    assert lock is not None and lock.is_of(tmp_path / "demo")
    assert json.loads(path.read_text())["pid"] == os.getpid()
    lock.release()
    assert "a job (pid 7 on left, since yesterday) left" in capsys.readouterr().err


def test_on_a_shared_disk_another_machine_that_touches_its_lock_writes(tmp_path, monkeypatch):
    path = leave_from_elsewhere(tmp_path / "demo")
    monkeypatch.setattr(run_lock.processes, "is_local", lambda path: False)
    monkeypatch.setattr(run_lock, "SILENT_SECONDS", 1.0)
    over = threading.Event()

    def touch() -> None:
        while not over.wait(0.1):
            os.utime(path)

    toucher = threading.Thread(target=touch)
    toucher.start()
    try:
        with pytest.raises(UserError, match="stop it, choose another run.name, or remove .*/.run_lock if no"):
            RunLock.take(tmp_path / "demo")
        assert json.loads(path.read_text())["pid"] == 7
    finally:
        over.set()
        toucher.join()


def test_the_holder_touches_its_lock(tmp_path, monkeypatch):
    monkeypatch.setattr(run_lock, "BEAT_SECONDS", 0.05)
    lock = RunLock.take(tmp_path)
    assert lock is not None
    os.utime(tmp_path / LOCK, (0, 0))
    beaten = threading.Event()
    for _ in range(100):
        if (tmp_path / LOCK).stat().st_mtime > 0 or beaten.wait(0.05):
            break
    lock.release()
    assert (tmp_path / LOCK).stat().st_mtime > 0


def test_a_folder_in_which_no_file_can_be_made_is_not_locked():
    assert RunLock.take(Path("/proc/self")) is None
