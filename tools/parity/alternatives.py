"""Distances between equally valid computations on this machine; bounds on rounding are no tighter than these.

The reference's gradients in the run's dtype are recomputed with linear layers that sum in halves, with eager instead of
fused attention or vice versa, and with one thread instead of several. Each rounds in other places and is equally valid.

    python -m tools.parity.alternatives OFF DRAW --config FILE ...

is `train.py` from weights that are off by the error of rounding them to the run's dtype: an FP32 run as sound as its
twin. If a whole run and its twin differ, the gate checks with a few of them whether chance alone makes as large a
difference. Weights are perturbed rather than the learning rate: Adam's first steps are little more than the signs of
the gradients, which another rate does not change, while rounding flips some of them, which moves their weights by twice
the rate.
"""

from __future__ import annotations

import runpy
import sys
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

_ATTENTION = {"sdpa": "eager", "eager": "sdpa"}


def alternatives(model: PreTrainedModel) -> dict[str, AbstractContextManager[None]]:
    """Context managers under which a model computes the same in a different order, by name."""
    threads, attention = torch.get_num_threads(), str(getattr(model.config, "_attn_implementation", None))
    found: dict[str, AbstractContextManager[None]] = {"sums in halves": _halves()}
    if threads > 1:  # one per core of this rank: more would wait for each other most of the time
        found["one thread"] = _switched(torch.set_num_threads, threads, 1)
    if attention in _ATTENTION and (attention == "sdpa" or model._supports_sdpa):
        other = _ATTENTION[attention]
        found[f"{other} attention"] = _switched(model.set_attn_implementation, attention, other)
    return found


def _halves() -> AbstractContextManager[Any]:
    def forward(self: nn.Linear, given: torch.Tensor) -> torch.Tensor:
        return by_halves({"weight": self.weight, "bias": self.bias}, given)

    return patch.object(nn.Linear, "forward", forward)


@contextmanager
def _switched(switch: Callable[[Any], object], own: Any, other: Any) -> Iterator[None]:
    switch(other)
    try:
        yield
    finally:
        switch(own)


@contextmanager
def moved_start(off: float, draw: int) -> Iterator[None]:
    """Context manager: each weight of a newly built model is larger or smaller by the fraction `off`, by chance.

    draw: seed of the signs.
    """
    build_model = build.build_model

    def moved(*args: Any, **kwargs: Any) -> Any:
        model = build_model(*args, **kwargs)
        dice = torch.Generator().manual_seed(draw)
        for parameter in model.parameters():
            values = getattr(parameter, "ds_tensor", parameter).data  # a rank's slice at ZeRO-3
            up = torch.randint(2, values.shape, generator=dice).to(values.device)
            if values.is_floating_point():
                values.mul_(1 + off * (2 * up - 1))
        return model

    with patch.object(build, "build_model", moved):
        yield


if __name__ == "__main__":
    at = 1 + sys.argv[1].startswith("--local_rank")  # which the deepspeed launcher puts first
    fraction, seed = sys.argv[at : at + 2]
    del sys.argv[at : at + 2]
    with moved_start(float(fraction), int(seed)):
        runpy.run_path(*TRAIN, run_name="__main__")
