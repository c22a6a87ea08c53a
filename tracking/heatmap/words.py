"""Write the line under each panel, which names what stands out."""

import math
import warnings
from collections import Counter

import numpy as np

from tracking.heatmap.grid import Heat
from tracking.heatmap.modules import in_words, leaves
from tracking.heatmap.panels import DTYPES, PANELS
from tracking.heatmap.still import still_sentence
from tracking.heatmap.trend import trend
from tracking.numbers import number, percent

NEAR = 0.25
"""Share of FP16's range from which an activation is reported, whether it grows or not."""
_FAR = 2.0  # a forecast looks ahead by this many times the measured steps
_ALIKE = 1.5  # modules share a clause if their values are within this factor
_CHANGED = 10.0  # factor of change from which a value is reported
_MUCH = 0.01  # share of values below the smallest normal number from which it is reported


def sentences(heat: Heat) -> dict[str, str]:
    """One line of text for each panel of `heat` with values."""
    return {key: line for key, (line, _) in findings(heat).items()}


def findings(heat: Heat) -> dict[str, tuple[str, bool]]:
    """Panel to (line of text, whether it reports something that a healthy run would not show)."""
    writers = {
        "activation": _activations,
        "gradient": _gradients,
        "underflow": _underflow,
        "drift": _drift,
        "update": _updates,
        "lost": _lost,
        "nonfinite": _nonfinite,
        "dtype": _dtypes,
    }
    return {key: writers[key](heat) for key in PANELS if heat.has(key)} if heat else {}


def _grouped(heat: Heat, found: list) -> list[list]:
    """Group findings of the same kind of module with similar values, soonest first."""
    groups: dict[str, list[list]] = {}
    for item in sorted(found, key=lambda item: (item[3], -item[1])):
        alike = groups.setdefault(in_words([heat.rows[item[0]]]).rpartition(" ")[2], [])
        near = (group for group in alike if max(item[1], group[0][1]) <= _ALIKE * min(item[1], group[0][1]))
        if (group := next(near, None)) is None:
            alike.append(group := [])
        group.append(item)
    every = [group for alike in groups.values() for group in alike]
    return sorted(every, key=lambda group: (group[0][3], -group[0][1]))


def _endangered(heat: Heat) -> list[list]:
    """Groups of similar modules near the end of FP16's range or growing towards it, soonest first; each module as (row,
    share of the range, trend, step at which the range is reached).

    Blocks only pass on the values of their modules, so they are dropped if any module was found.
    """
    horizon, found = heat.steps[-1] + _FAR * (heat.steps[-1] - heat.edges[0]), []
    for row, values in enumerate(heat.panels["activation"]):
        known = np.flatnonzero(np.isfinite(values))
        if not known.size:
            continue
        last = float(values[known[-1]])
        growth = trend(heat.steps, values) if last > NEAR**4 else None  # below 0.4% there is no danger soon
        step = growth.reaches(1.0) if growth is not None and growth.value < 1 else math.inf
        if last >= NEAR or step <= horizon:
            found.append((row, last, growth, step))
    inner = leaves(heat.rows)
    if any(inner[row] for row, *_ in found):
        found = [item for item in found if inner[item[0]]]
    return _grouped(heat, found)


def _activations(heat: Heat) -> tuple[str, bool]:
    found = _endangered(heat)
    fp16 = "fp16" in heat.computes
    range_of = "FP16's range" if fp16 else f"FP16's range ({', '.join(heat.computes) or 'the run'} has a wider one)"
    if not found:
        row, column = _largest(heat, "activation")
        most = percent(heat.panels["activation"][row, column], 2)
        return f"largest: {most} of {range_of}, {_name(heat, row)} at {_step(heat, column)}; none is near it.", False
    lines = []
    for group in found[:3]:
        rows, (_, _, growth, step) = sorted(row for row, *_ in group), group[0]  # the soonest
        largest = percent(max(share for _, share, _, _ in group), 2)
        line = f"{in_words([heat.rows[row] for row in rows])}: activations at {largest} of {range_of}"
        values = np.nanmax(np.nan_to_num(heat.panels["activation"][rows], nan=0.0), axis=0)
        above = np.flatnonzero(values < NEAR).max(initial=-1) + 1
        if above < len(values):
            line += f", above {percent(NEAR, 2)} since step {int(heat.steps[above]):,}"
        if growth is not None and math.isfinite(step):
            share = growth.per_100_steps
            faster = percent(share, 2) if share < 1 else f"{number(1 + share, 3)}x"
            what = "overflow expected" if fp16 else "FP16 would overflow"
            line += f", growing {faster} per 100 steps: {what} near step {round(step):,}"
        lines.append(line)
    more = f" {len(found) - 3} more kinds of modules are near it." if len(found) > 3 else ""
    return "; ".join(lines) + "." + more, True


def _gradients(heat: Heat) -> tuple[str, bool]:
    column, newest, low, high = _extremes(heat, "gradient")
    least, most = (f"{number(newest[row], 2)} ({_name(heat, row)})" for row in (low, high))
    changed = _changed_modules(heat, "gradient")
    return f"at {_step(heat, column)} from {least} to {most}{changed}.", bool(changed)


def _extremes(heat: Heat, panel: str) -> tuple[int, np.ndarray, int, int]:
    """(last column with a value, its values, row of the smallest value, row of the largest)."""
    column = _newest(heat.panels[panel])
    newest = heat.panels[panel][:, column]
    return column, newest, int(np.nanargmin(newest)), int(np.nanargmax(newest))


def _changed_modules(heat: Heat, panel: str) -> str:
    """Clause naming modules whose values changed by a large factor since the second eighth of the steps; else empty."""
    values = heat.panels[panel]
    count = values.shape[1]
    if count < 8:
        return ""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # about modules without a value
        logs = np.log(np.where(values > 0, values, np.nan))
        early, late = (np.nanmedian(part, axis=1) for part in (logs[:, count // 8 : count // 4 + 1], logs[:, -2:]))
        # Relative to the median module: all gradients shrink together as a run converges.
        change = late - early - np.nanmedian(late - early)
    rows = np.flatnonzero(np.abs(np.nan_to_num(change)) > math.log(_CHANGED))
    if not rows.size:
        return ""
    strongest = rows[np.argsort(-np.abs(change[rows]))]
    alike = [row for row in strongest if np.sign(change[row]) == np.sign(change[strongest[0]])]
    factor = math.exp(abs(float(change[strongest[0]])))
    how = "grew" if change[strongest[0]] > 0 else "shrank"
    names = in_words([heat.rows[row] for row in sorted(alike)])
    return f"; {names} {how} up to {number(factor, 3)}x against the others"


def _underflow(heat: Heat) -> tuple[str, bool]:
    values = heat.panels["underflow"]
    row, column = _largest(heat, "underflow")
    worst = float(values[row, column])
    if worst < _MUCH:
        where = f"{_name(heat, row)} at {_step(heat, column)}"
        return f"at most {percent(worst, 2)} of a module's gradient values, {where}.", False
    newest = _newest(values)
    rows = np.flatnonzero(np.nan_to_num(values[:, newest]) >= max(_MUCH, 0.5 * float(np.nanmax(values[:, newest]))))
    if not rows.size or float(np.nanmax(values[:, newest])) < _MUCH:
        return f"up to {percent(worst, 2)} in {_name(heat, row)} at {_step(heat, column)}; under 1% at the last.", True
    share = float(np.nanmax(values[rows, newest]))
    names = in_words([heat.rows[index] for index in rows])
    return f"{names}: {percent(share, 2)} of the gradient values at {_step(heat, newest)}.", True


def _drift(heat: Heat) -> tuple[str, bool]:
    values = np.nan_to_num(heat.panels["drift"], posinf=np.inf)
    rows = np.flatnonzero(values.max(axis=1) > 0)
    if not rows.size:
        return "every 16-bit weight equals its rounded master, at every measured step.", False
    first, names = int(np.flatnonzero(values.max(axis=0) > 0)[0]), in_words([heat.rows[row] for row in rows])
    away = f"up to {number(float(values.max()), 2)} away"
    return f"{names}: differ from their rounded masters since {_step(heat, first)}, {away}.", True


def _updates(heat: Heat) -> tuple[str, bool]:
    column, newest, low, high = _extremes(heat, "update")
    least, most = (f"{_name(heat, row)} by {number(newest[row], 2)}" for row in (low, high))
    usual = f"median update/weight ratio {number(float(np.nanmedian(newest)), 2)} per step"
    changed = _changed_modules(heat, "update")
    return f"{usual}; {most}, {least} ({_step(heat, column)}){changed}.", bool(changed)


def _lost(heat: Heat) -> tuple[str, bool]:
    if still := still_sentence(heat):
        return f"{still}.", True
    column, newest, _, high = _extremes(heat, "lost")
    usual, most = (percent(float(share), 2) for share in (np.nanmedian(newest), newest[high]))
    return f"{usual} in the median module at {_step(heat, column)}, {most} in {_name(heat, high)}.", False


def _nonfinite(heat: Heat) -> tuple[str, bool]:
    found = [finding for finding in heat.nonfinite if finding[2] > 0]
    if not found:
        return "none.", False
    first = min(step for step, _, _ in found)
    where = in_words([module for step, module, _ in found if step == first])
    often: Counter[str] = Counter()
    for _, module, count in found:
        often[module] += int(count)
    total, most = sum(often.values()), in_words([often.most_common(1)[0][0]])
    return f"first in {where}, at step {first:,}; {total:,} in all, most in {most}.", True


def _dtypes(heat: Heat) -> tuple[str, bool]:
    values = np.nan_to_num(heat.panels["dtype"]).astype(int)
    newest = values[:, -1]
    parts = []
    for code in sorted(set(newest[newest > 0]), key=lambda code: -int((newest == code).sum())):
        names = [heat.rows[row] for row in np.flatnonzero(newest == code)]
        parts.append(f"{DTYPES[code]} in {f'{len(names)} modules' if len(names) > 3 else in_words(names)}")
    changed = np.flatnonzero((values != values[:, :1]).any(axis=1))
    text = ", ".join(parts) if len(parts) > 1 else f"{DTYPES[int(newest.max())]} everywhere"
    for row in changed[:1]:
        at = int(np.flatnonzero(values[row] != values[row, 0])[0])
        which = in_words([heat.rows[index] for index in changed])
        text += f"; changed: {which}, to {DTYPES[int(values[row, at])] or 'unknown'} by {_step(heat, at)}"
    return f"{text}.", bool(changed.size)


def _newest(values: np.ndarray) -> int:
    """Index of the last column with a value."""
    return int(np.flatnonzero(np.isfinite(values).any(axis=0))[-1])


def _largest(heat: Heat, panel: str) -> tuple[int, int]:
    row, column = np.unravel_index(int(np.nanargmax(heat.panels[panel])), heat.panels[panel].shape)
    return int(row), int(column)


def _name(heat: Heat, row: int) -> str:
    return in_words([heat.rows[row]])


def _step(heat: Heat, column: int) -> str:
    return f"step {int(heat.steps[column]):,}"
