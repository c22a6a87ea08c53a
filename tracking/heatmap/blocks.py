"""A heat map in a terminal: one column per character in colour, or ASCII shades if the terminal has nothing else."""

import numpy as np
from rich.text import Text

from config.printable import line
from tracking.heatmap.grid import Heat, limits
from tracking.heatmap.modules import short_name
from tracking.heatmap.panels import DTYPE_COLOURS, DTYPES, PANELS
from tracking.numbers import number, percent

_LABEL = 24
_SHADES = " .:-=+*#%@"
# Eight evenly spaced colours of matplotlib's viridis.
_COLOURS = ("#440154", "#46327e", "#365c8d", "#277f8e", "#1fa187", "#4ac16d", "#a0da39", "#fde725")


def draw_blocks(heat: Heat, key: str, *, width: int, height: int, ascii_only: bool = False) -> Text:
    """One panel in at most `height` lines of `width` characters.

    Unless ASCII is requested, two rows share a line (upper and lower half of each character).
    Rows are modules if they fit, else kinds of modules or blocks, whichever are fewer.
    """
    per_line = 1 if ascii_only else 2
    room = max(1, height - 1)
    shown = heat
    if len(heat.rows) > room * per_line:
        shown = min((heat.folded("kinds"), heat.folded("blocks")), key=lambda found: len(found.rows))
    columns = max(4, width - _LABEL - 1)
    shown = shown.narrowed(columns)
    values = shown.panels[key]
    names = list(shown.rows)
    if len(values) > room * per_line:  # still too many rows: keep evenly spaced ones
        kept = np.linspace(0, len(values) - 1, room * per_line).astype(int)
        values, names = values[kept], [names[index] for index in kept]
    levels = _levels(shown, key, values)
    wide = np.repeat(levels, max(1, columns // max(1, levels.shape[1])), axis=1)[:, :columns]
    text = Text(no_wrap=True)
    for row in range(0, len(wide), per_line):
        text.append(short_name(line(names[row]), _LABEL - 1).ljust(_LABEL), style="dim")
        if ascii_only:
            shades = "012345678" if key == "dtype" else _SHADES[1:]
            text.append("".join(" " if level < 0 else shades[level] for level in wide[row]))
        else:
            lower = wide[row + 1] if row + 1 < len(wide) else np.full(wide.shape[1], -1)
            for upper, under in zip(wide[row], lower, strict=True):
                text.append(*_cell(int(upper), int(under), key))
        text.append("\n")
    first, last = f"{int(shown.edges[0]):,}", f"{int(shown.edges[-1]):,}"
    text.append(" " * _LABEL + first + last.rjust(max(1, wide.shape[1] - len(first))), style="dim")
    return text


def legend(heat: Heat, key: str, *, ascii_only: bool = False) -> Text:
    text = Text(no_wrap=True)
    if key == "dtype":
        for code, name in enumerate(DTYPES):
            if code:
                text.append("# " if ascii_only else "█ ", style=None if ascii_only else DTYPE_COLOURS[code])
                text.append(f"{name if not ascii_only else str(code) + ' ' + name}  ", style="dim")
        return text
    low, high = limits(heat, key)
    said = percent if PANELS[key].percent else number
    text.append(f"{said(low, 2)} ", style="dim")
    for level in range(8):
        text.append(_SHADES[level + 1] if ascii_only else "█", style=None if ascii_only else _COLOURS[level])
    text.append(f" {said(high, 2)}", style="dim")
    return text


def _levels(heat: Heat, key: str, values: np.ndarray) -> np.ndarray:
    """Colour index of each value (0 to 7, or a position in DTYPES); -1 where there is no value."""
    if key == "dtype":
        return np.where(np.isfinite(values), np.nan_to_num(values), -1).astype(int)
    low, high = limits(heat, key)
    with np.errstate(all="ignore"):
        share = np.log(values / low) / np.log(high / low) if PANELS[key].log else (values - low) / (high - low)
    known = np.isfinite(values) & ((values > 0) | (not PANELS[key].log))
    return np.where(known, np.clip(np.nan_to_num(share, posinf=1.0, neginf=0.0) * 8, 0, 7).astype(int), -1)


def _cell(upper: int, lower: int, key: str) -> tuple[str, str | None]:
    colours = DTYPE_COLOURS if key == "dtype" else _COLOURS
    if upper < 0 and lower < 0:
        return " ", None
    if upper < 0:
        return "▄", colours[lower]
    return ("▀", colours[upper]) if lower < 0 else ("▀", f"{colours[upper]} on {colours[lower]}")
