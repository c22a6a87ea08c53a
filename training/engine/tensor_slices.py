"""The changes that DeepSpeed's AutoTP made to a model whose matrices are shared among ranks (`parallel.tensor`).

A parameter is a slice of a whole one, or a replica, whole and equal on every rank of the group. When replicas diverge,
the gradient norm stays the same on all ranks (docs/upstream/), so each step compares losses and the replicas' bits.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from modeling.tensor_parallel import CUT, cut, cut_of
from training.distributed import SliceGroup, TensorGroup, World
from training.engine.flips import bit_sum, bit_sums, halves
from training.engine.health import RanksDisagree

_STEPS = 16  # [steps] Period in which every value of a replica is checked once


def attach_slices(model: nn.Module, group: TensorGroup | None) -> None:
    """Record on every parameter how it is cut, for `cut`. Raises ValueError for one that is cut in an unknown way."""
    if group is None:
        return
    for name, parameter in model.named_parameters():
        try:
            setattr(parameter, CUT, cut_of(parameter))
        except ValueError as problem:
            raise ValueError(f"{name}: {problem}") from problem
    if not any(cut(parameter) for parameter in model.parameters()):
        raise ValueError("no parameter is cut")


def counts_here(parameter: Any, group: TensorGroup | None) -> bool:
    """Whether this rank's part of a parameter counts in a sum over all ranks: replicas are counted once."""
    return group is None or group.rank == 0 or cut(parameter) is not None


@dataclass(frozen=True)
class SharedVocabulary:
    """The rows of a head that is cut, as `modeling.linear_cross_entropy` asks for them."""

    first: int
    """[token] First of this rank's rows."""
    size: int
    """[tokens] Rows of all ranks."""
    sum: Callable[[torch.Tensor], torch.Tensor]
    """In-place sum over the ranks."""
    maximum: Callable[[torch.Tensor], torch.Tensor]


def shared_vocabulary(model: Any, group: TensorGroup | None) -> SharedVocabulary | None:
    """The ranks that share the rows of the output embedding; None if each rank has all of them."""
    how = cut(getattr(model.get_output_embeddings(), "weight", None))
    if group is None or how is None or how.dimension:
        return None
    return SharedVocabulary(sum(how.sizes[: group.rank]), sum(how.sizes), group.sum, group.maximum)


def replicas(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """The parameters that are whole on each of the ranks that share the others."""
    return ((name, parameter) for name, parameter in model.named_parameters() if cut(parameter) is None)


def slice_group(parameter: Any, world: World) -> SliceGroup | None:
    """The ranks that have the slices of a parameter; None if it is whole here."""
    return None if cut(parameter) is None else world.tensor or world.experts


def own_slice(values: torch.Tensor, parameter: Any, world: World) -> torch.Tensor:
    """This rank's slice of a whole parameter's tensor, as a view; all of it if the parameter is whole here."""
    how, group = cut(parameter), slice_group(parameter, world)
    return values if how is None or group is None else how.slice_of(values, group.rank)


def joined(values: torch.Tensor, parameter: Any, world: World) -> torch.Tensor:
    """The whole tensor of which `values` are this rank's slice; a replica's values unchanged. A group's collective."""
    return joined_in(slice_group(parameter, world), values, parameter)


def joined_in(group: SliceGroup | None, values: torch.Tensor, parameter: Any) -> torch.Tensor:
    """`joined` for a group that holds the slices of every cut parameter; group None: nothing is cut."""
    how = cut(parameter)
    return values if group is None or how is None else gathered(group, values, how.dimension, how.sizes)


def gathered(group: SliceGroup, values: torch.Tensor, dim: int, sizes: Sequence[int]) -> torch.Tensor:
    """The slices of all ranks side by side. dim, sizes: in which these differ, as those of a vocabulary by a row."""
    largest = list(values.shape)
    largest[dim] = max(sizes)
    padded = values.new_zeros(largest)
    padded.narrow(dim, 0, values.shape[dim]).copy_(values)
    return torch.cat([row.narrow(dim, 0, size) for row, size in zip(group.gather(padded), sizes, strict=True)], dim)


class Replicas:
    """The parameters that each rank has in full while ranks share the others."""

    def __init__(self, model: nn.Module, world: World) -> None:
        self._model, self._world = model, world

    @torch.no_grad()
    def sums(self, step: int) -> torch.Tensor:
        """(2,) float64: both halves of the sum of the bits of this step's share. No collective and no device sync."""
        total = torch.zeros((), dtype=torch.int64, device=self._world.device)
        for _, values in self._held():
            size = -(-len(values) // _STEPS)
            total += bit_sum(values[step % _STEPS * size :][:size])
        return halves(total).double()

    def require_equal(self, rows: Sequence[tuple[float, ...]]) -> None:
        """rows: each rank's loss and `sums`. If any differ, this is a collective and raises RanksDisagree."""
        assert self._world.tensor is not None
        size = self._world.tensor.size
        groups = [rows[first : first + size] for first in range(0, len(rows), size)]
        if all(len({row[1:] for row in group}) == 1 and _equal(*(row[0] for row in group)) for group in groups):
            return
        everywhere = self._world.gather_objects(bit_sums(dict(self._held())))
        what = f"their losses are {', '.join(repr(row[0]) for row in rows)}"
        for rank, found in enumerate(everywhere):
            first = everywhere[rank // size * size]
            if parted := [name for name in found if found[name] != first[name]]:
                what = f"{parted[0]} differs on rank {rank}"
                break
        raise RanksDisagree(
            f"ranks that share matrices (parallel.tensor = {size}) no longer compute the same: {what}; their replicas "
            "diverge while the gradient norm stays equal; resume from the last checkpoint"
        )

    def _held(self) -> Iterator[tuple[str, torch.Tensor]]:
        """This rank's part of the weights: all of a replica, or at ZeRO-3 its partition."""
        held = replicas(self._model)
        return ((name, getattr(parameter, "ds_tensor", parameter).detach().view(-1)) for name, parameter in held)


def _equal(*losses: float) -> bool:
    """Whether losses agree. One that is not finite is left to the guard: it may have begun on one rank."""
    return len(set(losses)) == 1 or not all(map(math.isfinite, losses))
