"""A sweep's results: its trials ranked, what each cost and why it ended, as Markdown and JSON."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from config.redact import redact
from launch.sweep.events import LAST_STEPS, History, read_history
from launch.sweep.file import as_setting, label_of
from launch.sweep.folder import ENDED, Entry, Outcome, Plan
from tracking.pages.markdown import Table, page, text

_STATUS_ORDER = ("done", "running", "stopped", "hopeless", "crashed", "refused", "diverged", "waiting")
"""Finished trials rank before unfinished ones, whose losses are of other steps."""


@dataclass(frozen=True)
class Row:
    """One trial."""

    entry: Entry
    outcome: Outcome
    history: History
    loss: float | None
    """[nats] Loss that it is ranked by."""
    cost: float | None
    """[money] Price of its device hours; None without a price."""

    @property
    def hours(self) -> float:
        """[hours] Duration of all its starts."""
        return self.outcome.seconds / 3600


@dataclass(frozen=True)
class Results:
    """All trials of a sweep, best first."""

    plan: Plan
    rows: list[Row]
    ranked_by: str

    @property
    def device_hours(self) -> float:
        """[hours] Total of all trials on all their processes."""
        return sum(row.hours * (row.history.world_size or self.plan.processes) for row in self.rows)

    @property
    def ended(self) -> int:
        """[trials] Trials that need not be started again."""
        return sum(row.outcome.status in ENDED for row in self.rows)

    def as_dict(self) -> dict[str, Any]:
        """The results for JSON; unknown values are null, those that are not finite strings."""
        spent = None if self.plan.price is None else self.plan.price * self.device_hours
        trials = [
            {
                "rank": number,
                "trial": row.entry.index,
                "name": row.entry.name,
                "overrides": redact(row.entry.overrides),
                "status": row.outcome.status,
                "reason": redact(row.outcome.reason),
                "exit_code": row.outcome.exit_code,
                "starts": row.outcome.starts,
                "steps": row.history.steps,
                "validation_loss": _finite(row.history.validation_loss),
                "training_loss": _finite(row.history.training_loss),
                "tokens_per_second": row.history.tokens_per_second,
                "hours": row.hours,
                "processes": row.history.world_size,
                "cost": row.cost,
            }
            for number, row in enumerate(self.rows, start=1)
        ]
        return {
            "sweep": self.plan.name,
            "ranked_by": self.ranked_by,
            "ended": self.ended,
            "device_hours": self.device_hours,
            "cost": spent,
            "trials_per_device_hour": self.ended / self.device_hours if self.device_hours else None,
            "trials_per_money": self.ended / spent if spent else None,
            "trials": trials,
        }


def results_of(plan: Plan) -> Results:
    """Read every trial's record and events."""
    found = [(entry, plan.outcome(entry), read_history(plan.run_folder(entry))) for entry in plan.current]
    # All are ranked by the same loss: by the validation loss only if every finished trial has one.
    finished = [history for _, outcome, history in found if outcome.status == "done"] or [item[2] for item in found]
    validated = all(history.evaluations for history in finished)
    rows = []
    for entry, outcome, history in found:
        loss = history.validation_loss if validated else history.training_loss
        devices = history.world_size or plan.processes
        cost = None if plan.price is None else plan.price * devices * outcome.seconds / 3600
        rows.append(Row(entry, outcome, history, loss, cost))
    rows.sort(key=_rank)
    ranked_by = "validation loss" if validated else f"training loss, mean of the last {LAST_STEPS} steps"
    return Results(plan, rows, ranked_by)


def _rank(row: Row) -> tuple[int, float, int]:
    loss = math.inf if row.loss is None or math.isnan(row.loss) else row.loss
    return _STATUS_ORDER.index(row.outcome.status), loss, row.entry.index


def as_markdown(results: Results) -> str:
    """The ranked table and the cost, for sweep.md and the terminal."""
    plan, whole = results.plan, results.as_dict()
    line = f"{results.ended} of {len(results.rows)} trials ended in {results.device_hours:.3g} device hours"
    if whole["trials_per_device_hour"]:
        line += f": {whole['trials_per_device_hour']:.3g} trials per device hour"
    if whole["cost"]:
        line += f", cost {whole['cost']:.3g}, {whole['trials_per_money']:.3g} trials per dollar"
    ended = [(text(row.entry.name), row.outcome) for row in results.rows if row.outcome.reason]
    return page(
        f"# {text(plan.name)}: {len(results.rows)} trials, ranked by {results.ranked_by}",
        _table(results).padded(),
        _over_seeds(results).padded(),
        f"{line}.",
        [f"{name} {outcome.status}: {text(outcome.reason)}" for name, outcome in ended],
    )


def _table(results: Results) -> Table:
    keys = list(dict.fromkeys(key for row in results.rows for key in row.entry.overrides))
    money = [] if results.plan.price is None else ["cost"]
    head = ["", "trial", *keys, "validation", "training", "steps", "tokens/s", "hours", *money, "status"]
    table = Table([text(name) for name in head])
    for number, row in enumerate(results.rows, start=1):
        line = [number, row.entry.name, *(_value(row.entry.overrides, key) for key in keys)]
        line += [_number(row.history.validation_loss, ".4f"), _number(row.history.training_loss, ".4f")]
        line += [row.history.steps, _number(row.history.tokens_per_second, ",.0f"), f"{row.hours:.3g}"]
        line += [_number(row.cost, ".3g")] if money else []
        table.add(*map(text, [*line, row.outcome.status]))
    return table


def _over_seeds(results: Results) -> Table:
    """Mean and spread over trials that differ only in run.seed; empty when there are none."""
    groups: dict[str, list[float]] = {}
    for row in results.rows:
        rest = label_of({key: value for key, value in row.entry.overrides.items() if key != "run.seed"})
        if row.outcome.status == "done" and row.loss is not None and "run.seed" in row.entry.overrides:
            groups.setdefault(rest, []).append(row.loss)
    table = Table(("over seeds", "runs done", "mean loss", "standard deviation"))
    if any(len(losses) > 1 for losses in groups.values()):
        for name, losses in sorted(groups.items(), key=lambda item: fmean(item[1])):
            spread = f"{stdev(losses):.4f}" if len(losses) > 1 else "-"
            table.add(text(name), len(losses), f"{fmean(losses):.4f}", text(spread))
    return table


def _value(overrides: dict[str, Any], key: str) -> str:
    return as_setting(overrides[key]) if key in overrides else ""


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _finite(value: float | None) -> float | str | None:
    return value if value is None or math.isfinite(value) else str(value)
