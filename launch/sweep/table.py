"""A sweep's results: ranked trials with their cost and why they ended, for results.json and as Markdown."""

import math
from collections.abc import Mapping
from statistics import fmean, stdev
from typing import Any

from config.redact import redact
from launch.sweep.events import LAST_STEPS, read_history
from launch.sweep.file import as_setting, label_of
from launch.sweep.folder import ENDED, Plan
from tracking.pages.markdown import Table, page, text

_STATUS_ORDER = ("done", "out of time", "running", "stopped", "hopeless", "crashed", "refused", "diverged", "waiting")
"""Rank order: finished trials come before unfinished ones, whose losses belong to other steps."""
_LOSSES = {"validation_loss": "validation loss", "training_loss": f"training loss, mean of the last {LAST_STEPS} steps"}
"""Fields that trials may be ranked by, and their display names."""


def results_of(plan: Plan) -> dict[str, Any]:
    """The content of results.json, best trial first; unknown values are None."""
    found = [(entry, plan.outcome(entry), read_history(plan.run_folder(entry))) for entry in plan.current]
    # All trials are ranked by the same loss: the validation loss only if every finished trial has one.
    finished = [history for _, outcome, history in found if outcome.status == "done"] or [item[2] for item in found]
    loss = "validation_loss" if all(history.evaluations for history in finished) else "training_loss"
    trials, device_hours = list[dict[str, Any]](), 0.0
    for entry, outcome, history in found:
        hours = outcome.seconds / 3600
        spent = hours * (history.world_size or plan.processes)
        device_hours += spent
        trials.append(
            {
                "trial": entry.index,
                "name": entry.name,
                "overrides": redact(entry.overrides),
                "status": outcome.status,
                "reason": redact(outcome.reason),
                "exit_code": outcome.exit_code,
                "starts": outcome.starts,
                "steps": history.steps,
                "validation_loss": history.validation_loss,
                "training_loss": history.training_loss,
                "tokens_per_second": history.tokens_per_second,
                "hours": hours,
                "processes": history.world_size,
                "cost": None if plan.price is None else plan.price * spent,
            }
        )

    def rank(trial: Mapping[str, Any]) -> tuple[int, float, int]:
        last = trial[loss] is None or math.isnan(trial[loss])
        return _STATUS_ORDER.index(trial["status"]), math.inf if last else trial[loss], trial["trial"]

    trials.sort(key=rank)
    ended = sum(trial["status"] in ENDED for trial in trials)
    cost = None if plan.price is None else plan.price * device_hours
    return {
        "sweep": plan.name,
        "ranked_by": _LOSSES[loss],
        "ended": ended,
        "device_hours": device_hours,
        "cost": cost,
        "trials_per_device_hour": ended / device_hours if device_hours else None,
        "trials_per_money": ended / cost if cost else None,
        "trials": [{"rank": number, **trial} for number, trial in enumerate(trials, start=1)],
    }


def as_markdown(results: Mapping[str, Any]) -> str:
    """Ranked table and cost as Markdown, for sweep.md and the terminal."""
    trials = results["trials"]
    line = f"{results['ended']} of {len(trials)} trials ended in {results['device_hours']:.3g} device hours"
    if results["trials_per_device_hour"]:
        line += f": {results['trials_per_device_hour']:.3g} trials per device hour"
    if results["cost"]:
        line += f", cost {results['cost']:.3g}, {results['trials_per_money']:.3g} trials per dollar"
    return page(
        f"# {text(results['sweep'])}: {len(trials)} trials, ranked by {results['ranked_by']}",
        _table(trials, priced=results["cost"] is not None).padded(),
        _over_seeds(results).padded(),
        f"{line}.",
        [f"{text(one['name'])} {one['status']}: {text(one['reason'])}" for one in trials if one["reason"]],
    )


def _table(trials: list[dict[str, Any]], *, priced: bool) -> Table:
    keys = list(dict.fromkeys(key for trial in trials for key in trial["overrides"]))
    head = ["", "trial", *keys, "validation", "training", "steps", "tokens/s", "hours", *["cost"] * priced, "status"]
    table = Table([text(name) for name in head])
    for trial in trials:
        settings = {key: as_setting(value) for key, value in trial["overrides"].items()}
        line = [trial["rank"], trial["name"], *(settings.get(key, "") for key in keys)]
        line += [_number(trial["validation_loss"], ".4f"), _number(trial["training_loss"], ".4f"), trial["steps"]]
        line += [_number(trial["tokens_per_second"], ",.0f"), f"{trial['hours']:.3g}"]
        line += [_number(trial["cost"], ".3g")] if priced else []
        table.add(*map(text, [*line, trial["status"]]))
    return table


def _over_seeds(results: Mapping[str, Any]) -> Table:
    """Mean and standard deviation over trials that differ only in run.seed; empty without such trials."""
    field = next(name for name, words in _LOSSES.items() if words == results["ranked_by"])
    groups: dict[str, list[float]] = {}
    for trial in results["trials"]:
        rest = label_of({key: value for key, value in trial["overrides"].items() if key != "run.seed"})
        known = trial[field] is not None and math.isfinite(trial[field])
        if trial["status"] == "done" and known and "run.seed" in trial["overrides"]:
            groups.setdefault(rest, []).append(trial[field])
    table = Table(("over seeds", "runs done", "mean loss", "standard deviation"))
    if any(len(losses) > 1 for losses in groups.values()):
        for name, losses in sorted(groups.items(), key=lambda item: fmean(item[1])):
            spread = f"{stdev(losses):.4f}" if len(losses) > 1 else "-"
            table.add(text(name), len(losses), f"{fmean(losses):.4f}", text(spread))
    return table


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
