"""Reads a DeepSpeed JSON, checks its keys and values against keys.py, and extracts ZeRO stage and offload."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from config.deepspeed.keys import REFUSED, SECTIONS
from config.errors import UserError
from config.json_text import read_object
from config.load import show, suggest


def read_document(path: Path) -> dict[str, Any]:
    """The object in a DeepSpeed JSON file. Raises UserError."""
    return read_object(path, "DeepSpeed JSON")


def in_fp32(document: dict[str, Any]) -> dict[str, Any]:
    """The document without its 16-bit sections, to run the same in FP32."""
    return {key: value for key, value in document.items() if key not in ("bf16", "fp16", "torch_autocast")}


def initializable(resolved: dict[str, Any]) -> dict[str, Any]:
    """A resolved JSON for `deepspeed.initialize`: without train_batch_size if ranks share matrices, since DeepSpeed
    0.19.8 checks it against a different number of ranks."""
    shared = resolved.get("tensor_parallel", {}).get("autotp_size", 1) > 1
    return {key: value for key, value in resolved.items() if not shared or key != "train_batch_size"}


def write_in_fp32(path: Path, copy: Path) -> None:
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_text(json.dumps(in_fp32(read_document(path)), indent=2) + "\n", encoding="utf-8")


def check_document(path: Path, document: dict[str, Any]) -> None:
    """Raises UserError for an unknown or refused key, a value of the wrong kind, or an offload that the stage lacks."""
    _check_keys(path, document)
    zero, stage = document.get("zero_optimization", {}), zero_stage(document)
    for name, least in (("optimizer", 1), ("param", 3)):
        key, section = f"zero_optimization.offload_{name}", zero.get(f"offload_{name}", {})
        device = section.get("device", "none")
        if device != "none" and stage < least:
            needed = f"needs zero_optimization.stage {least} or more, not {stage}; remove it"
            raise UserError(f"{path}: {key}.device = '{device}' {needed}")
        if device == "nvme" and not section.get("nvme_path"):
            raise UserError(f"{path}: {key}.nvme_path is missing; device = 'nvme' needs it")


def unknown_keys(path: Path, document: dict[str, Any]) -> list[str]:
    """Keys of another trainer's JSON unknown to DeepSpeed. Raises UserError for wrong values and misspelt keys."""
    found: list[str] = []
    _check_keys(path, document, unknown=found)
    return found


def zero_stage(document: dict[str, Any]) -> int:
    return int(document.get("zero_optimization", {}).get("stage", 0))


def offload(document: dict[str, Any]) -> str:
    """`none`, `optimizer`, `param` or `optimizer+param`: what ZeRO offloads to host memory."""
    zero = document.get("zero_optimization", {})
    parts = [name for name in ("optimizer", "param") if zero.get(f"offload_{name}", {}).get("device", "none") != "none"]
    return "+".join(parts) or "none"


def leaves(section: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted key and value of everything that is not a section."""
    for key, value in section.items():
        if isinstance(value, dict):
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _check_keys(path: Path, section: dict[str, Any], prefix: str = "", *, unknown: list[str] | None = None) -> None:
    """Check one section and those below it. unknown: collects the keys of `unknown_keys`."""
    kinds = SECTIONS[prefix]
    dot = f"{prefix}." if prefix else ""
    for name, value in section.items():
        key = dot + name
        if unknown is not None and (key in REFUSED or value is None or f"stage3_{name}" in kinds):
            continue
        if unknown is not None and name not in kinds:
            if near := difflib.get_close_matches(name, kinds, 1, 0.8):
                does = "stops at it" if prefix else "ignores it"
                raise UserError(f"{path}: {key}: DeepSpeed has no such key and {does}; did you mean {near[0]}?")
            unknown.append(key)
            continue
        if key in REFUSED:
            raise UserError(f"{path}: {key} is refused: {REFUSED[key]}")
        if name not in kinds:
            known = [f"{parent}.{item}" if parent else item for parent, keys in SECTIONS.items() for item in keys]
            raise UserError(f"{path}: {key}: DeepSpeed 0.19.8 has no such key{suggest(key, known)}")
        if kinds[name] == "section" and isinstance(value, dict):
            _check_keys(path, value, key, unknown=unknown)
        elif value != "auto" or kinds[name] == "section":
            check_value(path, key, value, kinds[name])
    stage = section.get("stage")
    if prefix == "zero_optimization" and stage is not None and stage not in (0, 1, 2, 3):
        raise UserError(f"{path}: zero_optimization.stage = {show(stage)} is not one of 0, 1, 2, 3")


def check_value(path: Path, key: str, value: Any, kind: str) -> None:
    """Raises UserError unless `value` is of its kind in keys.SECTIONS."""
    positive = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
    kinds = {
        "section": (False, "an object; write {...}"),
        "bool": (isinstance(value, bool), "true or false"),
        # DeepSpeed's own documentation writes bucket sizes as 5e8, which JSON reads as a float.
        "int": (positive and float(value).is_integer(), "a whole number of 0 or more"),
        "float": (positive, "a number of 0 or more"),
        "str": (isinstance(value, str), "text"),
        "list": (isinstance(value, list), "a list"),
    }
    right, expected = kinds.get(kind, (value in kind.split("|"), f"one of {', '.join(kind.split('|'))}"))
    if not right:
        raise UserError(f"{path}: {key} = {show(value)} is not {expected}")
