"""Events into one wandb run."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from config.errors import one_line
from tracking.events import Event
from tracking.trackers.delivery import Delivery, log_traceback, report
from tracking.wandb.charts import AXIS, FIRST, histograms
from tracking.wandb.models import checkpoint_facts, log_artifact
from tracking.wandb.tables import Alerts, Tables

MIN_FREE_BYTES = 4 << 20
"""Free space below which nothing more is logged to an offline run: wandb says nothing about what a full disk refuses,
and the rest of the disk is for the events."""

_PREEMPTED = "preempted"
SUMMARY = ("verdict", "verdict_text", "next_command", "warnings")
"""Fields of the `run_end` in the summary of the wandb run."""


class NoSpaceLeft(RuntimeError):
    """The disk of an offline run is nearly full, and a retry would not help."""


class WandbDelivery(Delivery):
    """Logs events to one wandb run. Only a failing chart row ends it; tables, models and alerts may fail."""

    def __init__(self, run: Any, job: dict[str, Any], delivered: int) -> None:
        """delivered: lines that earlier sessions have delivered. Of an online run its server says how many it has."""
        super().__init__(job["log_every_steps"], delivered if run.offline else max(0, run.starting_step - 1))
        self._run, self.url = run, None if run.offline else run.url
        self._config, self._models = job["config"], job["models"]
        self._folder = Path(run.settings.sync_file).parent
        self._tables, self._alerts = Tables(), Alerts()
        self._reported: set[str] = set()

    def pass_event(self, event: Event) -> None:
        """Count an event of an earlier session, and keep it for the tables."""
        super().pass_event(event)
        self._tables.add(event, self.rows.attempts, delivered=True)

    def log(self, event: Event, row: dict[str, Any]) -> None:
        """Log a row, and what else an event leads to."""
        import wandb

        kind = event["event"]
        drawn = {name: wandb.Histogram(np_histogram=pair) for name, pair in histograms(event).items()}
        first = {FIRST[name]: value for name, value in row.items() if name in FIRST}  # in "Charts", the first section
        self._run.log(row | first | drawn, step=self.line)
        if kind == "run_start":
            session = {name: event.get(name) for name in ("regions", "world_size", "resumed_from", "config_sha256")}
            self._run.config.update({"session": session}, allow_val_change=True)
        elif kind == "checkpoint":
            self._try("a checkpoint", lambda: self._artifact(event))
        elif kind == "incident" and not self._run.offline:
            self._try("an alert", lambda: self._alert(event))
        self._tables.add(event, self.rows.attempts, delivered=False)

    def _artifact(self, event: Event) -> None:
        if "://" in event["path"] or Path(event["path"]).is_dir():  # it may have been deleted to make room
            log_artifact(self._run, checkpoint_facts(event, self._config))

    def _alert(self, event: Event) -> None:
        arguments = self._alerts.alert(event, self._run.name, time.time())
        if arguments is not None:
            self._run.alert(**arguments)

    def flush(self) -> None:
        """Log the tables that changed, when due. Raises NoSpaceLeft."""
        self._require_space()
        if self._tables.due(time.monotonic()):
            self._log_tables()

    def _require_space(self) -> None:
        if self._run.offline and shutil.disk_usage(self._folder).free < MIN_FREE_BYTES:
            raise NoSpaceLeft("no space left on its disk")

    def _log_tables(self) -> None:
        def log() -> None:
            if tables := self._tables.take(time.monotonic()):
                self._run.log(tables | {AXIS: self.rows.attempts}, step=self.line)

        self._try("a table", log)

    def _try(self, what: str, act: Callable[[], None]) -> None:
        """Call `act`; an error is logged once per `what`, and goes to the run's wandb.log in full."""
        try:
            act()
        except Exception as error:
            log_traceback()
            if what not in self._reported:
                self._reported.add(what)
                report("log", f"wandb did not take {what}: {one_line(error, 200)}; the rest continues")

    def close(self, exit_code: int) -> None:
        """Log the last tables and the models of the job, and close the wandb run. Raises NoSpaceLeft."""
        for facts in self._models:
            log_artifact(self._run, facts)
        self._log_tables()
        if self.end is not None and self.end.get("verdict"):
            fields = {name: self.end.get(name) for name in SUMMARY}
            self._try("the verdict", lambda: self._run.summary.update(fields))
        if self.end is not None and self.end["status"] == _PREEMPTED:
            self._run.mark_preempting()
        self._run.finish(exit_code=exit_code)
        self._require_space()
