"""Checkpoints and exports as artifact references: wandb gets the location and metadata of a model, but no weights.

An artifact's digest depends on the names and URLs of its references. Their names include the first characters of a
content hash, so that a step saved again after a rollback becomes a new version.
"""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from config.errors import UserError
from config.redact import redact
from tracking.events import Event

MODEL = "model"
"""Artifact type, which has to be this one for W&B's registry."""

_MAX_NAME = 128
_SHORT = 12  # characters of a hash


def checkpoint_facts(event: Event, config: dict[str, Any]) -> dict[str, Any]:
    """Facts to record about the checkpoint of a `checkpoint` event; its hash is None if the manifest is unreadable."""
    own = {name: event[name] for name in ("tokens", "bytes", "verified")}
    return _checkpoint(event["path"], event["step"], config) | own


def named_checkpoint_facts(folder: Path, config: dict[str, Any], parity: dict[str, Any] | None) -> dict[str, Any]:
    """Facts to record about a checkpoint folder, with a parity verdict. Raises UserError for any other folder."""
    step = re.fullmatch(r"step-(\d+)", folder.resolve().name)
    if step is None or not (folder / "manifest.json").is_file():
        raise UserError(f"--checkpoint {folder}: is not a complete checkpoint; give a checkpoints/step-N folder")
    return _checkpoint(str(folder.resolve()), int(step[1]), config) | {"parity": parity}


def _checkpoint(path: str, step: int, config: dict[str, Any]) -> dict[str, Any]:
    run, deepspeed = config.get("run") or {}, config.get("deepspeed") or {}
    precision = run.get("precision") or {}
    return {
        "kind": "checkpoint",
        "run": (run.get("run") or {}).get("name"),
        "reference": path if "://" in path else Path(path).resolve().as_uri(),
        "manifest_sha256": None if "://" in path else _sha256(Path(path) / "manifest.json"),
        "step": step,
        "dtype": "fp32",  # the FP32 masters, which every checkpoint has
        "compute": precision.get("manifest") or precision.get("compute"),
        "zero_stage": (deepspeed.get("zero_optimization") or {}).get("stage", 0),
        "parity": None,
    }


def export_facts(folder: Path) -> dict[str, Any]:
    """Facts to record about a folder written by tools.export_hf. Raises UserError for any other folder."""
    try:
        known = json.loads((folder / "mantissa.json").read_text(encoding="utf-8"))
        return {
            "kind": "export",
            "run": known["run"],
            "reference": folder.resolve().as_uri(),
            "manifest_sha256": _sha256(folder / "SHA256SUMS"),
            "step": known["training"]["step"],
            "dtype": known["export"]["dtype"],
            "compute": known["precision"]["manifest"] or known["precision"]["compute"],
            "zero_stage": known["precision"]["ZeRO stage"],
            "files": known["export"]["files"],
            "parity": _verdict(known["parity"]) if known["parity"] else None,
        }
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"{type(error).__name__}: {error}"
        raise UserError(f"--export {folder}: is no exported model ({why}); give OUT of tools.export_hf") from None


def parity_facts(path: Path) -> dict[str, Any]:
    """The verdict in a parity.json and the hash of that file. Raises UserError for any other file."""
    try:
        return _verdict(json.loads(path.read_text(encoding="utf-8"))) | {"report_sha256": _sha256(path)}
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = type(error).__name__
        raise UserError(f"--parity {path}: not a parity.json ({why}); give the one of tools.parity") from None


def _verdict(found: dict[str, Any]) -> dict[str, Any]:
    failed = [check["name"] for check in found["checks"] if not check["passed"]]
    return {"verdict": found["verdict"], "failed": failed, "differences": found.get("differences", [])}


def log_artifact(run: Any, facts: dict[str, Any]) -> None:
    """Record a model in wandb as metadata and a reference; nothing is uploaded."""
    import wandb

    facts = redact(facts)
    short = (facts["manifest_sha256"] or "unknown")[:_SHORT]
    verdict = (facts["parity"] or {}).get("verdict", "")
    name = re.sub(r"(?a)[^\w.-]", "-", f"{facts['run'] or run.id}-{facts['kind']}")[-_MAX_NAME:]
    artifact = wandb.Artifact(
        name,
        type=MODEL,
        description=f"{facts['kind']} of step {facts['step']}, {facts['dtype']}; parity: {verdict or 'not tested'}",
        metadata=facts,
    )
    entry = "-".join(filter(None, (f"step-{facts['step']}", facts["dtype"], short, verdict.replace(" ", "-"))))
    artifact.add_reference(facts["reference"], name=entry, checksum=False)
    run.log_artifact(artifact, aliases=["latest", f"step-{facts['step']}"])


def _sha256(path: Path) -> str | None:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return None  # on another machine, or already deleted to make room
