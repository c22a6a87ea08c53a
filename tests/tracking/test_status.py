"""The status and lock of a run folder: one job writes it at a time, and a killed one is never shown as running."""

import fcntl
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from config.cli import REPOSITORY
from config.errors import UserError
from tests.support.runs.report_runs import session
from tracking import run_lock
from tracking.run_dir import RunDir
from tracking.run_lock import LOCK, SILENT_SECONDS, RunLock, created_and_locked
from tracking.status import Status, run_status


@pytest.fixture
def process(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    with holder(tmp_path) as process:
        yield process


def record(folder: Path, *, steps: int = 3, age: float = 1.0, **end: object) -> None:
    """A session of so many steps, the last event `age` seconds ago; end: fields of its run_end."""
    with session(folder, time=time.time() - age, seconds=0.0) as run:
        run.steps(steps)
        if end:
            run.event("run_end", **end)
        run.event("note", text="something that came last")


@pytest.mark.parametrize(("status", "code"), [("done", 0), ("preempted", 75), ("aborted", 3), ("crashed", 69)])
def test_a_recorded_end_is_the_status(tmp_path, status, code):
    record(tmp_path / "demo", status=status, exit_code=code, reason="the loss\nis nan" if code else "")
    found = run_status(tmp_path / "demo")
    assert (found.state, found.exit_code, found.step) == (status, code, 3)
    assert found.since == pytest.approx(time.time() - 1, abs=30)
    assert found.cause == ("the loss is nan" if code else "")
    assert found.over


def test_a_process_that_was_killed_is_a_crash_at_once(tmp_path, process):
    record(tmp_path / "demo")
    found = run_status(tmp_path / "demo")
    assert (found.state, found.cause, found.step) == ("running", "", 3)
    assert found.since == pytest.approx(time.time(), abs=60)
    process.kill()
    process.wait()
    found = run_status(tmp_path / "demo")
    assert (found.state, found.exit_code, found.step) == ("killed", None, 3)
    host = socket.gethostname()
    assert found.cause.startswith(f"its process (pid {process.pid} on {host}) is gone and recorded no end")
    assert found.cause.endswith("s old")


def test_a_process_that_stands_still_is_running_and_said_to_be_silent(tmp_path, process):
    record(tmp_path / "demo", age=-1.0)
    later = time.time() + SILENT_SECONDS + 60
    found = run_status(tmp_path / "demo", now=later)
    assert (found.state, found.over) == ("silent", False)
    assert found.cause.startswith(("no event for 1m5", "no event for 2m"))


def test_a_restarted_run_is_running_before_it_has_written_anything(tmp_path, process):
    record(tmp_path / "demo", age=3600.0, status="preempted", exit_code=75)
    assert run_status(tmp_path / "demo").state == "running"
    assert run_status(tmp_path / "demo").cause == ""


def test_an_end_counts_although_its_process_still_writes_the_report(tmp_path, process):
    record(tmp_path / "demo", age=-2.0, status="done", exit_code=0)
    assert run_status(tmp_path / "demo").state == "done"


def test_a_lock_of_another_machine_counts_while_it_is_touched(tmp_path, process):
    record(tmp_path / "demo")
    lock = tmp_path / "demo" / LOCK
    lock.write_text(json.dumps(json.loads(lock.read_text()) | {"machine": "another", "host": "node-7"}))
    assert run_status(tmp_path / "demo").state == "running"
    before = time.time() - SILENT_SECONDS - 5
    os.utime(lock, (before, before))
    assert run_status(tmp_path / "demo").state == "killed"


def test_a_lock_that_was_given_back_without_an_end_is_a_crash(tmp_path):
    record(tmp_path / "demo")
    (tmp_path / "demo" / LOCK).write_bytes(b"")
    found = run_status(tmp_path / "demo")
    assert found.state == "killed"
    assert found.cause.startswith("no process has the run folder, and no end was recorded")


def test_a_folder_without_a_lock_runs_while_its_events_grow(tmp_path):
    record(tmp_path / "demo")
    assert run_status(tmp_path / "demo").state == "running"
    assert run_status(tmp_path / "demo", now=time.time() + 120).state == "killed"


def test_a_folder_without_events_is_a_crash_and_says_so(tmp_path):
    found = run_status(tmp_path)
    assert found == Status("killed", found.cause)
    assert found.cause.endswith("nothing was recorded")


def test_the_events_are_read_from_their_end_over_long_lines_and_a_half_written_one(tmp_path):
    folder = RunDir.create(tmp_path, "demo", fresh=False)
    record(folder.path, steps=50, status="done", exit_code=0)
    with folder.events.open("ab") as file:
        big = {"event": "telemetry", "step": 50, "time": 1.0, "tokens": 1, "gradients": "x" * 300_000}
        file.write(json.dumps(big).encode() + b"\n")
        file.write(b'{"event":"step","step":51,"ti')
    found = run_status(folder.path)
    assert (found.state, found.step) == ("done", 50)


def test_a_damaged_events_file_raises_nothing(tmp_path):
    (tmp_path / "events.jsonl").write_bytes(b'\xff\x00\n[]\n{"event":"run_end","step":"x"}\n' * 9)
    (tmp_path / LOCK).write_bytes(b'{"pid": "1"}')
    assert run_status(tmp_path).state == "killed"


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
