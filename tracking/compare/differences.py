"""Differences in how runs were set up: config, data, versions, hardware.

Values that look like secrets are blanked before they are compared or shown.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from config.redact import redact
from tracking.figures import HEADLINES
from tracking.numbers import number
from tracking.run_facts import RunFacts

# Keys that do not affect numerical results; the first two always differ.
_NAMES = ("run.name", "run.dir")
CHANGE_NO_NUMBER = (*_NAMES, "run.resume", "run.hypothesis", "tracking.", "data.cache_dir", "parity.")
SETTINGS_FIRST = ("optimizer.learning_rate", "run.seed")
"""Settings listed first."""
_DATA = ("data.", "batch.", "tokenizer")
_DTYPE = "(dtype)"


@dataclass(frozen=True)
class Difference:
    """One fact that is not the same in all runs. values: one per run, in order; None if not recorded.

    group: config, data, deepspeed, code, versions or hardware. may_explain: whether it may explain different results or
    speeds; False for names, and for the DeepSpeed JSON, which repeats the config.
    """

    group: str
    key: str
    values: tuple[Any, ...]
    may_explain: bool = True

    def __str__(self) -> str:
        return f"{self.key} {side_by_side(self.values)}"


def differences(runs: Sequence[RunFacts]) -> list[Difference]:
    """Every recorded fact that differs between `runs`, config first."""
    tables = [dict(_facts(run)) for run in runs]
    recorded = [{group for group, key in table if not key.startswith("(")} for table in tables]
    found = []
    for group, key in dict.fromkeys(name for table in tables for name in table):
        values = tuple(table.get((group, key)) for table in tables)
        # A missing fact is unknown if it comes from the events or an absent file; a missing config key is unset.
        unset = [not key.startswith("(") and group in groups for groups in recorded]
        known = [value for value, is_unset in zip(values, unset, strict=True) if value is not None or is_unset]
        if any(value != known[0] for value in known[1:]):
            may_explain = group != "deepspeed" and not key.startswith(CHANGE_NO_NUMBER)
            found.append(Difference(group, key, values, may_explain))
    return sorted(_merge_dtypes(found), key=lambda item: _GROUP_ORDER.index(item.group))


def _merge_dtypes(found: Sequence[Difference]) -> Iterator[Difference]:
    """Merge modules whose dtypes differ in the same way into one difference."""
    alike: dict[Any, list[Difference]] = {}
    for item in found:
        alike.setdefault((item.values if item.key.startswith(_DTYPE) else item.key), []).append(item)
    for items in alike.values():
        more = f" and {len(items) - 1} more" if len(items) > 1 else ""
        yield replace(items[0], key=items[0].key + more)


_GROUP_ORDER = ("config", "data", "code", "versions", "hardware", "deepspeed")


def _facts(run: RunFacts) -> Iterator[tuple[tuple[str, str], Any]]:
    """((group, dotted key), value) pairs of everything that is compared."""
    environment, start = run.environment, run.start
    config = redact(run.config)
    for key, value in flat(config):
        if key in _NAMES:
            continue
        yield ("data" if key.startswith(_DATA) else "config", key), value
    for name in ("compute", "zero_stage", "accumulation", "parameters", "model", "loss_unit"):
        resolved = name == "compute" and (run.config.get("precision") or {}).get("compute") == start.get(name)
        if start.get(name) is not None and not resolved:  # already listed as precision.compute
            yield ("config", f"({name})"), start[name]
    if len(run.columns):
        yield ("config", "(headline)"), HEADLINES.get(run.headline, "loss")
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
    for name, version in (environment.get("versions") or {}).items():
        yield ("versions", name), version
    yield from _hardware(run)


def _hardware(run: RunFacts) -> Iterator[tuple[tuple[str, str], Any]]:
    environment = run.environment
    for name in ("hostname", "platform", "memory_bytes"):
        if name in environment:
            yield ("hardware", name), environment[name]
    for section in ("cpu", "accelerator", "variables"):
        for key, value in flat(redact(environment.get(section) or {})):
            if key not in ("MASTER_PORT", "SLURM_JOB_ID"):  # different for every job
                yield ("hardware", f"{section}.{key}" if section != "variables" else f"${key}"), value
    yield ("hardware", "processes"), run.world_size


def flat(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Flatten a tree into (dotted key, value) pairs; lists are values, mappings are descended into."""
    if isinstance(tree, dict):
        for key, value in tree.items():
            yield from flat(value, f"{prefix}.{key}" if prefix else str(key))
    elif prefix:
        yield prefix, tree


_MOST_VALUES = 6


def side_by_side(values: Sequence[Any]) -> str:
    """Each distinct value once, as `a / b / ...`; many numbers as their smallest and largest."""
    found = list(dict.fromkeys(format_value(value) for value in values))
    if len(found) <= _MOST_VALUES:
        return " / ".join(found)
    if all(isinstance(value, int | float) for value in values):
        return f"{format_value(min(values))} to {format_value(max(values))} ({len(found)} values)"
    return f"{' / '.join(found[:_MOST_VALUES])} / ... ({len(found)} values)"


def format_value(value: Any) -> str:
    """A value as shown in tables, numbers with all their digits; `-` if not recorded."""
    if value is None:
        return "-"
    if isinstance(value, float):
        mantissa, _, exponent = repr(value).partition("e")
        digits = mantissa.replace(".", "").strip("-0")
        tiny = 0 < abs(value) < 1e-3
        return number(value, len(digits) or 1) if exponent or tiny else mantissa.removesuffix(".0")
    return str(value)
