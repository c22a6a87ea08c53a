"""Find runs that are repeats of one another: the same setup with another seed or a slightly nudged learning rate.

The spread of repeats is the noise that any other difference has to exceed. Two runs with the same seed and learning
rate are not repeats: why they differ is the question to answer.
"""

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from config.redact import redact
from tracking.compare.differences import CHANGE_NO_NUMBER, flat
from tracking.run_dir import setting
from tracking.run_facts import RunFacts

NUDGE = 0.02
"""Largest relative difference of learning rates between repeats. The controls of a parity run differ by less
(`tools.parity.judge_runs.NUDGE`), the trials of a sweep by more."""

_SEED = re.compile(r"[-_.]?(s|seed|control)?[-_.]?\d*$")


@dataclass(frozen=True)
class Group:
    """Runs that are repeats of one another; a run without repeats is a group of one."""

    label: str
    runs: tuple[int, ...]
    """Indices of its runs, in order."""


def seed_groups(runs: Sequence[RunFacts]) -> list[Group]:
    """Group the runs, ordered by each group's first run. A run with an unknown config is a group of its own."""
    works, found = [_work(run) for run in runs], list[list[int]]()
    draws = [(setting(run.config, "run.seed"), setting(run.config, "optimizer.learning_rate")) for run in runs]
    for index in range(len(runs)):
        for members in found:
            first = members[0]
            alike = works[index] is not None and works[index] == works[first]
            if alike and _near(draws[index][1], draws[first][1]) and draws[index] not in [draws[m] for m in members]:
                members.append(index)
                break
        else:
            found.append([index])
    names = [[runs[index].label for index in members] for members in found]
    labels = [common_label(repeats) for repeats in names]
    return [
        Group(label if labels.count(label) == 1 else repeats[0], tuple(members))
        for label, repeats, members in zip(labels, names, found, strict=True)
    ]


def _work(run: RunFacts) -> Any:
    """Settings, data and code of the run, except seed and learning rate; None if the config is unknown."""
    if not run.config:
        return None
    settings = {
        key: repr(value)
        for key, value in flat(redact(run.config))
        if key not in ("run.seed", "optimizer.learning_rate") and not key.startswith(CHANGE_NO_NUMBER)
    }
    start = {name: run.start.get(name) for name in ("compute", "zero_stage", "parameters", "world_size")}
    data = (run.environment.get("data") or {}).get("fingerprint")
    return settings, start, data, run.environment.get("git"), run.environment.get("versions")


def _near(a: Any, b: Any) -> bool:
    known = isinstance(a, int | float) and isinstance(b, int | float)
    return a == b or (known and abs(a - b) <= NUDGE * max(abs(a), abs(b)))


def common_label(names: Sequence[str]) -> str:
    """Common prefix of the names, without a trailing `seed`, `s`, `control` or number."""
    if len(names) == 1:
        return names[0]
    return _SEED.sub("", os.path.commonprefix(names)) or names[0]


def shortest_ends(names: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """The shortest end of each name's parts that no other name has; all of its parts if there is none."""
    ends = Counter(tuple(parts[at:]) for parts in names for at in range(len(parts)))
    own = ((parts, [parts[at:] for at in reversed(range(len(parts)))]) for parts in names)
    return [next((end for end in longer if ends[tuple(end)] == 1), parts) for parts, longer in own]
