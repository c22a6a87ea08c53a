"""The console output of a run: aligned lines, with live progress below them on a terminal.

Besides progress, a line is printed for each skipped step and its reason, each loss-scale change, incident (with the
command that replays it), evaluation and checkpoint, and for the end. A non-finite step names the first such tensor;
`events.jsonl` lists all of them.
"""

import atexit
import math
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from statistics import mean, median
from typing import TextIO

from rich.console import RenderableType
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn
from rich.text import Text

from config.printable import line
from tracking.events import Event, computes_in, describe_event, lower_than_promised, observed_dtypes
from tracking.figures import followed
from tracking.numbers import duration, human, loss, mib, number, rate, scale
from tracking.terminal import console, paragraph

_BLOCKS = "▁▂▃▄▅▆▇█"
_SPARK_WIDTH = 12
_BAR_WIDTH = 12
_FIXED = _BAR_WIDTH + 20  # characters of the first live line used by spinner, counter and bar
_INDENT = "  "  # before the live lines below it
_SPEED_WINDOW = 20  # steps that the ETA averages over
_FOLLOW = ("scale", "nonfinite", "incident")  # events merged into the line about a skipped step
_STYLES = {"warning": "yellow", "reexecution": "yellow", "corruption": "bold red"}


class _Progress(Progress):
    """The bar, with what does not fit beside it in lines below."""

    below: Sequence[str] = ()

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self.below:
            yield Text("\n".join(_INDENT + line for line in self.below), no_wrap=True, overflow="crop")


class ConsoleSink:
    """Shows events on `stream` (standard output by default)."""

    def __init__(self, total_steps: int, *, log_every_steps: int, stream: TextIO | None = None) -> None:
        """`total_steps`: total optimizer steps to attempt; `log_every_steps`: interval of plain progress lines."""
        self._total = total_steps
        self._every = log_every_steps
        self._stream = sys.stdout if stream is None else stream
        self._console = console(file=self._stream, soft_wrap=True)
        self._losses: list[float] = []  # one entry per step at first; thinned out as it grows
        self._thin = 1
        self._first_loss: float | None = None
        self._seconds: deque[float] = deque(maxlen=_SPEED_WINDOW)
        self._rates: list[float] = []  # tokens/s of the steps since the last line
        self._fp16 = False
        prints = (getattr(self._stream, "encoding", None) or "utf-8").lower().startswith("utf")
        self._blocks = _BLOCKS if prints else ""
        self._skipped: list[Event] = []  # a skipped step and its consequences, held back until complete
        self._dtypes = ""
        self._progress: _Progress | None = None
        self._task: TaskID | None = None

    def write(self, event: Event) -> None:
        kind, here = event["event"], [step["step"] for step in self._skipped[:1]] == [event["step"]]
        if self._skipped and (kind == "step" or not here):
            self._print_skipped()
        match kind:
            case _ if here and kind in _FOLLOW:
                self._skipped.append(event)
                if kind == "incident":  # the last event of its step
                    self._print_skipped()
            case "run_start":
                self._on_run_start(event)
            case "step":
                self._on_step(event)
            case "run_end":
                self.close()
                how = event.get("verdict") or event["status"]
                self.print_line(f"{how} after {event['step']} steps and {event['tokens']:,} tokens")
            case "incident":
                self._print_incident(event)
            case "scale" | "nonfinite" | "corruption" | "reexecution" | "warning" | "eval" | "checkpoint":
                self.print_line(f"step {event['step']}: {describe_event(event)}", _STYLES.get(kind, ""))
            case "precision":
                self._on_precision(event)

    def _on_precision(self, event: Event) -> None:
        """Print the dtypes observed inside modules if they changed, and always any that are lower than promised."""
        dtypes = "; ".join(f"{what} {' and '.join(found)}" for what, found in observed_dtypes(event).items())
        if dtypes and dtypes != self._dtypes:
            self.print_line(f"step {event['step']}: dtypes observed: {dtypes}")
            self._dtypes = dtypes
        for found in lower_than_promised(event):
            self.print_line(f"step {event['step']}: {found}", "yellow")

    def print_line(self, text: str, style: str = "") -> None:
        """Print `text` above the live lines, wrapped to the width of a terminal; one line elsewhere."""
        self._console.print(paragraph(line(text), self._console, style))
        self._stream.flush()

    def close(self) -> None:
        """End the live lines and restore the terminal's cursor."""
        self._print_skipped()
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
            atexit.unregister(self.close)

    def _on_run_start(self, event: Event) -> None:
        computes = computes_in(event)
        self._fp16 = "fp16" in computes
        resumed = f", resumed from {event['resumed_from']}" if event["resumed_from"] else ""
        trained, whole = event.get("trained_parameters"), event["parameters"]
        share = f"{trained:,} of " if trained not in (None, whole) else ""
        self.print_line(
            f"training {share}{whole:,} parameters in {' and '.join(computes)}, ZeRO-{event['zero_stage']}, "
            f"{event['world_size']} process{'' if event['world_size'] == 1 else 'es'}{resumed}"
        )
        if not self._console.is_terminal:
            return
        self.close()
        self._progress = _Progress(
            SpinnerColumn(finished_text=" "),
            TextColumn("{task.completed:.0f}/{task.total:.0f}"),
            BarColumn(bar_width=_BAR_WIDTH),
            TextColumn("{task.fields[status]}", markup=False),
            console=self._console,
            refresh_per_second=4,
        )
        step = event["step"]
        self._task = self._progress.add_task("step", total=self._total, completed=step, status="first step ...")
        self._progress.start()
        atexit.register(self.close)  # or a crash would leave the terminal without a cursor

    def _on_step(self, event: Event) -> None:
        self._remember(event)
        self._rates.append(event["tokens_per_second"])
        due = event["step"] % self._every == 0 or event["step"] == self._total
        speed, *cells = self._cells(event) if due or self._progress is not None else ("",)
        if self._progress is not None and self._task is not None:
            width = self._console.width
            first, *self._progress.below = _pack([speed, *cells], width - _FIXED, width - len(_INDENT))
            self._progress.update(self._task, completed=event["step"], status=first)
        if due:
            place = f"step {event['step']:>{len(str(self._total))}}/{self._total}  "
            if self._progress is not None:  # the live lines show the rest
                _, memory, _, _, norm, rate, scale, skipped = cells
                name, value = followed(event)
                kept = [f"{name} {value:7.4f}", norm, rate, skipped, scale, speed, memory]
                text = _pack(kept, self._console.width - len(place), 0)[0]
            else:
                text = "  ".join(filter(None, [speed, *cells]))
            self.print_line(place + text)
            self._rates.clear()
        if not event["applied"]:
            self._skipped = [event]

    def _print_skipped(self) -> None:
        """Print one line about a skipped step: why, the loss-scale change, and the first non-finite tensor."""
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
        if further and further[-1]["event"] == "incident":
            self._print_incident(further[-1], words[-1:] if tensors else [])
            return
        count = f"{step['skipped_total']} skipped so far"
        text = f"step {step['step']}: skipped, the weights are unchanged ({count}); {'; '.join(words)}"
        self.print_line(text, "yellow")

    def _print_incident(self, event: Event, cause: Sequence[str] = ()) -> None:
        style = "bold red" if event["verdict"] == "ABORT" else "yellow"
        self.print_line(f"step {event['step']}: {'; '.join([describe_event(event), *cause])}", style)
        if event["replay"]:  # on its own unwrapped line, to be copied
            self._console.print(Text(f"{_INDENT}replay: {line(event['replay'])}", style))

    def _remember(self, event: Event) -> None:
        self._seconds.append(event["step_seconds"])
        _, value = followed(event)
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
        name, value = followed(event)
        eta = (self._total - event["step"]) * mean(self._seconds)
        return [
            f"{human(median(self._rates)):>6} tok/s",
            f"ETA {duration(eta):<6}",
            mib(event["memory_bytes"]),
            f"{name} {loss(value):>7}{first}",
            sparkline(self._losses, _SPARK_WIDTH, self._blocks),
            f"grad norm {number(event['grad_norm'], 3):>8}",
            f"lr {rate(event['lr'])}",
            f"scale {scale(event['loss_scale'])}" if self._fp16 else "",
            f"skipped {event['skipped_total']}" if event["skipped_total"] else "",
        ]


def sparkline(values: list[float], width: int, blocks: str = _BLOCKS) -> str:
    """`values` averaged into at most `width` cells, one block character each, taller for higher values."""
    if len(values) < 2 or not blocks:
        return ""
    count = min(width, len(values))
    edges = [round(index * len(values) / count) for index in range(count + 1)]
    cells = [sum(values[a:b]) / (b - a) for a, b in zip(edges, edges[1:], strict=False)]
    low, high = min(cells), max(cells)
    span = (high - low) or 1.0
    return "".join(blocks[round((cell - low) / span * (len(blocks) - 1))] for cell in cells)


def _pack(cells: Iterable[str], first: int, width: int) -> list[str]:
    """Lay out cells in order on as few lines as possible: up to `first` characters on the first, `width` on others."""
    lines, room = [""], first
    for cell in filter(None, cells):
        longer = f"{lines[-1]}  {cell}" if lines[-1] else cell
        if len(longer) <= room:
            lines[-1] = longer
        else:
            lines.append(cell)
            room = width
    return lines
