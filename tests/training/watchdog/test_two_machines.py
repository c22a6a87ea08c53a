"""Ranks, machines and cables that fail between two machines: who is named, how soon, and how the job goes on.

The machines are Linux namespaces, so this needs root and an sshd, and is skipped elsewhere. The times are those of
docs/restarts.md with room for a busy machine.
"""

import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from config.cli import REPOSITORY
from config.launcher import deepspeed_program
from tests.support.jobs.launches import BIN, command, events, finish
from tests.support.machines.machines import SKIP, Machine, two_machines

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(bool(SKIP), reason=SKIP)]

START_SECONDS = 240
ELASTIC_TOLERANCE = 5e-6  # nats in FP32, docs/elastic.md


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[dict[str, Machine]]:
    with two_machines(tmp_path) as both:
        yield both


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a job that nothing disturbed, two processes on one machine."""
    folder = tmp_path_factory.mktemp("unbroken")
    finish(command("torchrun", folder, "it", "generate.tokens=0"), seconds=START_SECONDS)
    return [event["loss"] for event in events(folder, "it", "step")]


class Run:
    """A job of six steps that was started on the left machine, and what it printed when."""

    def __init__(
        self,
        machines: dict[str, Machine],
        name: str,
        *overrides: str,
        order: str,
        told: str = "",
        supervised: tuple[str, ...] = (),
    ) -> None:
        """order: the hostfile, rank 0's machine first. told: what tests/support/jobs/dying_train.py is told."""
        self.machines, self.name, self.folder = machines, name, machines["left"].folder.parent
        self.mark = self.folder / f"{name}.mark"
        hostfile, environment = self.folder / f"{name}.hosts", self.folder / "environment"
        hostfile.write_text("".join(f"{machine} slots=1\n" for machine in order.split()))
        environment.write_text(f"PATH={BIN}:{os.environ['PATH']}\nOMP_NUM_THREADS=1\n")
        line = command("python", self.folder, name, "checkpoint.every_steps=1", "generate.tokens=0", *overrides)[1:]
        if told:
            line[:1] = [str(REPOSITORY / "tests/support/jobs/dying_train.py")]
            line.append(f"run.hypothesis={told},{self.mark}")
        line = [*deepspeed_program(), "--hostfile", str(hostfile), *line]
        if supervised:
            line = [sys.executable, "-m", "launch.supervise", "--wait", "1", *supervised, "--", *line]
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "GLOO"))}
        self.process = subprocess.Popen(
            machines["left"].command(*line),
            env=clean
            | {"PATH": f"{BIN}:{os.environ['PATH']}", "DS_ENV_FILE": str(environment), "PYTHONPATH": str(REPOSITORY)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.lines: list[tuple[float, str]] = []
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for text in self.process.stdout:
            self.lines.append((time.monotonic(), text))

    @property
    def output(self) -> str:
        return "".join(text for _, text in self.lines)

    def until_marked(self) -> None:
        """Wait until the rank that was told to has come to its step."""
        ends = time.monotonic() + START_SECONDS
        while not self.mark.exists():
            assert time.monotonic() < ends and self.process.poll() is None, self.output
            time.sleep(0.1)

    def end(self, seconds: float) -> int:
        """The exit code."""
        ends = time.monotonic() + seconds
        while self.process.poll() is None:
            assert time.monotonic() < ends, self.output
            time.sleep(0.1)
        time.sleep(0.5)  # the rest of its output
        return self.process.returncode

    def seconds_until(self, pattern: str, since: float, *, within: float) -> float:
        """The time of the first line with `pattern`."""
        ends = since + within
        while True:
            for moment, text in list(self.lines):
                if re.search(pattern, text):
                    return moment - since
            assert time.monotonic() < ends, self.output
            time.sleep(0.1)

    def losses(self) -> list[float]:
        """The last attempt at each step."""
        last = {event["step"]: event["loss"] for event in events(self.folder, self.name, "step")}
        return [last[step] for step in sorted(last)]

    def worlds(self) -> list[int]:
        """Number of processes of each start."""
        return [event["world_size"] for event in events(self.folder, self.name, "run_start")]


KILLED = r"error: rank 1 \(pid \d+ on right\) was killed by SIGKILL, seen at .* UTC .*; rank 0 stops, exit code 69"


def test_a_rank_killed_on_the_other_machine_is_named_with_its_signal(machines):
    job = Run(machines, "killed", order="left right", told="SIGKILL,1,3")
    job.until_marked()
    since = time.monotonic()
    assert job.seconds_until(KILLED, since, within=30) < 30
    assert job.end(60) == 247, job.output  # pdsh gives the highest of the hosts' codes: 256 - 9


def test_a_supervised_job_goes_on_where_a_rank_was_killed(machines, unbroken):
    job = Run(machines, "again", order="left right", told="SIGKILL,1,3", supervised=("--min-nodes", "1"))
    assert job.end(2 * START_SECONDS) == 0, job.output
    assert "supervise: rank 1 (pid " in job.output
    assert job.worlds() == [2, 2]
    assert job.losses() == unbroken


def cut(machine: Machine) -> None:
    machine.run("ip", "link", "set", "eth0", "down")


def kill(machine: Machine) -> None:
    """All its processes but the first at once, as when a container is removed."""
    machine.run("mount", "--bind", "/dev/null", str(machine.folder.parent / "key.pub"))  # nobody gets in any more
    machine.run("sh", "-c", "kill -KILL -1")


@pytest.mark.parametrize(
    ("fault", "order", "words", "seconds"),
    [
        (cut, "left right", r"rank 1 .* is out of reach: no answer from right for 60 s", 90),
        (cut, "right left", r"rank 0 .* is out of reach: no answer from right for 60 s", 90),
        (kill, "right left", r"rank 0 \(pid \d+ on right\) (was killed by SIGKILL|has ended)", 40),
    ],
)
def test_a_lost_machine_is_named_and_the_job_goes_on_without_it(machines, unbroken, fault, order, words, seconds):
    job = Run(machines, "it", order=order, told="SIGCONT,0,3", supervised=("--min-nodes", "1"))
    job.until_marked()
    fault(machines["right"])
    since = time.monotonic()
    job.seconds_until(f"left: error: {words}.*rank . stops, exit code 69", since, within=seconds)
    job.seconds_until("supervise: .*restart 1 of 5", since, within=seconds + 150)
    job.seconds_until(
        "supervise: 1 of 2 machines: no answer over ssh from right; continues", since, within=seconds + 200
    )
    assert job.end(START_SECONDS + 60) == 0, job.output
    assert job.worlds() == [2, 1]
    assert job.losses() == pytest.approx(unbroken, abs=ELASTIC_TOLERANCE)


def test_a_rank_that_is_stopped_is_spoken_of_and_waited_for(machines):
    """A machine that answers is not lost, however long its rank says nothing."""
    job = Run(machines, "stopped", order="left right", told="SIGSTOP,1,3")
    job.until_marked()
    since = time.monotonic()
    silent = r"rank 1 \(pid (\d+) on right\) has been silent for 60 s, stopped or too busy to run Python; rank 0 waits"
    job.seconds_until(silent, since, within=120)
    found = re.search(silent, job.output)
    assert found is not None
    machines["right"].run("kill", "-KILL", found[1])  # the number that it has there
    job.seconds_until(KILLED, time.monotonic(), within=30)
    assert job.end(60) == 247, job.output


def test_a_stop_asked_of_the_supervisor_reaches_rank_0_over_ssh(machines):
    job = Run(machines, "asked", "run.steps=100000", order="right left", supervised=("--min-nodes", "2"))
    job.seconds_until("step +3/", time.monotonic(), within=START_SECONDS)
    subprocess.run(["pkill", "-TERM", "-P", str(job.process.pid)], check=True)
    assert job.end(90) == 75, job.output
    assert "SIGTERM: the run is asked to save and end" in job.output
    assert [event["exit_code"] for event in events(job.folder, "asked", "run_end")] == [75]
