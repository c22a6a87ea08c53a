"""What follows from the task and from data.path where the run config leaves it open."""

from __future__ import annotations

from dataclasses import replace
from pathlib import PurePath

from config.schema import Config

_SUFFIXES = {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
_COMPRESSED = (".gz", ".zst")


def settle_task(config: Config) -> Config:
    """`config` with data.source = auto and data.tokenizer = model decided, as far as they can be."""
    data = config.data
    if data.source == "auto":
        data = replace(data, source=_source_of(data.path))  # type: ignore[arg-type]  # one of the field's choices
    if data.tokenizer == "model" and config.model.name_or_path is not None:
        data = replace(data, tokenizer=config.model.name_or_path)
    return replace(config, data=data)


def _source_of(path: str | None) -> str:
    if path is None:
        return "stdlib"
    suffixes = [suffix for suffix in PurePath(path).suffixes if suffix not in _COMPRESSED]
    return _SUFFIXES.get(suffixes[-1] if suffixes else "", "hub")
