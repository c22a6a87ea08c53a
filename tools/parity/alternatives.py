"""Distances between sound alternatives on this machine: bounds on rounding are no tighter than these.

The reference's gradients in the run's dtype are computed again with linear layers that sum in halves, with the other of
eager and fused attention, and with another number of threads. Each rounds at other places and is as right.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from unittest.mock import patch

import torch
from torch import nn
from transformers import PreTrainedModel

from tools.parity.recompute import by_halves

_ATTENTION = {"sdpa": "eager", "eager": "sdpa"}


def alternatives(model: PreTrainedModel) -> dict[str, AbstractContextManager[None]]:
    """Contexts in which a model computes the same in another order, by name."""
    found: dict[str, AbstractContextManager[None]] = {"sums in halves": _halves(), "other threads": _threads()}
    attention = str(getattr(model.config, "_attn_implementation", None))
    if attention in _ATTENTION and (attention == "sdpa" or model._supports_sdpa):
        found[f"{_ATTENTION[attention]} attention"] = _other_attention(model, attention)
    return found


@contextmanager
def _halves() -> Iterator[None]:
    def forward(self: nn.Linear, given: torch.Tensor) -> torch.Tensor:
        return by_halves({"weight": self.weight, "bias": self.bias}, given)

    with patch.object(nn.Linear, "forward", forward):
        yield


@contextmanager
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1 if before > 1 else 2)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _other_attention(model: PreTrainedModel, own: str) -> Iterator[None]:
    model.set_attn_implementation(_ATTENTION[own])
    try:
        yield
    finally:
        model.set_attn_implementation(own)
