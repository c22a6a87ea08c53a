"""The Prometheus metrics of a run: their units, their meaning, and how each event updates them.

Names follow Prometheus conventions. Every metric has the label `run`; `rank` only if the value belongs to one rank.
Counters start at zero in each process, which `rate` and `increase` handle. Gauges carry the run's own totals.
"""

import math
from collections.abc import Mapping
from dataclasses import fields
from itertools import product
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary
from prometheus_client.metrics import MetricWrapperBase

from config.schema import WarningsSection
from tracking.events import Event, spread
from tracking.verdict import WORDS

STEP_BUCKETS_S = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0, 300.0)
VERDICTS = ("SKIP", "CUT_LR", "CORRECT", "PROMOTE", "ROLLBACK", "ABORT")
_RANKS_SHOWN = 16  # maximum number of ranks with their own series; a step event lists no more

# Name without the prefix to (type, help, labels besides `run`).
METRICS: dict[str, tuple[type[MetricWrapperBase], str, tuple[str, ...]]] = {
    "info": (
        Gauge,
        "What runs, in its labels; always 1. scheduler_job is the Slurm job or Kubernetes pod.",
        ("host", "scheduler_job", "model", "compute", "zero_stage", "world_size"),
    ),
    "session_start_timestamp_seconds": (Gauge, "When this process started to train, in seconds since the epoch.", ()),
    "planned_steps": (Gauge, "Optimizer steps the run is to attempt in all.", ()),
    "step": (Gauge, "Optimizer steps attempted so far, over all sessions; goes back on a rollback.", ()),
    "last_step_timestamp_seconds": (Gauge, "When the newest step ended; the start of training before the first.", ()),
    "last_event_timestamp_seconds": (Gauge, "When anything was last recorded, in seconds since the epoch.", ()),
    "loss_nats": (Gauge, "Training loss of the newest step, in nats per label token; NaN or Inf if it is.", ()),
    "gradient_norm": (Gauge, "Global norm of the newest gradient, unscaled, before clipping.", ()),
    "clip_ratio": (Gauge, "Factor that clipping applied to the newest gradient; 1 where it did not clip.", ()),
    "learning_rate": (Gauge, "Learning rate of the newest step.", ()),
    "loss_scale": (Gauge, "Loss scale of the newest step; 1 where nothing is scaled.", ()),
    "reward": (Gauge, "Mean reward of the newest step's answers, in runs that learn from rewards.", ()),
    "reward_spread": (Gauge, "Standard deviation of the same rewards.", ()),
    "gap_k3_nats": (Gauge, "Distance of the sampler's policy from the trainer's (k3), in nats per token.", ()),
    "gap_of_bound": (Gauge, "The same in units of its bound; above 1 the step is refused.", ()),
    "consecutive_skipped_steps": (Gauge, "Skipped steps in a row, up to the newest.", ()),
    "tokens_per_second": (Gauge, "Tokens of the newest step over its duration, all ranks together.", ()),
    "memory_peak_bytes": (Gauge, "Peak memory of the rank that needs most; resident memory on a CPU.", ()),
    "steps_total": (Counter, "Optimizer steps attempted, by outcome.", ("outcome",)),
    "tokens_total": (Counter, "Tokens trained on, those of skipped steps and repeated ones included.", ()),
    "step_seconds": (Histogram, "Duration of a step, data wait included.", ()),
    "data_wait_seconds_total": (Counter, "Time that rank 0 waited for its batches.", ()),
    "scale_changes_total": (Counter, "Changes of the loss scale or of its hysteresis.", ("reason",)),
    "incidents_total": (Counter, "Steps the guard refused, by its verdict.", ("verdict",)),
    "nonfinite_total": (Counter, "Tensors with inf or nan, in steps that were attributed.", ("tensor", "kind")),
    "nonfinite_by_rank_total": (Counter, "The same tensors, by the rank they were found on.", ("rank",)),
    "early_warnings_total": (Counter, "Figures that left their healthy range, by the bound's name.", ("signal",)),
    "injected_faults_total": (Counter, "Faults injected by the config.", ()),
    "notes_total": (Counter, "Notes, such as a sink that failed.", ()),
    "validation_loss_nats": (Gauge, "Newest validation loss, in nats per label token, or minus the reward.", ()),
    "checkpoints_total": (Counter, "Checkpoints published.", ("verified",)),
    "checkpoint_failures_total": (Counter, "Checkpoints that could not be saved.", ()),
    "checkpoint_seconds": (Summary, "Time from a save's start to its published checkpoint.", ()),
    "checkpoint_stall_seconds_total": (Counter, "Time that saves blocked training.", ()),
    "checkpoint_bytes": (Gauge, "Size of the newest checkpoint.", ()),
    "checkpoint_step": (Gauge, "Step of the newest checkpoint.", ()),
    "checkpoint_timestamp_seconds": (Gauge, "When the newest checkpoint was recorded; the start before the first.", ()),
    "matmul_flop_ratio": (Gauge, "Share of the forward pass's matmul FLOPs computed in a dtype.", ("dtype",)),
    "rank_memory_peak_bytes": (Gauge, f"Peak memory of one rank, in runs of up to {_RANKS_SHOWN}.", ("rank",)),
    "rank_work_seconds": (Gauge, f"Own work of one rank in the newest step, of up to {_RANKS_SHOWN}.", ("rank",)),
    "work_seconds": (Gauge, "Own work of the ranks in the newest step: least, median, most.", ("statistic",)),
    "slowest_rank": (Gauge, "The rank with the most own work in the newest step.", ()),
    "end_timestamp_seconds": (Gauge, "When training ended, by status.", ("status",)),
    "verdict": (Gauge, "1 for the verdict on the run, else 0; it is running until its end was judged.", ("word",)),
    "exit_code": (Gauge, "Exit code: 0 done, 3 numerics, 71 broken machine, 74 checkpoints, 75 preempted.", ()),
}

# Create counters at zero from the start: `increase` misses the first count of a series that appears with it.
_KNOWN_LABELS: dict[str, list[tuple[str, ...]]] = {
    "steps_total": [("applied",), ("skipped",)],
    "scale_changes_total": [(reason,) for reason in ("overflow", "hysteresis", "growth")],
    "incidents_total": [(verdict,) for verdict in VERDICTS],
    "early_warnings_total": [(bound.name,) for bound in fields(WarningsSection)],
    "nonfinite_total": [*product(("activation", "gradient", "parameter", "loss"), ("inf", "nan"))],
    "checkpoints_total": [("true",), ("false",)],
}

_GAUGES = {  # event to gauges, each with the field of the event or of its metrics that sets it, if recorded
    "run_start": {
        "step": "step",
        "session_start_timestamp_seconds": "time",
        "last_step_timestamp_seconds": "time",
        "checkpoint_timestamp_seconds": "time",
    },
    "step": {
        "step": "step",
        "last_step_timestamp_seconds": "time",
        "loss_nats": "loss",
        "gradient_norm": "grad_norm",
        "clip_ratio": "clip_coefficient",
        "learning_rate": "lr",
        "loss_scale": "loss_scale",
        "tokens_per_second": "tokens_per_second",
        "memory_peak_bytes": "memory_bytes",
        "reward": "reward/mean",
        "reward_spread": "reward/spread",
        "gap_k3_nats": "gap/k3",
        "gap_of_bound": "gap/of_bound",
    },
    "eval": {"validation_loss_nats": "loss"},
    "checkpoint": {"checkpoint_bytes": "bytes", "checkpoint_step": "step", "checkpoint_timestamp_seconds": "time"},
    "run_end": {"exit_code": "exit_code"},
}

_COUNTERS = {  # event to counters, each with the event fields used as labels
    "scale": (("scale_changes_total", "reason"),),
    "incident": (("incidents_total", "verdict"),),
    "nonfinite": (("nonfinite_total", "tensor", "kind"), ("nonfinite_by_rank_total", "rank")),
    "fault": (("injected_faults_total",),),
    "warning": (("early_warnings_total", "signal"),),
    "note": (("notes_total",),),
}


class Metrics:
    """The metrics of one run, in their own registry. Only one thread may call `update`."""

    def __init__(self, run: str, *, planned_steps: int, facts: Mapping[str, str]) -> None:
        """run: the label on every metric. facts: host and scheduler_job, as labels of `mantissa_info`."""
        self.registry = CollectorRegistry(auto_describe=False)
        self._run, self._facts, self._planned = run, facts, planned_steps
        self._families: dict[str, Any] = {}
        self._children: dict[tuple[str, ...], Any] = {}
        for name, (kind, text, labels) in METRICS.items():
            options: dict[str, Any] = {"buckets": STEP_BUCKETS_S} if kind is Histogram else {}
            self._families[name] = kind(f"mantissa_{name}", text, ("run", *labels), registry=self.registry, **options)
            for known in _KNOWN_LABELS.get(name, [] if labels or kind is Gauge else [()]):
                self._of(name, *known)
        self._consecutive = 0

    def _of(self, name: str, *labels: str) -> Any:
        """The series of a metric with these values of its further labels, cached."""
        key = (name, *labels)
        if key not in self._children:
            self._children[key] = self._families[name].labels(self._run, *labels)
        return self._children[key]

    def update(self, event: Event) -> None:
        self._of("last_event_timestamp_seconds").set(event["time"])
        for name, *labels in _COUNTERS.get(event["event"], ()):
            self._of(name, *(str(event[label]) for label in labels)).inc()
        values = {**event.get("metrics", {}), **event}
        for name, field in _GAUGES.get(event["event"], {}).items():
            if values.get(field) is not None:
                self._of(name).set(values[field])
        if handler := getattr(self, f"_on_{event['event']}", None):
            handler(event)

    def _on_run_start(self, event: Event) -> None:
        labels = {**self._facts} | {name: str(event.get(name) or "") for name in ("model", "compute")}
        labels |= {name: str(event[name]) for name in ("zero_stage", "world_size")}
        self._families["info"].labels(run=self._run, **labels).set(1)
        self._set_verdict("running")
        self._of("planned_steps").set(self._planned)
        self._of("consecutive_skipped_steps").set(0)
        for rank in range(min(event["world_size"], _RANKS_SHOWN)):
            self._of("nonfinite_by_rank_total", str(rank))

    def _on_step(self, event: Event) -> None:
        self._consecutive = 0 if event["applied"] else self._consecutive + 1
        self._of("consecutive_skipped_steps").set(self._consecutive)
        self._of("steps_total", "applied" if event["applied"] else "skipped").inc()
        self._of("step_seconds").observe(event["step_seconds"])
        self._of("data_wait_seconds_total").inc(event.get("data_seconds") or 0.0)
        tokens = event["tokens_per_second"] * event["step_seconds"]
        if math.isfinite(tokens):
            self._of("tokens_total").inc(round(tokens))
        work, memory = spread(event, "work_seconds"), spread(event, "memory_bytes")
        if work is not None:
            for statistic in ("least", "median", "most"):
                self._of("work_seconds", statistic).set(getattr(work, statistic))
            self._of("slowest_rank").set(work.rank)
        for name, found in (("rank_work_seconds", work), ("rank_memory_peak_bytes", memory)):
            for rank, value in enumerate(found.all if found else ()):
                self._of(name, str(rank)).set(value)

    def _on_incident(self, event: Event) -> None:
        if event.get("position") is not None and event["verdict"] == "ROLLBACK":
            self._consecutive = 0

    def _on_note(self, event: Event) -> None:
        if event.get("failed") == "checkpoint":
            self._of("checkpoint_failures_total").inc()

    def _on_checkpoint(self, event: Event) -> None:
        self._of("checkpoints_total", "true" if event["verified"] else "false").inc()
        self._of("checkpoint_seconds").observe(event["seconds"])
        self._of("checkpoint_stall_seconds_total").inc(event["stall_seconds"])

    def _on_precision(self, event: Event) -> None:
        shares = event["flop_share"] or {}
        for dtype in {*shares, *(key[1] for key in self._children if key[0] == "matmul_flop_ratio")}:
            self._of("matmul_flop_ratio", dtype).set(shares.get(dtype, 0.0))

    def _on_run_end(self, event: Event) -> None:
        self._of("end_timestamp_seconds", event["status"]).set(event["time"])
        if event.get("verdict"):
            self._set_verdict(event["verdict"])

    def _set_verdict(self, current: str) -> None:
        for word in WORDS:
            self._of("verdict", word).set(word == current)
