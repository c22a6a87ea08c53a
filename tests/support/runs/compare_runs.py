"""Run folders and events for tests of what reads them, written through the real sink, with a planted divergence."""

import itertools
import random
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

from tracking.jsonl import JsonlSink
from tracking.run_dir import RunDir
from tracking.run_facts import Collector, RunFacts

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


def whole_event(kind: str, step: int = 0, /, **fields: Any) -> dict[str, Any]:
    """An event as sinks get it; what a `step` or `run_start` needs and is not given is made up."""
    made = {"step": partial(step_fields, step), "run_start": start_fields}.get(kind, dict)(**fields)
    return {"event": kind, "step": step, "time": 1.7e9 + step / 2, "tokens": step * TOKENS_PER_STEP, **made}


def facts_of(events: Iterable[dict[str, Any]], label: str = "demo") -> RunFacts:
    """The facts of a run without a folder."""
    collector = Collector()
    for event in events:
        collector.add(event)
    return collector.facts(label, label, None)


def ticking_clock(start: float = 1.7e9, seconds: float = 0.5) -> Callable[[], float]:
    """A clock that moves on by `seconds` each time it is read."""
    ticks = itertools.count()
    return lambda: start + seconds * next(ticks)


STEPS = 40
CONFIG: dict[str, Any] = {
    "run": {"name": "x", "steps": STEPS, "seed": 0},
    "data": {"source": "text", "tokenizer": "bpe:4096", "sequence_length": 512},
    "batch": {"global_size": 8, "micro_size": 2},
    "optimizer": {"learning_rate": 3e-4},
    "precision": {"compute": "bf16", "path": "cast"},
}
ENVIRONMENT: dict[str, Any] = {
    "hostname": "node7",
    "versions": {"torch": "2.13.0", "deepspeed": "0.19.8"},
    "accelerator": {"device": "NVIDIA H100"},
    "world_size": 2,
    "git": {"commit": "0123456789abcdef", "dirty": False},
    "data": {"fingerprint": "aa11", "vocab_size": 4096},
}


def merged(tree: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """`tree` with dotted keys set: {"run.seed": 1}."""
    found = {key: merged(value, {}) if isinstance(value, dict) else value for key, value in tree.items()}
    for dotted, value in changes.items():
        node, *rest = dotted.split(".", 1)
        found[node] = merged(found.get(node, {}), {rest[0]: value}) if rest else value
    return found


class RunWriter:
    """Writes events with a clock of its own: half a second an event, unless a step says how long it took."""

    def __init__(self, root: Path, name: str) -> None:
        self.run_dir = RunDir.create(root, name, fresh=False)
        self._sink = JsonlSink(self.run_dir.events)
        self.time = 1.7e9

    def event(self, name: str, step: int, /, **fields: Any) -> None:
        tokens = fields.pop("tokens", step * TOKENS_PER_STEP)
        self._sink.write({"event": name, "step": step, "time": self.time, "tokens": tokens, **fields})

    def start(self, step: int = 0, **fields: Any) -> None:
        self.event("run_start", step, **start_fields(**fields))

    def step(self, step: int, **fields: Any) -> None:
        """One step; its losses are a function of the step alone, so that runs are the same unless `fields` differ."""
        loss = 3.0 + 5.0 / (1 + step / 10) + random.Random(step).gauss(0, 0.02)
        made = step_fields(step, step_seconds=0.5, loss=loss)
        made |= {"sample_ids_sha256": f"{step:04x}" * 16, **fields}
        self.time += made["step_seconds"]
        self.event("step", step, **made)

    def steps(self, first: int, last: int, **fields: Any) -> None:
        for step in range(first, last + 1):
            self.step(step, **fields)

    def end(self, step: int = STEPS) -> RunDir:
        self.event("run_end", step, status="done", exit_code=0)
        self._sink.close()
        return self.run_dir


def write_run(
    root: Path, name: str, *, change=None, after=None, config=None, environment=None, steps=STEPS, **start: Any
) -> RunDir:
    """A finished run of `steps` steps with an evaluation every tenth.

    change: step and its fields to the fields that differ, or None. after: step to further events that follow it.
    config, environment: dotted keys that differ. start: fields of `run_start`.
    """
    writer = RunWriter(root, name)
    settings = merged(CONFIG, {"run.name": name, **(config or {})})
    writer.run_dir.write_inputs(settings, {"zero": 2}, merged(ENVIRONMENT, environment or {}))
    writer.start(**start)
    for step in range(1, steps + 1):
        writer.step(step, **((change(step, {}) if change else None) or {}))
        for event in (after or {}).get(step, []):
            fields = {key: value for key, value in event.items() if key not in ("event", "at")}
            writer.event(event["event"], event.get("at", step), **fields)
        if step % 10 == 0:
            writer.event("eval", step, loss=3.2 + 10 / step, perplexity=1.0)
    return writer.end(steps)
