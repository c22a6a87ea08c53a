"""A comparison on the terminal: what matters first, tables that stay readable from two runs to a dozen."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from config.printable import line, shown
from tracking.compare.differences import Difference, format_value, rates_are_compared
from tracking.compare.measures import Measure
from tracking.compare.result import Comparison, Pair
from tracking.events import Event, describe_event
from tracking.numbers import human, loss, mib, number, precise_duration, rate, scale
from tracking.pages.markdown import Table
from tracking.terminal import words

SIDE_BY_SIDE = 4
"""The most runs that are columns; more are rows, and each differing value is followed by the runs that have it."""
_MAX_DIFFERENCES = 40
_MAX_EVENTS = 12
_MAX_VALUE = 60

COMPARABLE = "Comparable: same data, tokenizer, batch, model, precision, schedule and hardware, as far as recorded"


def show(comparison: Comparison, console: Console) -> None:
    """Print the whole comparison."""
    _show_runs(comparison, console)
    if comparison.pairs:
        _show_caveats(comparison, console)
        console.print(Text("\nWhere they diverge", style="bold"))
        for pair in comparison.pairs:
            _show_pair(pair, console, detailed=len(comparison.runs) <= SIDE_BY_SIDE)
        console.print(Text("\nWhat differs", style="bold"))
        _show_differences(comparison, console)
        console.print(Text("\nWhich is better", style="bold"))
        for verdict in comparison.verdicts:
            console.print(Padding(words(verdict), (0, 0, 0, 2)))
    console.print(_measures_table(comparison).grid(boxed=False))


def comparable(comparison: Comparison) -> str:
    """Sentence about runs without a caveat."""
    rates = rates_are_compared(comparison.differences)
    return f"{COMPARABLE}{'; the learning rate is what is compared' if rates else ''}"


def _show_caveats(comparison: Comparison, console: Console) -> None:
    if not comparison.caveats:
        console.print(Text(f"\n{comparable(comparison)}", style="bold green"))
        return
    console.print(Text("\nNot directly comparable", style="bold yellow"))
    for caveat in comparison.caveats:
        console.print(Padding(words(f"! {caveat}"), (0, 0, 0, 2)))


def _show_runs(comparison: Comparison, console: Console) -> None:
    for index, run in enumerate(comparison.runs):
        text = words(run.label, "bold")
        text.append(shown(f"  {'baseline, ' if index == 0 else ''}{run.verdict.text}, {run.source}"), style="dim")
        console.print(text, soft_wrap=True)


def _show_pair(pair: Pair, console: Console, *, detailed: bool) -> None:
    headline = words(f"  {pair.run.label}: ", "bold")
    headline.append(shown(pair.headline), style="green" if pair.divergence.step is None else "")
    console.print(headline)
    console.print(Padding(words(f"cause: {pair.cause}"), (0, 0, 0, 4)))
    if pair.tolerance_cause:
        console.print(Padding(words(f"beyond tolerance {pair.tolerance_cause}"), (0, 0, 0, 4)))
    if not detailed or pair.divergence.step is None:
        return
    console.print(Padding(_rows_table(pair).grid(boxed=False), (0, 0, 0, 4)))
    for label, event in pair.divergence.events[:_MAX_EVENTS]:
        console.print(Padding(words(f"{label}, step {event['step']}: {event_line(event)}", "dim"), (0, 0, 0, 4)))
    more = len(pair.divergence.events) - _MAX_EVENTS
    if more > 0:
        console.print(Padding(Text(f"and {more} more events; --json has them all", style="dim"), (0, 0, 0, 4)))


def _rows_table(pair: Pair) -> Table:
    table = Table(("step", "run", "loss", "grad norm", "lr", "scale", "applied", "samples"))
    places = {place for place in (pair.divergence.step, pair.divergence.beyond_tolerance) if place is not None}
    for row in sorted(pair.divergence.rows, key=lambda row: row["step"]):
        table.add(
            row["step"],
            _short(row["run"], 24),
            f"{row['loss']:.9g}",
            f"{row['grad_norm']:.9g}",
            rate(row["lr"]),
            scale(row["loss_scale"]),
            "yes" if row["applied"] else "skipped",
            row["sample_ids_sha256"],
            style="yellow" if row["step"] in places else "",
        )
    return table


def _show_differences(comparison: Comparison, console: Console) -> None:
    items = [item for item in comparison.differences if item.group != "deepspeed"]
    hidden = len(comparison.differences) - len(items)
    if not items:
        console.print("  nothing recorded")
    else:
        table = _differences_table(comparison, items[:_MAX_DIFFERENCES])
        console.print(Padding(table.grid(boxed=False), (0, 0, 0, 2)))
    if len(items) > _MAX_DIFFERENCES:
        console.print(f"  and {len(items) - _MAX_DIFFERENCES} more; --json has them all", style="dim")
    if hidden:
        console.print(f"  and {hidden} keys of the DeepSpeed JSON that follow from these", style="dim")


def _differences_table(comparison: Comparison, items: Sequence[Difference]) -> Table:
    few, labels = len(comparison.runs) <= SIDE_BY_SIDE, [run.label for run in comparison.runs]
    table, group = Table(("", "", *((_short(label, 24) for label in labels) if few else ("values (runs)",)))), ""
    for item in items:
        name, group = ("" if item.group == group else item.group), item.group
        values = [_short(format_value(value), _MAX_VALUE) for value in item.values]
        table.add(words(name, "dim"), item.key, *(values if few else [runs_by_value(item, labels)]))
    return table


def runs_by_value(item: Difference, names: Sequence[str]) -> str:
    """Each value once, with the runs that have it."""
    holders: dict[str, list[str]] = {}
    for value, name in zip(item.values, names, strict=True):
        holders.setdefault(_short(format_value(value), _MAX_VALUE), []).append(name)
    return "; ".join(f"{value} ({', '.join(runs)})" for value, runs in holders.items())


def _measures_table(comparison: Comparison) -> Table:
    """Runs as columns when they are few, as rows when they are many (then only the main measures)."""
    runs, rows = comparison.runs, comparison.measures
    if len(runs) <= SIDE_BY_SIDE:
        cells = [(words(row.title, "dim"), *(_cell(row, index) for index in range(len(runs)))) for row in rows]
        return Table(("", *(_short(run.label, 24) for run in runs)), cells)
    rows = [row for row in rows if row.key in COLUMN_TITLES]
    cells = [(words(run.label), *(_cell(row, index) for row in rows)) for index, run in enumerate(runs)]
    return Table(("run", *(COLUMN_TITLES[row.key] for row in rows)), cells)


COLUMN_TITLES = {
    "loss_at_equal_tokens": "loss, tokens",
    "loss_at_equal_time": "loss, time",
    "validation_at_equal_tokens": "validation",
    "tokens_per_second": "tokens/s",
    "memory_bytes": "memory",
    "skipped": "skips",
    "incidents": "incidents",
    "running_seconds": "time",
    "cost": "cost",
}


def _cell(row: Measure, index: int) -> Text:
    text = words(format_measure(row.kind, row.values[index]))
    if index in row.best:
        text.append(" *")
        text.stylize("bold green")
    return text


def format_measure(kind: str, value: float | str) -> str:
    """A measure's value with its unit; - where nothing was recorded."""
    if isinstance(value, str):
        return value or "-"
    if math.isnan(value):
        return "-"
    match kind:
        case "loss":
            return loss(value)
        case "count":
            return f"{value:,.0f}"
        case "seconds":
            return precise_duration(value)
        case "bytes":
            return mib(value)
        case "rate":
            return human(value)
        case "hours":
            return f"{number(value)} h"
    return number(value)


def event_line(event: Event) -> str:
    """One event in one line, with the command that replays an incident."""
    return "; ".join(filter(None, (describe_event(event), line(event.get("replay") or ""))))


def _short(text: str, most: int) -> str:
    """`text` cut in the middle to `most` characters: names of runs often differ in their ends."""
    return text if len(text) <= most else f"{text[: most // 2 - 1]}..{text[-(most - most // 2 - 1) :]}"
