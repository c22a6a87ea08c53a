"""Read wandb's own files of an offline run: LevelDB logs of protobufs, one for each session."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def records(folder: Path) -> list[Any]:
    """The records of a session's folder: a header of 7 bytes, then blocks of 32 KiB."""
    from wandb.proto import wandb_internal_pb2

    content = b"".join(path.read_bytes() for path in folder.glob("*.wandb"))  # one, or none
    found, position, message = [], 7, b""
    while position + 7 <= len(content):
        if 32768 - position % 32768 < 7:  # a header never crosses blocks
            position += 32768 - position % 32768
        length, kind = int.from_bytes(content[position + 4 : position + 6], "little"), content[position + 6]
        message += content[position + 7 : position + 7 + length]
        position += 7 + length
        if kind in (1, 4):  # the whole message, or its last part
            found.append(wandb_internal_pb2.Record.FromString(message))
            message = b""
    return found


def sessions(wandb_folder: Path) -> list[Path]:
    """The folders of a run's offline sessions, the oldest first."""
    return sorted(wandb_folder.glob("offline-run-*"))


def rows(wandb_folder: Path) -> list[dict[str, Any]]:
    """The rows of the charts, of all sessions."""
    history = (record.history for record in _all(wandb_folder) if record.WhichOneof("record_type") == "history")
    return [
        {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in row.item} for row in history
    ]


def config(wandb_folder: Path) -> dict[str, Any]:
    """The run's config, as the last session left it."""
    found: dict[str, Any] = {}
    for record in _all(wandb_folder):
        kind = record.WhichOneof("record_type")
        if kind in ("run", "config"):
            updates = record.run.config.update if kind == "run" else record.config.update
            found |= {item.key: json.loads(item.value_json) for item in updates if item.key}
    return found


def _all(wandb_folder: Path) -> Iterator[Any]:
    for folder in sessions(wandb_folder):
        yield from records(folder)
