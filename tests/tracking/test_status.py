"""The status of a run is checked: one that was killed is never shown as running, one that runs never as crashed."""

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.runs.report_runs import session
from tests.tracking.test_run_lock import holder
from tracking.run_dir import RunDir
from tracking.run_lock import LOCK, SILENT_SECONDS
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
