"""The facts in an exported model's card, read from the run folder and the checkpoint.

A model card is shared more widely than a run folder, so facts are chosen by name: no host, no user, no local path.
"""

import json
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

from config.errors import UserError
from config.redact import redact
from config.schema import Config
from config.version import VERSION
from tools.parity.report import verdict_lines
from tracking.compare.surviving import read_run_events, surviving
from tracking.events import Event
from tracking.run_dir import RunDir
from training.checkpoint.manifest import read_state

_EXPORTED_WITH = ("torch", "transformers", "safetensors")


def run_facts(run: RunDir, checkpoint: Path, config: Config, environment: dict[str, Any]) -> dict[str, Any]:
    """Sections of the card: training and losses up to the checkpoint, data, precision, versions and hardware.

    Losses are in nats; None if nothing was recorded.
    """
    progress, precision, data = read_state(checkpoint)["progress"], config.precision, config.data
    history = surviving(read_run_events(run.events)) if run.events.is_file() else []
    events = [event for event in history if event["step"] <= progress["step"]]
    losses = [event["loss"] for event in events if event["event"] == "step"]
    last: Event = next((event for event in reversed(events) if event["event"] == "eval"), {})
    starts = [event for event in events if event["event"] == "run_start" and event["step"] < progress["step"]]
    start: Event = starts[-1] if starts else {}  # of the session that made the step, not of one that resumed from it
    parts = {f"loss, {name}": loss for name, loss in last.get("by_source", {}).items()}
    regions = Counter((start.get("regions") or {}).values())
    exporting = {"mantissa": VERSION} | {name: version(name) for name in _EXPORTED_WITH}
    return {
        "training": {
            "task": config.task,
            "step": progress["step"],
            "applied": progress.get("applied"),
            "skipped": progress.get("skipped"),
            "tokens": progress.get("tokens"),
            "first loss": losses[0] if losses else None,
            "last loss": losses[-1] if losses else None,
            "validation loss": last.get("loss"),
            **{f"validation {name}": value for name, value in {**last.get("metrics", {}), **parts}.items()},
            "validated after step": last.get("step"),
            "incidents": sum(event["event"] == "incident" for event in events),
            "processes": start.get("world_size"),
            "hypothesis": start.get("hypothesis") or None,
        },
        "data": {
            "source": f"hub: {data.path}" if data.source == "hub" else data.source,
            "fingerprint": environment.get("data", {}).get("fingerprint"),
            "tokenizer": without_path(data.tokenizer),
            "sequence length": data.sequence_length,
            "global batch": config.batch.global_size,
            "seed": config.run.seed,
        },
        "precision": {
            "path": precision.path,
            "compute": precision.compute,
            "masters and moments": "fp32",
            "gradients reduced in": precision.reduce,
            "regions": ", ".join(f"{count} in {dtype}" for dtype, count in sorted(regions.items())) or None,
            "ZeRO stage": start.get("zero_stage"),
            "manifest": _manifest(config, start),
        },
        "versions": {
            **environment.get("versions", {}),
            "Mantissa commit": (environment.get("git") or {}).get("commit"),
            "exported with": ", ".join(f"{name} {number}" for name, number in exporting.items()),
        },
        "hardware": {name: (environment.get("accelerator") or {}).get(name) for name in ("device", "devices")},
    }


def _manifest(config: Config, start: Event) -> Any:
    """The content of the run's manifest, if it has one, as the session that made the step read it."""
    if config.precision.path != "manifest" or not config.precision.manifest:
        return None
    recorded = start.get("manifest")  # runs of earlier versions did not record it, and the file may have changed since
    if recorded is None:
        return "not recorded: " + Path(config.precision.manifest).name
    rules = [{key: value for key, value in rule.items() if value is not None} for rule in recorded["rules"]]
    return {"default": recorded["default"], "rules": rules}


def without_path(spec: str) -> str:
    """A hub id or other name unchanged; only the last component of a local path."""
    looks_local = spec.startswith(("/", ".", "~")) or Path(spec).exists()
    return Path(spec).name if looks_local else spec


def parity_facts(path: Path, config: Config, environment: dict[str, Any]) -> dict[str, Any]:
    """The verdict of a `parity.json`, and the conditions in which it differs from this run.

    Raises UserError if the file is not the report of a parity run.
    """
    kept = ("name", "measured", "bound", "passed")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        conditions = found["conditions"]
        facts = {
            "verdict": found["verdict"],
            "checks": [{key: check[key] for key in kept} for check in found["checks"]],
            "lines": verdict_lines(found),
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = type(error).__name__
        raise UserError(f"--parity {path}: not a parity.json ({why}); give the one that tools.parity wrote") from error
    own = {
        "compute": config.precision.manifest or config.precision.compute,
        "data": environment.get("data", {}).get("fingerprint"),
        "sequence_length": config.data.sequence_length,
        "global_batch": config.batch.global_size,
    }
    facts["differences"] = [
        f"{key} was {conditions.get(key)} there and is {value} here"
        for key, value in own.items()
        if conditions.get(key) != value
    ]
    return redact(facts)
