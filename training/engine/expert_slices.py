"""How DeepSpeed learns that ranks share experts (`parallel.expert`).

ZeRO-1 and 2 partition a parameter that is marked `allreduce = False` over the ranks that have the same slice, the
"expert data parallel group", and sum its gradient over these; they divide by the number of all ranks, as they do
elsewhere, so that the sum is that of the global batch. All of this hangs on `has_moe_layers`, which DeepSpeed sets
where it finds a layer of its own; the model's are transformers'.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.moe.layer import MoE
from deepspeed.utils import groups
from torch import nn

from training.distributed import ExpertGroup, World

_MARKER = "mantissa_shared_experts"


class _Marker(MoE):
    """A layer of DeepSpeed's without parameters, by which it knows that there are experts."""

    def __init__(self, ranks: int) -> None:
        nn.Module.__init__(self)
        self.num_experts = ranks

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """The groups are made already."""


def experts_name(group: ExpertGroup) -> str:
    """DeepSpeed's name of the groups."""
    return f"ep_size_{group.size}"


@contextmanager
def shared_experts(model: Any, world: World) -> Iterator[None]:
    """Inside, DeepSpeed builds an engine for a model whose experts `world` shares, if any."""
    shared = world.experts
    if shared is None:
        yield
        return
    name, first = experts_name(shared), world.rank - shared.rank
    groups._EXPERT_PARALLEL_GROUP[name] = shared.group
    groups._EXPERT_PARALLEL_GROUP_RANKS[name] = range(first, first + shared.size)
    groups._EXPERT_DATA_PARALLEL_GROUP[name] = shared.same
    groups._EXPERT_DATA_PARALLEL_GROUP_RANKS[name] = range(shared.rank, world.world_size, shared.size)
    model.add_module(_MARKER, _Marker(shared.size))
    try:
        yield
    finally:
        delattr(model, _MARKER)


def forget_groups() -> None:
    """DeepSpeed would take those of an engine that is closed for the next one's."""
    for known in (
        groups._EXPERT_PARALLEL_GROUP,
        groups._EXPERT_PARALLEL_GROUP_RANKS,
        groups._EXPERT_DATA_PARALLEL_GROUP,
        groups._EXPERT_DATA_PARALLEL_GROUP_RANKS,
    ):
        known.clear()
