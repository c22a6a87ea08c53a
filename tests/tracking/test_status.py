"""A run's folder, status and lock: filled without half-writing, one writer at a time, a killed run is never running."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml

from config.cli import REPOSITORY
from config.errors import UserError
from config.files import write_atomically
from config.version import VERSION
from tests.support.refusals import refused
from tests.support.runs.report_runs import session
from tracking import run_lock
from tracking.environment import environment, safe_variables
from tracking.run_dir import RunDir
from tracking.run_lock import LOCK, SILENT_SECONDS, RunLock, created_and_locked
from tracking.status import FIRST_SECONDS, Status, run_status


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


def test_a_first_step_may_take_longer_than_a_minute(tmp_path, process):
    record(tmp_path / "demo", steps=0, age=-1.0)
    assert run_status(tmp_path / "demo", now=time.time() + 300).state == "running"
    assert run_status(tmp_path / "demo", now=time.time() + FIRST_SECONDS + 60).state == "silent"


@pytest.mark.parametrize(("steps", "state"), [(2, "silent"), (3, "running"), (5, "running"), (9, "running")])
def test_an_evaluation_or_a_save_may_take_longer_than_a_minute(tmp_path, process, steps, state):
    """Neither after step 2; an evaluation after step 3, a save after step 5, and both after the last one."""
    settings = {"evaluate": {"every_steps": 3}, "checkpoint": {"every_steps": 0, "also_after": [5]}}
    (tmp_path / "demo/config.yaml").write_text(yaml.safe_dump(settings | {"run": {"steps": 9}}))
    record(tmp_path / "demo", steps=steps, age=-1.0)
    assert run_status(tmp_path / "demo", now=time.time() + 300).state == state
    assert run_status(tmp_path / "demo", now=time.time() + FIRST_SECONDS + 60).state == "silent"


def test_a_save_that_training_has_announced_may_take_longer_than_a_minute(tmp_path, process):
    with session(tmp_path / "demo", time=time.time() + 1, seconds=0.0) as run:
        run.steps(2)
        run.event("note", text="run.max_minutes is up; saving", saving=True)
        assert run_status(tmp_path / "demo", now=time.time() + 300).state == "running"
        run.save()
        assert run_status(tmp_path / "demo", now=time.time() + 300).state == "silent"


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


def test_a_fresh_run_renames_the_earlier_ones(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    for content in ("a", "b", "c"):
        run_dir = RunDir.create(root, "demo", fresh=True)
        assert not run_dir.events.exists()
        run_dir.events.write_text(content)
    folders = {path.name: (path / "events.jsonl").read_text() for path in root.iterdir()}
    assert folders == {"demo.1": "a", "demo.2": "b", "demo": "c"}


def test_a_resumed_run_uses_the_folder_as_it_is(tmp_path: Path) -> None:
    RunDir.create(tmp_path, "demo", fresh=False).events.write_text("kept")
    again = RunDir.create(tmp_path, "demo", fresh=False)
    assert again.events.read_text() == "kept" and again.checkpoints.is_dir() and again.name == "demo"


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/abs", "a/"])
def test_a_name_that_is_no_folder_name_is_refused(tmp_path: Path, name: str) -> None:
    assert "run.name" in refused(RunDir.create, tmp_path, name, fresh=False)


def test_what_is_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for root, name, key in (
        (tmp_path / "file", "demo", "run.dir"),
        (tmp_path, "file", "run.name"),
        (tmp_path / "absent" / "runs", "demo", "does not exist"),
        (tmp_path / "file" / "runs", "demo", "run.dir"),
    ):
        assert key in refused(RunDir.create, root, name, fresh=True)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_an_unwritable_parent_is_a_user_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    try:
        assert "may write" in refused(RunDir.create, tmp_path / "runs", "demo", fresh=False)
    finally:
        tmp_path.chmod(0o700)


def test_a_file_system_that_refuses_is_a_user_error() -> None:
    assert "run.dir" in refused(RunDir.create, Path("/proc/self"), "demo", fresh=False)


def test_inputs_are_written_and_the_earlier_ones_kept(run_dir: RunDir) -> None:
    first = {"optimizer": {"betas": (0.9, 0.95), "eps": 1e-8}}
    for start, config in enumerate((first, first, {"optimizer": {"eps": 1e-6}}), start=1):
        run_dir.write_inputs(config, {"bf16": {"enabled": True}}, {"start": start})
    names = {path.name for path in run_dir.path.iterdir() if path.is_file()}
    assert names == {
        *("config.yaml", "config.1.yaml", "ds_config.json"),
        *("environment.json", "environment.1.json", "environment.2.json"),
    }
    kept = yaml.safe_load((run_dir.path / "config.1.yaml").read_text())
    assert kept == {"optimizer": {"betas": [0.9, 0.95], "eps": 1e-8}}
    assert yaml.safe_load(run_dir.config.read_text()) == {"optimizer": {"eps": 1e-6}}
    assert json.loads((run_dir.path / "environment.2.json").read_text()) == {"start": 2}


def test_a_failed_write_leaves_the_old_file_and_no_remains(tmp_path: Path) -> None:
    target = tmp_path / "config.yaml"
    write_atomically(target, b"old")
    with pytest.raises(TypeError):
        write_atomically(target, "not bytes")  # type: ignore[arg-type]
    assert target.read_bytes() == b"old" and list(tmp_path.iterdir()) == [target]


def test_a_writer_killed_at_any_moment_leaves_a_whole_file(tmp_path: Path) -> None:
    target = tmp_path / "big.json"
    code = (
        "import itertools, sys; from pathlib import Path; from tracking.run_dir import write_atomically\n"
        "for n in itertools.count(): write_atomically(Path(sys.argv[1]), bytes([65 + n % 26]) * 2_000_000)"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(target)])
    try:
        while not target.exists():
            time.sleep(0.01)
        for _ in range(30):
            content = target.read_bytes()
            assert len(content) == 2_000_000 and content == content[:1] * len(content)
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    assert len(target.read_bytes()) == 2_000_000


_SECRET = "hunter2hunter2"


def test_it_tells_versions_machine_and_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", "demo.yaml", "run.steps=5"])
    facts = environment({"world_size": 2, "devices": ["cpu", "cpu"]})
    assert json.loads(json.dumps(facts)) == facts
    assert facts["versions"]["mantissa"] == VERSION
    assert facts["versions"]["torch"] == version("torch") and facts["versions"]["deepspeed"] == version("deepspeed")
    assert facts["cpu"]["usable_cores"] >= 1 and facts["memory_bytes"] > 2**28
    assert facts["command_line"] == ["train.py", "--config", "demo.yaml", "run.steps=5"]
    assert (facts["world_size"], facts["devices"]) == (2, ["cpu", "cpu"])


def test_the_commit_is_that_of_the_code_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["git", "-C", str(REPOSITORY), "rev-parse", "HEAD"]
    head = subprocess.run(command, capture_output=True, text=True, check=False)
    git = environment({})["git"]
    assert (git["commit"] if git else "") == head.stdout.strip()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert environment({})["git"] is None


def test_only_named_variables_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY", "HOME_MADE", "SLURM_JWT"):
        monkeypatch.setenv(name, _SECRET)
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    facts = environment({})
    assert facts["variables"]["OMP_NUM_THREADS"] == "3" and facts["variables"]["NCCL_DEBUG"] == "INFO"
    assert _SECRET not in json.dumps(facts)


def test_a_login_in_an_allowed_variable_is_hidden() -> None:
    assert safe_variables({"NCCL_NET": f"tcp://me:{_SECRET}@host:1"}) == {"NCCL_NET": "tcp://***@host:1"}
