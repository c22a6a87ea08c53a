"""The dashboard: one frame of a run, fitted to the terminal."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.box import ASCII, ROUNDED
from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from config.printable import shown
from tracking.figures import followed
from tracking.heatmap.blocks import draw_blocks, legend
from tracking.heatmap.grid import Heat
from tracking.heatmap.panels import PANELS
from tracking.heatmap.words import sentences
from tracking.numbers import duration, human, loss, mib, number, percent, rate, scale
from tracking.ranks import spread
from tracking.status import Status
from tracking.verdict import STYLES, Verdict
from tracking.watch.curves import Axes, Line, draw
from tracking.watch.state import WatchState

_LEVELS = {"good": "green", "plain": "", "warn": "yellow", "bad": "bold red"}
_TWO_COLUMNS = 100  # characters from which curves stand side by side
_FACTS = 42  # characters of the column of numbers
_SLOW = 1.3  # times the median from which the slowest rank is highlighted


@dataclass(frozen=True)
class View:
    """Settings of one frame besides the state."""

    name: str
    planned_steps: int | None
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
    """Whether keys are read, so that the help for them is shown."""
    status: Status = Status("running")
    verdict: Verdict = Verdict("running", "", None, "", 0, over=False)
    panel: str = ""
    """The heat map to show instead of curves."""
    heat: Heat | None = None
    """Data of that panel."""
    alert: str = ""
    """Warning about a run that has not failed."""

    @property
    def room(self) -> int:
        """Lines below the head, which holds cause and alert as well."""
        return self.height - 2 - len(self.cause) - len(self.alerts)

    @property
    def cause(self) -> list[str]:
        """Lines of the verdict's cause and next command, whole unless one would fill a quarter of the screen."""
        lines = self._wrapped(self.verdict.cause)
        return lines + self._wrapped(self.verdict.command) if self.verdict.tone == "bad" else lines

    @property
    def alerts(self) -> list[str]:
        """Lines of the alert, cut as those of the cause."""
        return self._wrapped(self.alert)

    def _wrapped(self, text: str) -> list[str]:
        return textwrap.wrap(shown(text), self.width, max_lines=max(1, self.height // 4), placeholder=" ...")


def frame(state: WatchState, view: View) -> RenderableType:
    """The run as it is, in at most `view.height` lines of `view.width` characters."""
    head = _head(state, view)
    if state.start is None:
        return Group(head)
    if view.panel:
        return Group(head, *_layers(state, view))
    return Group(head, *(_wide(state, view) if view.width >= _TWO_COLUMNS else _narrow(state, view)))


def _layers(state: WatchState, view: View) -> list[RenderableType]:
    """A heat map of the layers over the steps, what stands out in it, and what happened."""
    heat, title = view.heat, PANELS[view.panel].title
    log_lines = min(6, max(0, view.room // 5 - 2))
    if not heat or not heat.has(view.panel):
        text = Text("nothing was measured yet; telemetry.every_steps sets the interval", style="dim")
        return [_panel(text, title, view, width=view.width)]
    wrapped = textwrap.wrap(shown(sentences(heat)[view.panel]), view.width - 6)[:3]
    height = max(3, view.room - len(wrapped) - 3 - (log_lines + 2 if log_lines else 0))
    chosen = heat.by_kind(view.panel)
    drawn = draw_blocks(chosen, view.panel, width=view.width - 4, height=height, ascii_only=view.ascii)
    parts = [drawn, legend(chosen, view.panel, ascii_only=view.ascii), Text("\n".join(wrapped))]
    frames = [_panel(Group(*parts), title, view, width=view.width)]
    return [*frames, *([_log_panel(state, view, log_lines)] if log_lines else [])]


def _wide(state: WatchState, view: View) -> list[RenderableType]:
    """Curves beside numbers, events below."""
    room = view.room
    log_lines = min(10, max(1, room // 4 - 1))
    body = room - log_lines - 2
    facts = _facts(state, view)[: body - 2]
    ranks = _ranks(state, body - len(facts) - 4)
    right = [_panel(_rows(facts, _FACTS - 4), "now", view)]
    if ranks:
        right.append(_panel(_rows(ranks, _FACTS - 4), "ranks: least / median / most", view))
    wide = view.width - _FACTS
    lower = max(3, body // 2 - 2)
    log = _scaled(state)
    halves = Table.grid()
    halves.add_row(
        _curve("grad_norm", "gradient norm", state, view, wide // 2, lower, log=True),
        _curve("loss_scale", "loss scale", state, view, wide - wide // 2, lower, log=True)
        if log
        else _curve("tokens_per_second", "tokens/s, all ranks", state, view, wide - wide // 2, lower),
    )
    grid, title = Table.grid(), _loss_title(state)
    grid.add_column(width=wide)
    grid.add_column(width=_FACTS)
    grid.add_row(Group(_curve("loss", title, state, view, wide, max(3, body - lower - 4)), halves), Group(*right))
    return [grid, _log_panel(state, view, log_lines)]


def _loss_title(state: WatchState) -> str:
    unit = (state.start or {}).get("loss_unit", "nats per token")
    return f"{state.followed}, {unit}" if unit else state.followed


def _narrow(state: WatchState, view: View) -> list[RenderableType]:
    """The loss above numbers in two columns."""
    room = view.room
    half = (view.width - 6) // 2
    facts = _facts(state, view)[: 2 * max(1, min(6, (room - 7) // 2))]
    rows = (len(facts) + 1) // 2
    log_lines = min(8, max(0, room - rows - 12))
    title = _loss_title(state)
    curve = _curve(
        "loss", title, state, view, view.width, max(2, room - rows - 4 - (log_lines + 2 if log_lines else 0))
    )
    numbers = Table.grid(padding=(0, 1, 0, 0))
    numbers.add_row(_rows(facts[:rows], half), _rows(facts[rows:], half))
    return [curve, _panel(numbers, "now", view), *([_log_panel(state, view, log_lines)] if log_lines else [])]


def _scaled(state: WatchState) -> bool:
    assert state.start is not None
    regions = set((state.start.get("regions") or {}).values())
    return state.start["compute"] == "fp16" or "fp16" in regions


def _panel(content: RenderableType, title: str, view: View, *, width: int | None = None, style: str = "dim") -> Panel:
    box = ASCII if view.ascii else ROUNDED
    return Panel(content, title=title, title_align="left", box=box, border_style=style, width=width, padding=(0, 1))


def _curve(
    name: str, title: str, state: WatchState, view: View, width: int, height: int, *, log: bool = False
) -> Panel:
    """height: of the curve alone, without its frame."""
    lines = [Line(state.curves[name], "cyan")]
    if name == "loss":
        lines.append(Line(state.validation, "bold yellow", points=True))
    axes = Axes(width - 4, height, max(1, state.step), log_steps=view.log_steps, log_values=log, ascii=view.ascii)
    newest = (state.newest or {}).get(name) if name != "loss" or state.newest is None else followed(state.newest)[1]
    said, label = (scale, _power_of_two) if name == "loss_scale" else (number, number)
    shown = f"{title} {said(newest)}" if newest is not None else title
    return _panel(draw(lines, state.skips, axes, label), shown, view, width=width)


def _power_of_two(value: float) -> str:
    """A place on the axis of the loss scale: 2^18, or 2^17.5 between two."""
    return f"2^{number(math.log2(value), 3)}" if value > 0 else "0"


def _head(state: WatchState, view: View) -> RenderableType:
    status, style = _status(state, view)
    first = Text.assemble(
        (shown(view.name), "bold"),
        "  ",
        (shown(status), style),
        no_wrap=True,
        overflow="crop" if view.ascii else "ellipsis",
    )
    if state.start is not None:
        start = state.start
        computes = sorted(set((start.get("regions") or {}).values())) or [start["compute"]]
        ranks = f"{start['world_size']} rank{'' if start['world_size'] == 1 else 's'}"
        what = f"{human(start['parameters'])} parameters, {'+'.join(computes)}, ZeRO-{start['zero_stage']}, {ranks}"
        first.append(shown(f"  {what}"), style="dim")
    cause = (Text(text, style=style, no_wrap=True) for text in view.cause)
    alert = (Text(text, style="yellow", no_wrap=True) for text in view.alerts)
    return Group(first, *cause, *alert, _progress(state, view))


def _status(state: WatchState, view: View) -> tuple[str, str]:
    if view.read < 1.0:
        return f"reading {percent(view.read, 2)}", "cyan"
    if state.start is None:
        return "nothing recorded yet", "yellow"
    verdict, code = view.verdict, view.status.exit_code
    since = "" if verdict.step is None else f" since step {verdict.step:,}"
    return f"{verdict.word}{since}{f' (exit {code})' if code else ''}", STYLES[verdict.tone]


def _progress(state: WatchState, view: View) -> Text:
    planned = view.planned_steps
    done = min(1.0, state.step / planned) if planned else None
    eta = state.eta_seconds(planned)
    words = [f"step {state.step:,}" + (f" of {planned:,}" if planned else "")]
    if eta is not None and view.status.state == "running":
        words.append(f"ETA {duration(eta)}")
    if state.session_time is not None and state.time is not None:
        words.append(f"session {state.sessions}: {duration(state.time - state.session_time)}")
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


def _facts(state: WatchState, view: View) -> list[tuple[str, str, str]]:
    """(name, value, style) of the current numbers, problems in colour; what does not apply is left out."""
    newest: dict[str, Any] = state.newest or {}
    count = state.counts
    skipped = newest.get("skipped_total", 0)
    share = f" ({percent(skipped / state.step, 2)})" if skipped and state.step else ""
    incidents = ", ".join(f"{n} {what}" for (kind, what), n in count.items() if kind == "incident")
    scales = f"{count['scale', 'overflow']} down, {count['scale', 'growth']} up" if _scaled(state) else ""
    speed, seconds = state.tokens_per_second, state.step_seconds
    saved = state.checkpoint
    rows = [
        ("tokens", human(state.tokens), ""),
        ("speed", f"{human(speed)} tokens/s" if speed else "", ""),
        ("a step", f"{number(seconds, 3)} s{_waiting(newest)}" if seconds else "", ""),
        ("memory", f"{mib(state.memory_bytes)}, peak" if state.memory_bytes else "", ""),
        ("learning rate", rate(newest["lr"]) if newest else "", ""),
        (
            "validation",
            f"{loss(followed(state.validated)[1])} at {state.validated['step']:,}" if state.validated else "",
            "",
        ),
        ("skipped", f"{skipped:,}{share}", "yellow" if skipped else ""),
        ("loss scale", scales, ""),
        ("loss not finite", f"{state.nonfinite_losses:,} x" if state.nonfinite_losses else "", "bold red"),
        ("incidents", incidents or "none", "bold red" if incidents else ""),
        ("warnings", f"{view.verdict.warnings:,}" if view.verdict.warnings else "", "yellow"),
        ("inf or nan", "; ".join(_tail(what, 22) for what, _ in state.causes.most_common(1)), "bold red"),
        ("checkpoint", f"step {saved['step']:,}{_age(saved, view)}" if saved else "none", ""),
        ("computed in", ", ".join(f"{k} {percent(v, 3)}" for k, v in state.flop_share.items() if v), ""),
        *((name, number(value), "") for name, value in (newest.get("metrics") or {}).items()),
    ]
    return [row for row in rows if row[1]]


def _tail(text: str, width: int) -> str:
    """The last `width` characters of a module's name."""
    return text if len(text) <= width else "..." + text[3 - width :]


def _waiting(newest: dict[str, Any]) -> str:
    waited = newest.get("data_seconds")
    return f", {percent(waited / newest['step_seconds'], 2)} data wait" if waited is not None else ""


def _age(event: dict[str, Any], view: View) -> str:
    return "" if view.status.over else f", {duration(max(0.0, view.now - event['time']))} ago"


def _rows(rows: Sequence[tuple[str, str, str]], width: int) -> Text:
    text = Text("\n").join(
        Text.assemble((f"{what:<15} ", "dim"), (shown(value)[: max(8, width - 16)], style))
        for what, value, style in rows
    )
    text.no_wrap = True
    return text


def _ranks(state: WatchState, most: int) -> list[tuple[str, str, str]]:
    """Own work and memory: least, median and most, and of every rank where that fits into `most` rows."""
    newest: dict[str, Any] = state.newest or {}
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


def _log_panel(state: WatchState, view: View, height: int) -> Panel:
    text = Text(no_wrap=True, overflow="crop" if view.ascii else "ellipsis")
    newest = list(state.log)[-height:]
    for index, (step, level, words) in enumerate([(0, "plain", "")] * (height - len(newest)) + newest):
        text.append("\n" if index else "")
        text.append(f"{step:>8,}  " if words else "", style="dim")
        text.append(words, style=_LEVELS[level])
    return _panel(text, "what happened", view, width=view.width)
