"""Detect a run that hardly moves: rounding hides almost all updates from the 16-bit weights used for compute.

With a learning rate that is small for 16 bits, updates change the FP32 masters at once, but a 16-bit weight only once
they add up to half a unit in its last place. A healthy fine-tuning run loses most updates of a single step this way and
still moves, so a module counts as still only if it loses nearly all of them for a long time.
"""

import re

import numpy as np

from tracking.heatmap.grid import Heat
from tracking.heatmap.modules import folded_name, in_words
from tracking.heatmap.panels import DTYPES
from tracking.numbers import percent
from tracking.run_dir import setting
from tracking.run_facts import RunFacts

STILL = 0.99
"""A module is still if at least this share of a step's updates leaves the compute weight unchanged: its weights then
take a hundred steps, on average, to change once."""
_ENOUGH = 3  # consecutive measurements
_HALF = 0.5  # share of the measurements, and of the modules
_SHOWN = 3  # kinds of modules named in the sentence
_NORM = re.compile(r"norm|(?:^|\.)ln(?:_|\d|$)", re.IGNORECASE | re.ASCII)


def still_sentence(heat: Heat, *, after: int = 0) -> str:
    """Sentence about the modules that are still, worst first; empty unless at least half of all modules are.

    after: last step of the warm-up, which is ignored. A module must be still for the last three measurements and half
    of all at least: updates lost only as the schedule ends say nothing about the run. Norms are ignored: their weights
    are near 1, where 16-bit numbers are far apart, and lose 91 to 100% of updates in the demo, which learns.
    """
    if not heat.has("lost"):
        return ""
    values, count = heat.panels["lost"], 0
    kinds: dict[tuple[str, str], list[tuple[str, float, int]]] = {}  # (dtype, kind) to (module, share, since)
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


def still_of_run(facts: RunFacts, heat: Heat | None = None) -> str:
    """`still_sentence` for a run. heat: None reads it, and raises UserError if the events cannot be read."""
    warmup = setting(facts.config, "schedule.warmup_steps")
    heat = facts.heat if heat is None else heat
    return still_sentence(heat, after=warmup if isinstance(warmup, int) else 0)
