"""The numbers that sum up a run, computed from its folder alone (finished, crashed or still running)."""

from __future__ import annotations

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from config import yaml_text
from config.errors import UserError
from tracking.events import Event
from tracking.jsonl import read_events, surviving
from tracking.run_dir import RunDir


@dataclass(frozen=True)
class Summary:
    """One run in numbers. Losses in nats, times in seconds, memory in bytes; None where nothing was recorded.

    `steps` and everything counted per step tell about the surviving history (see `tracking.jsonl.surviving`);
    scale events, incidents and non-finite tensors are counted over all sessions.
    """

    name: str
    status: str
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
    grad_norm_median: float | None
    grad_norm_max: float | None
    clipped: int
    scale_reasons: dict[str, int]
    first_scale: float | None
    last_scale: float | None
    incidents: int
    nonfinite: list[Event]
    notes: list[str]
    tokens_per_second: float | None
    step_seconds: float | None
    wall_seconds: float
    memory_bytes: int | None
    checkpoint: str | None


def summarise(run_dir: RunDir) -> Summary:
    """Sum up `run_dir/events.jsonl`. Raises UserError when there is none or nothing has been recorded."""
    events = list(read_events(run_dir.events))
    starts = [event for event in events if event["event"] == "run_start"]
    if not starts:
        raise UserError(f"{run_dir.events}: no run_start event; nothing was recorded in this run folder")
    state = surviving(events)
    steps = _only(state, "step")
    losses = [(event["loss"], event["step"]) for event in steps if math.isfinite(event["loss"])]
    norms = [e["grad_norm"] for e in steps if e["grad_norm"] is not None and math.isfinite(e["grad_norm"])]
    evals, scales, checkpoints = _only(state, "eval"), _only(events, "scale"), _only(state, "checkpoint")
    ends = [event for event in events if event["event"] == "run_end" and event["time"] >= starts[-1]["time"]]
    best = min(losses, default=(None, None))
    memory = [event["memory_bytes"] for event in steps if event["memory_bytes"]]
    return Summary(
        name=run_dir.name,
        status=ends[-1]["status"] if ends else "running or crashed (no run_end event)",
        exit_code=ends[-1]["exit_code"] if ends else None,
        sessions=len(starts),
        start=starts[-1],
        steps=len(steps),
        applied=sum(event["applied"] for event in steps),
        skipped=sum(not event["applied"] for event in steps),
        tokens=max((event["tokens"] for event in steps), default=0),
        first_loss=losses[0][0] if losses else None,
        last_loss=losses[-1][0] if losses else None,
        best_loss=best[0],
        best_loss_step=best[1],
        nonfinite_losses=len(steps) - len(losses),
        first_eval_loss=evals[0]["loss"] if evals else None,
        eval_loss=evals[-1]["loss"] if evals else None,
        perplexity=evals[-1]["perplexity"] if evals else None,
        grad_norm_median=median(norms) if norms else None,
        grad_norm_max=max(norms, default=None),
        clipped=sum(1 for event in steps if (event["clip_coefficient"] or 1.0) < 1.0),
        scale_reasons=dict(Counter(event["reason"] for event in scales)),
        first_scale=steps[0]["loss_scale"] if steps else None,
        last_scale=steps[-1]["loss_scale"] if steps else None,
        incidents=len(_only(events, "incident")),
        nonfinite=_only(events, "nonfinite"),
        notes=[event["text"] for event in _only(events, "note")],
        tokens_per_second=median(e["tokens_per_second"] for e in steps) if steps else None,
        step_seconds=median(e["step_seconds"] for e in steps) if steps else None,
        wall_seconds=_wall_seconds(events),
        memory_bytes=max(memory, default=None),
        checkpoint=checkpoints[-1]["path"] if checkpoints else None,
    )


def _only(events: list[Event], kind: str) -> list[Event]:
    return [event for event in events if event["event"] == kind]


def _wall_seconds(events: list[Event]) -> float:
    """Time between the first and the last event of each session, summed: pauses between sessions do not count."""
    total, start, last = 0.0, None, 0.0
    for event in events:
        if event["event"] == "run_start" and start is not None:
            total += last - start
        if event["event"] == "run_start" or start is None:
            start = event["time"]
        last = event["time"]
    return total + (last - start if start is not None else 0.0)


def read_inputs(run_dir: RunDir) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """The resolved config, DeepSpeed JSON and environment of the run; an absent file gives an empty dict."""
    config = _load(run_dir.config, yaml_text.parse)
    return config, _load(run_dir.deepspeed_config, json.loads), _load(run_dir.environment, json.loads)


def _load(path: Path, parse: Any) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        content = parse(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path}: cannot be read ({' '.join(str(error).split())[:200]}); restore or remove it"
        ) from error
    return content if isinstance(content, dict) else {}
