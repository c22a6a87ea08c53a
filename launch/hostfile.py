"""The deepspeed launcher's hostfile: NAME slots=N, a line each."""

from __future__ import annotations

import re
from pathlib import Path

from config.errors import UserError


def read_hostfile(path: Path) -> dict[str, int]:
    """Name to slots (processes) of each machine, in the file's order. Raises UserError where it is none."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"--hostfile {path}: cannot be read: {getattr(error, 'strerror', error)}") from error
    slots: dict[str, int] = {}
    for number, text in enumerate(lines, 1):
        line = text.strip()
        if not line or line.startswith("#"):
            continue
        match = re.match(r"(\S+)\s+slots=(\d+)", line)
        if match is None or match[1].startswith("-"):
            raise UserError(f"{path}: line {number}: {line!r} is not NAME slots=N; correct it")
        if match[1] in slots:
            raise UserError(f"{path}: line {number}: {match[1]} is there twice; add its slots up in one line")
        slots[match[1]] = int(match[2])
    if not slots:
        raise UserError(f"{path}: names no host; write a line such as worker-0 slots=8")
    return slots
