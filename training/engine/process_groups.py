"""Process groups that DeepSpeed keeps in globals of its own, past the engine that they were made for."""

import deepspeed
from deepspeed.utils import groups

_OF_TENSORS = (
    *("_TENSOR_MODEL_PARALLEL_GROUP", "_MODEL_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP", "mpu"),
    *("_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE", "_MPU_TENSOR_MODEL_PARALLEL_RANK"),
)
_OF_EXPERTS = (
    "_EXPERT_PARALLEL_GROUP",
    "_EXPERT_PARALLEL_GROUP_RANKS",
    "_EXPERT_DATA_PARALLEL_GROUP",
    "_EXPERT_DATA_PARALLEL_GROUP_RANKS",
)


def forget_groups() -> None:
    """Forget a destroyed engine's groups, which DeepSpeed would give to the next one, or refuse to build it."""
    for name in _OF_TENSORS:
        setattr(groups, name, None)  # not destroyed: one may be the group of all
    for name in _OF_EXPERTS:
        getattr(groups, name).clear()
    if group := groups._get_zero_param_intra_parallel_group():  # of zero_hpz_partition_size
        deepspeed.comm.destroy_process_group(group)
