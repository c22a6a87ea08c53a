"""The process that runs a tracker's client: follows `events.jsonl` until training says "end" or is gone.

Started by `tracking.trackers.sink`, never by hand. Standard input brings one line of JSON (the job) and later "end".
Each event becomes the row that wandb gets, on the same axis: steps attempted so far, which never goes back.
"""

from __future__ import annotations

import json
import math
import os
import select
import signal
import sys
from pathlib import Path
from typing import Any

from config.errors import one_line
from config.redact import Redactor
from tracking.events import Event, fault_in
from tracking.jsonl import decode
from tracking.trackers.clients import DELIVERED, Client, open_client
from tracking.wandb.charts import AXIS, Rows
from tracking.wandb.follow import Delivered, Follower, Line, exclusive_lock

POLL_S = 0.5
LOCK_WAIT_S = 30.0


class Delivery:
    """Gives new events to a client; those of earlier sessions are only counted."""

    def __init__(self, client: Client, delivered: Delivered, log_every_steps: int) -> None:
        self._client, self._delivered, self._every = client, delivered, log_every_steps
        self._skip = delivered.lines
        self._rows, self._redactor = Rows(), Redactor()
        self._line = 0
        self.end: Event | None = None
        """The `run_end` of the newest session."""

    def add(self, line: Line) -> None:
        """Take one line of the events."""
        earlier, self._line = line.number <= self._skip, line.number
        if earlier and self._rows.pass_step(line.text):
            return
        event = self._redactor.value("", decode(line.text))
        if event is None or fault_in(event) is not None:
            return
        if event["event"] in ("run_start", "run_end"):
            self.end = event if event["event"] == "run_end" else None
        if earlier:
            self._rows.pass_event(event)
            return
        row = self._rows.row(event)
        if event["event"] != "step" or event["step"] % self._every == 0 or not event["applied"]:
            numbers = {name: float(value) for name, value in row.items() if isinstance(value, int | float)}
            attempt = int(numbers.pop(AXIS))
            numbers.pop("_timestamp", None)
            self._client.log(numbers, attempt, event["time"])

    def flush(self) -> None:
        """Have the client store what it was given, and remember how much that was."""
        self._client.flush()
        if self._line > self._delivered.lines:
            self._delivered.save(self._line)


def follow(client: Client, job: dict[str, Any]) -> None:
    """Deliver events as they come; returns when training said "end" or is gone and every event is delivered."""
    folder = Path(job["folder"])
    delivered = Delivered(folder / DELIVERED.format(job["tracker"]))
    delivery = Delivery(client, delivered, job["log_every_steps"])
    follower, last_round = Follower(folder / "events.jsonl"), False
    while not last_round:
        ready, _, _ = select.select([sys.stdin], [], [], POLL_S)
        last_round = bool(ready) or os.getppid() != job["training_pid"]
        new = False
        while lines := follower.new_lines():
            new = True
            for line in lines:
                delivery.add(line)
        if new:
            delivery.flush()
    code = math.nan if delivery.end is None else delivery.end["exit_code"]
    client.close(0 if code == 0 else int(code) if math.isfinite(code) else 1)


def main() -> int:
    """Read the job, run it; 1 after any failure, whose reason is the last line of the log."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a scheduler signals the whole job; the last events are still to come
    job = json.loads(sys.stdin.readline())
    try:
        with exclusive_lock(Path(job["folder"]) / f".{job['tracker']}_lock", LOCK_WAIT_S):
            follow(open_client(job), job)
    except Exception as error:
        print(Redactor().text(f"{type(error).__name__}: {one_line(error, 300)}"), flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
