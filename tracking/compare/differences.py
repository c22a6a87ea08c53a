"""What differed between runs before they began: config, data, versions, hardware; and what that makes of a comparison.

Only what differs is told. Values that look like secrets are blanked before anything compares or shows them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tracking.environment import redact
from tracking.run_facts import RunFacts

# What a run is called and how it is shown, not what it computes; of these, the first two differ always.
_NAMES = ("run.name", "run.dir")
_ONLY_NAMES = (*_NAMES, "run.resume", "run.hypothesis", "tracking.", "data.cache_dir", "parity.")
_DATA = ("data.", "batch.", "tokenizer")
_MISSING = "-"
_DTYPE = "(dtype)"


@dataclass(frozen=True)
class Difference:
    """One fact that is not the same in all runs. values: one a run, in their order; None where it was not recorded.

    group: config, data, deepspeed, code, versions or hardware. told: whether it may explain other numbers or times;
    not what only names or shows a run, nor the DeepSpeed JSON, which repeats the config.
    """

    group: str
    key: str
    values: tuple[Any, ...]
    told: bool = True


def differences(runs: Sequence[RunFacts]) -> list[Difference]:
    """Every recorded fact that differs between `runs`, the config first; what no run recorded is left out."""
    tables = [dict(_facts(run)) for run in runs]
    found = []
    for group, key in dict.fromkeys(name for table in tables for name in table):
        values = tuple(table.get((group, key)) for table in tables)
        # A fact from the events, or a file that a run has not, is unknown where it is missing; a config key is unset.
        unset = [not key.startswith("(") and _has_settings(table, group) for table in tables]
        known = [value for value, is_unset in zip(values, unset, strict=True) if value is not None or is_unset]
        if any(value != known[0] for value in known[1:]):
            told = group != "deepspeed" and not key.startswith(_ONLY_NAMES)
            found.append(Difference(group, key, values, told))
    return sorted(_folded(found), key=lambda item: _GROUPS.index(item.group))


def _has_settings(table: dict[tuple[str, str], Any], group: str) -> bool:
    return any(name == group and not key.startswith("(") for name, key in table)


def _folded(found: Sequence[Difference]) -> Iterator[Difference]:
    """Modules whose dtypes differ in the same way are told as one."""
    alike: dict[Any, list[Difference]] = {}
    for item in found:
        alike.setdefault((item.values if item.key.startswith(_DTYPE) else item.key), []).append(item)
    for items in alike.values():
        more = f" and {len(items) - 1} more" if len(items) > 1 else ""
        yield replace(items[0], key=items[0].key + more)


_GROUPS = ("config", "data", "code", "versions", "hardware", "deepspeed")


def _facts(run: RunFacts) -> Iterator[tuple[tuple[str, str], Any]]:
    """(group, dotted key) to value, of everything that may be compared."""
    environment, start = run.environment, run.start
    config = redact("", run.config)
    for key, value in flat(config):
        if key in _NAMES:
            continue
        yield ("data" if key.startswith(_DATA) else "config", key), value
    for name in ("compute", "zero_stage", "accumulation", "parameters", "model"):
        resolved = name == "compute" and (run.config.get("precision") or {}).get("compute") == start.get(name)
        if start.get(name) is not None and not resolved:  # the config says so already
            yield ("config", f"({name})"), start[name]
    for key, value in flat((run.marks.get("run_start") or [{}])[0].get("regions") or {}):  # before any promotion
        yield ("config", f"{_DTYPE} {key}"), value
    for name in ("fingerprint", "vocab_size"):
        if (environment.get("data") or {}).get(name) is not None:
            yield ("data", f"({name})"), environment["data"][name]
    for key, value in flat(redact("", run.deepspeed)):
        yield ("deepspeed", key), value
    git = environment.get("git") or {}
    if git:
        yield ("code", "git commit"), str(git.get("commit"))[:12] + (" with local changes" if git.get("dirty") else "")
    for name, number in (environment.get("versions") or {}).items():
        yield ("versions", name), number
    yield from _hardware(run)


def _hardware(run: RunFacts) -> Iterator[tuple[tuple[str, str], Any]]:
    environment = run.environment
    for name in ("hostname", "platform", "memory_bytes"):
        if name in environment:
            yield ("hardware", name), environment[name]
    for section in ("cpu", "accelerator", "variables"):
        for key, value in flat(redact("", environment.get(section) or {})):
            if key not in ("MASTER_PORT", "SLURM_JOB_ID"):  # another one each time, and no difference
                yield ("hardware", f"{section}.{key}" if section != "variables" else f"${key}"), value
    yield ("hardware", "processes"), run.world_size


def flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key to value; a list is one value, a mapping never is."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from flat(value, f"{prefix}.{key}" if prefix else str(key))
    elif prefix:
        yield prefix, tree


def caveats(runs: Sequence[RunFacts], found: Sequence[Difference]) -> list[str]:
    """Why these runs are not apples to apples, one plain sentence each; none when they are."""
    by_key = {item.key: item for item in found}
    told = []
    for keys, consequence in _CONSEQUENCES:
        hit = [by_key[key] for key in keys if key in by_key]
        if hit:
            told.append(f"{consequence}: {'; '.join(f'{item.key} {side_by_side(item.values)}' for item in hit)}")
    told += _seen_caveats(runs)
    return told


_CONSEQUENCES: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        ("data.tokenizer", "(vocab_size)"),
        "another tokenizer: a loss is in nats per token, and a token is not the same amount of text",
    ),
    (
        ("(fingerprint)", "data.source", "data.path", "data.name", "data.validation_fraction"),
        "other data: neither the training nor the validation losses are of the same text",
    ),
    (("data.sequence_length",), "another sequence length: longer contexts have lower losses"),
    (("batch.global_size",), "another batch: steps are not comparable, look at equal tokens"),
    (("(parameters)", "model.name_or_path", "model.architecture"), "another model: look at equal time and cost"),
    (
        ("precision.compute", "(compute)", "precision.path", "precision.manifest", "precision.reduce"),
        "another precision: losses differ by rounding from the first step on",
    ),
    (
        ("run.steps", "schedule.name", "schedule.warmup_steps"),
        "another schedule: at equal tokens the learning rates differ",
    ),
    (("evaluate.batches",), "another share of the validation set: validation losses are not of the same text"),
    (("processes", "accelerator.device", "cpu.model", "cpu.usable_cores"), "other hardware: times are not comparable"),
)


def _seen_caveats(runs: Sequence[RunFacts]) -> Iterator[str]:
    """What only the events tell: data order, tokens seen, ends that are missing."""
    first = runs[0]
    for run in runs[1:]:
        step = first_other_order(first, run)
        if step is not None:
            yield f"another data order: {run.label} sees other sequences than {first.label} from step {step} on"
    for run in runs:
        if not run.config:
            yield f"the config of {run.label} is not known"
    tokens = [int(run.columns.tokens[-1]) if len(run.columns) else 0 for run in runs]
    if len(set(tokens)) > 1:
        seen = ", ".join(f"{run.label} {count:,}" for run, count in zip(runs, tokens, strict=True))
        yield f"other numbers of tokens seen: {seen}; equal tokens means the smallest of these"


def first_other_order(first: RunFacts, other: RunFacts) -> int | None:
    """First step that both runs have and on which they saw other sequences; None when there is none."""
    _, left, right = np.intersect1d(first.columns.step, other.columns.step, assume_unique=True, return_indices=True)
    a, b = first.columns.order[left], other.columns.order[right]
    differing = np.flatnonzero((a != b) & (a >= 0) & (b >= 0))
    return int(first.columns.step[left[differing[0]]]) if differing.size else None


def side_by_side(values: Sequence[Any]) -> str:
    """`a / b` for as many values as a line holds, equal neighbours told once."""
    return " / ".join(dict.fromkeys(shown(value) for value in values))


def shown(value: Any) -> str:
    """A value as the tables show it."""
    if value is None:
        return _MISSING
    if isinstance(value, float):
        return repr(value)
    return str(value)
