"""FP32 masters out of DeepSpeed's checkpoint files: one process, any ZeRO stage, any number of ranks, no GPU.

DeepSpeed's own `zero_to_fp32` refuses ZeRO-0 and the BF16 optimizer of ZeRO-1, and leaves frozen parameters of ZeRO-1
out (0.19.8), so the partitions are read here. Each master is then held against what else the checkpoint has of it:

- ZeRO-0: the weights in the model file are the masters; there is nothing else.
- ZeRO-1 and 2: partitions are addressed by parameter name; the model file holds the computing weights whole, and every
  master, rounded to their dtype, has to be equal to them.
- ZeRO-3: partitions are addressed by their order in each parameter group; `zero_to_fp32` has to read the same.

Files are mapped, not read, and unpickled with an allow-list of classes: a file that names any other code is refused.
"""

from __future__ import annotations

import contextlib
import io
import math
import pickle
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from deepspeed.runtime.fp16 import loss_scaler as deepspeed_scaler
from deepspeed.runtime.zero.config import ZeroStageEnum
from deepspeed.utils.tensor_fragment import fragment_address
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from config.errors import UserError
from precision.loss_scale import DeepSpeedPolicy
from training.loss_scaler import LossScaler

ALLOWED: list[Callable | tuple[Callable, str]] = [
    ZeroStageEnum,
    fragment_address,
    LossScaler,
    DeepSpeedPolicy,
    deepspeed_scaler.LossScaler,
    deepspeed_scaler.DynamicLossScaler,
]
"""Classes that may be named in a checkpoint's pickles, beside tensors and plain types."""

_OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")

Read = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class SavedTensor:
    """One parameter of a checkpoint, not read yet."""

    shape: torch.Size
    read: Read
    """The FP32 master, whole; of a frozen parameter, which has none, its weight in the dtype it was kept in."""
    again: Read | None = None
    """The same from the other place that has it, in that place's dtype; None where there is no other."""


@dataclass
class SavedModel:
    """What a checkpoint's DeepSpeed files hold of the model."""

    stage: int
    """ZeRO stage; 2 stands for 1 and 2, whose files are alike."""
    ranks: int
    tensors: dict[str, SavedTensor] = field(default_factory=dict)
    """Every parameter, by its name in the model. A shared one may be there under each of its names."""
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    """Persistent buffers, as they were kept."""
    frozen: set[str] = field(default_factory=set)
    """Parameters that no optimizer group holds."""
    second_reading: str = "none: at ZeRO-0 the weights are the masters"
    """What `again` reads, in words."""


def open_saved_model(folder: Path) -> SavedModel:
    """Open a `deepspeed/` folder of a checkpoint.

    Raises UserError when a file is missing, damaged, of a kind that cannot be read here, or names code that is not
    allowed.
    """
    shards = _optimizer_files(folder)
    if not shards:
        return _without_zero(folder)
    states = [_load(path)["optimizer_state_dict"] for path in shards]
    partitions = states[0].get("partition_count", len(states))
    expected = max(partitions) if isinstance(partitions, list) else partitions
    if expected != len(states):
        raise UserError(f"{folder}: has {len(states)} of {expected} *_optim_states.pt files; restore the missing ones")
    if "fp32_flat_groups" in states[0]:
        return _partitioned_weights(folder, states)
    if "single_partition_of_fp32_groups" in states[0]:
        return _partitioned_masters(folder, states)
    raise UserError(
        f"{shards[0]}: holds no FP32 partitions that this reader knows; the engine that saved it can load it"
    )


def _without_zero(folder: Path) -> SavedModel:
    state = _load(folder / "mp_rank_00_model_states.pt")
    saved = SavedModel(stage=0, ranks=1)
    _take_buffers(saved, state)
    for name, weight in state["module"].items():
        if name not in saved.buffers:
            saved.tensors[name] = SavedTensor(weight.shape, _of(weight))
    return saved


def _partitioned_masters(folder: Path, states: list[dict[str, Any]]) -> SavedModel:
    """ZeRO-1 and 2: each rank's flat partition of a group, with the address of every parameter's part in it."""
    state = _load(folder / "mp_rank_00_model_states.pt")
    saved = SavedModel(stage=2, ranks=len(states), second_reading="the weights in the model file, rounded alike")
    _take_buffers(saved, state)
    module, shared = state["module"], state["shared_params"] or {}
    parts: dict[str, list[torch.Tensor]] = {}
    for partition in states:
        groups = partition["single_partition_of_fp32_groups"]
        for group, addresses in zip(groups, partition["param_slice_mappings"], strict=True):
            for name, address in addresses.items():
                # an address may end in the padding that was cut off the last rank's partition
                parts.setdefault(name, []).append(group[address.start : address.start + address.numel])
    for shapes in state["param_shapes"]:
        for name, shape in shapes.items():
            _require_size(folder, name, shape, sum(part.numel() for part in parts.get(name, [])))
            saved.tensors[name] = SavedTensor(shape, _joined(parts[name], shape), _of(module[name]))
    for name, weight in module.items():
        if name not in saved.tensors and name not in saved.buffers and name not in shared:
            saved.frozen.add(name)
            saved.tensors[name] = SavedTensor(weight.shape, _of(weight))
    return saved


def _partitioned_weights(folder: Path, states: list[dict[str, Any]]) -> SavedModel:
    """ZeRO-3: every parameter is cut into equal parts, the last one padded; each rank's parts lie end to end."""
    files = [folder / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt" for rank in range(len(states))]
    models = [_load(path) for path in files]
    saved = SavedModel(stage=3, ranks=len(states), second_reading="DeepSpeed's zero_to_fp32")
    _take_buffers(saved, models[0])
    upstream = _zero_to_fp32(folder)
    for index, shapes in enumerate(models[0]["param_shapes"]):
        flats, start = [state["fp32_flat_groups"][index] for state in states], 0
        for name, shape in shapes.items():
            length = math.ceil(shape.numel() / len(states))
            parts = [flat[start : start + length] for flat in flats]
            start += length
            _require_size(folder, name, shape, sum(part.numel() for part in parts))
            saved.tensors[name] = SavedTensor(shape, _joined(parts, shape), _upstreams(upstream, name))
        if any(flat.numel() != start for flat in flats):
            raise UserError(
                f"{folder}: group {index} holds more than its {len(shapes)} parameters; not a file of ZeRO-3"
            )
    for name, shape in (models[0]["frozen_param_shapes"] or {}).items():
        parts = [model["frozen_param_fragments"][name] for model in models]
        _require_size(folder, name, shape, sum(part.numel() for part in parts))
        saved.frozen.add(name)
        saved.tensors[name] = SavedTensor(shape, _joined(parts, shape), _upstreams(upstream, name))
    return saved


def _zero_to_fp32(folder: Path) -> dict[str, Any]:
    """DeepSpeed's own reading, lazy. It unpickles without an allow-list, files that have passed ours."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return get_fp32_state_dict_from_zero_checkpoint(str(folder.parent), tag=folder.name, lazy_mode=True)


def _upstreams(upstream: dict[str, Any], name: str) -> Read:
    return lambda: upstream[name].contiguous()


def _take_buffers(saved: SavedModel, state: dict[str, Any]) -> None:
    saved.buffers = {name: state["module"][name] for name in state["buffer_names"] or ()}


def _of(tensor: torch.Tensor) -> Read:
    return lambda: tensor


def _joined(parts: list[torch.Tensor], shape: torch.Size) -> Read:
    return lambda: torch.cat([part.view(-1) for part in parts])[: shape.numel()].view(shape)


def _require_size(folder: Path, name: str, shape: torch.Size, found: int) -> None:
    if found < shape.numel():
        raise UserError(
            f"{folder}: the partitions hold {found} of the {shape.numel()} values of {name}; masters that were "
            "offloaded to NVMe are not in the checkpoint, else a file is damaged"
        )


def _optimizer_files(folder: Path) -> list[Path]:
    """One file a rank, in rank order."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give a checkpoints/step-N folder of a run")
    found = {}
    for path in folder.iterdir():
        match = _OPTIMIZER_FILE.fullmatch(path.name)
        if match and int(match[2]):
            raise UserError(f"{path}: is of a tensor-parallel run, which cannot be exported")
        if match:
            found[int(match[1])] = path
    return [found[rank] for rank in sorted(found)]


def _load(path: Path) -> dict[str, Any]:
    try:
        with torch.serialization.safe_globals(ALLOWED):
            return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except FileNotFoundError as error:
        raise UserError(f"{path}: is missing; the checkpoint is not whole") from error
    except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
        refused = re.search(r"GLOBAL ([\w.]+)", str(error))
        if refused:
            reason = f"names code that is not allowed in a checkpoint ({refused[1]}); do not load it"
        else:
            reason = f"cannot be read ({' '.join(str(error).split())[:120]}); use another checkpoint"
        raise UserError(f"{path}: {reason}") from error
