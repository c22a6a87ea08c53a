"""The process beside training that follows `events.jsonl` and passes each event to one client.

Standard input receives one line of JSON (the job) and later the line "end"; standard output carries one-line messages:
"log: ..." for the user, and "sent: ...", "wrote: ..." or "failed: ..." before the process exits. Standard error is the
client's log in the run folder. A file in the run folder holds the number of lines that the client has stored; the next
session delivers the rest.
"""

import json
import os
import select
import signal
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from config.errors import UserError, one_line
from config.files import write_atomically
from config.printable import printable
from config.redact import Redactor
from tracking.events import Event
from tracking.file_lock import exclusive_lock
from tracking.jsonl import Follower, beginnings, event_on
from tracking.summary import read_run
from tracking.wandb.charts import Rows

VERDICT = ("verdict", "verdict_text", "next_command", "warnings")
"""Fields of `run_end` that say how the run ended."""
RUNNING = {"verdict": "running", "verdict_text": "running", "next_command": ""}
"""The same of a run that has started; its earlier sessions' warnings still count."""

POLL_S = 0.5
_STEP = beginnings("step")
_PAST = beginnings("step", "telemetry")
"""Events of earlier sessions that no client looks at again, most of a file."""


class Delivered:
    """Persists the number of event lines that a client has stored, over all sessions."""

    def __init__(self, path: Path) -> None:
        """path: file that holds the number."""
        self._path = path
        try:
            self.lines = max(0, int(path.read_bytes()))
        except (OSError, ValueError):
            self.lines = 0

    def save(self, lines: int) -> None:
        self.lines = lines
        with suppress(OSError):  # disk full; at worst the next session delivers some lines again
            write_atomically(self._path, str(self.lines).encode())


class Delivery(ABC):
    """Passes new events to a client; events of earlier sessions are only counted."""

    def __init__(self, log_every_steps: int, delivered: int) -> None:
        """delivered: number of lines that the client has from earlier sessions."""
        self._every, self.earlier = log_every_steps, delivered
        self._redactor = Redactor()
        self.rows = Rows()
        self.line = 0
        """Number of the newest line."""
        self.end: Event | None = None
        """The `run_end` of the newest session."""

    def add(self, number: int, text: bytes) -> None:
        """Process one line of the events. number: counted from 1."""
        earlier, self.line = number <= self.earlier, number
        if earlier and text.startswith(_PAST):
            self.rows.attempts += text.startswith(_STEP)  # no need to parse it
            return
        event = event_on(text)
        if event is None:
            return  # readers of the file report damaged lines; log the rest
        event = self._redactor.value("", event)
        if event["event"] in ("run_start", "run_end"):
            self.end = event if event["event"] == "run_end" else None
        row = self.rows.row(event)
        if event["event"] != "step" or event["step"] % self._every == 0 or not event["applied"]:
            self.log(event, row, earlier=earlier)

    @abstractmethod
    def log(self, event: Event, row: dict[str, Any], *, earlier: bool) -> None:
        """Pass an event and its chart row (`tracking.wandb.charts`) to the client.

        earlier: the client has the event from an earlier session; never the case for a step or telemetry.
        """

    @abstractmethod
    def flush(self) -> None:
        """Have the client store what it was given. Called at least twice a second."""

    @abstractmethod
    def close(self, exit_code: int, verdict: dict[str, Any]) -> None:
        """End the client's run with training's exit code, or 1 if it crashed without a `run_end`.

        verdict: the VERDICT fields; empty if the run cannot be judged.
        """

    def follow(self, job: dict[str, Any]) -> None:
        """Deliver events as they arrive; return once training said "end" or is gone and all events are delivered."""
        follower, last_round = Follower(Path(job["events"])), False
        while not last_round:
            ready, _, _ = select.select([sys.stdin], [], [], POLL_S)
            last_round = bool(ready) or os.getppid() != job["training_pid"]
            for text in follower.lines():
                self.add(follower.number, text)
            self.flush()
        verdict = self._judged(Path(job["events"]).parent)
        self.close(1 if self.end is None else int(self.end["exit_code"]), verdict)

    def _judged(self, run_folder: Path) -> dict[str, Any]:
        """The VERDICT fields of `run_end`, or what every other reader says of a run that crashed or was killed."""
        if self.end is not None and self.end.get("verdict"):
            return {name: self.end.get(name) for name in VERDICT}
        try:
            found = read_run(run_folder).verdict
        except UserError:
            return {}
        fields = (found.word, found.text, found.command, found.warnings)
        return self._redactor.value("", dict(zip(VERDICT, fields, strict=True)))


def run_client(deliver: Callable[[dict[str, Any]], None]) -> int:
    """Read the job and run it as the only process delivering this run to the client; returns 1 after any failure.

    Waits for its turn, since the process of a session that just ended may still be delivering.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a scheduler signals the whole job before the last events
    job = json.loads(sys.stdin.readline())
    messages = os.dup(1)
    os.dup2(2, 1)  # what a client prints goes to its log
    sys.stdout = os.fdopen(messages, "w", encoding="utf-8")
    lock = Path(job["lock"])
    try:
        with exclusive_lock(lock, job["lock_wait_s"]) as acquired:
            if not acquired:
                raise RuntimeError(f"another process is already delivering {lock.parent}")
            deliver(job)
    except Exception as error:
        log_traceback()
        report("failed", Redactor().text(f"{type(error).__name__}: {one_line(error, 200)}"))
        return 1
    return 0


def log_traceback() -> None:
    """Write the current exception to the client's log, without secrets."""
    sys.stderr.write(printable(Redactor().text(traceback.format_exc())))


def report(kind: str, text: str) -> None:
    """Send one line to training, which may be gone already."""
    try:
        print(f"{kind}: {text}", flush=True)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 - the interpreter fails at exit
