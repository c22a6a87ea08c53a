"""Send events to one wandb run: chart rows, tables of what went wrong, alerts and models."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from config.errors import one_line
from config.printable import line
from tracking.events import Event
from tracking.run_dir import RunDir
from tracking.trackers.delivery import RUNNING, Delivery, log_traceback, report
from tracking.wandb.charts import AXIS, FIRST, histograms
from tracking.wandb.models import checkpoint_facts, log_artifact

MIN_FREE_BYTES = 4 << 20
"""Free disk space below which nothing more is logged to an offline run: wandb fails silently on a full disk, and the
remaining space is for the events."""

MAX_ROWS = 2000
"""Maximum number of newest rows in a table, which wandb uploads whole each time."""
TABLE_EVERY_S = 60.0
ALERT_EVERY_S = 300.0
"""Minimum interval between alerts for one verdict."""
STALE_S = 900.0
"""Age from which an incident, left over from a session whose wandb had died, raises no alert."""

_COLUMNS = {
    "incident": ("verdict", "reason", "modules", "promoted_to", "rolled_back_to", "replay"),
    "nonfinite": ("rank", "module", "tensor", "kind", "count", "largest_finite", "micro_batch", "seen"),
    "scale": ("from", "to", "reason", "consecutive_overflows", "lr", "momentum_norm"),
}
_LEVELS = {"ABORT": "ERROR", "ROLLBACK": "ERROR"}
_MAX_TITLE = 63


class NoSpaceLeft(RuntimeError):
    """The disk of an offline run is nearly full, so that a retry would not help."""


class WandbDelivery(Delivery):
    """Logs events to one wandb run. Failures of tables, alerts and checkpoint artifacts are only reported."""

    def __init__(self, run: Any, job: dict[str, Any], delivered: int) -> None:
        """delivered: number of lines delivered by earlier sessions; for an online run the server's number counts."""
        super().__init__(job["log_every_steps"], delivered if run.offline else max(0, run.starting_step - 1))
        self._run, self.url = run, None if run.offline else run.url
        self._config, self._models = job["config"], job["models"]
        self._checkpoints = RunDir(Path(job["events"]).parent).checkpoints
        self._folder = Path(run.settings.sync_file).parent
        self._tables, self._alerts = Tables(), Alerts()
        self._reported: set[str] = set()

    def log(self, event: Event, row: dict[str, Any], *, earlier: bool) -> None:
        """Log a row and everything else for an event. Tables also include events of earlier sessions."""
        import wandb

        self._tables.add(event, self.rows.attempts, delivered=earlier)
        if earlier:
            return
        kind = event["event"]
        drawn = {name: wandb.Histogram(np_histogram=pair) for name, pair in histograms(event).items()}
        first = {FIRST[name]: value for name, value in row.items() if name in FIRST}  # "Charts", the first section
        self._run.log(row | first | drawn, step=self.line)
        if kind == "run_start":
            session = {name: event.get(name) for name in ("regions", "world_size", "resumed_from", "config_sha256")}
            self._run.config.update({"session": session}, allow_val_change=True)
            # The server has the verdict of the last session.
            self._try("the verdict", lambda: self._run.summary.update(RUNNING))
        elif kind == "checkpoint" and (place := self._place(event["path"])):
            facts = checkpoint_facts(event | {"path": place}, self._config)
            self._try("a checkpoint", lambda: log_artifact(self._run, facts))
        elif kind == "incident" and not self._run.offline:
            arguments = self._alerts.alert(event, self._run.name, time.time())
            if arguments is not None:
                self._try("an alert", lambda: self._run.alert(**arguments))

    def _place(self, path: str) -> str:
        """URL or folder of a checkpoint, whose path may be relative to another folder; empty if already deleted."""
        folder = self._checkpoints / Path(path).name
        return path if "://" in path else str(folder) if folder.is_dir() else ""

    def flush(self) -> None:
        """Log the changed tables if due. Raises NoSpaceLeft."""
        if self._run.offline and shutil.disk_usage(self._folder).free < MIN_FREE_BYTES:
            raise NoSpaceLeft("no space left on its disk")
        if self._tables.due(time.monotonic()):
            self._log_tables()

    def _log_tables(self) -> None:
        def log() -> None:
            if tables := self._tables.take(time.monotonic()):
                self._run.log(tables | {AXIS: self.rows.attempts}, step=self.line)

        self._try("a table", log)

    def _try(self, what: str, act: Callable[[], None]) -> None:
        """Call `act`; an error is reported once per `what`, and logged in full in the run's wandb.log."""
        try:
            act()
        except Exception as error:
            log_traceback()
            if what not in self._reported:
                self._reported.add(what)
                report("log", f"wandb did not take {what}: {one_line(error, 200)}; the rest continues")

    def close(self, exit_code: int, verdict: dict[str, Any]) -> None:
        """Log the job's models, the last tables and the verdict, and close the wandb run. Raises NoSpaceLeft."""
        for facts in self._models:
            log_artifact(self._run, facts)
        self._log_tables()
        self._try("the verdict", lambda: self._run.summary.update(verdict))
        if self.end is not None and self.end["status"] == "preempted":
            self._run.mark_preempting()
        self._run.finish(exit_code=exit_code)
        self.flush()


class Tables:
    """Tables of a run's incidents, non-finite tensors and scale events over all sessions, newest last."""

    def __init__(self) -> None:
        self._rows: dict[str, list[list[Any]]] = {}
        self._changed: set[str] = set()
        self._logged = 0.0

    def add(self, event: Event, attempt: int, *, delivered: bool) -> None:
        """Add a row if `event` belongs in a table. delivered: wandb has it from an earlier session."""
        kind = event["event"]
        if kind not in _COLUMNS:
            return
        rows = self._rows.setdefault(kind, [])
        rows.append([attempt, event["step"], *(_cell(event.get(name)) for name in _COLUMNS[kind])])
        del rows[:-MAX_ROWS]
        if not delivered:
            self._changed.add(kind)

    def due(self, now: float) -> bool:
        """Whether a table changed and none was logged for TABLE_EVERY_S. now: monotonic seconds."""
        return bool(self._changed) and now - self._logged >= TABLE_EVERY_S

    def take(self, now: float) -> dict[str, Any]:
        """The tables that changed since the last call, for logging."""
        import wandb

        changed, self._changed, self._logged = sorted(self._changed), set(), now
        return {
            f"tables/{kind}": wandb.Table(
                columns=["attempt", "step", *_COLUMNS[kind]], data=self._rows[kind], allow_mixed_types=True
            )
            for kind in changed
        }


def _cell(value: Any) -> Any:
    """A table cell, with lists and non-finite numbers as text, since a table's JSON supports neither."""
    if isinstance(value, list | tuple):
        return ", ".join(str(item) for item in value)
    if isinstance(value, float) and value - value != 0:
        return str(value)
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)


class Alerts:
    """Limits alerts to one per verdict in ALERT_EVERY_S; suppressed ones are counted in the next."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def alert(self, event: Event, run_name: str, now: float) -> dict[str, Any] | None:
        """Arguments of `wandb.alert` for an incident, or None for no alert. now: seconds since the epoch."""
        if event["event"] != "incident" or now - event["time"] > STALE_S:
            return None
        verdict = event["verdict"]
        if now - self._last.get(verdict, -ALERT_EVERY_S) < ALERT_EVERY_S:
            self._left_out[verdict] = self._left_out.get(verdict, 0) + 1
            return None
        self._last[verdict] = now
        lines = [f"{verdict} at step {event['step']} of {run_name}: {event['reason']}"]
        if event["modules"]:
            lines.append(f"modules: {', '.join(event['modules'])}")
        if left_out := self._left_out.pop(verdict, 0):
            lines.append(f"{left_out} more since the last alert")
        if event["replay"]:
            lines.append(f"replay: {event['replay']}")
        return {
            "title": line(f"{verdict} in {run_name}")[:_MAX_TITLE],
            "text": "\n".join(map(line, lines)),
            "level": _LEVELS.get(verdict, "WARN"),
            "wait_duration": ALERT_EVERY_S,
        }
