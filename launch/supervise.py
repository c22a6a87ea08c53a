"""Start a training job again when, and only when, that helps.

    python -m launch.supervise [options] -- deepspeed --num_gpus 8 train.py --config config/recipes/demo.yaml

Restarts what died: a rank that was killed or crashed, a launcher that went. Does not restart what ended: done, a wrong
config, numerics, checkpoints that cannot be written, run.max_minutes, or a stop that was asked for here. What the job
itself said is read from its events.jsonl, since torchrun and accelerate turn every exit code into 1.

Behind `deepspeed --hostfile FILE` a restart can go on without the machines that were lost: --min-nodes.

SIGTERM, SIGUSR1 or Ctrl-C: the run saves and ends with exit code 75. A second one kills it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from config.cli import CONFIG_ERROR, DIVERGED, PREEMPTED, UNSAVED, Arguments, entry_point
from config.errors import UserError
from config.load import load_config
from launch.hosts import Choice, Hosts
from launch.job import Job, ended_how, say

FRUITLESS = 2
"""Starts in a row that got no further than those before them, after which the job is given up."""
LONGEST_WAIT_SECONDS = 300.0


@dataclass(frozen=True)
class Limits:
    """How often to restart."""

    restarts: int = 5
    within_minutes: float = 60.0
    wait_seconds: float = 5.0


@dataclass(frozen=True)
class Nodes:
    """With how many machines of the hostfile to go on."""

    least: int | None = None
    wait_minutes: float = 30.0

    def choice(self, hosts: Hosts | None, run: Run, stopped: Callable[[], bool]) -> Choice | None:
        """None for a job without a hostfile. Raises UserError: --min-nodes does not fit the command."""
        if self.least is not None:
            if hosts is None:
                raise UserError("--min-nodes: needs deepspeed --hostfile FILE behind --; other launchers start nothing")
            if not 1 <= self.least <= len(hosts.slots):
                raise UserError(
                    f"--min-nodes {self.least}: the hostfile has {len(hosts.slots)} machines; give 1 to that"
                )
            hosts.refuse_what_chooses()
        return Choice(hosts, run.fits, self.least, self.wait_minutes, say, stopped) if hosts else None


@dataclass(frozen=True)
class Session:
    """What one start of the job wrote into events.jsonl."""

    furthest: int = -1
    """Highest step attempted; -1 when it made none."""
    saved: int = -1
    """Step of its newest checkpoint; -1 when it saved none."""
    exit_code: int | None = None
    """What the run itself says about its end; None when it did not come to say it."""
    reason: str = ""
    seconds: float = 0.0
    """From its first event to its last."""


@dataclass(frozen=True)
class Run:
    """The run that a command line starts."""

    events: Path
    max_minutes: float | None
    global_size: int
    micro_size: int

    @classmethod
    def of_command(cls, command: Sequence[str]) -> Run:
        """Raises UserError: no train.py with a --config in it, or a mistake in the config."""
        script = next((index for index, word in enumerate(command) if word.endswith(".py")), None)
        if script is None:
            raise UserError(
                "command line: no train.py behind --; example: python -m launch.supervise -- torchrun train.py"
            )
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument("--config")
        parser.add_argument("--deepspeed_config", "--deepspeed-config")
        options, rest = parser.parse_known_args(list(command[script + 1 :]))
        if options.config is None:
            raise UserError(f"command line: --config FILE is missing behind {command[script]}")
        overrides = [word for word in rest if "=" in word and not word.startswith("-")]
        config = load_config(Path(options.config), overrides, options.deepspeed_config)
        run, batch = config.run, config.batch
        events = Path(run.dir).expanduser() / run.name / "events.jsonl"
        return cls(events, run.max_minutes, batch.global_size, batch.micro_size)

    def fits(self, processes: int) -> bool:
        """Whether so many processes can make the global batch."""
        return self.global_size % (self.micro_size * processes) == 0

    def mark(self) -> tuple[int, int]:
        """Where the events end now: what comes behind is the next session's."""
        if not self.events.is_file():
            return (0, 0)
        file = self.events.stat()
        return (file.st_ino, file.st_size)

    def session_since(self, mark: tuple[int, int]) -> Session:
        """What was written since `mark`. A torn last line is left out; run.resume=never begins a file of its own."""
        if not self.events.is_file():
            return Session()
        with self.events.open("rb") as file:
            file.seek(mark[1] if os.fstat(file.fileno()).st_ino == mark[0] else 0)
            lines = [line for line in file.read().splitlines() if line.startswith(b"{") and line.endswith(b"}")]
        events = [json.loads(line) for line in lines]
        last_start = max((index for index, event in enumerate(events) if event["event"] == "run_start"), default=0)
        end: dict[str, Any] = next((event for event in events[last_start:] if event["event"] == "run_end"), {})
        return Session(
            furthest=max((event["step"] for event in events if event["event"] == "step"), default=-1),
            saved=max((event["step"] for event in events if event["event"] == "checkpoint"), default=-1),
            exit_code=end.get("exit_code"),
            reason=end.get("reason", ""),
            seconds=events[-1]["time"] - events[0]["time"] if events else 0.0,
        )


def ending(session: Session, codes: Sequence[int], *, asked: bool, max_minutes: float | None = None) -> int | None:
    """The exit code to end with; None when a restart may help.

    codes: the launcher's exit code, and that of the rank which failed first where the launcher tells it.
    """
    if session.exit_code == PREEMPTED:
        time_is_up = max_minutes is not None and session.seconds > 0.95 * 60 * max_minutes
        return PREEMPTED if asked or time_is_up or "max_minutes" in session.reason else None
    if session.exit_code is not None:
        return session.exit_code or abs(codes[0])  # done, but the report may have failed after that
    final = next((code for code in codes if code in (CONFIG_ERROR, DIVERGED, UNSAVED)), None)
    if final is None and asked:
        return codes[0] if codes[0] > 0 else 1
    return final


class Supervisor:
    """Starts one job until it has ended, may not be restarted any more, or comes to nothing."""

    def __init__(self, command: Sequence[str], run: Run, limits: Limits, nodes: Nodes, folder: Path) -> None:
        """folder: for the hostfile of a restart.

        Raises UserError: `nodes` does not fit the command, or its hostfile cannot be read.
        """
        self._command, self._run, self._limits, self._folder = command, run, limits, folder
        self._hosts = Hosts.of_command(command)
        self._choice = nodes.choice(self._hosts, run, lambda: self._asked)
        self._job: Job | None = None
        self._asked = False
        self._restarted_at: list[float] = []

    def run(self) -> int:
        """The exit code of the job's last start."""
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._stop)
        furthest, saved, fruitless = -1, -1, 0
        while True:
            mark = self._run.mark()
            job = self._start(saved)
            if job is None:
                return PREEMPTED if self._asked else 1
            if self._asked:  # just while it was started
                job.kill()
            code = job.wait()
            session = self._run.session_since(mark)
            codes = [code, *filter(None, [job.failed_code()])]
            final = ending(session, codes, asked=self._asked, max_minutes=self._run.max_minutes)
            if final is not None:
                return final
            why = job.cause() or session.reason or f"the launcher {ended_how(code)}"
            gained = session.furthest > furthest or session.saved > saved
            furthest, saved = max(furthest, session.furthest), max(saved, session.saved)
            fruitless = 0 if gained else fruitless + 1
            problem = self._exhausted(fruitless, furthest)
            if problem is not None:
                say(f"{why}; {problem}")
                return code if code > 0 else 1
            self._pause(why, saved, fruitless)
            if self._asked:
                return PREEMPTED

    def _start(self, saved: int) -> Job | None:
        """None when there are too few machines for it, or a stop was asked for while it waited for more."""
        # What started anew or from a given checkpoint goes on from its own, once it has saved one.
        resume = ["run.resume=auto"] if saved >= 0 else []
        if self._hosts is None or self._choice is None:
            self._job = Job([*self._command, *resume])
            return self._job
        names = self._choice.first() if self._job is None else self._choice.next()
        if names is None:
            return None
        if self._job is not None:
            self._hosts.end(names)  # what is left on a machine that was out of reach and has come back
        self._job = Job([*self._hosts.command(names, self._folder), *resume], self._hosts, names)
        return self._job

    def _exhausted(self, fruitless: int, furthest: int) -> str | None:
        """Why there is no further restart; None when there is one."""
        if fruitless >= FRUITLESS:
            where = f"beyond step {furthest}" if furthest >= 0 else "to a first step"
            return f"{fruitless} starts in a row did not get {where}: given up, since another one would not either"
        now, within = time.monotonic(), self._limits.within_minutes
        self._restarted_at = [moment for moment in self._restarted_at if now - moment < 60 * within]
        if len(self._restarted_at) >= self._limits.restarts:
            return f"given up after {len(self._restarted_at)} restarts within {within:g} minutes (--restarts, --within)"
        return None

    def _pause(self, why: str, saved: int, fruitless: int) -> None:
        seconds = min(LONGEST_WAIT_SECONDS, self._limits.wait_seconds * 2**fruitless)
        self._restarted_at.append(time.monotonic())
        count = f"restart {len(self._restarted_at)} of {self._limits.restarts}"
        where = (
            f"from the newest checkpoint, step {saved}" if saved >= 0 else "from the newest checkpoint, if there is one"
        )
        say(f"{why}; {count} in {seconds:g} s, {where}")
        ends = time.monotonic() + seconds
        while not self._asked and time.monotonic() < ends:
            time.sleep(min(0.2, seconds))

    def _stop(self, number: int, frame: FrameType | None) -> None:
        name, again = signal.Signals(number).name, self._asked
        self._asked = True
        if self._job is None:
            return
        if again or not self._job.ask_to_stop():
            say(f"{name}: the job is killed")
            self._job.kill()
        else:
            say(f"{name}: the run saves and ends; once more kills it")


@entry_point()
def main(arguments: Sequence[str]) -> int:
    """Supervise the command behind `--`; returns the exit code."""
    parser = Arguments(prog="python -m launch.supervise", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--restarts", type=int, default=Limits.restarts, help="at most so many (%(default)s) ...")
    parser.add_argument(
        "--within", type=float, default=Limits.within_minutes, help="... in so many minutes (%(default)g)"
    )
    parser.add_argument(
        "--wait", type=float, default=Limits.wait_seconds, help="seconds before a restart (%(default)g)"
    )
    parser.add_argument(
        "--min-nodes", type=int, help="go on with so many machines of the hostfile when others are lost (all)"
    )
    parser.add_argument(
        "--wait-nodes", type=float, default=Nodes.wait_minutes, help="minutes to wait for that many (%(default)g)"
    )
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:split])
    command = list(arguments[split + 1 :])
    run = Run.of_command(command)
    limits = Limits(options.restarts, options.within, options.wait)
    with tempfile.TemporaryDirectory(prefix="supervise-") as folder:
        return Supervisor(command, run, limits, Nodes(options.min_nodes, options.wait_nodes), Path(folder)).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
