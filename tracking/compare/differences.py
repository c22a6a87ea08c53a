"""Differences between runs before they start (config, data, versions, hardware), and the caveats that follow.

Only what differs is listed. Values that look like secrets are blanked before anything compares or shows them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from config.redact import redact
from tracking.numbers import exact
from tracking.run_facts import RunFacts

# Names and display, which change no number; of these, the first two always differ.
_NAMES = ("run.name", "run.dir")
CHANGE_NO_NUMBER = (*_NAMES, "run.resume", "run.hypothesis", "tracking.", "data.cache_dir", "parity.")
SETTINGS_FIRST = ("optimizer.learning_rate", "run.seed")
"""Settings that are shown before all others."""
_DATA = ("data.", "batch.", "tokenizer")
_DTYPE = "(dtype)"


@dataclass(frozen=True)
class Difference:
    """One fact that is not the same in all runs. values: one per run, in their order; None where it was not recorded.

    group: config, data, deepspeed, code, versions or hardware. may_explain: whether it may explain other numbers or
    times, which names do not, nor the DeepSpeed JSON, which repeats the config.
    """

    group: str
    key: str
    values: tuple[Any, ...]
    may_explain: bool = True


def differences(runs: Sequence[RunFacts]) -> list[Difference]:
    """Every recorded fact that differs between `runs`, the config first; facts that no run recorded are left out."""
    tables = [dict(_facts(run)) for run in runs]
    found = []
    for group, key in dict.fromkeys(name for table in tables for name in table):
        values = tuple(table.get((group, key)) for table in tables)
        # Missing: unknown for a fact from the events or from a file that the run lacks; unset for a config key.
        unset = [not key.startswith("(") and _has_settings(table, group) for table in tables]
        known = [value for value, is_unset in zip(values, unset, strict=True) if value is not None or is_unset]
        if any(value != known[0] for value in known[1:]):
            may_explain = group != "deepspeed" and not key.startswith(CHANGE_NO_NUMBER)
            found.append(Difference(group, key, values, may_explain))
    return sorted(_merge_dtypes(found), key=lambda item: _GROUP_ORDER.index(item.group))


def _has_settings(table: dict[tuple[str, str], Any], group: str) -> bool:
    return any(name == group and not key.startswith("(") for name, key in table)


def _merge_dtypes(found: Sequence[Difference]) -> Iterator[Difference]:
    """Modules whose dtypes differ in the same way become one difference."""
    alike: dict[Any, list[Difference]] = {}
    for item in found:
        alike.setdefault((item.values if item.key.startswith(_DTYPE) else item.key), []).append(item)
    for items in alike.values():
        more = f" and {len(items) - 1} more" if len(items) > 1 else ""
        yield replace(items[0], key=items[0].key + more)


_GROUP_ORDER = ("config", "data", "code", "versions", "hardware", "deepspeed")


def _facts(run: RunFacts) -> Iterator[tuple[tuple[str, str], Any]]:
    """((group, dotted key), value) of everything that is compared."""
    environment, start = run.environment, run.start
    config = redact(run.config)
    for key, value in flat(config):
        if key in _NAMES:
            continue
        yield ("data" if key.startswith(_DATA) else "config", key), value
    for name in ("compute", "zero_stage", "accumulation", "parameters", "model"):
        resolved = name == "compute" and (run.config.get("precision") or {}).get("compute") == start.get(name)
        if start.get(name) is not None and not resolved:  # the config already has it
            yield ("config", f"({name})"), start[name]
    for key, value in flat((run.rare_events.get("run_start") or [{}])[0].get("regions") or {}):  # before any promotion
        yield ("config", f"{_DTYPE} {key}"), value
    for name in ("fingerprint", "vocab_size"):
        if (environment.get("data") or {}).get(name) is not None:
            yield ("data", f"({name})"), environment["data"][name]
    for key, value in flat(redact(run.deepspeed)):
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
        for key, value in flat(redact(environment.get(section) or {})):
            if key not in ("MASTER_PORT", "SLURM_JOB_ID"):  # new each time, not a difference
                yield ("hardware", f"{section}.{key}" if section != "variables" else f"${key}"), value
    yield ("hardware", "processes"), run.world_size


def flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key to value; a list is one value, a mapping never is."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from flat(value, f"{prefix}.{key}" if prefix else str(key))
    elif prefix:
        yield prefix, tree


@dataclass(frozen=True)
class Caveat:
    """A reason that runs are not directly comparable. voids: keys of the measures that it makes meaningless."""

    text: str
    voids: tuple[str, ...] = ()

    @property
    def head(self) -> str:
        """The reason alone, such as "different tokenizer"."""
        return self.text.partition(":")[0]


def caveats(runs: Sequence[RunFacts], found: Sequence[Difference]) -> list[Caveat]:
    """Reasons that these runs are not directly comparable; empty when they are."""
    known = []
    for keys, consequence, voids in _CONSEQUENCES:
        hit = [
            item for key in keys for item in found if item.key == key or key.endswith(".") and item.key.startswith(key)
        ]
        if hit:
            values = "; ".join(f"{item.key} {side_by_side(item.values)}" for item in hit)
            known.append(Caveat(f"{consequence}: {values}", voids))
    rates = [item for item in found if item.key in _RATES]
    if rates and not rates_are_compared(found):
        text = "different learning rate: losses compare the rates as well as what else differs"
        known.append(Caveat(f"{text}: {'; '.join(f'{item.key} {side_by_side(item.values)}' for item in rates)}"))
    scheduled = rates or any(item.key.startswith(("schedule.", "run.steps", "batch.")) for item in found)
    return known + [Caveat(text) for text in _event_caveats(runs, scheduled=bool(scheduled))]


_RATES = ("optimizer.learning_rate", "optimizer.groups")


def rates_are_compared(found: Sequence[Difference]) -> bool:
    """Whether the learning rate differs, and no other setting than the seed, so that it is what is compared."""
    settings = {item.key for item in compared_settings(found)}
    return bool(settings) and settings <= {*_RATES}


def compared_settings(found: Sequence[Difference]) -> list[Difference]:
    """Settings other than the seed that differ and may explain other numbers."""
    return [item for item in found if item.group in ("config", "data") and item.may_explain and item.key != "run.seed"]


_VALIDATION = ("validation_at_equal_tokens", "validation_at_equal_time", "best_validation")
_LOSSES = ("loss_at_equal_tokens", "loss_at_equal_time", "seconds_to_baseline", *_VALIDATION)
_TIMES = ("loss_at_equal_time", "validation_at_equal_time", "seconds_to_baseline")
_CONSEQUENCES: tuple[tuple[tuple[str, ...], str, tuple[str, ...]], ...] = (
    (
        ("data.tokenizer", "(vocab_size)"),
        "different tokenizer: a loss is in nats per token, and the tokens are different pieces of text",
        (*_LOSSES, "tokens_per_second", "cost_per_million_tokens"),
    ),
    (
        ("(fingerprint)", "data.source", "data.path", "data.name", "data.validation_fraction"),
        "different data: training and validation losses are not of the same text",
        _LOSSES,
    ),
    (("data.sequence_length",), "different sequence length: longer contexts have lower losses", _LOSSES),
    (("batch.global_size",), "different batch: steps are not comparable, compare at equal tokens", ("skipped",)),
    (
        ("(parameters)", "model.name_or_path", "model.architecture"),
        "different model: compare at equal time and cost",
        ("loss_at_equal_tokens", "validation_at_equal_tokens", "tokens_per_second", "memory_bytes"),
    ),
    (
        ("precision.compute", "(compute)", "precision.path", "precision.manifest", "precision.reduce"),
        "different precision: losses differ by rounding from the first step",
        (),
    ),
    (
        ("run.steps", "schedule."),
        "different schedule: at equal tokens the learning rates differ",
        (),
    ),
    (
        ("evaluate.batches",),
        "different share of the validation set: validation losses are not of the same text",
        _VALIDATION,
    ),
    (
        ("processes", "accelerator.device", "cpu.model", "cpu.usable_cores"),
        "different hardware: losses at equal time compare the machines",
        _TIMES,
    ),
)


def _event_caveats(runs: Sequence[RunFacts], *, scheduled: bool) -> Iterator[str]:
    """Caveats that only the events show (data order, learning rates, tokens seen), and missing configs.

    scheduled: whether a setting that the learning rates follow differs.
    """
    first = runs[0]
    for run in runs[1:]:
        step = first_difference(first, run, "order")
        if step is not None:
            yield f"different data order: {run.label} sees other sequences than {first.label} from step {step}"
        step = None if scheduled else first_difference(first, run, "lr")
        if step is not None:
            yield f"different learning rate: {run.label} has another one than {first.label} from step {step}"
    for run in runs:
        if cut := [event["step"] for event in run.rare_events.get("incident", ()) if event["verdict"] == "CUT_LR"]:
            yield f"different learning rate: that of {run.label} was cut after step {cut[0]}"
        if run.verdict.word in ("diverged", "not learning"):
            yield f"{run.label} went wrong: {run.verdict.text}"
        if not run.config:
            yield f"the config of {run.label} is unknown"
    reaching, short = split_early(runs)
    for run in short[:MOST_EARLY]:
        yield f"{run.label} {came_to(run)}, before the others: its losses are compared there"
    if len(short) > MOST_EARLY:
        yield f"{len(short) - MOST_EARLY} more runs did not get as far as the others"
    tokens = [last_tokens(run) for run in reaching]
    if len(set(tokens)) > 1:
        seen = ", ".join(f"{run.label} {count:,.0f}" for run, count in zip(reaching, tokens, strict=True))
        yield f"different numbers of tokens seen: {seen}; equal tokens means the smallest of these"


def came_to(run: RunFacts) -> str:
    """How far a run came, as the predicate of a sentence."""
    step = int(run.columns.step[-1]) if len(run.columns) else 0
    return f"{'ended at' if run.verdict.over else 'has come to'} step {step:,} ({last_tokens(run):,.0f} tokens)"


MOST_EARLY = 4
"""Runs that came less far than the others of which each has rows, and a caveat, of its own."""
_FAR = 0.9
"""Share of the tokens that two runs have seen from which a run sets how far all are compared; chosen, not measured."""


def split_early(runs: Sequence[RunFacts]) -> tuple[list[RunFacts], list[RunFacts]]:
    """The runs that say how far all are compared, and those that would cut the others short, the longest first."""
    ends = sorted((last_tokens(run) for run in runs if len(run.columns)), reverse=True)
    enough = _FAR * ends[1] if len(ends) > 1 else 0.0
    short = [run for run in runs if len(run.columns) and last_tokens(run) < enough]
    return [run for run in runs if run not in short], sorted(short, key=last_tokens, reverse=True)


def last_tokens(run: RunFacts) -> float:
    """Tokens that a run has seen."""
    return float(run.columns.tokens[-1]) if len(run.columns) else 0.0


def first_difference(first: RunFacts, other: RunFacts, column: str) -> int | None:
    """First step recorded by both runs at which a column differs, where both have it; None when there is none.

    Learning rates are compared as long as both have skipped the same number of steps: the schedule counts applied ones.
    """
    _, left, right = np.intersect1d(first.columns.step, other.columns.step, assume_unique=True, return_indices=True)
    a, b = getattr(first.columns, column)[left], getattr(other.columns, column)[right]
    differs = (a != b) & (a >= 0) & (b >= 0)  # -1 and nan stand for what was not recorded
    if column == "lr":
        skipped = [np.cumsum(~run.columns.applied)[at] for run, at in ((first, left), (other, right))]
        differs &= skipped[0] == skipped[1]
    differing = np.flatnonzero(differs)
    return int(first.columns.step[left[differing[0]]]) if differing.size else None


def side_by_side(values: Sequence[Any]) -> str:
    """`a / b / ...`, each distinct value once."""
    return " / ".join(dict.fromkeys(format_value(value) for value in values))


def format_value(value: Any) -> str:
    """A value as the tables show it; - for one that was not recorded."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return exact(value)
    return str(value)
