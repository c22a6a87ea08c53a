"""The console output of a run: live progress on a terminal, aligned plain lines anywhere else.

Besides progress, a line is printed for each skipped step, with why, for each change of the loss scale, incident,
evaluation and checkpoint, and for the end. Of a step that was not finite the first tensor is named; `events.jsonl` has
all of them.
"""

from __future__ import annotations

import atexit
import math
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

from rich.console import RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn
from rich.text import Text

from config.printable import line
from tracking.events import Event, describe_event
from tracking.numbers import duration, human, loss, mib, number, rate, scale
from tracking.observed_dtypes import computed, lower_than_promised
from tracking.terminal import console

_BLOCKS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 12
_BAR_WIDTH = 12
_FIXED = _BAR_WIDTH + 20  # characters of the first live line for spinner, counter and bar
_INDENT = "  "  # of the live lines below it
_SPEED_WINDOW = 20  # steps over which the ETA averages


class _Progress(Progress):
    """The bar, and below it what does not fit beside it."""

    below: Sequence[str] = ()

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self.below:
            yield Text("\n".join(_INDENT + line for line in self.below), no_wrap=True, overflow="crop")


class ConsoleSink:
    """Shows events on `stream` (standard output by default)."""

    def __init__(self, total_steps: int, *, log_every_steps: int, stream: TextIO | None = None) -> None:
        """`total_steps`: optimizer steps to attempt in all; `log_every_steps`: how often plain lines show a step."""
        self._total = total_steps
        self._every = log_every_steps
        self._stream = sys.stdout if stream is None else stream
        self._console = console(file=self._stream, soft_wrap=True)
        self._losses: list[float] = []  # one entry a step, thinned out so that it stays short
        self._thin = 1
        self._first_loss: float | None = None
        self._seconds: deque[float] = deque(maxlen=_SPEED_WINDOW)
        self._fp16 = False
        self._blocks = _BLOCKS if _can_print(_BLOCKS, self._stream) else ""
        self._skipped: list[Event] = []  # a skipped step and what followed from it, until all of it is known
        self._dtypes = ""
        self._progress: _Progress | None = None
        self._task: TaskID | None = None

    def write(self, event: Event) -> None:
        """Show one event."""
        follows = event["event"] in ("scale", "nonfinite") and event["step"] in [it["step"] for it in self._skipped[:1]]
        if not follows:
            self._print_skipped()
        match event["event"]:
            case _ if follows:
                self._skipped.append(event)
            case "run_start":
                self._on_run_start(event)
            case "step":
                self._on_step(event)
            case "run_end":
                self._on_run_end(event)
            case "scale" | "nonfinite" | "corruption" | "reexecution" | "incident" | "warning" | "eval" | "checkpoint":
                self.print_line(f"step {event['step']}: {describe_event(event)}")
            case "precision":
                self._on_precision(event)

    def _on_precision(self, event: Event) -> None:
        """The dtypes inside the modules, when they are not those of the last time; in every case what is too low."""
        dtypes = "; ".join(f"{what} {' and '.join(found)}" for what, found in computed(event).items())
        if dtypes and dtypes != self._dtypes:
            self.print_line(f"step {event['step']}: seen inside the modules: {dtypes}")
            self._dtypes = dtypes
        for found in lower_than_promised(event):
            self.print_line(f"step {event['step']}: {found}")

    def print_line(self, text: str) -> None:
        """Print `text` on one line above the live line."""
        self._console.print(Text(line(text)))
        self._stream.flush()

    def close(self) -> None:
        """End the live lines and restore the terminal's cursor."""
        self._print_skipped()
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
            atexit.unregister(self.close)

    def _on_run_start(self, event: Event) -> None:
        computes = sorted(set((event.get("regions") or {}).values())) or [event["compute"]]
        self._fp16 = "fp16" in computes
        resumed = f", resumed from {event['resumed_from']}" if event["resumed_from"] else ""
        trained, whole = event.get("trained_parameters"), event["parameters"]
        share = f"{trained:,} of " if trained not in (None, whole) else ""
        self.print_line(
            f"training {share}{whole:,} parameters in {' and '.join(computes)}, ZeRO-{event['zero_stage']}, "
            f"{event['world_size']} process{'' if event['world_size'] == 1 else 'es'}{resumed}"
        )
        if self._console.is_terminal:
            self._start_live(event["step"])

    def _start_live(self, step: int) -> None:
        self.close()
        self._progress = _Progress(
            SpinnerColumn(finished_text=" "),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=_BAR_WIDTH),
            TextColumn("{task.fields[status]}", markup=False),
            console=self._console,
            refresh_per_second=4,
        )
        self._task = self._progress.add_task("step", total=self._total, completed=step, status="first step ...")
        self._progress.start()
        atexit.register(self.close)  # a crash would otherwise leave the terminal without a cursor

    def _on_step(self, event: Event) -> None:
        self._remember(event)
        cells = self._cells(event)
        if self._progress is not None and self._task is not None:
            width = self._console.width
            first, *self._progress.below = _pack(cells, width - _FIXED, width - len(_INDENT))
            self._progress.update(self._task, completed=event["step"], status=first)
        elif event["step"] % self._every == 0 or event["step"] == self._total:
            width = len(str(self._total))
            self.print_line(f"step {event['step']:>{width}}/{self._total}  " + "  ".join(c for c in cells if c))
        if not event["applied"]:
            self._skipped = [event]

    def _print_skipped(self) -> None:
        """One line about a skipped step: why, what became of the loss scale, and the first tensor that is to blame."""
        if not self._skipped:
            return
        (step, *further), self._skipped = self._skipped, []
        words = [describe_event(event) for event in further if event["event"] == "scale"]
        if not words:
            norm = "" if step["grad_norm"] is None else f", gradient norm {number(step['grad_norm'])}"
            words = [f"loss {number(step['loss'])}{norm}"]
        tensors = [describe_event(event) for event in further if event["event"] == "nonfinite"]
        if tensors:
            more = f" and {len(tensors) - 1} more tensors, see events.jsonl" if len(tensors) > 1 else ""
            words.append(tensors[0] + more)
        count = f"{step['skipped_total']} skipped so far"
        self.print_line(f"step {step['step']}: skipped, the weights are unchanged ({count}); {'; '.join(words)}")

    def _remember(self, event: Event) -> None:
        self._seconds.append(event["step_seconds"])
        value = event["loss"]
        if not math.isfinite(value):
            return
        if self._first_loss is None:
            self._first_loss = value
        if event["step"] % self._thin == 0:
            self._losses.append(value)
        if len(self._losses) > 64 * _SPARK_WIDTH:
            self._losses = self._losses[::2]
            self._thin *= 2

    def _cells(self, event: Event) -> list[str]:
        first = f" from {number(self._first_loss)}" if self._first_loss is not None else ""
        return [
            f"{human(event['tokens_per_second']):>6} tok/s",
            f"ETA {duration(self._eta(event['step'])):<6}",
            mib(event["memory_bytes"]),
            f"loss {loss(event['loss']):>7}{first}",
            sparkline(self._losses, _SPARK_WIDTH, self._blocks),
            f"grad norm {number(event['grad_norm'], 3):>8}",
            f"lr {rate(event['lr'])}",
            f"scale {scale(event['loss_scale'])}" if self._fp16 else "",
            f"skipped {event['skipped_total']}" if event["skipped_total"] else "",
        ]

    def _eta(self, step: int) -> float:
        return (self._total - step) * sum(self._seconds) / max(1, len(self._seconds))

    def _on_run_end(self, event: Event) -> None:
        self.close()
        self.print_line(
            f"{event.get('verdict') or event['status']} after {event['step']} steps and {event['tokens']:,} tokens"
        )


def sparkline(values: list[float], width: int, blocks: str = _BLOCKS) -> str:
    """`values`, averaged into at most `width` cells, as one character each; highest value, tallest block."""
    if len(values) < 2 or not blocks:
        return ""
    count = min(width, len(values))
    edges = [round(index * len(values) / count) for index in range(count + 1)]
    cells = [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
    low, high = min(cells), max(cells)
    span = (high - low) or 1.0
    return "".join(blocks[round((cell - low) / span * (len(blocks) - 1))] for cell in cells)


def _pack(cells: Iterable[str], first: int, width: int) -> list[str]:
    """The cells, in order, on as many lines as they need: the first has `first` characters, the others `width`."""
    lines, room = [""], first
    for cell in filter(None, cells):
        longer = f"{lines[-1]}  {cell}" if lines[-1] else cell
        if len(longer) <= room:
            lines[-1] = longer
        else:
            lines.append(cell)
            room = width
    return lines


def _can_print(text: str, stream: Any) -> bool:
    try:
        text.encode(getattr(stream, "encoding", None) or "utf-8")
    except UnicodeEncodeError:
        return False
    return True
