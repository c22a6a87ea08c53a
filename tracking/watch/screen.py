"""The dashboard: one frame of a run, fitted to the terminal."""

import math
import textwrap
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from rich.box import ASCII, ROUNDED
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from config.printable import line, shown
from tracking.events import Event, computes_in, spread
from tracking.figures import HEADLINES, followed
from tracking.heatmap.blocks import draw_blocks, legend
from tracking.heatmap.grid import Heat
from tracking.heatmap.panels import PANELS
from tracking.heatmap.words import sentences
from tracking.numbers import duration, human, loss, mib, number, percent, rate, scale
from tracking.report.log import newest_events
from tracking.run_dir import setting
from tracking.run_facts import RunFacts
from tracking.status import Status
from tracking.verdict import STYLES
from tracking.watch.curves import Axes, Line, draw

_RECENT_STEPS = 50  # speed and ETA are medians over these
_STYLES = {
    **dict.fromkeys(("nonfinite", "incident", "corruption"), "bold red"),
    **dict.fromkeys(("fault", "note", "warning", "reexecution"), "yellow"),
    **dict.fromkeys(("eval", "checkpoint"), "green"),
}
"""Kind of event to its style, for those logged in colour."""
_TWO_COLUMNS = 100  # minimum terminal width in characters for two columns
_FACTS = 42  # width in characters of the column of numbers
_SLOW = 1.3  # multiple of the median above which the slowest rank is highlighted


@dataclass(frozen=True)
class View:
    """Settings of one frame besides the run."""

    width: int
    height: int
    now: float
    """[seconds since the epoch]"""
    log_steps: bool = False
    ascii: bool = False
    read: float = 1.0
    """[fraction] Share of the events file read so far."""
    damaged: int = 0
    keys: bool = False
    """Whether key presses are read; if so, help for them is shown."""
    panel: str = ""
    """The heat map to show instead of curves."""
    heat: Heat | None = None
    """Data for that panel."""
    alert: str = ""
    """Warning that the run hardly moves, if any."""

    def wrapped(self, text: str) -> list[str]:
        """Wrap a text of the header into lines, cut off at a quarter of the screen."""
        return textwrap.wrap(shown(text), self.width, max_lines=max(1, self.height // 4), placeholder=" ...")


def frame(run: RunFacts, view: View) -> RenderableType:
    """The current state of the run in at most `view.height` lines of `view.width` characters."""
    status, verdict = run.checked or Status("running"), run.verdict
    cause = view.wrapped(verdict.cause) + (view.wrapped(verdict.command) if verdict.tone == "bad" else [])
    alert = view.wrapped(view.alert)
    style = STYLES[verdict.tone]
    lines = [(text, style) for text in cause] + [(text, "yellow") for text in alert]
    head = Group(_head(run, status, view), *(Text(*line, no_wrap=True) for line in lines), _progress(run, status, view))
    if not run.start:
        return head
    room = view.height - 2 - len(lines)
    layout = _layers if view.panel else _wide if view.width >= _TWO_COLUMNS else _narrow
    return Group(head, *layout(run, view, room))


def _layers(run: RunFacts, view: View, room: int) -> list[RenderableType]:
    """Heat map of layers over steps, what stands out in it, and recent events."""
    heat, title = view.heat, PANELS[view.panel].title
    log_lines = min(6, max(0, room // 5 - 2))
    if not heat or not heat.has(view.panel):
        text = Text("nothing was measured yet; telemetry.every_steps sets the interval", style="dim")
        return [_panel(text, title, view, width=view.width)]
    wrapped = textwrap.wrap(shown(sentences(heat)[view.panel]), view.width - 6)[:3]
    height = max(3, room - len(wrapped) - 3 - (log_lines + 2 if log_lines else 0))
    chosen = heat.by_kind(view.panel)
    drawn = draw_blocks(chosen, view.panel, width=view.width - 4, height=height, ascii_only=view.ascii)
    parts = [drawn, legend(chosen, view.panel, ascii_only=view.ascii), Text("\n".join(wrapped))]
    frames = [_panel(Group(*parts), title, view, width=view.width)]
    return [*frames, *([_log_panel(run, view, log_lines)] if log_lines else [])]


def _wide(run: RunFacts, view: View, room: int) -> list[RenderableType]:
    """Curves beside numbers, with events below."""
    log_lines = min(10, max(1, room // 4 - 1))
    body = room - log_lines - 2
    facts = _facts(run, view)[: body - 2]
    ranks = _ranks(run.newest, body - len(facts) - 4)
    right = [_panel(_rows(facts, _FACTS - 4), "now", view)]
    if ranks:
        right.append(_panel(_rows(ranks, _FACTS - 4), "ranks: least / median / most", view))
    wide = view.width - _FACTS
    lower = max(3, body // 2 - 2)
    log = _scaled(run)
    halves = Table.grid()
    halves.add_row(
        _curve("grad_norm", "gradient norm", run, view, wide // 2, lower, log=True),
        _curve("loss_scale", "loss scale", run, view, wide - wide // 2, lower, log=True)
        if log
        else _curve("tokens_per_second", "tokens/s, all ranks", run, view, wide - wide // 2, lower),
    )
    grid, title = Table.grid(), _loss_title(run)
    grid.add_column(width=wide)
    grid.add_column(width=_FACTS)
    grid.add_row(Group(_curve("loss", title, run, view, wide, max(3, body - lower - 4)), halves), Group(*right))
    return [grid, _log_panel(run, view, log_lines)]


def _loss_title(run: RunFacts) -> str:
    unit, name = run.loss_unit, HEADLINES.get(run.headline, "loss")
    return f"{name}, {unit}" if unit else name


def _narrow(run: RunFacts, view: View, room: int) -> list[RenderableType]:
    """The loss above two columns of numbers, with events below if there is room."""
    half = (view.width - 6) // 2
    facts = _facts(run, view)[: 2 * max(1, min(6, (room - 7) // 2))]
    rows = (len(facts) + 1) // 2
    log_lines = min(8, max(0, room - rows - 12))
    title = _loss_title(run)
    curve = _curve("loss", title, run, view, view.width, max(2, room - rows - 4 - (log_lines + 2 if log_lines else 0)))
    numbers = Table.grid(padding=(0, 1, 0, 0))
    numbers.add_row(_rows(facts[:rows], half), _rows(facts[rows:], half))
    return [curve, _panel(numbers, "now", view), *([_log_panel(run, view, log_lines)] if log_lines else [])]


def _scaled(run: RunFacts) -> bool:
    return "fp16" in (run.start["compute"], *computes_in(run.start))


def _panel(content: RenderableType, title: str, view: View, *, width: int | None = None) -> Panel:
    box = ASCII if view.ascii else ROUNDED
    return Panel(content, title=title, title_align="left", box=box, border_style="dim", width=width, padding=(0, 1))


def _curve(name: str, title: str, run: RunFacts, view: View, width: int, height: int, *, log: bool = False) -> Panel:
    """A framed curve. height: of the curve without its frame."""
    columns, newest = run.columns, run.newest.get(name)
    lines = [Line(columns.step, getattr(columns, name), "cyan")]
    if name == "loss":
        evaluated, _, _, losses = run.evaluations
        if run.headline:
            lines = [Line(columns.step, columns.metrics.get(run.headline, columns.loss), "cyan")]
            losses = run.evaluated.get(run.headline, losses)
        lines.append(Line(evaluated, losses, "bold yellow", points=True))
        newest = followed(run.newest)[1] if run.newest else None
    last = max(1, _newest_step(run))
    axes = Axes(width - 4, height, last, log_steps=view.log_steps, log_values=log, ascii=view.ascii)
    said, label = (scale, _power_of_two) if name == "loss_scale" else (number, number)
    shown = f"{title} {said(newest)}" if newest is not None else title
    return _panel(draw(lines, columns.step[~columns.applied], axes, label), shown, view, width=width)


def _newest_step(run: RunFacts) -> int:
    """Current step of the run: the newest one recorded, or the one that its session started from."""
    return int(run.columns.step[-1]) if len(run.columns) else int(run.start.get("step", 0))


def _recent(run: RunFacts, name: str) -> float | None:
    """Median of a column over the newest steps of the newest session; None before its first step."""
    values = getattr(run.columns, name)[-_RECENT_STEPS:]
    values = values[run.columns.step[-_RECENT_STEPS:] > run.start.get("step", 0)]
    return median(values.tolist()) if values.size else None


def _power_of_two(value: float) -> str:
    """Axis label for a loss scale, such as 2^18, or 2^17.5 between powers of two."""
    return f"2^{number(math.log2(value), 3)}" if value > 0 else "0"


def _head(run: RunFacts, status: Status, view: View) -> Text:
    said, style = _status(run, status, view)
    overflow: Any = "crop" if view.ascii else "ellipsis"
    head = Text.assemble((shown(run.label), "bold"), "  ", (shown(said), style), no_wrap=True, overflow=overflow)
    if start := run.start:
        computes = "+".join(computes_in(start))
        ranks = f"{start['world_size']} rank{'' if start['world_size'] == 1 else 's'}"
        what = f"{human(start['parameters'])} parameters, {computes}, ZeRO-{start['zero_stage']}, {ranks}"
        head.append(shown(f"  {what}"), style="dim")
    return head


def _status(run: RunFacts, status: Status, view: View) -> tuple[str, str]:
    if view.read < 1.0:
        return f"reading {percent(view.read, 2)}", "cyan"
    if not run.start:
        return "nothing recorded yet", "yellow"
    verdict, code = run.verdict, status.exit_code
    since = "" if verdict.step is None else f" since step {verdict.step:,}"
    return f"{verdict.word}{since}{f' (exit {code})' if code else ''}", STYLES[verdict.tone]


def _progress(run: RunFacts, status: Status, view: View) -> Text:
    step, seconds, planned = _newest_step(run), _recent(run, "step_seconds"), setting(run.config, "run.steps")
    planned = planned if isinstance(planned, int) else None
    done = min(1.0, step / planned) if planned else None
    words = [f"step {step:,}" + (f" of {planned:,}" if planned else "")]
    if planned and seconds is not None and status.state == "running":
        words.append(f"ETA {duration(max(0, planned - step) * seconds)}")
    if run.start:
        session = run.sessions[-1]
        words.append(f"session {len(run.sessions)}: {duration(session.last - session.began)}")
    if view.damaged:
        words.append(f"{view.damaged} damaged lines")
    if view.keys:
        words.append("q quits, x log steps, h layers")
    text = "   ".join(words)
    room = min(40, view.width - len(text) - 3)
    bar = Text(no_wrap=True, overflow="crop" if view.ascii else "ellipsis")
    if done is not None and room >= 10:
        full = int(done * room)
        on, off = ("#", "-") if view.ascii else ("━", "━")
        bar.append(on * full, style="green")
        bar.append(off * (room - full) + "  ", style="dim")
    bar.append(text)
    return bar


def _facts(run: RunFacts, view: View) -> list[tuple[str, str, str]]:
    """(name, value, style) of the current numbers that apply, with problems in colour."""
    newest, rare, columns, step = run.newest, run.rare_events, run.columns, _newest_step(run)
    skipped = newest.get("skipped_total", 0)
    share = f" ({percent(skipped / step, 2)})" if skipped and step else ""
    refused = Counter(event["verdict"] for event in rare.get("incident", []))
    incidents = ", ".join(f"{count} {verdict}" for verdict, count in refused.items())
    changes = run.scale_reasons
    scales = f"{changes['overflow']} down, {changes['growth']} up" if _scaled(run) else ""
    speed, seconds = _recent(run, "tokens_per_second"), _recent(run, "step_seconds")
    saved, validated, observed = (rare.get(kind, [{}])[-1] for kind in ("checkpoint", "eval", "precision"))
    broken = int(np.count_nonzero(~np.isfinite(columns.loss)))
    tensors = rare.get("nonfinite", [])
    causes = Counter("loss" if event["tensor"] == "loss" else line(event["module"]) for event in tensors)
    worst = next((what for what, _ in causes.most_common(1)), "")
    shares = (observed.get("flop_share") or {}).items()
    memory, warnings = run.peak_memory_bytes, run.verdict.warnings
    waited = newest.get("data_seconds")
    wait = "" if waited is None else f", {percent(waited / newest['step_seconds'], 2)} data wait"
    age = f", {duration(max(0.0, view.now - saved['time']))} ago" if saved and not run.verdict.over else ""
    rows = [
        ("tokens", human(columns.tokens[-1] if len(columns) else 0), ""),
        ("speed", f"{human(speed)} tokens/s" if speed else "", ""),
        ("a step", f"{number(seconds, 3)} s{wait}" if seconds else "", ""),
        ("memory", f"{mib(memory)}, peak" if memory > 0 else "", ""),
        ("learning rate", rate(newest["lr"]) if newest else "", ""),
        ("validation", f"{loss(followed(validated)[1])} at {validated['step']:,}" if validated else "", ""),
        ("skipped", f"{skipped:,}{share}", "yellow" if skipped else ""),
        ("loss scale", scales, ""),
        ("loss not finite", f"{broken:,} x" if broken else "", "bold red"),
        ("incidents", incidents or "none", "bold red" if incidents else ""),
        ("warnings", f"{warnings:,}" if warnings else "", "yellow"),
        ("inf or nan", worst if len(worst) <= 22 else f"...{worst[-19:]}", "bold red"),
        ("checkpoint", f"step {saved['step']:,}{age}" if saved else "none", ""),
        ("computed in", ", ".join(f"{line(dtype)} {percent(part, 3)}" for dtype, part in shares if part), ""),
        *((name, number(value), "") for name, value in (newest.get("metrics") or {}).items()),
    ]
    return [row for row in rows if row[1]]


def _rows(rows: Sequence[tuple[str, str, str]], width: int) -> Text:
    text = Text("\n").join(
        Text.assemble((f"{what:<15} ", "dim"), (shown(value)[: max(8, width - 16)], style))
        for what, value, style in rows
    )
    text.no_wrap = True
    return text


def _ranks(newest: Event, most: int) -> list[tuple[str, str, str]]:
    """Rows on own work and memory of ranks: least, median, most, and each rank if that fits into `most` rows."""
    memory, work = spread(newest, "memory_bytes"), spread(newest, "work_seconds")
    rows = []
    if work is not None:
        unit, factor = ("s", 1.0) if work.most >= 1.0 else ("ms", 1e3)
        times = " / ".join(f"{number(seconds * factor, 3)}" for seconds in (work.least, work.median, work.most))
        rows.append((f"own work, {unit}", times, ""))
        rows.append(("slowest", f"rank {work.rank}", "bold red" if work.most > _SLOW * work.median else ""))
    if memory is not None:
        sizes = " / ".join(f"{size / 2**20:,.0f}" for size in (memory.least, memory.median, memory.most))
        rows.append(("memory, MiB", sizes, ""))
        rows.append(("largest", f"rank {memory.rank}", ""))
    each = list(zip(memory.all, work.all, strict=False)) if memory and work else []
    if each and len(each) <= most - len(rows):
        rows += [(f"rank {rank}", f"{mib(size)}, {number(s, 3)} s", "") for rank, (size, s) in enumerate(each)]
    return rows[: max(0, most)]


def _log_panel(run: RunFacts, view: View, height: int) -> Panel:
    text = Text(no_wrap=True, overflow="crop" if view.ascii else "ellipsis")
    newest = [(event["step"], *_logged(event, words)) for event, words in newest_events(run, height)]
    for index, (step, words, style) in enumerate([(0, "", "")] * (height - len(newest)) + newest):
        text.append("\n" if index else "")
        text.append(f"{step:>8,}  " if words else "", style="dim")
        text.append(words, style=style)
    return _panel(text, "what happened", view, width=view.width)


def _logged(event: Event, words: str) -> tuple[str, str]:
    """Text and style of an event in the log."""
    style = _STYLES.get(event["event"], "")
    if event["event"] == "run_end":
        style = "green" if event["exit_code"] == 0 else "bold red"
    if "rolled_back_to" in event:
        words += f"; rolled back to {Path(event['rolled_back_to']).name}"
    return " ".join(line(words).split()), style
