"""Whether a checkpoint is of this run: what two runs must share for one to go on from the other's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_ANEW = "start anew with run.resume=never or another run.name"

LAYOUT = ("world size", "ZeRO stage", "precision.compute", "offload")
"""What a run may change as it goes on: how the masters are cut up, and what is computed with (docs/elastic.md)."""

_BEFORE = {"data.document_masking": False}
"""What checkpoints were that do not say it."""


def other_identity(theirs: dict[str, Any], mine: dict[str, Any]) -> str | None:
    """The first of `mine` that is another one in `theirs`, in words; None when there is none."""
    theirs = {**_BEFORE, **theirs}
    for key, value in mine.items():
        if key not in LAYOUT and theirs.get(key) != value:
            return f"{key} is {theirs.get(key)} there and {value} in this run; use the same {key}, or {_ANEW}"
    return None


def other_layout(theirs: dict[str, Any], mine: dict[str, Any]) -> str | None:
    """How the layout differs, such as "world size 2 -> 4"; None where it does not."""
    changes = [
        f"{key} {theirs.get(key)} -> {mine[key]}" for key in LAYOUT if key in mine and theirs.get(key) != mine[key]
    ]
    return ", ".join(changes) or None


def parameter_shapes(model: torch.nn.Module) -> dict[str, list[int]]:
    """Every parameter's whole shape by name, also where ZeRO-3 holds it in parts."""
    return {name: list(getattr(p, "ds_shape", p.shape)) for name, p in model.named_parameters()}


def other_parameters(theirs: dict[str, list[int]], mine: dict[str, list[int]]) -> str | None:
    """The first parameter that has another shape or is only in one of them, in words; None when there is none."""
    for name in [*mine, *theirs]:
        if theirs.get(name) != mine.get(name):
            shapes = f"{name} has shape {theirs.get(name)} there and {mine.get(name)} in this run"
            return f"{shapes}; it is of another model; {_ANEW}"
    return None
