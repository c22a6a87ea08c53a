"""The file RUN: the run that a checkpoints folder belongs to, and how often it went back to an older checkpoint. Every
manifest seals these as well: a step saved after the run went back is newer than a higher step from before."""

import contextlib
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from config.files import write_atomically
from config.json_text import sealed, unsealed

RUN = "RUN"
_ID = re.compile(r"[0-9a-f]{16}")

Order = tuple[int, int]
"""How often the run had gone back, and the step: the larger, the newer."""


@dataclass(frozen=True)
class Record:
    """The content of RUN."""

    id: str
    name: str
    went_back: int = 0
    back_to: int = 0
    """The step that the run last went back to."""

    def left(self, order: Order) -> bool:
        """Whether the run abandoned a checkpoint of this order when it went back."""
        return order[0] < self.went_back and order[1] > self.back_to

    def other_than(self, manifest: dict[str, Any]) -> str | None:
        """The run of a manifest, human-readable, if it is another one."""
        run = run_in(manifest)
        return f"another run, {run[1]} ({run[0]})" if run is not None and run[0] != self.id else None

    def write(self, folder: Path) -> None:
        """Write it to a checkpoints folder. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / RUN, sealed(asdict(self)).encode())


def read_record(folder: Path) -> Record | None:
    """The RUN of a checkpoints folder; None if there is none, or it is damaged."""
    with contextlib.suppress(OSError, ValueError, TypeError, KeyError):
        content, intact = unsealed((folder / RUN).read_bytes())
        if intact and _ID.fullmatch(content["id"]):
            return Record(**content)
    return None


def run_in(manifest: dict[str, Any]) -> tuple[str, str] | None:
    """Id and name of the run that a manifest seals; None for an older manifest, which has none."""
    run = manifest.get("run")
    return (run["id"], run["name"]) if isinstance(run, dict) and {"id", "name"} <= run.keys() else None


def order_in(manifest: dict[str, Any]) -> Order:
    """The place of a checkpoint among those of its run, from its manifest."""
    return int(manifest.get("went_back", 0)), int(manifest["step"])
