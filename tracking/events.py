"""The events of `events.jsonl`: their names, their required fields, and a one-line description of each event.

Every event has `event`, `step` (optimizer steps attempted so far), `time` (seconds since the epoch) and `tokens`
(global, so far). The fields below are required in addition; an event may have more. Units:

- `loss` in nats, the mean over the label tokens of the global batch; `perplexity` is its exponential;
- `grad_norm` and `momentum_norm` in gradient units: global, unscaled, before clipping;
- `lr`, `loss_scale`, `from`, `to` and `clip_coefficient` are plain factors;
- `seconds`, `step_seconds`, `stall_seconds` in seconds; `memory_bytes` and `bytes` in bytes.

Non-finite numbers are written as the strings "inf", "-inf" and "nan". On reading, these strings become floats again,
except in the TEXT_FIELDS, where "nan" is text (`nonfinite.kind`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from statistics import median
from typing import Any

from config.printable import first_of, line
from tracking.figures import HEADLINES, followed
from tracking.numbers import loss, mib, number, percent, perplexity, scale

Event = dict[str, Any]

COMMON_FIELDS = ("event", "step", "time", "tokens")

REQUIRED_FIELDS: dict[str, tuple[str, ...]] = {
    "run_start": ("world_size", "config_sha256", "parameters", "compute", "zero_stage", "resumed_from"),
    "step": (
        *("loss", "grad_norm", "clip_coefficient", "lr", "loss_scale", "applied", "skipped_total"),
        *("step_seconds", "tokens_per_second", "memory_bytes", "sample_ids_sha256"),
    ),
    "scale": ("from", "to", "reason", "consecutive_overflows", "lr", "momentum_norm"),
    "nonfinite": ("rank", "module", "tensor", "kind", "count"),
    "incident": ("verdict", "reason", "modules", "replay"),
    "eval": ("loss", "perplexity"),
    "checkpoint": ("path", "seconds", "stall_seconds", "bytes", "verified"),
    "run_end": ("status", "exit_code"),
    # Share of the forward pass's matmul FLOPs by observed compute dtype. `inner`, in newer versions: observed dtypes of
    # softmaxes, norm statistics and the like (precision/inner_dtypes.py: report).
    "precision": ("flop_share",),
    # Statistics of each module's tensors, by module or parameter name.
    "telemetry": ("gradients", "activation_max", "probe", "drift", "update_ratio", "gradient_exponents"),
    # A figure left its healthy range before the loss shows a problem; `reason` explains it and says what to do.
    "warning": ("signal", "module", "value", "bound", "modules", "reason"),
    # A wrong value, found because copies differ or because an update does not match its FP64 recomputation.
    "corruption": ("found_by", "ranks", "hosts", "module", "tensor", "bits", "repaired", "text"),
    # A step was rerun: outcome is transient, persistent or numeric.
    "reexecution": ("outcome", "ranks", "hosts", "why", "suspicion", "seconds"),
    # A step was compared with plain torch: per check, how much was compared, and the worst error with its bound.
    "self_check": ("checks", "skipped"),
    # A fault requested by the config was injected, for tests and drills.
    "fault": ("kind", "rank", "module"),
    # Free text. The record itself writes one when a sink failed or events were lost.
    "note": ("text",),
}

TEXT_FIELDS = frozenset(
    {
        *("event", "config_sha256", "sample_ids_sha256", "compute", "resumed_from", "reason", "module", "modules"),
        *("tensor", "kind", "verdict", "replay", "path", "status", "text", "name", "model", "hypothesis", "attention"),
        *("loss_unit", "verdict_text", "next_command", "standstill", "found_by", "outcome", "why", "suspicion"),
        *("hosts", "signal"),
    }
)
_TEXTS = TEXT_FIELDS - {"modules", "hosts"}
_NUMBERS = frozenset(
    {
        *("tokens", "loss", "grad_norm", "clip_coefficient", "lr", "loss_scale", "skipped_total", "step_seconds"),
        *("tokens_per_second", "memory_bytes", "data_seconds", "from", "to", "consecutive_overflows", "perplexity"),
        *("seconds", "stall_seconds", "bytes", "world_size", "parameters", "zero_stage", "exit_code", "count"),
        *("trained_parameters", "active_parameters", "active_trained_parameters"),
        *("slice", "slices", "tensor_slice", "tensor_slices"),
    }
)
_LARGEST = 1 << 53  # for a step; as a time, a few hundred million years


def check(event: str, fields: dict[str, Any]) -> None:
    """Raise ValueError if `event` is unknown, lacks a required field or sets `time`.

    This is a bug in the caller, so it is raised immediately rather than treated as a failed sink.
    """
    if event not in REQUIRED_FIELDS:
        near = get_close_matches(event, REQUIRED_FIELDS, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"unknown event {event!r}{hint}; the events are {', '.join(REQUIRED_FIELDS)}")
    missing = [name for name in REQUIRED_FIELDS[event] if name not in fields]
    if missing:
        raise ValueError(f"event {event!r} lacks {', '.join(missing)}")
    if "time" in fields:
        raise ValueError(f"event {event!r} must not set `time`; the record's clock does")


def fault_in(event: Event) -> str | None:
    """Why `event`, read from a file, is invalid, such as "has no loss"; None if it is valid."""
    kind = event.get("event")
    if not isinstance(kind, str):
        return "has no name"
    for name in ("step", "time"):
        if not _is_number(event.get(name)) or not 0 <= event[name] < _LARGEST:
            return f"({kind}) has no {name} that can be used"
    for name in REQUIRED_FIELDS.get(kind, ()):
        if name not in event:
            return f"({kind}) has no {name}"
    for name, value in event.items():
        if value is not None and (
            (name in _NUMBERS and not _is_number(value)) or (name in _TEXTS and not isinstance(value, str))
        ):
            return f"({kind}) has a {name} of the wrong type"
    metrics = event.get("metrics") or {}
    if not isinstance(metrics, dict) or not all(value is None or _is_number(value) for value in metrics.values()):
        return f"({kind}) has metrics of the wrong type"
    return None


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def computes_in(start: Event) -> list[str]:
    """Dtypes in which a run computes, from its `run_start`: those of its manifest's regions, or the single one."""
    return sorted(set((start.get("regions") or {}).values())) or [str(start.get("compute") or "")]


def restored_step(incident: Event) -> int:
    """Step of the checkpoint to which an incident rolled back; that of the incident if it does not name one."""
    number = str(incident.get("rolled_back_to")).rpartition("step-")[2]
    return int(number) if number.isdecimal() else int(incident["step"])


def describe_event(event: Event) -> str:
    """One event in one line of printable text, without its step."""
    return line(_describe(event))


def _describe(event: Event) -> str:
    match event["event"]:
        case "scale":
            old, new, in_a_row = event["from"], event["to"], event.get("consecutive_overflows")
            # hysteresis keeps the scale unchanged for now
            change = f"stays {scale(new)}" if old == new else f"{scale(old)} -> {scale(new)}"
            times = f", {in_a_row} in a row" if in_a_row else ""
            return f"loss scale {change} ({event['reason']}{times})"
        case "nonfinite":
            module = "" if event["tensor"] == "loss" else f" of {event['module']}"
            share = f" (slice {event['slice']} of {event['slices']} of its sequences)" if event.get("slices") else ""
            if event.get("tensor_slices"):
                share = f" (slice {event['tensor_slice']} of {event['tensor_slices']} of its matrices)"
            return f"{event['count']} {event['kind']} in the {event['tensor']}{module} on rank {event['rank']}{share}"
        case "corruption":
            hosts = f" ({', '.join(event['hosts'])})" if event["hosts"] else ""
            return f"silent corruption: {event['text']}{hosts}{'; repaired' if event['repaired'] else ''}"
        case "reexecution":
            return _reexecution(event)
        case "incident":
            return f"{event['verdict']}: {event['reason']}"
        case "warning":
            return f"{'self-check' if event['signal'] == 'self_check' else 'early warning'}: {event['reason']}"
        case "fault":
            return f"injected fault {event['kind']} on rank {event['rank']}, {event['module']}"
        case "eval":
            exponential = f", perplexity {perplexity(event['perplexity'])}" if event.get("perplexity") else ""
            what, main = followed(event)
            further = [(name, value) for name, value in event.get("metrics", {}).items() if name not in HEADLINES]
            metrics = "".join(f", {name} {number(value)}" for name, value in further)
            parts = ", ".join(f"{name} {number(value)}" for name, value in event.get("by_source", {}).items())
            return f"validation {what} {loss(main)}{exponential}{metrics}{parts and f'; loss of {parts}'}"
        case "checkpoint":
            seconds = f" in {event['seconds']:.1f} s" if event.get("seconds") is not None else ""
            size = f", {mib(event['bytes'])}" if event.get("bytes") else ""
            return f"checkpoint {event['path']}{seconds}{size}"
        case "run_start":
            origin = f"resumed from {event['resumed_from']}" if event.get("resumed_from") else "started"
            return f"{origin}, {event['world_size']} process{'' if event['world_size'] == 1 else 'es'}"
        case "run_end":
            code = f", exit code {event['exit_code']}" if event.get("exit_code") is not None else ""
            reason = f": {event['reason']}" if event.get("reason") else ""
            return f"{event['status']}{code}{reason}"
        case "precision":
            shares = ", ".join(f"{dtype} {percent(share)}" for dtype, share in event["flop_share"].items())
            return "; ".join(filter(None, (f"computes in {shares}", *lower_than_promised(event))))
    return str({key: value for key, value in event.items() if key not in COMMON_FIELDS})


_NAMED = 3
"""Maximum number of modules named in a line about observed dtypes."""


def lower_than_promised(event: Event) -> list[str]:
    """A line per operation that a `precision` event shows in a lower dtype than promised; empty in a sound run."""
    return [
        f"{entry['what']} in {entry['computed']} where {entry['promised']} is promised: "
        f"{first_of(entry['modules'], _NAMED)}"
        for entry in _inner(event).get("lower", [])
    ]


def observed_dtypes(event: Event) -> dict[str, dict[str, int]]:
    """Operation seen by a `precision` event to dtype to number of modules."""
    return _inner(event).get("computed", {})


def unobserved(event: Event) -> list[tuple[str, str]]:
    """(operation, why a `precision` event could not observe it and in which modules) pairs."""
    found = []
    for entry in _inner(event).get("unobserved", []):
        names = f" ({first_of(entry['modules'], _NAMED)})" if entry["modules"] else ""
        found.append((entry["what"], f"not observable{names}: {entry['why']}"))
    return found


def _inner(event: Event) -> dict[str, Any]:
    """The report of precision/inner_dtypes.py; empty for older events, which lack it."""
    return event.get("inner") or {}


def _reexecution(event: Event) -> str:
    ranks, hosts = event["ranks"], ", ".join(event["hosts"])
    words = {
        "transient": "a transient fault of the machine",
        "persistent": "a persistent fault of the machine",
        "numeric": "a numeric event, not a fault of the machine",
    }
    who = f" on rank {' or '.join(map(str, ranks))} ({hosts})" if ranks else ""
    if event["outcome"] != "numeric" and not ranks:
        who = " on a rank that cannot be named"
    where = event.get("modules") or []
    further = f"; gradients that changed: {', '.join(where)}" if where and event["outcome"] != "numeric" else ""
    drain = f"; drain {hosts or 'the hosts one by one'}" if event.get("drain") else ""
    return f"run again: {words.get(event['outcome'], event['outcome'])}{who}: {event['why']}{further}{drain}"


@dataclass(frozen=True)
class Spread:
    """Summary of one measure over all ranks."""

    least: float
    median: float
    most: float
    rank: int
    """The rank with the largest value."""
    all: tuple[float, ...]
    """Values by rank; empty if only the other fields were recorded."""


def spread(event: Event, measure: str) -> Spread | None:
    """`measure` (memory_bytes or work_seconds) of a step event's `by_rank` field; None if it was not recorded.

    Up to 16 ranks are recorded as a list; larger runs record least, median, most and the rank with the most.
    """
    value: Any = (event.get("by_rank") or {}).get(measure)
    if isinstance(value, Mapping):
        return Spread(value["least"], value["median"], value["most"], value["rank"], ())
    if isinstance(value, Sequence) and value:
        most = max(value)
        return Spread(min(value), median(value), most, value.index(most), tuple(value))
    return None
