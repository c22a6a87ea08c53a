"""Content of the overview: one line per run, or per group of runs that differ only in their seed."""

import csv
import io
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, Self

import numpy as np
from markupsafe import Markup

from config.printable import shown
from tracking.compare.differences import SETTINGS_FIRST, format_value
from tracking.compare.groups import common_label, shortest_ends
from tracking.figures import followed
from tracking.numbers import duration, human, loss, number, percent, scale
from tracking.serve.library import Entry
from tracking.verdict import WORDS

WIDTH, HEIGHT = 140, 34
"""[pixels] Size of the sparkline."""
_PLACES = 60
_MOST_SETTINGS = 4
_MOST_CHOICES = 60
_UNLIKE = 10.0
COLUMNS = {
    "name": "run",
    "verdict": "verdict",
    "settings": "what differs",
    "loss": "loss",
    "validation": "validation",
    "step": "step",
    "skips": "skipped",
    "speed": "tokens/s",
    "scale": "loss scale",
    "warnings": "warnings",
    "incidents": "incidents",
    "started": "started",
    "changed": "changed",
}
"""Column key to heading. A setting can be a column too: its dotted key with a leading dot."""
USUAL = ("verdict", "settings", "loss", "validation", "step", "skips", "changed")
"""Default columns, which fit into 1,280 pixels."""
_DESCENDING = frozenset({"step", "speed", "skips", "scale", "warnings", "incidents", "started", "changed"})
_CONFIG_FIRST = ("precision.", "optimizer.", "deepspeed.", "model.", "batch.", "data.", "run.")
_FORMULA = re.compile(r"[=+\-@\t\r\uff0b\uff0d\uff1d\uff20]")
_AROUND = 30  # characters of context on either side of a search hit
_IN_SIGHT = {"name": 10_000, "tag": 10_000, "verdict": 100, "hypothesis": 40, "note": 40}
"""Number of leading characters of each text that the line always shows."""


@dataclass(frozen=True)
class Asked:
    """Search, order, grouping and columns requested by the reader."""

    search: str = ""
    """Words that must all occur in the run's name, tags, note, verdict, hypothesis or settings."""
    sort: str = "changed"
    descending: bool = True
    by_seed: bool = False
    columns: tuple[str, ...] = USUAL
    dates: bool = False
    """Whether times are shown as dates rather than as ages."""

    @classmethod
    def of(cls, search: str, sort: str, group: str, columns: Sequence[str], time: str) -> Self:
        """Parse the fields of a query. sort: a column, prefixed with `-` to reverse its direction."""
        column = sort.removeprefix("-")
        if (column not in COLUMNS or column == "settings") and not column.startswith("."):
            column = "changed"
        places = {name: place for place, name in enumerate(COLUMNS)}
        known = [name for name in dict.fromkeys(columns) if name in places or name.startswith(".")]
        # Columns for settings stay side by side.
        chosen = sorted(known, key=lambda name: places.get(name, places["settings"]))
        descending = (column in _DESCENDING) != sort.startswith("-")
        usual = tuple(name for name in chosen if name != "name") or USUAL
        return cls(search.strip()[:200], column, descending, group == "seed", usual, time == "date")

    @property
    def words(self) -> list[str]:
        """Search words in lower case."""
        return self.search.lower().split()


def table(entries: Sequence[Entry], asked: Asked, *, now: float) -> dict[str, Any]:
    """Values for `serve/runs.html`, the overview of `entries`. now: seconds since the epoch."""
    wanted = _wanted(entries, asked)
    keys = differing(wanted)
    groups: dict[str, list[Entry]] = {}
    for entry in wanted:
        groups.setdefault((entry.group if asked.by_seed else "") or entry.key, []).append(entry)
    ranked = sorted(groups.values(), key=lambda group: _rank(group, asked))
    count = Counter(entry.verdict.word for entry in entries)
    words: dict[str, int] = {word: count[word] for word in WORDS if count[word]}
    names = short_names([*keys, *(name[1:] for name in asked.columns if name.startswith("."))])
    measured = sorted({entry.followed for entry in wanted})
    titles = COLUMNS | {"loss": " or ".join(measured) or "loss"}
    titles |= {f".{key}": names[key] for key in keys[:_MOST_CHOICES]}
    titles |= {name: names[name[1:]] for name in asked.columns if name not in COLUMNS}
    edges = {name: _edges([entry for entry in wanted if entry.followed == name]) for name in measured}
    scales = [f"{loss(found[0])} to {loss(found[1])}" for found in edges.values() if found]
    sparks = [{"spark": _sparkline(group, edges[group[0].followed])} for group in ranked]
    return {
        "lines": [_line(group, keys, names, asked, now) | spark for group, spark in zip(ranked, sparks, strict=True)],
        "asked": asked,
        "runs": len(entries),
        "shown": len(wanted),
        "words": words,  # number of runs by verdict, worst first
        "columns": {name: titles[name] for name in ("name", *asked.columns)},
        "orders": {name: title for name, title in titles.items() if name != "settings"},
        "choices": {name: titles[name] if name in COLUMNS else name[1:] for name in titles if name != "name"},
        "differing": len(keys),
        "scale": scales[0] if len(edges) == len(scales) == 1 else "",  # of the sparklines, if they share one
    }


def export(entries: Sequence[Entry], asked: Asked) -> str:
    """The matching runs, in order, as CSV with every setting in which they differ.

    Text that a spreadsheet would take for a formula is prefixed with an apostrophe.
    """
    wanted = _wanted(entries, asked)
    keys = differing(wanted)
    wanted.sort(key=lambda entry: _rank([entry], asked))
    file = io.StringIO()
    writer = csv.writer(file, quoting=csv.QUOTE_NONNUMERIC)  # some spreadsheets also split at semicolons
    writer.writerow([*(name for name, _ in _fields(wanted[0])), *map(_csv, keys)] if wanted else ["run"])
    for entry in wanted:
        values = [*(value for _, value in _fields(entry)), *(entry.settings.get(key) for key in keys)]
        writer.writerow([_csv(value) for value in values])
    return file.getvalue()


def _fields(entry: Entry) -> Iterator[tuple[str, Any]]:
    values = {column: _number([entry], column) for column in _NUMBERS}
    yield "run", entry.key
    yield "verdict", entry.verdict.word
    yield "since_step", entry.verdict.step
    yield "cause", entry.verdict.cause
    yield "warnings", entry.verdict.warnings
    yield "incidents", entry.facts.counts["incident"]
    yield "step", entry.status.step
    yield "planned_steps", entry.planned
    for name in ("loss", "reward"):
        yield name, values["loss"] if name == entry.followed else None
        yield f"validation_{name}", values["validation"] if name == entry.followed else None
    yield "tokens_per_second", values["speed"]
    yield "skipped", int(values["skips"])
    yield "loss_scale", values["scale"]
    yield "started", _iso(values["started"])
    yield "changed", _iso(entry.changed)
    yield "tags", ", ".join(entry.notes.tags)
    yield "note", entry.notes.note
    yield "hypothesis", entry.hypothesis


def _csv(value: Any) -> Any:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    if isinstance(value, bool) or not isinstance(value, int | float):
        text = shown(value)
        return f"'{text}" if _FORMULA.match(text) else text
    return value


def differing(entries: Sequence[Entry]) -> list[str]:
    """Dotted keys of settings with different values among the `entries` that have them, most informative first.

    Learning rate and seed lead; the others follow by their number of distinct values.
    """
    found: dict[str, set[str]] = {}
    for entry in entries:
        for key, value in entry.settings.items():
            found.setdefault(key, set()).add(repr(value))

    def place(key: str) -> tuple[int, int, int]:
        first = SETTINGS_FIRST.index(key) if key in SETTINGS_FIRST else len(SETTINGS_FIRST)
        return first, -len(found[key]), next((i for i, start in enumerate(_CONFIG_FIRST) if key.startswith(start)), 99)

    return sorted((key for key, values in found.items() if len(values) > 1), key=place)


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Dotted key to its shortest suffix that no other key has."""
    distinct = list(dict.fromkeys(keys))
    return dict(zip(distinct, map(".".join, shortest_ends([key.split(".") for key in distinct])), strict=True))


def marked(text: object, words: Sequence[str]) -> Markup:
    """A run's text with search hits in <mark>."""
    said = shown(text)
    if not words:
        return Markup.escape(said)
    pattern = re.compile("|".join(map(re.escape, sorted(words, key=len, reverse=True))), re.IGNORECASE)
    parts, at = [], 0
    for hit in pattern.finditer(said):
        parts += [Markup.escape(said[at : hit.start()]), Markup("<mark>{}</mark>").format(hit[0])]
        at = hit.end()
    return Markup("").join([*parts, Markup.escape(said[at:])])


def _wanted(entries: Sequence[Entry], asked: Asked) -> list[Entry]:
    words = asked.words
    return [entry for entry in entries if all(_place_of(entry, word) for word in words)]


def _place_of(entry: Entry, word: str) -> tuple[str, str] | None:
    """(first part of a run that contains the word, its text); None if no part does."""
    return next(((what, text) for what, text in _searched(entry) if word in text.lower()), None)


def _searched(entry: Entry) -> Iterator[tuple[str, str]]:
    texts = [("verdict", entry.verdict.text), ("note", entry.notes.note), ("hypothesis", entry.hypothesis)]
    for what, text in [("name", entry.key), *(("tag", tag) for tag in entry.notes.tags), *texts]:
        yield what, _said(text)  # hide secrets before cutting: half of one would not be recognised
    for key, value in entry.settings.items():
        yield "setting", f"{key}={_value(value)}"
        yield "setting", f"{key}={value}"


_said = lru_cache(1 << 14)(shown)  # every search needs the same texts again


def _found(entry: Entry, words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Excerpts around search hits that the line itself does not show."""
    for word in words:
        what, text = _place_of(entry, word) or ("name", "")
        at = text.lower().find(word)
        if at + len(word) <= _IN_SIGHT.get(what, 0):
            continue
        low = 0 if what == "setting" else max(0, at - _AROUND)
        high = at + len(word) + _AROUND
        before, after = "\u2026" if low else "", "\u2026" if high < len(text) else ""
        yield what, f"{before}{text[low:high]}{after}"


def _mean(values: Sequence[float]) -> float:
    known = [value for value in values if math.isfinite(value)]
    return sum(known) / len(known) if known else math.nan


_NUMBERS: dict[str, tuple[Callable[[Entry], float], Callable[[Sequence[float]], float]]] = {
    "verdict": (lambda entry: WORDS.index(entry.verdict.word), min),
    "loss": (lambda entry: entry.newest, _mean),
    "validation": (lambda entry: followed(entry.facts.rare_events.get("eval", [{}])[-1])[1], _mean),
    "step": (lambda entry: entry.status.step, max),
    "skips": (lambda entry: entry.facts.newest.get("skipped_total") or 0, _mean),
    "speed": (lambda entry: entry.facts.newest.get("tokens_per_second") or math.nan, _mean),
    "scale": (lambda entry: entry.facts.newest.get("loss_scale") or math.nan, _mean),
    "warnings": (lambda entry: entry.verdict.warnings, sum),
    "incidents": (lambda entry: entry.facts.counts["incident"], sum),
    "started": (lambda entry: entry.facts.start.get("time") or math.nan, _mean),
    "changed": (lambda entry: entry.changed, max),
}
"""Column to (number of one run, reduction over a group)."""


def _values(group: Sequence[Entry], column: str) -> list[float]:
    return [float(_NUMBERS[column][0](entry)) for entry in group]


def _number(group: Sequence[Entry], column: str) -> float:
    return _NUMBERS[column][1](_values(group, column))


def _rank(group: Sequence[Entry], asked: Asked) -> tuple[int, Any]:
    """Sort key: numbers, then text; unknown values come last in both directions."""
    first, column = group[0], asked.sort
    value: Any = first.key if column == "name" else first.settings.get(column[1:])
    if column in _NUMBERS:
        rewarded = column in ("loss", "validation") and first.followed != "loss"
        value = -_number(group, column) if rewarded else _number(group, column)
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return 2, 0
    if isinstance(value, int | float):
        return 0, -value if asked.descending else value
    text = str(value)
    return 1, [-ord(letter) for letter in text] + [1] if asked.descending else [ord(letter) for letter in text]


def _line(group: list[Entry], keys: Sequence[str], names: dict[str, str], asked: Asked, now: float) -> dict[str, Any]:
    """One line of the table: a run or a group."""
    first, alone = group[0], len(group) == 1
    incidents = Counter(event["verdict"] for entry in group for event in entry.facts.rare_events.get("incident", ()))
    worst = _worst(group)
    own_cause = f"; {worst.key}: {worst.verdict.cause}" if worst.verdict.cause else ""
    seeds = sorted({str(entry.settings.get("run.seed")) for entry in group})
    kind = "seeds" if len(seeds) == len(group) else "runs"
    own = [(key, _value(first.settings[key])) for key in keys if key in first.settings and (alone or key != "run.seed")]
    steps, planned, speed = int(_number(group, "step")), first.planned, _number(group, "speed")
    course = _spread(_values(group, "loss"))
    unit = "" if first.followed == "loss" else f"{first.followed} "
    return {
        "keys": [entry.key for entry in group],
        "name": first.key if alone else f"{common_label([entry.key for entry in group])} ({len(group)} {kind})",
        "verdict": worst.verdict,
        "cause": worst.verdict.cause if alone else f"seeds {', '.join(seeds)}{own_cause}",
        "hypothesis": first.hypothesis,
        "tags": list(dict.fromkeys(tag for entry in group for tag in entry.notes.tags)),
        "note": first.notes.note if alone else "",
        "step": f"{steps:,}" + (f" of {planned:,}" if planned else ""),
        "done": min(1.0, steps / planned) if planned else 0.0,
        "loss": f"{unit}{course}" if course else "not finite" if first.facts.newest else "",
        "validation": _spread(_values(group, "validation")),
        "speed": "" if math.isnan(speed) else human(speed),
        "skips": _skipped(int(sum(_values(group, "skips"))), int(sum(_values(group, "step")))),
        "scale": scale_text(_number(group, "scale")),
        "warnings": int(_number(group, "warnings")),
        "incidents": sorted(incidents.items()),
        "times": {name: _time(_number(group, name), now, dates=asked.dates) for name in ("started", "changed")},
        "settings": [(names[key], value) for key, value in own[:_MOST_SETTINGS]],
        "more_settings": max(0, len(own) - _MOST_SETTINGS),
        "all_settings": "; ".join(f"{key} = {value}" for key, value in own),
        "own": {name: _value(value) for name in asked.columns if (value := first.settings.get(name[1:])) is not None},
        "found": list(dict.fromkeys(_found(first, asked.words))),
    }


def _value(value: Any) -> str:
    text = format_value(value)
    return text if len(text) <= 40 else text[:39] + "\u2026"


def _iso(time: float) -> str:
    return "" if math.isnan(time) else datetime.fromtimestamp(time, UTC).isoformat(timespec="seconds")


def _time(time: float, now: float, *, dates: bool) -> tuple[str, str, str]:
    """(ISO time, age or date as requested, the other of the two)."""
    if math.isnan(time):
        return "", "", ""
    date, age = datetime.fromtimestamp(time).astimezone(), now - time
    largest = re.match(r"\d+[a-z]", duration(age)) if age >= 60 else None  # coarse: an unchanged table is not resent
    ago = f"{largest[0]} ago" if largest else "just now"
    words = f"{date:%Y-%m-%d %H:%M}"
    return (_iso(time), words, ago) if dates else (_iso(time), ago, f"{words} {date:%Z}")


def _spread(values: Sequence[float]) -> str:
    """Mean of a group and the largest deviation from it."""
    known, mean = [value for value in values if math.isfinite(value)], _mean(values)
    if len(known) < 2:
        return loss(mean) if known else ""
    return f"{loss(mean)} \u00b1 {number(max(max(known) - mean, mean - min(known)), 2)}"


def _skipped(skipped: int, steps: int) -> str:
    return f"{skipped:,} ({percent(skipped / steps, 2)})" if skipped and steps else "0" if steps else ""


def scale_text(value: float) -> str:
    """A loss scale; empty without loss scaling."""
    return "" if math.isnan(value) or value == 1.0 else scale(value)


def _worst(group: Sequence[Entry]) -> Entry:
    return min(group, key=lambda entry: WORDS.index(entry.verdict.word))


def _edges(entries: Sequence[Entry]) -> tuple[float, float] | None:
    """(low, high) shared by all sparklines: over the sound runs, or over all if there are none.

    A first value far above the rest would flatten the curves, so the highest 3% of each curve are ignored, and so are
    runs _UNLIKE times as high as the median one, such as those with another objective.
    """
    sound = [entry for entry in entries if entry.verdict.word not in ("diverged", "not learning")]
    curves: list[np.ndarray] = []
    for some in (sound, entries):
        curves = curves or [np.sort(curve[:, 1]) for entry in some if len(curve := entry.curve) > 1]
    if not curves:
        return None
    peaks = [float(curve[int(0.97 * (len(curve) - 1))]) for curve in curves]
    usual = float(np.median(peaks))
    low = min(float(curve[0]) for curve in curves)
    return low, max(low, *(peak for peak in peaks if peak <= _UNLIKE * abs(usual) or peak <= usual))


def _sparkline(group: Sequence[Entry], edges: tuple[float, float] | None) -> dict[str, Any] | None:
    """SVG points of a group's mean curve, of the band of all its curves, and the x at which its verdict begins.

    They fill a box of WIDTH by HEIGHT, from the start to the planned end; None for fewer than two values.
    """
    usable = [curve for entry in group if len(curve := entry.curve) > 1]
    if not usable or edges is None:
        return None
    low, high = edges
    last = max(curve[-1, 0] for curve in usable)
    end = max(last, *(entry.planned or 0 for entry in group))
    steps = np.linspace(min(curve[0, 0] for curve in usable), last, _PLACES)
    values = np.stack([np.interp(steps, curve[:, 0], curve[:, 1], right=np.nan) for curve in usable])
    known = np.isfinite(values).any(axis=0)
    steps, values = steps[known], values[:, known]

    def across(step: Any) -> Any:
        return step / max(1.0, end) * (WIDTH - 4) + 2

    def points(heights: np.ndarray, reverse: bool = False) -> str:
        down = np.clip((high - heights) / max(high - low, 1e-12), 0, 1) * (HEIGHT - 6) + 3
        pairs = [f"{x:.1f},{y:.1f}" for x, y in zip(across(steps), down, strict=True)]
        return " ".join(reversed(pairs) if reverse else pairs)

    worst, band = _worst(group).verdict, ""
    if len(usable) > 1:
        band = f"{points(np.nanmin(values, axis=0))} {points(np.nanmax(values, axis=0), reverse=True)}"
    mark = None if worst.step is None or worst.tone not in ("bad", "warn") else float(across(min(worst.step, end)))
    middle = values[0] if len(usable) == 1 else np.nanmean(values, axis=0)
    return {"points": points(middle), "band": band, "mark": mark}
