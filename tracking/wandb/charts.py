"""Rows for wandb's charts: the numbers of each event on an axis that never goes back.

A run that was rolled back, or killed and resumed, attempts some steps again, so `step` goes back. The axis of the
charts is therefore `attempt`, the number of steps attempted so far over all sessions. Every row also has `step`,
`applied` and `tokens`. wandb's own minima (`define_metric(summary=...)`) start over in every session (measured with
0.31), so the lowest validation loss is tracked here.
"""

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np

from tracking.events import COMMON_FIELDS, Event

AXIS = "attempt"

FIRST = {
    "train/loss": "loss",
    "eval/loss": "validation loss",
    "train/reward/mean": "reward",
    "eval/reward/mean": "validation reward",
    "train/grad_norm": "gradient norm",
    "train/lr": "learning rate",
    "train/loss_scale": "loss scale",
}
"""Row to its name in the section that a tracker shows first."""

_OWN_CHARTS = frozenset(
    {"scale", "eval", "checkpoint", "incident", "nonfinite", "fault", "warning", "corruption", "reexecution"}
)
_STEP_FIELDS = (
    *("loss", "grad_norm", "clip_coefficient", "lr", "loss_scale", "skipped_total"),
    *("step_seconds", "tokens_per_second", "memory_bytes"),
)
_BINS = 64


class Rows:
    """Turns events, in file order, into chart rows. Events of earlier sessions must be passed too, for the counts."""

    def __init__(self) -> None:
        self.attempts = 0
        """Number of steps attempted so far."""
        self._applied: int | None = None  # unknown until the first step
        self._totals: Counter[str] = Counter()
        self._lowest = math.inf

    def row(self, event: Event) -> dict[str, Any]:
        """Count `event`; returns its chart row."""
        row = chart_values(event)
        if event["event"] == "step":
            self.attempts += 1
            self._applied = event["step"] - event["skipped_total"]
        elif event["event"] == "eval":
            self._lowest = min(self._lowest, event["loss"])  # unchanged by a nan loss
            if self._lowest < math.inf:
                row["eval/lowest_loss"] = self._lowest
        for name in _counted(event):
            self._totals[name] += 1
            row[name] = self._totals[name]
        if self._applied is not None:
            row["applied"] = self._applied
        return row | {AXIS: self.attempts, "_timestamp": event["time"]}


def _counted(event: Event) -> tuple[str, ...]:
    """Names of the running totals that `event` increments."""
    if event["event"] == "incident":
        return ("incident/total", f"incident/total_{event['verdict'].lower()}")
    return (f"{event['event']}/total",) if event["event"] in ("nonfinite", "scale") else ()


def chart_values(event: Event) -> dict[str, Any]:
    """Values that one event adds to the charts: `train/...` for a step, else its own group such as `scale/...`.

    Non-finite values are kept (wandb displays them); unrecorded ones (None) are left out.
    """
    kind = event["event"]
    if kind == "step":
        values = {f"train/{name}": event[name] for name in _STEP_FIELDS} | {"train/applied": int(event["applied"])}
        values |= {f"train/{name}": value for name, value in event.get("metrics", {}).items()}
        for name in ("loss_by_source", "labels_by_source"):
            values |= {f"train/{name}/{source}": value for source, value in event.get(name, {}).items()}
    elif kind in _OWN_CHARTS:
        values = {f"{kind}/{name}": value for name, value in event.items() if name not in COMMON_FIELDS}
        values |= {f"{kind}/{name}": value for name, value in event.get("metrics", {}).items()}
        values |= {f"{kind}/loss_by_source/{name}": value for name, value in event.get("by_source", {}).items()}
    elif kind == "telemetry":
        values = dict(_flatten(event))
    elif kind == "precision":
        values = {f"precision/flop_share/{dtype}": share for dtype, share in event["flop_share"].items()}
    else:
        values = {f"session/{kind}": 1, "note/failed": event.get("failed")}
    kept = {name: value for name, value in values.items() if isinstance(value, int | float | str)}
    return kept | {"step": event["step"], "tokens": event["tokens"]}


def histograms(event: Event) -> dict[str, tuple[Any, Any]]:
    """Histograms of a telemetry event, as (counts, edges): gradients by power of two, and each measure over modules.

    wandb draws histograms over steps as heat maps, so that a few panels suffice for a model of any size. The run's own
    heat maps show individual modules.
    """
    if event["event"] != "telemetry":
        return {}
    found = {}
    for name, values in _by_module(event).items():
        known = [value for value in values if value > 0 and math.isfinite(value)]
        if known:
            found[f"telemetry/modules/log10_{name}"] = np.histogram(np.log10(known), _BINS)
    exponents = event.get("gradient_exponents")
    if exponents and exponents["counts"]:
        counts = np.array(exponents["counts"])
        found["telemetry/log2_gradient"] = (counts, exponents["lowest"] + np.arange(len(counts) + 1))
    return found


def _flatten(event: Event) -> Iterator[tuple[str, Any]]:
    """Scalars that summarise a telemetry event over all modules, such as largest magnitudes and smallest cosine."""
    yield "telemetry/update_ratio", event["update_ratio"]
    for name, value in (event["drift"] or {}).items():
        yield f"telemetry/drift/{name}", value
    for name, values in _by_module(event).items():
        if values:
            yield f"telemetry/largest_{name}", float(np.max(values))  # nan, if one is; max() depends on their order
    cosines = [agreement["cosine"] for agreement in event["probe"].values()]
    if cosines:
        yield "telemetry/smallest_probe_cosine", float(np.min(cosines))


def _by_module(event: Event) -> dict[str, list[float]]:
    """Measure to its values over all modules."""
    gradients = event["gradients"].values()
    return {
        "activation": list(event["activation_max"].values()),
        "gradient_rms": [measures["rms"] for measures in gradients if "rms" in measures],
        "gradient_below_normal": [measures["below_normal"] for measures in gradients if "below_normal" in measures],
        "update_ratio": list(event.get("update_ratios", {}).values()),
    }
