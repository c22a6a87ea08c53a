"""Kill processes of a supervised job, one after another, at random instants: it ends or resumes, and loses nothing.

    python -m tests.support.jobs.kills --kills 200 --seed 1 --folder DIR [--launcher deepspeed] [--longest-delay 25]

Each kill is a SIGKILL to a rank, the launcher of the ranks, the runner above it, the supervisor, a tokenizing process
or wandb's. After it the job has to make a new step (of a new session, unless wandb's was killed) or end, with all
its processes, within 60 s; if it has ended it is started again. Several runs are made one after the other, until all
kills are spent; then each run's losses are compared with those of a run that nothing disturbed. Exit code 1: something
was not as it should be; the figures say what.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from config.cli import REPOSITORY
from tests.support.jobs.launches import command, last_attempts
from tracking.compare.surviving import read_events

WITHIN_SECONDS = 60.0
STEPS = 200
MARK = "MANTISSA_KILLS"
TARGETS = ("rank 0", "rank 1", "launcher", "runner", "supervisor", "tokenizing worker", "wandb worker")
ENDS_NOTHING = ("wandb worker",)


@dataclass
class Figures:
    """The figures measured."""

    kills: Counter[str] = field(default_factory=Counter)
    ended: Counter[str] = field(default_factory=Counter)
    resumed: Counter[str] = field(default_factory=Counter)
    stuck: list[str] = field(default_factory=list)
    """Kills after which nothing had happened in time."""
    left: list[str] = field(default_factory=list)
    """Processes that outlived their supervisor for so long, by kill."""
    longest: float = 0.0
    """[s] From a kill to the end of all processes, or to a new step."""
    steps: int = 0
    repeated: int = 0
    runs: int = 0
    different: list[str] = field(default_factory=list)
    shared_memory: list[str] = field(default_factory=list)

    def bad(self) -> bool:
        return bool(self.stuck or self.left or self.different or self.shared_memory)

    def report(self) -> str:
        rows = [
            f"{target:<20}{self.kills[target]:>6}{self.resumed[target]:>9}{self.ended[target]:>7}"
            for target in TARGETS
            if self.kills[target]
        ]
        return "\n".join(
            [
                f"{'killed':<20}{'kills':>6}{'resumed':>9}{'ended':>7}",
                *rows,
                f"longest from a kill to a new step or the end: {self.longest:.1f} s",
                f"steps made: {self.steps}, of them repeated after a kill: {self.repeated}, in {self.runs} runs",
                f"neither ended nor resumed within {WITHIN_SECONDS:.0f} s: {self.stuck or 'none'}",
                f"processes left: {self.left or 'none'}",
                f"left in /dev/shm: {self.shared_memory or 'none'}",
                f"runs that differ from the undisturbed one: {self.different or 'none'}",
            ]
        )


class Supervised:
    """One run under the supervisor, and the processes that belong to it."""

    def __init__(self, folder: Path, name: str, launcher: str) -> None:
        self.folder, self.name = folder, name
        self.events = folder / "runs" / name / "events.jsonl"
        self._log = (folder / f"{name}.log").open("ab")
        self._launcher = launcher
        self._mark = uuid.uuid4().hex
        self._process: subprocess.Popen[bytes] | None = None
        self.mapped: set[str] = set()
        """Names in /dev/shm that its processes were seen to map."""

    def start(self) -> None:
        """Start the supervisor."""
        overrides = [f"run.steps={STEPS}", "checkpoint.every_steps=5", "tracking.wandb=offline", "data.workers=2"]
        overrides += ["generate.tokens=0", "evaluate.every_steps=50", "data.tokenizer=bpe:2000"]
        supervise = [sys.executable, "-m", "launch.supervise", "--wait", "0.2", "--restarts", "1000", "--"]
        environment = dict(psutil.Process().environ()) | {MARK: self._mark, "OMP_NUM_THREADS": "1"}
        environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
        self._process = subprocess.Popen(
            [*supervise, *command(self._launcher, self.folder, self.name, *overrides)],
            cwd=REPOSITORY,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )

    def ended(self) -> bool:
        """Whether the supervisor has ended."""
        return self._process is None or self._process.poll() is not None

    def processes(self) -> list[psutil.Process]:
        """All that run, wherever they hang in the tree."""
        found = []
        for process in psutil.process_iter():
            with suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE and process.environ().get(MARK) == self._mark:
                    found.append(process)
        self.mapped |= mapped(found)
        return found

    def find(self, target: str) -> psutil.Process | None:
        """The process of that kind."""
        for process in self.processes():
            with suppress(psutil.Error):
                if kind_of(process) == target:
                    return process
        return None

    def steps(self) -> tuple[int, int]:
        """Sessions that made a step, and steps made in all."""
        sessions, steps, fresh = 0, 0, False
        for event in read_events(self.events) if self.events.exists() else ():
            fresh = fresh or event["event"] == "run_start"
            if event["event"] == "step":
                sessions, fresh, steps = sessions + fresh, False, steps + 1
        return sessions, steps

    def finished(self) -> bool:
        """Whether the run has made its last step and said so."""
        ends = [e for e in read_events(self.events) if e["event"] == "run_end"] if self.events.exists() else []
        return bool(ends) and ends[-1]["step"] == STEPS and ends[-1]["exit_code"] == 0


def kind_of(process: psutil.Process) -> str:
    """The process's part in the job."""
    words, environment = process.cmdline(), process.environ()
    line = " ".join(words)
    if "launch.supervise" in words:
        return "supervisor"
    if "tracking.wandb.worker" in words:
        return "wandb worker"
    if "multiprocessing.spawn" in line and "resource_tracker" not in line:
        return "tokenizing worker"
    if "deepspeed.launcher.launch" in words:
        return "launcher"
    if any(word.endswith(("bin/deepspeed", "deepspeed.launcher.runner")) for word in words[:3]):
        return "runner"
    if any(word.endswith("bin/torchrun") for word in words[:3]):
        return "launcher"
    if any(word.endswith("train.py") for word in words[:3]):
        return f"rank {environment.get('RANK')}"
    return "other"


def disturb(run: Supervised, target: str, delay: float, figures: Figures) -> None:
    """Kill one process, and see what comes of it."""
    if target == "tokenizing worker":
        prepare_anew(run)
    else:
        time.sleep(delay)
    victim = wait_for(lambda: run.find(target), unless=lambda: run.finished() or run.ended())
    if victim is None:
        return  # the run was over, or has no such process
    sessions, steps = run.steps()
    with suppress(psutil.NoSuchProcess):
        victim.kill()
    killed = time.monotonic()
    figures.kills[target] += 1
    number = sum(figures.kills.values())

    def resumed() -> bool:
        now = run.steps()
        return now[1] > steps and (target in ENDS_NOTHING or now[0] > sessions)

    while time.monotonic() < killed + WITHIN_SECONDS:
        if run.ended() and not run.processes():
            figures.ended[target] += 1
            break
        if resumed():
            figures.resumed[target] += 1
            break
        run.processes()  # for the memory that new ones map
        time.sleep(0.2)
    else:
        left = [f"{kind_of(process)} (pid {process.pid})" for process in run.processes()]
        where = figures.left if run.ended() else figures.stuck
        where.append(f"kill {number}, of the {target}: {', '.join(left)}")
        end(run)
    seconds = time.monotonic() - killed
    figures.longest = max(figures.longest, seconds)
    print(
        f"kill {number}: {target}, step {steps and last_attempts(run.folder, run.name)[-1]['step']}, {seconds:.1f} s",
        flush=True,
    )


def prepare_anew(run: Supervised) -> None:
    """End the job, and start it without prepared data, so that there are tokenizing processes."""
    end(run)
    shutil.rmtree(run.folder / "cache", ignore_errors=True)
    run.start()


def end(run: Supervised) -> None:
    """Kill whatever there is of the job."""
    while processes := run.processes():
        for process in processes:
            with suppress(psutil.Error):
                process.kill()
        time.sleep(0.1)
    wait_for(run.ended)


def wait_for(found, *, unless=lambda: False, seconds: float = 120.0):
    """The first true value of `found`; None once `unless` is true, or after this many seconds."""
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        if value := found():
            return value
        if unless():
            return None
        time.sleep(0.1)
    return None


def mapped(processes: Iterable[psutil.Process]) -> set[str]:
    """Names in /dev/shm that these processes map."""
    names = set()
    for process in processes:
        with suppress(psutil.Error, OSError):
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            names |= {line.rsplit("/dev/shm/", 1)[1] for line in maps.splitlines() if "/dev/shm/" in line}
    return names


def shared_memory() -> set[str]:
    """Files in /dev/shm that no process has mapped."""
    return {path.name for path in Path("/dev/shm").iterdir()} - mapped(psutil.process_iter())


def complete(run: Supervised) -> None:
    """Let the run come to its end."""
    for _ in range(5):
        if run.finished():
            break
        if run.ended():
            run.start()
        wait_for(lambda: run.finished() and run.ended(), unless=run.ended, seconds=900.0)
    wait_for(run.ended)
    end(run)


def main(arguments: Sequence[str]) -> int:
    """Kill, compare, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--folder", type=Path, required=True, help="an empty folder for the runs")
    parser.add_argument(
        "--longest-delay", type=float, default=25.0, help="[s] Most that is waited from a new step to the next kill"
    )
    parser.add_argument("--launcher", choices=("deepspeed", "torchrun"), default="deepspeed")
    options = parser.parse_args(arguments)
    options.folder.mkdir(parents=True, exist_ok=True)
    folder, launcher = options.folder.resolve(), options.launcher
    draw, figures, ours = random.Random(options.seed), Figures(), set[str]()
    targets = [target for target in TARGETS if (launcher, target) != ("torchrun", "runner")]
    undisturbed = Supervised(folder, "undisturbed", launcher)
    complete(undisturbed)
    truth = last_attempts(folder, "undisturbed")
    assert undisturbed.finished() and len(truth) == STEPS, f"see {folder}/undisturbed.log"
    while sum(figures.kills.values()) < options.kills:
        run = Supervised(folder, f"run-{figures.runs}", launcher)
        figures.runs += 1
        while not run.finished() and sum(figures.kills.values()) < options.kills:
            if run.ended():
                run.start()
            disturb(run, draw.choice(targets), draw.uniform(0.0, options.longest_delay), figures)
        complete(run)
        ours |= run.mapped  # other programs of this machine have memory there, too
        _, steps = run.steps()
        figures.steps += steps
        figures.repeated += steps - STEPS
        if last_attempts(folder, run.name) != truth:
            figures.different.append(run.name)
    left = shared_memory() & ours
    time.sleep(5.0)
    figures.shared_memory = sorted(left & shared_memory())
    print(figures.report())
    (folder / "figures.json").write_text(json.dumps(vars(figures), indent=1))
    return int(figures.bad())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
