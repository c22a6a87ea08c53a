"""The FP32 tensors that the optimizer updates, whatever DeepSpeed's optimizer of that stage calls them."""

from __future__ import annotations

from typing import Any

import torch

from training.distributed import Place


def local_masters(optimizer: Any) -> list[torch.Tensor]:
    """This rank's partition of the masters; at ZeRO-0 all of them, which are the parameters."""
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
        if hasattr(optimizer, name):
            return list(getattr(optimizer, name))
    return [parameter.data for group in optimizer.param_groups for parameter in group["params"]]


class UpdateMeter:
    """Measures how large an update was against the weights it changed. Copies the masters: only where asked for."""

    def __init__(self, optimizer: Any, *, stage: int, place: Place) -> None:
        self._optimizer, self._stage, self._place = optimizer, stage, place
        self._before: list[torch.Tensor] = []

    def start(self) -> None:
        """Call right before the optimizer step."""
        self._before = [master.detach().clone() for master in local_masters(self._optimizer)]

    def ratio(self) -> float:
        """||after - before|| / ||before|| over all ranks, to be called after the step. A collective."""
        squares = torch.zeros(2, dtype=torch.float64, device=self._place.device)
        for before, after in zip(self._before, local_masters(self._optimizer), strict=True):
            squares[0] += (after.detach() - before).double().square().sum().to(squares.device)
            squares[1] += before.double().square().sum().to(squares.device)
        self._before = []
        changed, weights = (squares if self._stage == 0 else self._place.sum(squares)).tolist()
        return (changed / weights) ** 0.5 if weights else 0.0
