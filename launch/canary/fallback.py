"""The fallbacks of a run whose check failed: overrides under which it goes on from the last good checkpoint."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from config.deepspeed.document import write_in_fp32
from config.files import write_atomically
from config.resolved import Resolved


def in_fp32(resolved: Resolved, folder: Path) -> list[str]:
    """All modules in FP32. Writes the run's DeepSpeed JSON without its 16-bit sections into `folder`."""
    return [
        *_json(resolved, folder),
        *("precision.path=cast", "precision.manifest=null", "precision.compute=fp32", "precision.masters=fp32"),
    ]


def promoted(resolved: Resolved, modules: Sequence[str], folder: Path) -> list[str]:
    """These modules in FP32, all others as they were: a manifest in `folder`, of the run's own or of its one dtype."""
    section = resolved.config.precision
    manifest: dict[str, Any] = {"default": resolved.compute, "rules": []}
    if section.manifest is not None:
        manifest = json.loads(Path(section.manifest).read_text(encoding="utf-8"))
        manifest.pop("$schema", None)  # a path beside the other file
    rules = [{"match": name, "compute": "fp32", "reason": "its check against FP32 failed"} for name in modules]
    path = folder / "promoted.json"
    content = {**manifest, "rules": [*manifest.get("rules", []), *rules]}
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())
    return [
        *_json(resolved, folder),
        *("precision.path=manifest", f"precision.manifest={path.resolve()}", "precision.compute=auto"),
        "precision.masters=fp32",
    ]


def _json(resolved: Resolved, folder: Path) -> list[str]:
    copy = folder / "fp32.json"
    write_in_fp32(resolved.deepspeed_path, copy)
    return [f"deepspeed.config={copy.resolve()}"]
