"""Distances between equally valid computations on this machine; bounds on rounding are no tighter than these.

The reference's gradients in the run's dtype are recomputed with linear layers that sum in halves, with eager instead of
fused attention or vice versa, and with another number of threads. Each rounds in other places and is equally valid.

    python -m tools.parity.alternatives --config FILE ...

is `train.py` from weights that are off by a bit of FP16: an FP32 run as sound as its twin. If a whole run and its twin
differ, the gate checks with it whether chance alone makes as large a difference. Weights are perturbed rather than the
learning rate: Adam's first steps are little more than the signs of the gradients, which another rate does not change,
while rounding flips some of them, which moves their weights by twice the rate.
"""

from __future__ import annotations

import runpy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from transformers import PreTrainedModel

from launch.job import TRAIN
from tools.parity.recompute import by_halves
from training.engine import build

A_BIT = 2.0**-12
"""[fraction] Random change of each weight, up or down, as large as the error of rounding it to FP16."""
_ATTENTION = {"sdpa": "eager", "eager": "sdpa"}


def alternatives(model: PreTrainedModel) -> dict[str, AbstractContextManager[None]]:
    """Context managers under which a model computes the same in a different order, by name."""
    threads, attention = torch.get_num_threads(), str(getattr(model.config, "_attn_implementation", None))
    found: dict[str, AbstractContextManager[None]] = {"sums in halves": _halves()}
    found["other threads"] = _switched(torch.set_num_threads, threads, 1 if threads > 1 else 2)
    if attention in _ATTENTION and (attention == "sdpa" or model._supports_sdpa):
        other = _ATTENTION[attention]
        found[f"{other} attention"] = _switched(model.set_attn_implementation, attention, other)
    return found


@contextmanager
def _halves() -> Iterator[None]:
    def forward(self: nn.Linear, given: torch.Tensor) -> torch.Tensor:
        return by_halves({"weight": self.weight, "bias": self.bias}, given)

    with patch.object(nn.Linear, "forward", forward):
        yield


@contextmanager
def _switched(switch: Callable[[Any], object], own: Any, other: Any) -> Iterator[None]:
    switch(other)
    try:
        yield
    finally:
        switch(own)


@contextmanager
def moved_start() -> Iterator[None]:
    """Context manager: models are built with weights that are off by A_BIT."""
    build_model = build.build_model

    def moved(*args: Any, **kwargs: Any) -> Any:
        model = build_model(*args, **kwargs)
        dice = torch.Generator().manual_seed(0)
        for parameter in model.parameters():
            values = getattr(parameter, "ds_tensor", parameter).data  # a rank's slice at ZeRO-3
            up = torch.randint(2, values.shape, generator=dice).to(values.device)
            if values.is_floating_point():
                values.mul_(1 + A_BIT * (2 * up - 1))
        return model

    with patch.object(build, "build_model", moved):
        yield


if __name__ == "__main__":
    with moved_start():
        runpy.run_path(*TRAIN, run_name="__main__")
