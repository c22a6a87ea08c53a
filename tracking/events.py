"""The vocabulary of `events.jsonl`: which events exist, and which fields each one must carry.

Every event has `event`, `step` (optimizer steps attempted so far), `time` (seconds since the epoch) and `tokens`
(global, so far). The further fields below are required; an event may carry more. Units:

- `loss` in nats, the mean over the label tokens of the global batch; `perplexity` is its exponential;
- `grad_norm` and `momentum_norm` in gradient units: global, unscaled, before clipping;
- `lr` per applied step; `loss_scale`, `from`, `to` and `clip_coefficient` are plain factors;
- `seconds`, `step_seconds`, `stall_seconds` in seconds; `memory_bytes` and `bytes` in bytes.

A number that is not finite is written as the string "inf", "-inf" or "nan". On reading, those strings become floats
again except in the TEXT_FIELDS, where "nan" is a word (`nonfinite.kind`).
"""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

Event = dict[str, Any]

COMMON_FIELDS = ("event", "step", "time", "tokens")

REQUIRED_FIELDS: dict[str, tuple[str, ...]] = {
    "run_start": ("world_size", "config_sha256", "parameters", "compute", "zero_stage", "resumed_from"),
    "step": (
        "loss",
        "grad_norm",
        "clip_coefficient",
        "lr",
        "loss_scale",
        "applied",
        "skipped_total",
        "step_seconds",
        "tokens_per_second",
        "memory_bytes",
        "sample_ids_sha256",
    ),
    "scale": ("from", "to", "reason", "consecutive_overflows", "lr", "momentum_norm"),
    "nonfinite": ("rank", "module", "tensor", "kind", "count"),
    "incident": ("verdict", "reason", "modules", "replay"),
    "eval": ("loss", "perplexity"),
    "checkpoint": ("path", "seconds", "stall_seconds", "bytes", "verified"),
    "run_end": ("status", "exit_code"),
    # In which dtypes the forward pass's matmuls really computed: their share of its matmul FLOPs.
    "precision": ("flop_share",),
    # What the numbers of each module looked like, by module or parameter name.
    "telemetry": ("gradients", "activation_max", "probe", "drift", "update_ratio", "gradient_exponents"),
    # A fault that the config asked for struck: for tests and game days.
    "fault": ("kind", "rank", "module"),
    # Written by the record itself: a sink was lost, or events were.
    "note": ("text",),
}

TEXT_FIELDS = frozenset(
    {
        "event",
        "config_sha256",
        "sample_ids_sha256",
        "compute",
        "resumed_from",
        "reason",
        "module",
        "modules",
        "tensor",
        "kind",
        "verdict",
        "replay",
        "path",
        "status",
        "text",
        "name",
        "model",
        "hypothesis",
    }
)


def check(event: str, fields: dict[str, Any]) -> None:
    """Raise ValueError when `event` is unknown, lacks a required field or overwrites a common one.

    Such a mistake is in the calling code, so it is loud at once and not a sink's trouble.
    """
    if event not in REQUIRED_FIELDS:
        near = get_close_matches(event, REQUIRED_FIELDS, n=1)
        hint = f" (did you mean {near[0]!r}?)" if near else ""
        raise ValueError(f"unknown event {event!r}{hint}; the events are {', '.join(REQUIRED_FIELDS)}")
    missing = [name for name in REQUIRED_FIELDS[event] if name not in fields]
    if missing:
        raise ValueError(f"event {event!r} lacks {', '.join(missing)}")
    if "time" in fields:
        raise ValueError(f"event {event!r} brings its own time; the record's clock sets it")
