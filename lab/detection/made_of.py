"""The code that a result and an FP32 twin were made of: those of other code are never taken for this one's.

A twin that another state of the code has made differs from its run in more than what was planted, and so everything
seems to be found.
"""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from config.cli import REPOSITORY

PACKAGES = ("torch", "deepspeed", "transformers")
_FOLDERS = ("config", "data", "ds_configs", "modeling", "precision", "tools", "tracking", "training")
_KINDS = (".py", ".yaml", ".json")
_ONLY_SHOWN = ("page.py", "command.py", "made_of.py", "gate.py", "planted.py")
"""Files that run and show the cells of a table, and do not decide what they are."""


def made_of(repository: Path = REPOSITORY, *, folder: str = "lab/detection") -> str:
    """16 hex digits of a hash over the code, its configs and manifests, and the versions of what it stands on.

    folder: of what measures, as well.
    """
    digest = hashlib.sha256(json.dumps([version(name) for name in PACKAGES]).encode())
    for each in (*_FOLDERS, folder):
        for path in sorted((repository / each).rglob("*")):
            if path.suffix in _KINDS and path.is_file() and not _is_only_shown(path):
                digest.update(f"\0{path.relative_to(repository)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _is_only_shown(path: Path) -> bool:
    return path.parent.parent.name == "lab" and path.name in _ONLY_SHOWN


def measured_on(facts: dict[str, Any]) -> dict[str, str]:
    """Versions of these packages, and the machine by `tracking.environment`: for pages."""
    machine = f"{facts['cpu']['usable_cores']} cores of {facts['cpu']['model']}"
    return {**{name: version(name) for name in PACKAGES}, "machine": machine}
