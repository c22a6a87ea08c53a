"""Tells DeepSpeed that ranks share experts (`parallel.expert`).

ZeRO partitions such a parameter over the ranks that have the same slice, and sums its gradient over these; it divides
by the number of all ranks, so that the sum is that of the global batch. ZeRO-1 and 2 recognise the parameter by
`allreduce = False` in a model with a layer of DeepSpeed's; ZeRO-3 refuses that, but recognises AutoEP's parameters.
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import deepspeed
from deepspeed.moe.layer import MoE
from deepspeed.utils import groups
from torch import nn

from training.distributed import ExpertGroup, World

_MARKER = "mantissa_shared_experts"
_OF_TENSORS = (
    *("_TENSOR_MODEL_PARALLEL_GROUP", "_MODEL_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP", "mpu"),
    *("_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE", "_MPU_TENSOR_MODEL_PARALLEL_RANK"),
)
_OF_EXPERTS = ("_EXPERT_PARALLEL_GROUP", "_EXPERT_DATA_PARALLEL_GROUP")


class _Marker(MoE):
    """A DeepSpeed layer without parameters, by which DeepSpeed sees that there are experts; the groups exist
    already."""

    def __init__(self, ranks: int) -> None:
        nn.Module.__init__(self)
        self.num_experts = ranks

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        pass


def experts_name(group: ExpertGroup) -> str:
    return f"ep_size_{group.size}"


@contextmanager
def shared_experts(model: Any, world: World, *, stage: int) -> Iterator[None]:
    """Context in which DeepSpeed builds an engine for a model whose experts `world` shares, if any."""
    shared = world.experts
    if shared is None:
        yield
        return
    name, first = experts_name(shared), world.rank - shared.rank
    groups._EXPERT_PARALLEL_GROUP[name] = shared.group
    groups._EXPERT_PARALLEL_GROUP_RANKS[name] = range(first, first + shared.size)
    groups._EXPERT_DATA_PARALLEL_GROUP[name] = shared.same
    groups._EXPERT_DATA_PARALLEL_GROUP_RANKS[name] = range(shared.rank, world.world_size, shared.size)
    if stage == 3:
        for parameter in model.parameters():
            if getattr(parameter, "group_name", None) == name:
                parameter.ds_zero_placement_family = "autoep_expert"
                parameter.ds_zero_partition_group_name = name
                parameter.ds_zero_partition_process_group = shared.same
        yield
        gather_in_order(model)
        return
    model.add_module(_MARKER, _Marker(shared.size))
    try:
        yield
    finally:
        delattr(model, _MARKER)


def forget_groups() -> None:
    """Forget a destroyed engine's groups: DeepSpeed would give them to the next engine, or refuse to build it."""
    for name in _OF_TENSORS:
        setattr(groups, name, None)  # not destroyed: one may be the group of all
    for name in _OF_EXPERTS:
        getattr(groups, name).clear()
        getattr(groups, f"{name}_RANKS").clear()
    if group := groups._get_zero_param_intra_parallel_group():  # of zero_hpz_partition_size
        deepspeed.comm.destroy_process_group(group)


def gather_in_order(model: Any) -> None:
    """Make all ranks gather ZeRO-3's parameters in the same order. DeepSpeed 0.19.8 prefetches them process group by
    process group in the order of a set, which differs between ranks, so that collectives would not match on GPUs."""
    for parameter in model.parameters():
        parameter.all_gather_coalesced = partial(_gathered_in_order, parameter.all_gather_coalesced)


def _gathered_in_order(gather: Callable[..., Any], parameters: Iterable[Any], **how: Any) -> Any:
    return gather(sorted(parameters, key=lambda parameter: parameter.ds_id), **how)
