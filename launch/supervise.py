"""Restart a training job after recoverable failures, and only then.

    python -m launch.supervise [options] -- deepspeed --num_gpus 8 train.py --config config/recipes/demo.yaml

Restarts a job if a rank or the launcher was killed or crashed, but not if it ended by itself: done, a wrong config,
numerics, checkpoints that cannot be written, run.max_minutes, or a stop requested here. Exit code 2 after a start that
trained is restarted too: the config was right, so a store or a hub may be down. How the run ended is read from its
events.jsonl, since torchrun and accelerate turn every exit code into 1.

With `deepspeed --hostfile FILE` a restart can continue without lost machines: --min-nodes.

SIGTERM, SIGUSR1 or Ctrl-C: the run saves and ends with exit code 75. A second one kills it.
"""

import argparse
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from types import FrameType
from typing import Any, Self

from config.cli import BROKEN, CONFIG_ERROR, DIVERGED, PREEMPTED, UNSAVED, Arguments, entry_point
from config.command_line import parse
from config.errors import UserError
from config.json_text import object_in
from config.load import load_config
from config.machine.processes import describe_exit
from config.schema import Config
from launch.hosts import Hosts, HostSelection
from launch.job import Job, log

MAX_STARTS_WITHOUT_PROGRESS = 2
"""Consecutive starts without a new step or checkpoint after which the supervisor gives up."""
LONGEST_WAIT_SECONDS = 300.0
FINAL = {
    CONFIG_ERROR: "the config or the command line is wrong",
    DIVERGED: "stopped on numerics",
    BROKEN: "a rank's machine computes or remembers wrongly: drain the node that the last line names",
    UNSAVED: "checkpoints cannot be written",
}
"""Exit codes of failures that no restart changes, and why."""


@dataclass(frozen=True)
class Session:
    """Summary of what one start of the job wrote to events.jsonl."""

    furthest: int = -1
    """Highest step attempted; -1 if none."""
    saved: int = -1
    """Step of its newest checkpoint in the run folder or in `checkpoint.dir`; -1 if none."""
    exit_code: int | None = None
    """Exit code in the run_end event; None without such an event, or if it says that the run crashed."""
    reason: str = ""
    seconds: float = 0.0
    """[seconds] Time from its first event to its last."""

    def is_out_of_time(self, max_minutes: float | None) -> bool:
        """Whether run.max_minutes stopped it, which a rank whose clock is ahead of rank 0's may have noticed first."""
        up = max_minutes is not None and self.seconds > 0.95 * 60 * max_minutes
        return up or "max_minutes" in self.reason


@dataclass(frozen=True)
class Run:
    """The run that a command line starts."""

    config: Config

    @classmethod
    def of_command(cls, command: Sequence[str]) -> Self:
        """The run of a command line. Raises UserError without train.py and --config, or if the config is wrong."""
        script = next((index for index, word in enumerate(command) if word.endswith(".py")), None)
        if script is None:
            example = "python -m launch.supervise -- torchrun train.py"
            raise UserError(f"command line: no train.py after --; example: {example}")
        options = parse(command[script + 1 :])
        return cls(load_config(Path(options.config), options.overrides, options.deepspeed_config, started=True))

    @property
    def events(self) -> Path:
        return Path(self.config.run.dir).expanduser() / self.config.run.name / "events.jsonl"

    def fits(self, processes: int) -> bool:
        """Whether the global batch divides among this many processes."""
        parallel, batch = self.config.parallel, self.config.batch
        groups, left_over = divmod(processes, parallel.sequence * parallel.tensor)
        whole = not left_over and processes % parallel.expert == 0
        return whole and batch.global_size % (batch.micro_size * groups) == 0

    def events_end(self) -> tuple[int, int]:
        """(inode, size) of events.jsonl now; whatever is written later belongs to the next session."""
        if not self.events.is_file():
            return (0, 0)
        file = self.events.stat()
        return (file.st_ino, file.st_size)

    def session_since(self, position: tuple[int, int]) -> Session:
        """Summary of the events written since `position`, as from `events_end`, and of checkpoints published since;
        run.resume=never starts a new file."""
        from tracking.jsonl import Follower  # imports orjson, which is not needed to start

        file = Follower(self.events)
        file.offset = position[1] if self.events_end()[0] == position[0] else 0
        furthest, saved, end, times = -1, -1, dict[str, Any](), list[float]()
        for event in file.events("run_start", "step", "checkpoint", "run_end"):  # one at a time: they may be gigabytes
            times[1:] = [event["time"]]
            match event["event"]:
                case "run_start":
                    end = {}
                case "run_end":
                    end = end or event
                case "step":
                    furthest = max(furthest, event["step"])
                case "checkpoint":
                    saved = max(saved, event["step"])
        # Published, but not yet read back or uploaded, or the upload failed: the next session does that.
        for path in self.events.parent.glob("checkpoints/step-*/manifest.json") if times else ():
            with suppress(KeyError, TypeError, ValueError):
                manifest = object_in(path)
                if datetime.fromisoformat(manifest["written"]).timestamp() >= times[0]:
                    saved = max(saved, int(manifest["step"]))
        return Session(
            furthest=furthest,
            saved=saved,
            exit_code=end.get("exit_code") if end.get("status") != "crashed" else None,
            reason=end.get("reason", ""),
            seconds=times[-1] - times[0] if times else 0.0,
        )


def final_exit_code(
    session: Session,
    codes: Sequence[int],
    *,
    stop_requested: bool,
    max_minutes: float | None,
    time_up_code: int,
    has_trained: bool,
) -> int | None:
    """The exit code to end with; None if a restart may help. codes: exit code of the launcher, then that of the rank
    that failed first if the launcher reports it. time_up_code: for run.max_minutes. has_trained: before this start."""
    if session.exit_code == PREEMPTED and stop_requested:
        return PREEMPTED
    if session.exit_code == PREEMPTED:
        return time_up_code if session.is_out_of_time(max_minutes) else None
    if session.exit_code is not None:
        return session.exit_code or abs(codes[0])  # after 0 the launcher may still fail, as in the report
    final = next((code for code in codes if code in FINAL and (code != CONFIG_ERROR or not has_trained)), None)
    if final is None and stop_requested:
        if session.furthest < 0:
            return PREEMPTED  # there was nothing to save yet, and the signal ended the rank
        return codes[0] if codes[0] > 0 else 1
    return final


class Supervisor:
    """Restarts one job until it has ended, its restarts are used up, or it makes no progress."""

    def __init__(self, command: Sequence[str], options: argparse.Namespace, folder: Path) -> None:
        """options: from the command line. folder: for the hostfile of a restart. Raises UserError."""
        self._command, self._options, self._folder = command, options, folder
        self._run = Run.of_command(command)
        self._job: Job | None = None
        self._stop_requested = False
        hosts, least = Hosts.of_command(command), options.min_nodes
        if hosts is None and least is not None:
            raise UserError("--min-nodes: needs deepspeed --hostfile FILE after --; other launchers start nothing")
        wait, stopped = options.wait_nodes, lambda: self._stop_requested
        self._selection = HostSelection(hosts, self._run.fits, least, wait, log, stopped) if hosts else None
        self._restarted_at: list[float] = []

    def run(self) -> int:
        """Supervise the job; returns the exit code of its last start."""
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, self._stop)
        furthest, saved, without_progress = -1, -1, 0
        while True:
            position = self._run.events_end()
            job = self._start(saved)
            if job is None:
                return PREEMPTED if self._stop_requested else 1
            if self._stop_requested and not job.request_stop():  # requested during the start
                job.kill()
            code = job.wait()
            session = self._run.session_since(position)
            codes = [code, *filter(None, [job.failed_code()])]
            final = final_exit_code(
                session,
                codes,
                stop_requested=self._stop_requested,
                max_minutes=self._run.config.run.max_minutes,
                time_up_code=self._options.time_up_code,
                has_trained=furthest >= 0,
            )
            if final is not None:
                return final
            why = job.failure_cause() or session.reason or f"the launcher {describe_exit(code)}"
            progress = session.furthest > furthest or session.saved > saved
            furthest, saved = max(furthest, session.furthest), max(saved, session.saved)
            without_progress = 0 if progress else without_progress + 1
            problem = self._reason_to_give_up(without_progress, furthest)
            if problem is not None:
                log(f"{why}; {problem}")
                return code if code > 0 else 1
            self._wait_before_restart(why, saved, without_progress)
            if self._stop_requested:
                return PREEMPTED

    def _start(self, saved: int) -> Job | None:
        """Start the job; None if too few machines are reachable, or if a stop came while waiting for more."""
        # Once a run has saved a checkpoint, it resumes from that, however it was first started.
        resume = ["run.resume=auto"] if saved >= 0 else []
        if self._selection is None:
            self._job = Job([*self._command, *resume])
            return self._job
        hosts = self._selection.hosts
        names = self._selection.for_first_start() if self._job is None else self._selection.for_restart()
        if names is None:
            return None
        if self._job is not None:
            hosts.end_processes(names)  # left over on a machine that was unreachable
        self._job = Job([*hosts.command(names, self._folder), *resume], hosts, names)
        return self._job

    def _reason_to_give_up(self, without_progress: int, furthest: int) -> str | None:
        """Why to give up, as text for the log; None if the job may be restarted."""
        if without_progress >= MAX_STARTS_WITHOUT_PROGRESS:
            where = f"beyond step {furthest}" if furthest >= 0 else "to a first step"
            return f"{without_progress} starts in a row did not get {where}: giving up"
        now, within = time.monotonic(), self._options.within
        self._restarted_at = [moment for moment in self._restarted_at if now - moment < 60 * within]
        if len(self._restarted_at) >= self._options.restarts:
            return f"given up after {len(self._restarted_at)} restarts within {within:g} minutes (--restarts, --within)"
        return None

    def _wait_before_restart(self, why: str, saved: int, without_progress: int) -> None:
        seconds = min(LONGEST_WAIT_SECONDS, self._options.wait * 2**without_progress)
        self._restarted_at.append(time.monotonic())
        count = f"restart {len(self._restarted_at)} of {self._options.restarts}"
        which = f"step {saved}" if saved >= 0 else "if there is one"
        log(f"{why}; {count} in {seconds:g} s, from the newest checkpoint, {which}")
        ends = time.monotonic() + seconds
        while not self._stop_requested and time.monotonic() < ends:
            time.sleep(min(0.2, seconds))

    def _stop(self, number: int, frame: FrameType | None) -> None:
        name, again = signal.Signals(number).name, self._stop_requested
        self._stop_requested = True
        if self._job is None:
            return
        if again or not self._job.request_stop():
            log(f"{name}: the job is killed")
            self._job.kill()
        else:
            log(f"{name}: the run is asked to save and end; a second signal kills it")


@entry_point()
def main(arguments: Sequence[str]) -> int:
    parser = Arguments("python -m launch.supervise", __doc__)
    number = parser.add_argument
    number("--restarts", type=int, default=5, help="most restarts (%(default)s) ...")
    number("--within", type=float, default=60.0, help="... within this many minutes (%(default)g)")
    number("--wait", type=float, default=5.0, help="seconds before a restart (%(default)g)")
    number("--min-nodes", type=int, help="machines of the hostfile to continue with when others are lost (all)")
    number("--wait-nodes", type=float, default=30.0, help="minutes to wait for that many (%(default)g)")
    number("--time-up-code", type=int, default=PREEMPTED, help="exit code for run.max_minutes (%(default)s)")
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:split])
    with tempfile.TemporaryDirectory(prefix="supervise-") as folder:
        return Supervisor(arguments[split + 1 :], options, Path(folder)).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
