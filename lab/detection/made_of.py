"""The code that a result and an FP32 twin were made of: those of other code are never taken for this one's.

A twin that another state of the code has made differs from its run in more than what was planted, and so everything
seems to be found.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from config.cli import REPOSITORY

PACKAGES = ("torch", "deepspeed", "transformers")
_FOLDERS = ("config", "data", "ds_configs", "modeling", "precision", "tools", "tracking", "training")
_DETECTION = ("lab/detection", "tests/support/models", "tests/support/rows")
_KINDS = (".py", ".yaml", ".json")
_ONLY_SHOWN = ("page.py", "command.py", "made_of.py", "gate.py", "planted.py")


def made_of(repository: Path = REPOSITORY, *, folders: Sequence[str] = _DETECTION) -> str:
    """16 hex digits of a hash over the code, its configs and manifests, what it stands on, and the GPU if there is one.

    folders: of what measures, as well.
    """
    stands_on = [*map(version, PACKAGES), *filter(None, [gpu_name()])]
    digest = hashlib.sha256(json.dumps(stands_on).encode())
    for path in hashed(repository, folders=folders):
        digest.update(f"\0{path.relative_to(repository)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def hashed(repository: Path = REPOSITORY, *, folders: Sequence[str] = _DETECTION) -> Iterator[Path]:
    """The files that `made_of` reads."""
    for each in (*_FOLDERS, *folders):
        for path in sorted((repository / each).rglob("*")):
            if path.suffix in _KINDS and path.is_file() and not is_only_shown(path):
                yield path


def is_only_shown(path: Path) -> bool:
    """Whether it runs or shows the cells of a table, and does not decide what they are."""
    return path.parent.parent.name == "lab" and path.name in _ONLY_SHOWN


def gpu_name() -> str:
    """The name of this machine's GPU; empty without one."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def measured_on(facts: dict[str, Any]) -> dict[str, str]:
    """Versions of these packages, the GPU, and the machine by `tracking.environment`: for pages."""
    gpu, cores = gpu_name(), f"{facts['cpu']['usable_cores']} cores of {facts['cpu']['model']}"
    return {**{name: version(name) for name in PACKAGES}, "gpu": gpu, "machine": f"{cores}, {gpu}" if gpu else cores}
