"""A run that does not move: rounding hides almost all updates from the weights that compute.

A learning rate that is small for 16 bits changes the FP32 masters, and the number that is computed with only once
updates have added up to half a unit in its last place. A healthy fine-tuning loses most of a single step's updates in
that way and moves all the same, so a module stands still only where it loses nearly all of them for long.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from tracking.heatmap.grid import Heat
from tracking.heatmap.modules import folded_name, in_words
from tracking.heatmap.panels import DTYPES
from tracking.numbers import percent
from tracking.run_dir import setting
from tracking.run_facts import RunFacts

STILL = 0.99
"""Share of a step's updates that change no bit of the weight that computes, from which on a module stands still: its
weights then take a hundred steps, on average, to change once."""
_ENOUGH = 3  # measurements in a row
_HALF = 0.5  # of the measurements, and of the modules
_SHOWN = 3  # kinds of modules in a sentence
_NORM = re.compile(r"norm|(?:^|\.)ln(?:_|\d|$)", re.IGNORECASE | re.ASCII)


@dataclass(frozen=True)
class Still:
    """Modules of one kind that stand still."""

    modules: list[str]
    share: float
    """[fraction] Updates that changed no bit, on average since `since`."""
    since: int
    """First step from which on all of them were measured at STILL or above."""
    dtype: str
    """Dtype that they compute in; empty where unknown."""


def still_modules(heat: Heat, *, after: int = 0) -> list[Still]:
    """Modules that stand still at the last measured step, worst first; empty unless at least half of them do.

    after: the end of the warm-up, which is left out. A module stands still for three measurements and half of all at
    least: updates lost as a schedule ends say nothing about the run. Norms are left out. Their weights are near 1,
    where the numbers of 16 bits lie far apart, and lose 91 to 100% in the demo, which learns.
    """
    if not heat.has("lost"):
        return []
    values, found = heat.panels["lost"], []
    measured = [row for row in np.flatnonzero(np.isfinite(values).any(axis=1)) if not _NORM.search(heat.rows[row])]
    for row in measured:
        known = np.flatnonzero(np.isfinite(values[row]) & (heat.steps > after))
        shares = values[row, known]
        moved = np.flatnonzero(shares < STILL)
        start = int(moved[-1]) + 1 if moved.size else 0
        if len(shares) - start >= max(_ENOUGH, _HALF * len(shares)):
            code = heat.panels["dtype"][row, known[-1]]
            dtype = DTYPES[int(code)] if np.isfinite(code) else ""
            share, since = float(np.mean(shares[start:], dtype=float)), int(heat.steps[known[start]])
            found.append(Still([heat.rows[row]], share, since, dtype))
    if len(found) < _HALF * len(measured):
        return []
    kinds: dict[tuple[str, str], list[Still]] = {}
    for one in found:
        kinds.setdefault((one.dtype, folded_name(one.modules[0], "kinds")), []).append(one)
    return sorted(map(_together, kinds.values()), key=lambda kind: -kind.share)


def _together(group: list[Still]) -> Still:
    names = [name for one in group for name in one.modules]
    share = sum(one.share for one in group) / len(group)
    return Still(names, share, max(one.since for one in group), group[0].dtype)


def still_sentence(heat: Heat, *, after: int = 0) -> str:
    """Sentence about the modules that stand still; empty while the run moves. after: as for `still_modules`."""
    kinds = still_modules(heat, after=after)
    if not kinds:
        return ""
    parts = [
        f"{percent(kind.share)} of the updates of {in_words(kind.modules)}"
        f"{'' if index else ' were lost to rounding,'} since step {kind.since:,}"
        for index, kind in enumerate(kinds[:_SHOWN])
    ]
    modules = sum(len(kind.modules) for kind in kinds)
    more = f" ({modules} modules in all)" if len(kinds) > _SHOWN else ""
    dtypes = " and ".join(dict.fromkeys(kind.dtype.upper() for kind in kinds if kind.dtype)) or "rounded"
    return (
        f"the model hardly moves, {dtypes} weights: {', '.join(parts)}{more}; reported from {percent(STILL)} on. "
        "The FP32 masters accumulate these updates"
    )


def still_of_run(facts: RunFacts) -> str:
    """`still_sentence` of a run. Raises UserError when its events cannot be read."""
    return still_sentence(facts.heat, after=warmup_of(facts.config))


def warmup_of(config: Mapping[str, Any]) -> int:
    """Steps of warm-up in a recorded config; 0 where it does not say."""
    steps = setting(config, "schedule.warmup_steps")
    return steps if isinstance(steps, int) else 0
