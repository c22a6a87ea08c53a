"""`train.py` from weights that are a bit of FP16 off: an FP32 run that is as sound as its twin.

What the parity gate asks where a whole run and its twin differ: does chance alone make as much of a difference? It is
weights that are moved, and not the learning rate. Adam's first steps are little more than the signs of the gradients,
which another rate leaves as they were, while rounding turns some of them over, each by twice the rate.
"""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

from launch.job import TRAIN
from training.engine import build

A_BIT = 2.0**-12
"""[fraction] Change of each weight, up or down by chance: as large as the error of rounding it to FP16."""


@contextmanager
def moved_start() -> Iterator[None]:
    """Context in which models are built with weights that are A_BIT off."""
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
