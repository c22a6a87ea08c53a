"""A comparison on the terminal: the essentials first, in tables that stay readable for two to a dozen runs."""

import math
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from config.errors import UserError
from config.printable import line, shown
from tracking.compare.caveats import compared_settings, rates_are_compared
from tracking.compare.differences import Difference, format_value, side_by_side
from tracking.compare.measures import Measure, format_measure
from tracking.compare.result import Comparison, Pair
from tracking.events import Event, describe_event
from tracking.numbers import number, rate, scale
from tracking.pages.markdown import Table
from tracking.terminal import words
from tracking.verdict import STYLES

SIDE_BY_SIDE = 4
"""Maximum number of runs shown as columns; beyond it runs become rows, and each differing value lists its runs."""
_WIDTH = 40
_MAX_DIFFERENCES = 40
_MAX_EVENTS = 12
_MAX_PAIRS = 24
_MAX_VALUE = 60
_MOST_COMPARED = 3
_MOST_NAMES, _MOST_VALUES = 8, 16  # runs listed per value, values listed per setting

COMPARABLE = "Comparable: same data, tokenizer, batch, model, precision, schedule and hardware, as far as recorded"


def show(comparison: Comparison, console: Console) -> None:
    for index, run in enumerate(comparison.runs):
        text = words(run.label, "bold")
        text.append(f"  {'baseline, ' if index == 0 else ''}", style="dim")
        text.append(shown(run.verdict.text), style=STYLES[run.verdict.tone])
        if run.verdict.warnings:
            text.append(f", {run.verdict.warnings:,} warning{'s' * (run.verdict.warnings > 1)}", style="yellow")
        text.append(shown(f", {run.source}"), style="dim")
        console.print(text, soft_wrap=True)
    if comparison.pairs:
        if comparison.caveats:
            console.print(Text("\nNot directly comparable", style="bold yellow"))
        else:
            console.print(Text(f"\n{comparable(comparison)}", style="bold green"))
        for caveat in comparison.caveats:
            console.print(Padding(words(f"! {caveat}"), (0, 0, 0, 2)))
        console.print(Text("\nWhich is better", style="bold"))
        for verdict in comparison.verdicts:
            console.print(Padding(words(verdict), (0, 0, 0, 2)))
        console.print(Text("\nWhere they diverge", style="bold"))
        for pair in comparison.pairs[:_MAX_PAIRS]:
            _show_pair(pair, console, detailed=len(comparison.runs) <= SIDE_BY_SIDE)
        if len(comparison.pairs) > _MAX_PAIRS:
            console.print(f"  and {len(comparison.pairs) - _MAX_PAIRS} more runs; --json has them all", style="dim")
        console.print(Text("\nWhat differs", style="bold"))
        _show_differences(comparison, console)
        console.print(Text("\nMeasures", style="bold"))
    console.print(_measures_table(comparison).grid(boxed=False))
    if comparison.means:
        console.print(means_table(comparison).grid(boxed=False))


def scatter_table(comparison: Comparison, setting: str, measure: str) -> Table:
    """Table of a measure by a setting, sorted by the setting; higher measures are plotted further to the right.

    setting: the end of its dotted key. Raises UserError if it does not differ, or if the measure is unknown.
    """
    items = [item for item in comparison.differences if f".{item.key}".endswith(f".{setting}")]
    rows = {row.key: row for row in comparison.measures if row.kind != "text"}
    if not items:
        known = ", ".join(item.key for item in comparison.differences if item.group != "deepspeed") or "none does"
        raise UserError(f"--by {setting}: does not differ between these runs; what differs: {known}")
    if measure not in rows:
        raise UserError(f"--measure {measure}: these runs have no such measure; there are {', '.join(rows)}")
    item, row = items[0], rows[measure]
    known_values = [float(value) for value in row.values if math.isfinite(float(value))]
    low, high = min(known_values, default=0.0), max(known_values, default=0.0)
    table = Table((item.key, row.title, f"{format_measure(row.kind, low)} to {format_measure(row.kind, high)}", "run"))
    for index in sorted(range(len(comparison.runs)), key=lambda index: sort_key(item.values[index])):
        value = float(row.values[index])
        share = (value - low) / (high - low) if high > low else 0.5
        place = round(share * (_WIDTH - 1)) if math.isfinite(value) else None
        dots = "".join("o" if at == place else "." for at in range(_WIDTH))
        label = _short(comparison.runs[index].label, 40)
        table.add(_short(format_value(item.values[index]), 30), _cell(row, index), words(dots), label)
    return table


def sort_key(value: Any) -> tuple[int, float, str]:
    """Sort key of a setting's values: numbers by size, then text, then unrecorded values."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return 0, value, ""
    return (2, 0.0, "") if value is None else (1, 0.0, str(value))


def comparable(comparison: Comparison) -> str:
    """One sentence for runs without caveats, naming the compared settings."""
    compared = compared_settings(comparison.differences)
    items = [f"{item.key} {_short(side_by_side(item.values), _MAX_VALUE)}" for item in compared]
    more = f" and {len(items) - _MOST_COMPARED} more settings" if len(items) > _MOST_COMPARED else ""
    what = "the learning rate is what is compared" if rates_are_compared(comparison.differences) else "what is compared"
    return f"{COMPARABLE}{f'; {what}: ' if items else ''}{', '.join(items[:_MOST_COMPARED])}{more}"


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
    for row in sorted(pair.divergence.rows, key=lambda row: row["step"]):
        table.add(
            row["step"],
            _short(row["run"], 24),
            number(row["loss"], 9),
            number(row["grad_norm"], 9),
            rate(row["lr"]),
            scale(row["loss_scale"]),
            "yes" if row["applied"] else "skipped",
            row["sample_ids_sha256"],
            style="yellow" if row["step"] in pair.divergence.places else "",
        )
    return table


def _show_differences(comparison: Comparison, console: Console) -> None:
    items = [item for item in comparison.differences if item.group != "deepspeed"]
    hidden = len(comparison.differences) - len(items)
    if not items:
        console.print("  nothing recorded")
    else:
        few, labels = len(comparison.runs) <= SIDE_BY_SIDE, [run.label for run in comparison.runs]
        table, group = Table(("", "", *([_short(label, 24) for label in labels] if few else ["values (runs)"]))), ""
        for item in items[:_MAX_DIFFERENCES]:
            name, group = ("" if item.group == group else item.group), item.group
            values = [_short(format_value(value), _MAX_VALUE) for value in item.values]
            cells = values if few else [runs_by_value(item, labels)]
            table.add(words(name, "dim"), _short(item.key, _MAX_VALUE), *cells)
        grid = table.grid(boxed=False)
        grid.columns[1].no_wrap = True
        if not few:
            grid.columns[2].no_wrap, grid.columns[2].justify = False, "left"  # a value may begin with a digit
        console.print(Padding(grid, (0, 0, 0, 2)))
    if len(items) > _MAX_DIFFERENCES:
        console.print(f"  and {len(items) - _MAX_DIFFERENCES} more; --json has them all", style="dim")
    if hidden:
        console.print(f"  and {hidden} keys of the DeepSpeed JSON that follow from these", style="dim")


def runs_by_value(item: Difference, names: Sequence[str]) -> str:
    """Each value once, followed by its runs; only the first few of many."""
    holders: dict[str, list[str]] = {}
    for value, name in zip(item.values, names, strict=True):
        holders.setdefault(_short(format_value(value), _MAX_VALUE), []).append(name)
    found = [f"{value} ({', '.join(_first(runs, _MOST_NAMES))})" for value, runs in holders.items()]
    return "; ".join(_first(found, _MOST_VALUES))


def _first(texts: Sequence[str], most: int) -> list[str]:
    return [*texts[:most], *([f"and {len(texts) - most} more"] if len(texts) > most else [])]


def _measures_table(comparison: Comparison) -> Table:
    """Few runs as columns; many as rows, with only the main measures."""
    runs, rows = comparison.runs, comparison.measures
    if len(runs) <= SIDE_BY_SIDE:
        cells = [(words(row.title, "dim"), *(_cell(row, index) for index in range(len(runs)))) for row in rows]
        return Table(("", *(_short(run.label, 24) for run in runs)), cells)
    rows = [row for row in rows if row.key in COLUMN_TITLES]
    cells = [(words(run.label), *(_cell(row, index) for row in rows)) for index, run in enumerate(runs)]
    return Table(("run", *(COLUMN_TITLES[row.key] for row in rows)), cells)


def means_table(comparison: Comparison) -> Table:
    """Means over repeats, from which the winners are picked: one row per group."""
    head = [COLUMN_TITLES.get(row.key, row.title) for row in comparison.means]
    table = Table(("mean of repeats", *head))
    for at, group in enumerate(comparison.groups):
        name = f"{group.label} (mean of {len(group.runs)})" if len(group.runs) > 1 else group.label
        table.add(words(name), *(_cell(row, at) for row in comparison.means))
    return table


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


def event_line(event: Event) -> str:
    """An event as one line, with the replay command if it has one."""
    return "; ".join(filter(None, (describe_event(event), line(event.get("replay") or ""))))


def _short(text: str, most: int) -> str:
    """`text` shortened in the middle to `most` characters, because names of runs often differ at the end."""
    return text if len(text) <= most else f"{text[: most // 2 - 1]}..{text[-(most - most // 2 - 1) :]}"
