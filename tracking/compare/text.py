"""A comparison on the terminal: what matters first, tables that stay readable from two runs to a dozen."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from tracking.compare.differences import Difference, shown
from tracking.compare.measures import Measure
from tracking.compare.result import Comparison, Pair
from tracking.console import duration, human
from tracking.events import Event

SIDE_BY_SIDE = 4
"""Up to this many runs are columns; more are rows, and differing values are told with the runs that have them."""
_MOST_DIFFERENCES = 40
_MOST_EVENTS = 12
_LONGEST = 60

ALIKE = "Apples to apples: same data, tokenizer, batch, model, precision, schedule and hardware, as far as recorded"


def show(comparison: Comparison, console: Console) -> None:
    """Print the whole comparison."""
    _show_runs(comparison, console)
    if comparison.pairs:
        _show_caveats(comparison, console)
        console.print(Text("\nWhere they part", style="bold"))
        for pair in comparison.pairs:
            _show_pair(pair, console, detailed=len(comparison.runs) <= SIDE_BY_SIDE)
        console.print(Text("\nWhat differed", style="bold"))
        _show_differences(comparison, console)
        console.print(Text("\nWho is better", style="bold"))
        for line in comparison.verdicts:
            console.print(Padding(Text(line), (0, 0, 0, 2)))
    console.print(_measures(comparison))


def _show_caveats(comparison: Comparison, console: Console) -> None:
    if not comparison.caveats:
        console.print(Text(f"\n{ALIKE}", style="bold green"))
        return
    console.print(Text("\nNot apples to apples", style="bold yellow"))
    for line in comparison.caveats:
        console.print(Padding(Text(f"! {line}"), (0, 0, 0, 2)))


def _show_runs(comparison: Comparison, console: Console) -> None:
    for index, run in enumerate(comparison.runs):
        text = Text(run.label, style="bold")
        text.append(f"  {'baseline, ' if index == 0 else ''}{run.status}, {run.source}", style="dim")
        console.print(text, soft_wrap=True)


def _show_pair(pair: Pair, console: Console, *, detailed: bool) -> None:
    headline = Text(f"  {pair.run.label}: ", style="bold")
    headline.append(pair.headline, style="green" if pair.parting.step is None else "")
    console.print(headline)
    console.print(Padding(Text(f"cause: {pair.cause}"), (0, 0, 0, 4)))
    if pair.beyond_cause:
        console.print(Padding(Text(f"beyond tolerance {pair.beyond_cause}"), (0, 0, 0, 4)))
    if not detailed or pair.parting.step is None:
        return
    console.print(Padding(_near(pair), (0, 0, 0, 4)))
    for label, event in pair.parting.events[:_MOST_EVENTS]:
        console.print(Padding(Text(f"{label}, step {event['step']}: {told(event)}", style="dim"), (0, 0, 0, 4)))
    more = len(pair.parting.events) - _MOST_EVENTS
    if more > 0:
        console.print(Padding(Text(f"and {more} more events; --json has them all", style="dim"), (0, 0, 0, 4)))


def _near(pair: Pair) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("step", "run", "loss", "grad norm", "lr", "scale", "applied", "samples"):
        table.add_column(name, justify="left" if name in ("run", "applied", "samples") else "right", header_style="dim")
    places = {place for place in (pair.parting.step, pair.parting.beyond) if place is not None}
    for row in sorted(pair.parting.near, key=lambda row: row["step"]):
        table.add_row(
            str(row["step"]),
            Text(_short(row["run"], 24)),
            _digits(row["loss"]),
            _digits(row["grad_norm"]),
            f"{row['lr']:.4g}",
            f"{row['loss_scale']:g}",
            "yes" if row["applied"] else "skipped",
            row["sample_ids_sha256"],
            style="yellow" if row["step"] in places else "",
        )
    return table


def _digits(value: float) -> str:
    return f"{value:.9g}" if math.isfinite(value) else str(value)


def _show_differences(comparison: Comparison, console: Console) -> None:
    items = [item for item in comparison.differences if item.group != "deepspeed"]
    hidden = len(comparison.differences) - len(items)
    if not items:
        console.print("  nothing that was recorded")
    else:
        console.print(Padding(_differences(comparison, items[:_MOST_DIFFERENCES]), (0, 0, 0, 2)))
    if len(items) > _MOST_DIFFERENCES:
        console.print(f"  and {len(items) - _MOST_DIFFERENCES} more; --json has them all", style="dim")
    if hidden:
        console.print(f"  and {hidden} keys of the DeepSpeed JSON that follow from these", style="dim")


def _differences(comparison: Comparison, items: Sequence[Difference]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("", style="dim")
    table.add_column("", overflow="fold")
    few = len(comparison.runs) <= SIDE_BY_SIDE
    for run in comparison.runs if few else ():
        table.add_column(_short(run.label, 24), overflow="fold")
    if not few:
        table.add_column("values (runs)", overflow="fold")
    group = ""
    for item in items:
        name, group = ("" if item.group == group else item.group), item.group
        if few:
            table.add_row(name, Text(item.key), *(Text(_short(shown(value), _LONGEST)) for value in item.values))
        else:
            table.add_row(name, Text(item.key), Text(grouped(item, [run.label for run in comparison.runs])))
    return table


def grouped(item: Difference, names: Sequence[str]) -> str:
    """Each value once, with the runs that have it."""
    holders: dict[str, list[str]] = {}
    for value, name in zip(item.values, names, strict=True):
        holders.setdefault(_short(shown(value), _LONGEST), []).append(name)
    return "; ".join(f"{value} ({', '.join(runs)})" for value, runs in holders.items())


def _measures(comparison: Comparison) -> Table:
    """Runs as columns when they are few, as rows when they are many (then only the measures that decide)."""
    table = Table(box=None, pad_edge=False)
    if len(comparison.runs) <= SIDE_BY_SIDE:
        table.add_column("")
        for run in comparison.runs:
            table.add_column(_short(run.label, 24), justify="right", overflow="fold")
        for row in comparison.measures:
            cells = [_cell(row, index) for index in range(len(row.values))]
            table.add_row(Text(row.title, style="dim"), *cells)
        return table
    rows = [row for row in comparison.measures if row.key in _NARROW]
    table.add_column("run", overflow="fold")
    for row in rows:
        table.add_column(_NARROW[row.key], justify="right", header_style="dim", no_wrap=True)
    for index, run in enumerate(comparison.runs):
        table.add_row(Text(run.label), *(_cell(row, index) for row in rows))
    return table


_NARROW = {
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
    text = Text(value_text(row.kind, row.values[index]))
    if index in row.best:
        text.append(" *")
        text.stylize("bold green")
    return text


def value_text(kind: str, value: float | str) -> str:
    """A measure's value with its unit; - where nothing was recorded."""
    if isinstance(value, str):
        return value or "-"
    if math.isnan(value):
        return "-"
    match kind:
        case "loss":
            return f"{value:.4f}"
        case "count":
            return f"{value:,.0f}"
        case "seconds":
            return f"{value:.3g} s" if value < 100 else duration(value)
        case "bytes":
            return f"{value / 2**30:.2f} GiB"
        case "rate":
            return human(value)
        case "hours":
            return f"{value:.4g} h"
    return f"{value:.4g}"


def told(event: Event) -> str:
    """One event in one line."""
    match event["event"]:
        case "scale":
            return f"loss scale {event['from']:g} -> {event['to']:g} ({event['reason']})"
        case "nonfinite":
            where = f"{event['tensor']} of {event['module']} on rank {event['rank']}"
            return f"{event['count']} {event['kind']} in the {where}"
        case "incident":
            return f"{event['verdict']}: {event['reason']}; {event['replay']}"
        case "fault":
            return f"planted fault {event['kind']} on rank {event['rank']}, {event['module']}"
        case "eval":
            return f"validation loss {event['loss']:.4f}"
        case "checkpoint":
            return f"checkpoint {event['path']}"
        case "run_start":
            origin = f"resumed from {event['resumed_from']}" if event.get("resumed_from") else "started"
            return f"{origin}, {event['world_size']} processes"
        case "run_end":
            return f"ended: {event['status']}"
        case "precision":
            return "computes in " + ", ".join(f"{dtype} {share:.1%}" for dtype, share in event["flop_share"].items())
    return str({key: value for key, value in event.items() if key not in ("event", "step", "time", "tokens")})


def _short(text: str, most: int) -> str:
    """Names of runs often differ in their ends, so the middle is what is left out."""
    return text if len(text) <= most else f"{text[: most // 2 - 1]}..{text[-(most - most // 2 - 1) :]}"
