"""Plausible events for the tests of tracking/."""

import itertools
import random
from collections.abc import Callable
from typing import Any

TOKENS_PER_STEP = 4096
# What `scale` and `telemetry` events have besides the fields that a test is about.
SCALE: dict[str, Any] = {"consecutive_overflows": 1, "lr": 1e-4, "momentum_norm": None}
TELEMETRY: dict[str, Any] = dict.fromkeys(("gradients", "activation_max", "probe", "gradient_exponents"), {})
TELEMETRY["update_ratio"] = None


def step_fields(step: int, *, loss: float | None = None, **changes: Any) -> dict[str, Any]:
    """The fields of a plausible `step` event."""
    noise = random.Random(step)
    norm = 0.4 + 2.0 / step + noise.random() * 0.3
    fields = {
        "loss": 3.0 + 5.0 / (1 + step / 10) + noise.gauss(0, 0.05) if loss is None else loss,
        "grad_norm": norm,
        "clip_coefficient": min(1.0, 1.0 / norm),
        "lr": 3e-4 * min(1.0, step / 10),
        "loss_scale": 65536.0,
        "applied": True,
        "skipped_total": 0,
        "step_seconds": 0.5 + noise.random() * 0.1,
        "tokens_per_second": TOKENS_PER_STEP / 0.55,
        "memory_bytes": 3 * 2**30,
        "sample_ids_sha256": f"{step:064x}",
    }
    return fields | changes


def start_fields(**changes: Any) -> dict[str, Any]:
    fields = {"world_size": 2, "config_sha256": "ab" * 32, "parameters": 12_345_678, "compute": "bf16", "zero_stage": 2}
    return fields | {"resumed_from": None} | changes


def ticking_clock(start: float = 1.7e9, seconds: float = 0.5) -> Callable[[], float]:
    """A clock that moves on by `seconds` each time it is read."""
    ticks = itertools.count()
    return lambda: start + seconds * next(ticks)
