"""The summary of a run in numbers, from its folder alone (finished, crashed or still running)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from config import json_text, yaml_text
from config.errors import UserError, one_line
from tracking.events import Event
from tracking.figures import HEADLINES, followed
from tracking.run_dir import RunDir
from tracking.run_facts import RunFacts, read_facts
from tracking.status import run_status


class Summary:
    """One run in numbers. Losses in nats, times in seconds, memory in bytes; None where nothing was recorded.

    `steps` and everything counted per step are of the surviving history (see `tracking.compare.surviving`);
    scale events, incidents and non-finite tensors are counted over all sessions. `nonfinite` holds at most
    `tracking.run_facts.MAX_RARE_EVENTS` events.
    """

    def __init__(self, facts: RunFacts) -> None:
        steps, rare = facts.columns, facts.rare_events
        course = steps.metrics.get(facts.headline, steps.loss)  # what it is followed by
        finite = np.flatnonzero(np.isfinite(course))
        losses = course[finite]
        best = int(np.argmax(losses) if facts.headline else np.argmin(losses)) if losses.size else None
        norms = steps.grad_norm[np.isfinite(steps.grad_norm)]
        evals, checkpoints = rare.get("eval", []), rare.get("checkpoint", [])
        corruption = [*rare.get("corruption", []), *rare.get("reexecution", [])]

        self.facts = facts
        self.name = facts.label
        self.verdict = facts.verdict
        self.exit_code: int | None = facts.end["exit_code"] if facts.end else None
        self.standstill: str = (facts.end or {}).get("standstill") or ""
        """Sentence about modules whose updates rounding lost, as the run's end recorded it."""
        self.sessions = facts.counts["run_start"]
        self.start = facts.start
        self.steps = len(steps)
        self.applied = int(np.count_nonzero(steps.applied))
        self.skipped = self.steps - self.applied
        self.tokens = int(steps.tokens.max()) if len(steps) else 0
        self.first_loss = float(losses[0]) if losses.size else None
        self.last_loss = float(losses[-1]) if losses.size else None
        self.best_loss = None if best is None else float(losses[best])
        self.best_loss_step = None if best is None else int(steps.step[finite[best]])
        self.nonfinite_losses = len(steps) - int(np.count_nonzero(np.isfinite(steps.loss)))
        self.first_eval_loss: float | None = followed(evals[0])[1] if evals else None
        self.eval_loss: float | None = followed(evals[-1])[1] if evals else None
        self.samples = [(event["step"], str(event["sample"])) for event in evals if event.get("sample")]
        """(step, text) of the samples at evaluations."""
        self.perplexity: float | None = evals[-1]["perplexity"] if evals else None
        self.metrics = _metrics(evals)
        """First and last value, by name, of the task's metrics on the validation set and of the loss of its parts."""
        self.grad_norm_median = float(np.median(norms)) if norms.size else None
        self.grad_norm_max = float(norms.max()) if norms.size else None
        self.clipped = int(np.count_nonzero((steps.clip_coefficient < 1.0) & (steps.clip_coefficient != 0.0)))
        self.scale_reasons = dict(facts.scale_reasons)
        self.first_scale = float(steps.loss_scale[0]) if len(steps) else None
        self.last_scale = float(steps.loss_scale[-1]) if len(steps) else None
        self.incidents = facts.counts["incident"]
        self.nonfinite = rare.get("nonfinite", [])
        self.warnings = rare.get("warning", [])
        self.corruption = sorted(corruption, key=lambda event: (event["step"], event["time"]))
        """Faults of the machine: `corruption` and `reexecution` events, in the order of their steps."""
        self.notes = list(dict.fromkeys(event["text"] for event in rare.get("note", [])))  # which each session repeats
        self.tokens_per_second = float(np.median(steps.tokens_per_second)) if len(steps) else None
        self.step_seconds = float(np.median(steps.step_seconds)) if len(steps) else None
        self.wall_seconds = facts.wall_seconds
        self.memory_bytes = int(facts.peak_memory_bytes) if facts.peak_memory_bytes > 0 else None
        self.checkpoint: str | None = checkpoints[-1]["path"] if checkpoints else None
        self.precision: Event | None = rare["precision"][-1] if rare.get("precision") else None
        """The newest `precision` event."""


def summarise(run_dir: RunDir) -> Summary:
    """Summarise the run folder in one pass. Raises UserError when nothing was recorded."""
    facts = read_run_folder(run_dir, run_dir.name)
    if not facts.start:
        raise UserError(f"{run_dir.events}: no run_start event; nothing was recorded in this run folder")
    return Summary(facts)


def _metrics(evals: list[Event]) -> dict[str, list[float]]:
    both = [
        {**(event.get("metrics") or {}), **{f"loss, {part}": loss for part, loss in event.get("by_source", {}).items()}}
        for event in (evals[:1] + evals[-1:])
    ]
    names = [name for name in (both[-1] if both else ()) if name not in HEADLINES]
    return {name: [metrics[name] for metrics in both if name in metrics] for name in names}


def read_run_folder(run_dir: RunDir, label: str, now: float | None = None) -> RunFacts:
    """The facts of a run folder with its config, DeepSpeed JSON and environment, and its status at `now`.

    now: seconds since the epoch; None is the present. Raises UserError as `read_facts`.
    """
    config, deepspeed, environment = read_inputs(run_dir)
    facts = read_facts(run_dir.events, label)
    checked = run_status(run_dir.path, now)
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
        raise UserError(f"{path}: cannot be read ({one_line(error, 200)}); restore or remove it") from error
    if not isinstance(content, dict):
        return {}
    for name, kind in kinds.items():
        if content.get(name) is not None and not isinstance(content[name], kind):
            raise UserError(f"{path}: {name} is not a {kind.__name__}, as written; restore or remove the file")
    if not all(isinstance(row, dict) and row.keys() >= _LEDGER for row in content.get("ledger") or ()):
        raise UserError(f"{path}: ledger is not as written; restore or remove the file")
    return content
