"""The code that a result and an FP32 twin were made of: those of other code are never taken for this one's.

A twin that another state of the code has made differs from its run in more than what was planted, and so everything
seems to be found.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

from config.cli import REPOSITORY

PACKAGES = ("torch", "deepspeed", "transformers")
_FOLDERS = ("config", "data", "ds_configs", "modeling", "precision", "tools", "tracking", "training", "lab/detection")
_KINDS = (".py", ".yaml", ".json")
_ONLY_SHOWN = ("page.py", "command.py", "made_of.py", "gate.py", "planted.py")
"""Files of lab/detection that run and show the cells, and do not decide what they are."""


def made_of(repository: Path = REPOSITORY) -> str:
    """16 hex digits of a hash over the code, its configs and manifests, and the versions of what it stands on."""
    digest = hashlib.sha256(json.dumps([version(name) for name in PACKAGES]).encode())
    for folder in _FOLDERS:
        for path in sorted((repository / folder).rglob("*")):
            if path.suffix in _KINDS and path.is_file() and not _is_only_shown(path):
                digest.update(f"\0{path.relative_to(repository)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _is_only_shown(path: Path) -> bool:
    return path.parent.name == "detection" and path.name in _ONLY_SHOWN


def made_with(code: str, overrides: Sequence[str]) -> str:
    """The mark of a finished twin: `made_of`, and the arguments that it ran with."""
    return json.dumps([code, *overrides])
