"""This rank's part of the FP32 masters and of the optimizer's state, at every ZeRO stage."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from config.json_text import json_sha256
from training.distributed import World


@dataclass(frozen=True)
class Start:
    """The masters before the first step of this session."""

    source: str
    """Where their values come from, human-readable."""
    checksums: Mapping[str, str]
    """Maps a parameter's name to the checksum of those values (`tensors.checksums_of`)."""

    def __str__(self) -> str:
        return f"{self.source}, equal to the bit (checksum {json_sha256(self.checksums, sort_keys=True)[:16]})"


def local_masters(optimizer: Any) -> list[torch.Tensor]:
    """This rank's masters; at ZeRO-0 the parameters. Split masters have no values here: see `Engine.masters`."""
    for name in ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition"):
        if hasattr(optimizer, name):
            return list(getattr(optimizer, name))
    return [parameter.data for group in optimizer.param_groups for parameter in group["params"]]


def local_states(optimizer: torch.optim.Optimizer, name: str) -> list[torch.Tensor]:
    """This rank's partition of one of torch's optimizer's state tensors; empty before the first applied step."""
    return [state[name] for state in optimizer.state.values() if isinstance(state.get(name), torch.Tensor)]


def sum_of_squares(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Sum of squares over all values of the tensors: a () float64 tensor."""
    total = torch.zeros((), dtype=torch.float64, device=device)
    for tensor in tensors:
        total += torch.linalg.vector_norm(tensor.detach(), dtype=torch.float64).square().to(device)
    return total


def update_ratio(before: list[torch.Tensor], after: list[torch.Tensor], *, stage: int, world: World) -> float:
    """||after - before|| / ||before|| over all ranks, from this rank's partition of the masters. A collective."""
    changes = (new.detach() - old for old, new in zip(before, after, strict=True))
    squares = torch.stack([sum_of_squares(changes, world.device), sum_of_squares(before, world.device)])
    changed, weights = (squares if stage == 0 else world.sum(squares)).tolist()
    return (changed / weights) ** 0.5 if weights else 0.0
