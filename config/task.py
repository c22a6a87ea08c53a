"""What follows from the task and from data.path where the run config leaves it open."""

from __future__ import annotations

from dataclasses import replace
from pathlib import PurePath
from typing import Any

from config.schema import Config

_SUFFIXES = {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet"}
_COMPRESSED = (".gz", ".zst")


def settle_task(config: Config) -> Config:
    """`config` with data.source = auto and data.tokenizer = model decided, as far as they can be."""
    data = config.data
    if data.source == "auto":
        data = replace(data, source=_decided(data.source, data.path))
    if data.sources:
        named = (
            replace(item, name=item.name or f"source {number}", source=_decided(item.source, item.path))
            for number, item in enumerate(data.sources, 1)
        )
        data = replace(data, sources=tuple(named))
    if data.tokenizer == "model" and config.model.name_or_path is not None:
        data = replace(data, tokenizer=config.model.name_or_path)
    return replace(config, data=data)


def _decided(source: str, path: str | None) -> Any:
    return _source_of(path) if source == "auto" else source


def _source_of(path: str | None) -> str:
    if path is None:
        return "stdlib"
    suffixes = [suffix for suffix in PurePath(path).suffixes if suffix not in _COMPRESSED]
    return _SUFFIXES.get(suffixes[-1] if suffixes else "", "hub")
