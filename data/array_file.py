"""Safetensors files of arrays with a hash of arrays and metadata: a reader gets all that was written, or None."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from config.files import write_atomically

Arrays = dict[str, np.ndarray]


def write_arrays(path: Path, arrays: Arrays, metadata: Mapping[str, str], *, flushed: bool = True) -> None:
    """Publish the file. flushed: as for `write_atomically`. Raises OSError."""
    arrays = {name: np.ascontiguousarray(values) for name, values in arrays.items()}
    write_atomically(path, save(arrays, {**metadata, "sha256": _sha256(arrays, metadata)}), flushed=flushed)


def read_arrays(path: Path) -> tuple[Arrays, dict[str, str]] | None:
    """Arrays and metadata; None if the file is missing or damaged, so that its content is made again."""
    try:
        with safe_open(path, framework="numpy") as file:
            metadata: dict[str, str] = dict(file.metadata() or {})
            arrays: Arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118, it is not a mapping
    except (OSError, SafetensorError, TypeError):  # TypeError: a damaged header names a dtype that numpy lacks
        return None
    return (arrays, metadata) if metadata.pop("sha256", None) == _sha256(arrays, metadata) else None


def _sha256(arrays: Arrays, metadata: Mapping[str, str]) -> str:
    digest = hashlib.sha256(json.dumps(sorted(metadata.items())).encode())
    for name in sorted(arrays):
        values: Any = arrays[name]
        digest.update(f"{name} {values.dtype} {values.shape}".encode() + values.tobytes())
    return digest.hexdigest()
