"""A run that does not move: rounding hides almost all updates from the weights that compute.

A learning rate that is small for 16 bits changes the FP32 masters, and the number that is computed with only once
updates have added up to half a unit in its last place. A healthy fine-tuning loses most of a single step's updates in
that way and moves all the same, so a module stands still only where it loses nearly all of them for long.
"""

import re
from collections.abc import Mapping
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


def still_sentence(heat: Heat, *, after: int = 0) -> str:
    """Sentence about the modules that stand still, worst first; empty unless at least half of them do.

    after: the end of the warm-up, which is left out. A module stands still for three measurements and half of all at
    least: updates lost as a schedule ends say nothing about the run. Norms are left out. Their weights are near 1,
    where the numbers of 16 bits lie far apart, and lose 91 to 100% in the demo, which learns.
    """
    if not heat.has("lost"):
        return ""
    values, count = heat.panels["lost"], 0
    kinds: dict[tuple[str, str], list[tuple[str, float, int]]] = {}  # by dtype and kind: module, share, since
    measured = [row for row in np.flatnonzero(np.isfinite(values).any(axis=1)) if not _NORM.search(heat.rows[row])]
    for row in measured:
        known = np.flatnonzero(np.isfinite(values[row]) & (heat.steps > after))
        shares = values[row, known]
        start = int(np.flatnonzero(shares < STILL).max(initial=-1)) + 1
        if len(shares) - start >= max(_ENOUGH, _HALF * len(shares)):
            code = heat.panels["dtype"][row, known[-1]]
            kind = DTYPES[int(code)] if np.isfinite(code) else "", folded_name(heat.rows[row], "kinds")
            share, since = float(np.mean(shares[start:], dtype=float)), int(heat.steps[known[start]])
            kinds.setdefault(kind, []).append((heat.rows[row], share, since))
            count += 1
    if not count or count < _HALF * len(measured):
        return ""
    worst = {kind: sum(share for _, share, _ in found) / len(found) for kind, found in kinds.items()}
    ranked = sorted(kinds, key=lambda kind: -worst[kind])
    parts = [
        f"{percent(worst[kind])} of the updates of {in_words([name for name, _, _ in kinds[kind]])}"
        f"{'' if index else ' were lost to rounding,'} since step {max(since for _, _, since in kinds[kind]):,}"
        for index, kind in enumerate(ranked[:_SHOWN])
    ]
    more = f" ({count} modules in all)" if len(kinds) > _SHOWN else ""
    dtypes = " and ".join(dict.fromkeys(dtype.upper() for dtype, _ in ranked if dtype)) or "rounded"
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
