"""Events given to one wandb run: rows of the charts, tables, alerts, models, the end."""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from config.errors import one_line
from config.printable import printable
from config.redact import Redactor
from tracking.events import Event, fault_in
from tracking.jsonl import decode
from tracking.wandb.charts import AXIS, Rows, histograms
from tracking.wandb.follow import Delivered, Line
from tracking.wandb.models import checkpoint_facts, log_artifact
from tracking.wandb.tables import Alerts, Tables
from tracking.wandb.transaction_log import last_step, repair, require_exit_record, require_free_space, wait_until_stable

_PREEMPTED = "preempted"


class Delivery:
    """Logs events to one wandb run. Only a failing chart row ends it; tables, models and alerts may fail."""

    def __init__(self, run: Any, job: dict[str, Any]) -> None:
        self._run = run
        self._config = job["config"]
        self._every = job["log_every_steps"]
        self._file = Path(run.settings.sync_file)
        self._delivered = Delivered(Path(job["delivered"]))
        # The server knows what it has; offline it is what was found in the files of earlier sessions.
        self._skip = self._delivered.lines if run.offline else max(0, run.starting_step - 1)
        self._rows, self._tables, self._alerts = Rows(), Tables(), Alerts()
        self._line = Line(0, b"")
        self._redactor = Redactor()
        self._reported: set[str] = set()
        self._end: Event | None = None

    def add(self, line: Line) -> None:
        """Log a new line; one of an earlier session is only counted."""
        earlier = line.number <= self._skip
        self._line = line
        if earlier and self._rows.pass_step(line.text):
            return
        event = self._redactor.value("", decode(line.text))
        if event is None or fault_in(event) is not None:
            return  # readers of the file report a damaged line; the rest is logged
        if event["event"] in ("run_start", "run_end"):
            self._end = event if event["event"] == "run_end" else None
        if earlier:
            self._rows.pass_event(event)
        else:
            self._log(event, line.number)
        self._tables.add(event, self._rows.attempts, delivered=earlier)
        if not earlier and self._delivered.due():
            if self._run.offline:
                require_free_space(self._file)
            self.save()

    def save_after_failure(self) -> None:
        """Record how much wandb has stored, after it failed."""
        wait_until_stable(self._file)
        self._delivered.save(max(self._skip, repair(self._file)))

    def save(self) -> None:
        """Record how much wandb has stored: what its own file holds."""
        self._delivered.save(max(self._skip, last_step(self._file)))

    def _log(self, event: Event, number: int) -> None:
        row, kind = self._rows.row(event), event["event"]
        if kind != "step" or event["step"] % self._every == 0 or not event["applied"]:
            self._run.log(row | histograms(event), step=number)
        if kind == "run_start":
            session = {name: event.get(name) for name in ("regions", "world_size", "resumed_from", "config_sha256")}
            self._run.config.update({"session": session}, allow_val_change=True)
        elif kind == "checkpoint":
            self._try("a checkpoint", lambda: self._artifact(event))
        elif kind == "incident" and not self._run.offline:
            self._try("an alert", lambda: self._alert(event))

    def _artifact(self, event: Event) -> None:
        if "://" in event["path"] or Path(event["path"]).is_dir():  # it may have been deleted to make room
            log_artifact(self._run, checkpoint_facts(event, self._config))

    def _alert(self, event: Event) -> None:
        arguments = self._alerts.alert(event, self._run.name, time.time())
        if arguments is not None:
            self._run.alert(**arguments)

    def tables(self, *, now: bool = False) -> None:
        """Log the tables that changed, when due or `now`."""
        clock = time.monotonic()
        if self._tables.due(clock) or now:
            self._try("a table", lambda: self._log_tables(clock))

    def _log_tables(self, clock: float) -> None:
        if tables := self._tables.take(clock):
            self._run.log(tables | {AXIS: self._rows.attempts}, step=self._line.number)

    def _try(self, what: str, act: Callable[[], None]) -> None:
        """Call `act`; an error is logged once per `what`, and goes to the run's wandb.log in full."""
        try:
            act()
        except Exception as error:
            log_traceback()
            if what not in self._reported:
                self._reported.add(what)
                report("log", f"wandb did not take {what}: {one_line(error, 200)}; the rest continues")

    def finish(self) -> None:
        """Close the wandb run as training ended; without a `run_end` it crashed."""
        self.tables(now=True)
        if self._end is not None and self._end["status"] == _PREEMPTED:
            self._run.mark_preempting()
        self._run.finish(exit_code=1 if self._end is None else self._end["exit_code"])
        if self._run.offline:
            require_exit_record(self._file)
        self._delivered.save(self._line.number)


def log_traceback() -> None:
    """The exception under way on standard error, the run folder's wandb.log, without secrets."""
    sys.stderr.write(printable(Redactor().text(traceback.format_exc())))


def report(kind: str, text: str) -> None:
    """One line to training, which may be gone already."""
    try:
        print(f"{kind}: {text}", flush=True)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115, PTH123 - the interpreter fails at exit
