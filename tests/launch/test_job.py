"""Jobs start by the interpreter's module: the launcher's program cannot start from a path with a space."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from launch import job as jobs
from tests.support.jobs.launches import wait_until

OWN = str(Path(sys.executable).parent)


@pytest.mark.parametrize(
    ("given", "started"),
    [
        ("deepspeed --num_gpus 2 train.py", "-m deepspeed.launcher.runner --num_gpus 2 train.py"),
        ("torchrun --standalone train.py", "-m torch.distributed.run --standalone train.py"),
        ("accelerate launch train.py", "-m accelerate.commands.launch train.py"),
    ],
)
def test_a_launcher_of_this_environment_is_started_by_its_interpreter(given: str, started: str) -> None:
    for path in (OWN, f"{OWN}:/usr/bin", "/nowhere"):
        assert jobs.by_interpreter(given.split(), path) == [sys.executable, *started.split()]


def test_other_programs_and_those_of_other_environments_stay(tmp_path: Path) -> None:
    other = tmp_path / "deepspeed"
    other.write_text("#!/bin/sh\n")
    other.chmod(0o755)
    for command in (["deepspeed", "train.py"], ["python", "train.py"], ["accelerate", "env"], [str(other)], []):
        assert jobs.by_interpreter(command, f"{tmp_path}:{OWN}") == command


@pytest.mark.parametrize(
    ("visible", "gpus", "processes"),
    [("4, 6,7", ["4", "6", "7"], 3), ("", [], 2), ("-1", [], 2), ("GPU-1a", ["GPU-1a"], 1)],
)
def test_each_visible_gpu_gets_a_process(monkeypatch, visible, gpus, processes) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert (jobs.visible_gpus(), jobs.default_processes()) == (gpus, processes)


def test_a_job_does_not_inherit_what_a_launcher_told_this_process(tmp_path, monkeypatch) -> None:
    for name in jobs.LAUNCHER_VARIABLES:
        monkeypatch.setenv(name, "7")
    monkeypatch.setenv("KEPT", "kept")
    environment = jobs.job_environment(MASTER_PORT="8")
    assert set(jobs.LAUNCHER_VARIABLES) & environment.keys() == {"MASTER_PORT"}
    assert (environment["MASTER_PORT"], environment["KEPT"]) == ("8", "kept")
    program = ["-c", "import os, launch; print(sorted(os.environ.keys() & set('RANK KEPT'.split())))"]
    assert jobs.launch(program, processes=1, log=tmp_path / "log") == 0
    assert (tmp_path / "log").read_text().splitlines()[1:] == ["['KEPT']"]


@pytest.mark.parametrize("processes", [1, 2])
def test_the_log_of_a_killed_job_says_the_signal(tmp_path: Path, processes: int) -> None:
    program = tmp_path / "program.py"
    killed = "if os.environ.get('RANK', '1') == '1': os.kill(os.getpid(), signal.SIGKILL)"
    program.write_text(f"import os, signal\n{killed}\n")
    assert jobs.launch([str(program)], processes=processes, log=tmp_path / "log") != 0
    who = "it" if processes == 1 else "rank 1"
    line = f"error: {who} was killed by SIGKILL, as the kernel does when memory runs out (see dmesg)"
    assert jobs.error_line_of(tmp_path / "log") == line


def test_sigterm_ends_the_job_of_the_one_who_waits_for_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    job = "import os, time; print(os.getpid(), flush=True); time.sleep(100)"
    waits = "import sys; from pathlib import Path; from launch.job import launch\n"
    waits += "launch(['-c', sys.argv[1]], processes=1, log=Path(sys.argv[2]))"
    waiting = subprocess.Popen([sys.executable, "-c", waits, job, str(log)], env=jobs.job_environment())
    wait_until(lambda: log.exists() and log.read_text().splitlines()[1:])
    waiting.terminate()
    assert waiting.wait(30) == 128 + signal.SIGTERM
    assert not Path(f"/proc/{log.read_text().splitlines()[1]}").exists()


def test_progress_is_asked_for_while_a_job_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "REPORT_SECONDS", 0.05)
    asked: list[bool] = []
    jobs.launch(
        ["-c", "import time; time.sleep(0.5)"], processes=1, log=tmp_path / "log", report=lambda: asked.append(True)
    )
    assert 2 <= len(asked) <= 10
    with pytest.raises(subprocess.TimeoutExpired, match=r"after 0\.2 seconds"):
        jobs.launch(["-c", "import time; time.sleep(100)"], processes=1, log=tmp_path / "log", seconds=0.2)


def test_a_killed_job_leaves_nothing_behind_in_whatever_session(tmp_path: Path) -> None:
    child = "import os, time; print(os.getpid(), flush=True); time.sleep(100)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], start_new_session=True)"
    job = jobs.start(["-c", parent], processes=1, log=tmp_path / "log")
    wait_until(lambda: (tmp_path / "log").read_text().splitlines()[1:])
    left = int((tmp_path / "log").read_text().splitlines()[1])
    jobs.kill(job)
    assert job.returncode == -signal.SIGKILL
    wait_until(lambda: not Path(f"/proc/{left}").exists() or "zombie" in Path(f"/proc/{left}/status").read_text())
