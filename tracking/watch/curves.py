"""Draw curves in a terminal with braille dots, two by four per character, or with stars in ASCII."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from rich.text import Text

LABEL = 9  # characters for labels left of a curve
_DOT = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # bits of a braille character by row and column
# Values that lie outside the middle 96% by more than this multiple of its height are cut off, to not flatten the curve.
_FAR = 2.0
_MARK = "not dim bold red"


@dataclass(frozen=True)
class Line:
    steps: np.ndarray
    values: np.ndarray
    """One value per step, in step order; non-finite ones are not drawn."""
    style: str
    points: bool = False
    """Whether to draw only points, for rare measurements."""

    def finite(self) -> Self:
        """The line without non-finite values."""
        known = np.isfinite(self.values)
        return replace(self, steps=self.steps[known], values=self.values[known])


@dataclass(frozen=True)
class Axes:
    width: int
    """[characters] Including the labels."""
    height: int
    """[characters] Including the line of step numbers."""
    last_step: int
    log_steps: bool = False
    log_values: bool = False
    ascii: bool = False


def draw(lines: Sequence[Line], marks: np.ndarray, axes: Axes, label: Callable[[float], str]) -> Text:
    """The panel as `axes.height` lines of text. marks: steps to mark on the axis below, such as skipped ones.

    Where several steps share a column of dots, the bright line is their mean and the dim band spans lowest to highest.
    Values far outside all others are cut off and marked.
    """
    columns, rows = max(4, axes.width - LABEL), max(1, axes.height - 1)
    lines = [line.finite() for line in lines]
    known = np.concatenate([line.values for line in lines])
    if not known.size:
        return Text("no finite value yet" + "\n" * rows, style="dim")
    log = axes.log_values and bool(known.min() > 0)
    low, high = _range(np.log10(known) if log else known)
    first = max(1, int(min(line.steps[0] for line in lines if line.steps.size)))
    canvas = _Canvas(columns, rows, axes, first=first, span=(low, high), log=log)
    for line in lines:
        canvas.points(line) if line.points else canvas.curve(line)
    text = Text(no_wrap=True)
    for row in range(rows):
        shown = row in (0, rows - 1) or (row == rows // 2 and rows >= 5)
        at = high - (high - low) * (row / max(1, rows - 1))
        text.append((label(10.0**at if log else at) if shown else "")[: LABEL - 1].rjust(LABEL - 1) + " ", style="dim")
        canvas.write(row, text)
        text.append("\n")
    text.append(canvas.steps(marks))
    return text


def _range(known: np.ndarray) -> tuple[float, float]:
    """Lowest and highest value to show; always distinct."""
    ordered = np.sort(known)
    aside = len(ordered) // 50
    bottom, top = float(ordered[aside]), float(ordered[-1 - aside])
    lowest, highest = float(ordered[0]), float(ordered[-1])
    reach = _FAR * (top - bottom)
    low = lowest if lowest >= bottom - reach or not reach else bottom
    high = highest if highest <= top + reach or not reach else top
    if high - low > 1e-6 * max(abs(high), abs(low)):
        return low, high
    return low - 0.05 * (abs(low) or 1.0), high + 0.05 * (abs(high) or 1.0)


class _Canvas:
    """A grid of dots within characters; each character has the style of what was drawn there last."""

    def __init__(self, columns: int, rows: int, axes: Axes, first: int, span: tuple[float, float], log: bool) -> None:
        self._columns, self._rows, self._axes, self._first = columns, rows, axes, first
        self._low, self._high, self._log = *span, log
        self._bits = [[0] * columns for _ in range(rows)]
        self._styles = [[""] * columns for _ in range(rows)]
        self._signs: dict[tuple[int, int], str] = {}  # characters that replace dots

    def _x(self, steps: np.ndarray) -> np.ndarray:
        """Dot columns of steps."""
        first, last = self._first, max(self._axes.last_step, self._first + 1)
        steps = np.clip(steps, first, last)
        places = (steps - first) / (last - first)
        if self._axes.log_steps:
            places = np.log(steps / first) / math.log(last / first)
        return np.minimum(2 * self._columns - 1, (places * (2 * self._columns - 1) + 0.5).astype(int))

    def _y(self, value: float) -> int:
        """Dot row of a value; 0 is the top."""
        dots = 4 * self._rows
        return min(dots - 1, max(0, int((self._high - self._to(value)) / (self._high - self._low) * (dots - 1) + 0.5)))

    def _to(self, value: float) -> float:
        return math.log10(value) if self._log else value

    def points(self, line: Line) -> None:
        for x, value in zip(self._x(line.steps).tolist(), line.values.tolist(), strict=True):
            place = self._y(value) // 4, x // 2
            self._signs[place] = "o" if self._axes.ascii else "●"
            self._styles[place[0]][place[1]] = line.style

    def curve(self, line: Line) -> None:
        """Draw the band of all values, and the line of their means through it."""
        if not line.steps.size:
            return
        columns, starts, counts = np.unique(self._x(line.steps), return_index=True, return_counts=True)
        lows, highs = (part.reduceat(line.values, starts).tolist() for part in (np.minimum, np.maximum))
        means = (np.add.reduceat(line.values, starts) / counts).tolist()
        for x, low, high in zip(columns.tolist(), lows, highs, strict=True):
            self._vertical(x, self._y(high), self._y(low), f"dim {line.style}")
        drawn = [(x, self._y(mean)) for x, mean in zip(columns.tolist(), means, strict=True)]
        for before, here in zip([drawn[0], *drawn], drawn, strict=False):
            self._connect(before, here, line.style)
        for x, low, high in zip(columns.tolist(), lows, highs, strict=True):
            if self._to(high) > self._high:
                self._mark_cut_off(0, x // 2, "^" if self._axes.ascii else "▲")
            if self._to(low) < self._low:
                self._mark_cut_off(self._rows - 1, x // 2, "v" if self._axes.ascii else "▼")

    def _mark_cut_off(self, row: int, column: int, sign: str) -> None:
        self._signs[row, column] = sign
        self._styles[row][column] = _MARK

    def _connect(self, start: tuple[int, int], end: tuple[int, int], style: str) -> None:
        (x, y), (to_x, to_y) = start, end
        for column in range(x, to_x + 1):
            part = [(column - x + side) / max(1, to_x - x) for side in (-0.5, 0.5)]
            a, b = (round(y + (to_y - y) * min(1.0, max(0.0, p))) for p in part)
            self._vertical(column, a, b, style)

    def _vertical(self, x: int, a: int, b: int, style: str) -> None:
        for y in range(min(a, b), max(a, b) + 1):
            self._bits[y // 4][x // 2] |= _DOT[y % 4][x % 2]
            self._styles[y // 4][x // 2] = style

    def write(self, row: int, text: Text) -> None:
        for column, (bits, style) in enumerate(zip(self._bits[row], self._styles[row], strict=True)):
            drawn = "*" if self._axes.ascii else chr(0x2800 + bits)
            text.append(self._signs.get((row, column), drawn if bits else " "), style=style or None)

    def steps(self, marks: np.ndarray) -> Text:
        """The line below the curve: first and last step, and the marks."""
        left, right = f"{self._first:,}", f" {self._axes.last_step:,}"
        cells = list((left + right.rjust(self._columns - len(left)))[: self._columns])
        marked = np.unique(self._x(marks) // 2).tolist()
        for column in marked:  # may cover the step numbers, which matter less
            cells[column] = "!" if self._axes.ascii else "▾"
        line = Text(" " * LABEL + "".join(cells), style="dim", no_wrap=True)
        for column in marked:
            line.stylize(_MARK, LABEL + column, LABEL + column + 1)
        return line
