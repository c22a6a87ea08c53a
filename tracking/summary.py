"""The summary of a run in numbers, from its folder alone (finished, crashed or still running)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from config import json_text, yaml_text
from config.errors import UserError
from tracking.events import Event
from tracking.run_dir import RunDir
from tracking.run_facts import RunFacts, read_facts
from tracking.status import run_status


@dataclass(frozen=True)
class Summary:
    """One run in numbers. Losses in nats, times in seconds, memory in bytes; None where nothing was recorded.

    `steps` and everything counted per step are of the surviving history (see `tracking.jsonl.surviving`);
    scale events, incidents and non-finite tensors are counted over all sessions. `nonfinite` holds at most
    `tracking.run_facts.MAX_RARE_EVENTS` events.
    """

    name: str
    status: str
    """done, preempted, aborted, crashed or running."""
    cause: str
    """Why it ended early, or for how long a running one has been silent; empty where there is nothing to say."""
    exit_code: int | None
    sessions: int
    start: Event
    steps: int
    applied: int
    skipped: int
    tokens: int
    first_loss: float | None
    last_loss: float | None
    best_loss: float | None
    best_loss_step: int | None
    nonfinite_losses: int
    first_eval_loss: float | None
    eval_loss: float | None
    perplexity: float | None
    metrics: dict[str, list[float]]
    """Of the task on the validation set, and the loss of each of its parts, by name: the first and the last value."""
    grad_norm_median: float | None
    grad_norm_max: float | None
    clipped: int
    scale_reasons: dict[str, int]
    first_scale: float | None
    last_scale: float | None
    incidents: int
    nonfinite: list[Event]
    warnings: list[Event]
    corruption: list[Event]
    """What was found of the machine's faults: `corruption` and `reexecution` events, in the order of their steps."""
    notes: list[str]
    tokens_per_second: float | None
    step_seconds: float | None
    wall_seconds: float
    memory_bytes: int | None
    checkpoint: str | None
    precision: Event | None
    """The newest `precision` event."""


def summarise(run_dir: RunDir) -> Summary:
    """Summarise `run_dir/events.jsonl` in one pass. Raises UserError when nothing was recorded."""
    facts = replace(read_facts(run_dir.events, run_dir.name), checked=run_status(run_dir.path))
    if not facts.start:
        raise UserError(f"{run_dir.events}: no run_start event; nothing was recorded in this run folder")
    steps, rare = facts.columns, facts.rare_events
    finite = np.flatnonzero(np.isfinite(steps.loss))
    losses = steps.loss[finite]
    best = int(np.argmin(losses)) if losses.size else None
    norms = steps.grad_norm[np.isfinite(steps.grad_norm)]
    evals, checkpoints = rare.get("eval", []), rare.get("checkpoint", [])
    return Summary(
        name=run_dir.name,
        status=facts.status,
        cause=facts.cause,
        exit_code=facts.end["exit_code"] if facts.end else None,
        sessions=facts.counts["run_start"],
        start=facts.start,
        steps=len(steps),
        applied=int(np.count_nonzero(steps.applied)),
        skipped=int(np.count_nonzero(~steps.applied)),
        tokens=int(steps.tokens.max()) if len(steps) else 0,
        first_loss=float(losses[0]) if losses.size else None,
        last_loss=float(losses[-1]) if losses.size else None,
        best_loss=None if best is None else float(losses[best]),
        best_loss_step=None if best is None else int(steps.step[finite[best]]),
        nonfinite_losses=len(steps) - losses.size,
        first_eval_loss=evals[0]["loss"] if evals else None,
        eval_loss=evals[-1]["loss"] if evals else None,
        perplexity=evals[-1]["perplexity"] if evals else None,
        metrics=_metrics(evals),
        grad_norm_median=float(np.median(norms)) if norms.size else None,
        grad_norm_max=float(norms.max()) if norms.size else None,
        clipped=int(np.count_nonzero((steps.clip_coefficient < 1.0) & (steps.clip_coefficient != 0.0))),
        scale_reasons=dict(facts.scale_reasons),
        first_scale=float(steps.loss_scale[0]) if len(steps) else None,
        last_scale=float(steps.loss_scale[-1]) if len(steps) else None,
        incidents=facts.counts["incident"],
        nonfinite=rare.get("nonfinite", []),
        warnings=rare.get("warning", []),
        corruption=sorted(
            [*rare.get("corruption", []), *rare.get("reexecution", [])],
            key=lambda event: (event["step"], event["time"]),
        ),
        notes=list(dict.fromkeys(event["text"] for event in rare.get("note", []))),  # which each session repeats
        tokens_per_second=float(np.median(steps.tokens_per_second)) if len(steps) else None,
        step_seconds=float(np.median(steps.step_seconds)) if len(steps) else None,
        wall_seconds=facts.wall_seconds,
        memory_bytes=int(facts.peak_memory_bytes) if facts.peak_memory_bytes > 0 else None,
        checkpoint=checkpoints[-1]["path"] if checkpoints else None,
        precision=rare["precision"][-1] if rare.get("precision") else None,
    )


def _metrics(evals: list[Event]) -> dict[str, list[float]]:
    both = [
        {**(event.get("metrics") or {}), **{f"loss, {part}": loss for part, loss in event.get("by_source", {}).items()}}
        for event in (evals[:1] + evals[-1:])
    ]
    return {name: [metrics[name] for metrics in both if name in metrics] for name in (both[-1] if both else ())}


def read_run_folder(run_dir: RunDir, label: str) -> RunFacts:
    """The facts of a run folder with its config, DeepSpeed JSON and environment. Raises UserError as `read_facts`."""
    config, deepspeed, environment = read_inputs(run_dir)
    facts = read_facts(run_dir.events, label)
    checked = run_status(run_dir.path)
    return replace(facts, config=config, deepspeed=deepspeed, environment=environment, checked=checked)


_SECTIONS = dict.fromkeys(("run", "model", "data", "batch", "precision", "tracking", "checkpoint"), dict)
_DICTS = ("data", "versions", "git", "accelerator", "cpu")
_FACTS = {**dict.fromkeys(_DICTS, dict), "ledger": list, "command_line": list}
_LEDGER = {"what", "dtype", "bytes"}


def read_inputs(run_dir: RunDir) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The resolved config, DeepSpeed JSON and environment of the run; an absent file gives an empty dict.

    Raises UserError for a file that cannot be read, or is not of the types it was written with.
    """
    config = _load(run_dir.config, yaml_text.parse, _SECTIONS)
    deepspeed = _load(run_dir.deepspeed_config, json_text.parse, {"zero_optimization": dict})
    return config, deepspeed, _load(run_dir.environment, json_text.parse, _FACTS)


def setting(config: dict[str, Any], dotted: str) -> Any:
    """A value of the resolved config by its dotted key; None when it is not there."""
    value: Any = config
    for key in dotted.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _load(path: Path, parse: Any, kinds: Mapping[str, type]) -> dict[str, Any]:
    """kinds: of which type values are that others rely on."""
    try:
        content = parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: cannot be read ({' '.join(str(error).split())[:200]}); restore or remove it"
        ) from error
    if not isinstance(content, dict):
        return {}
    for name, kind in kinds.items():
        if content.get(name) is not None and not isinstance(content[name], kind):
            raise UserError(f"{path}: {name} is no {kind.__name__} as it was written; restore or remove the file")
    if not all(isinstance(row, dict) and row.keys() >= _LEDGER for row in content.get("ledger") or ()):
        raise UserError(f"{path}: ledger is not as it was written; restore or remove the file")
    return content
