"""Tables of incidents, non-finite tensors and scale events; and an alert for each incident."""

from __future__ import annotations

from typing import Any

from config.printable import line
from tracking.events import Event

MAX_ROWS = 2000
"""The newest rows that a table keeps: wandb uploads the whole table each time."""
TABLE_EVERY_S = 60.0
ALERT_EVERY_S = 300.0
"""Seconds between two alerts of one verdict."""
STALE_S = 900.0
"""An incident older than this, from a session whose wandb had died, raises no alert."""

_COLUMNS = {
    "incident": ("verdict", "reason", "modules", "promoted_to", "rolled_back_to", "replay"),
    "nonfinite": ("rank", "module", "tensor", "kind", "count", "largest_finite", "micro_batch", "seen"),
    "scale": ("from", "to", "reason", "consecutive_overflows", "lr", "momentum_norm"),
}
_LEVELS = {"ABORT": "ERROR", "ROLLBACK": "ERROR"}
_MAX_TITLE = 63


class Tables:
    """The incidents, non-finite attributions and scale events of a run over all its sessions, newest last."""

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
        """Whether a table changed, and none was logged for TABLE_EVERY_S. now: monotonic seconds."""
        return bool(self._changed) and now - self._logged >= TABLE_EVERY_S

    def take(self, now: float) -> dict[str, Any]:
        """The tables that changed since the last call, to be logged."""
        import wandb

        changed, self._changed, self._logged = sorted(self._changed), set(), now
        return {
            f"tables/{kind}": wandb.Table(
                columns=["attempt", "step", *_COLUMNS[kind]], data=self._rows[kind], allow_mixed_types=True
            )
            for kind in changed
        }


def _cell(value: Any) -> Any:
    """Lists and non-finite numbers as text, since a table's JSON has neither."""
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
        """The arguments of `wandb.alert` for an incident; None for no alert. now: seconds since the epoch."""
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
