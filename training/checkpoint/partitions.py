"""Read FP32 masters and optimizer state from DeepSpeed's checkpoint files: any ZeRO stage and number of ranks, no GPU.

DeepSpeed's own `zero_to_fp32` refuses ZeRO-0 and the BF16 optimizer of ZeRO-1, and omits frozen parameters of ZeRO-1
(0.19.8). ZeRO-1 and 2 address partitions by parameter name, ZeRO-3 by their order in each parameter group. Files are
memory-mapped unless they are encrypted.
"""

import contextlib
import io
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from config.errors import UserError, one_line
from config.optimizers import COUNT
from modeling.tensor_parallel import Cut
from training.checkpoint.manifest import STATE, Damaged, read_state
from training.checkpoint.reader import PLAIN, Opener

_OPTIMIZER_FILE = re.compile(r"(?:bf16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
_MODEL_FILE = re.compile(r"(?:zero_pp_rank_\d+_)?mp_rank_(\d+)_model_states\.pt")

Read = Callable[[], torch.Tensor]
ReadFile = Callable[[Path], dict[str, Any]]
_Piece = tuple[torch.Tensor, dict[str, Any] | None, slice]
"""A rank's flat masters of a group, their optimizer state, and the place of a parameter's part in both."""


@dataclass(frozen=True)
class Stored:
    """A tensor in the files of the ranks that have its partitions or slices; read on demand."""

    shape: torch.Size
    parts: Sequence[torch.Tensor] = ()
    """Its values, one part after another; anything beyond `shape` is padding."""
    slices: "Sequence[Stored]" = ()
    """Instead of parts: the slices of the ranks that share it, cut along `dimension`."""
    dimension: int = 0

    def read(self) -> torch.Tensor:
        """The whole tensor, in the dtype that it is stored in."""
        if self.slices:
            return torch.cat([own.read() for own in self.slices], self.dimension)
        return self.values(0, self.shape.numel()).view(self.shape)

    def values(self, start: int, length: int) -> torch.Tensor:
        """(length,) its values from `start` on; a view if one part has them all. Slices are read in full."""
        if self.slices:
            return self.read().view(-1)[start : start + length]
        found, at = [], 0
        for part in self.parts:
            lower, upper = max(start, at), min(start + length, at + part.numel())
            if lower < upper:
                found.append(part.reshape(-1)[lower - at : upper - at])
            at += part.numel()
        if len(found) == 1:
            return found[0]
        return torch.cat(found) if found else torch.empty(0)


@dataclass(frozen=True)
class OptimizerState:
    tensors: Mapping[str, Stored]
    """State tensors, FP32, of the parameter's size, by their names in the file."""
    updates: int
    """Updates so far; 0 if the optimizer does not count them."""


@dataclass(frozen=True)
class SavedTensor:
    """One parameter of a checkpoint; read on demand."""

    shape: torch.Size
    read: Read
    """Reads the whole FP32 master; for a frozen parameter, which has none, the weight in the dtype it was saved in."""
    second_copy: Read | None = None
    """Reads the tensor's second copy in the checkpoint, in that copy's dtype; None if there is none."""
    master: Stored | None = None
    """None for a frozen parameter."""
    state: OptimizerState | None = None
    """None for a frozen parameter, before the first applied step, and at ZeRO-0 (`SavedModel.unnamed_states`)."""


@dataclass
class SavedModel:
    """The model in a checkpoint's DeepSpeed files."""

    stage: int
    """ZeRO stage; 2 means 1 or 2, whose files have the same layout."""
    ranks: int
    tensors: dict[str, SavedTensor] = field(default_factory=dict)
    """Every parameter, by its name in the model. A shared one may appear under each of its names."""
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)
    """Persistent buffers, in the dtype they were saved in."""
    frozen: set[str] = field(default_factory=set)
    """Parameters in no optimizer group."""
    unnamed_states: list[OptimizerState | None] = field(default_factory=list)
    """State at ZeRO-0, without names: in the order of the optimizer's groups and their parameters."""
    second_source: str = "none: at ZeRO-0 the weights are the masters"
    """Source of `second_copy`, for messages."""


def open_saved_model(folder: Path, opener: Opener = PLAIN) -> SavedModel:
    """Open a `deepspeed/` folder of a checkpoint, joining what ranks share (`parallel.tensor`). Raises UserError when a
    file is missing, damaged, in an unknown layout, or names code that is not allowed."""
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder; give a checkpoints/step-N folder of a run")
    matches = (_MODEL_FILE.fullmatch(path.name) for path in folder.iterdir())
    ranks = max((int(match[1]) for match in matches if match), default=0) + 1
    each = [_open_slices(folder, opener, rank, of=ranks) for rank in range(ranks)]
    return each[0] if ranks == 1 else _join(folder, each)


def _open_slices(folder: Path, opener: Opener, rank: int, *, of: int) -> SavedModel:
    """The part of the model on one of the ranks that share matrices; all of it if none do."""
    matches = filter(None, (_OPTIMIZER_FILE.fullmatch(path.name) for path in folder.iterdir()))
    found = {int(match[1]): folder / match[0] for match in matches if int(match[2]) == rank}
    shards, read = [found[part] for part in sorted(found)], partial(opener.read, mmap=True)
    if not shards:
        return _open_stage_0(folder, read, rank)
    states = [read(path)["optimizer_state_dict"] for path in shards]
    partitions = states[0].get("partition_count", len(states))
    expected = max(partitions) if isinstance(partitions, list) else partitions
    if expected != len(states):
        raise UserError(f"{folder}: has {len(states)} of {expected} *_optim_states.pt files; restore the missing ones")
    if "fp32_flat_groups" in states[0]:
        return _open_stage_3(folder, states, read, rank, upstream=opener.key is None and of == 1)
    if "single_partition_of_fp32_groups" in states[0]:
        return _open_stages_1_and_2(folder, states, read, rank)
    raise UserError(f"{shards[0]}: holds no known FP32 partitions; load it with the engine that saved it")


def _join(folder: Path, each: list[SavedModel]) -> SavedModel:
    """The whole model, joined from the parts of the ranks that share matrices."""
    try:
        cuts = {name: Cut(*cut) for name, cut in read_state(folder.parent)["tensor_slices"].items()}
    except (Damaged, KeyError, TypeError, OSError) as problem:
        raise UserError(f"{folder}: how its ranks share matrices is not in {STATE}: {one_line(problem)}") from problem
    tensors = dict(each[0].tensors)
    for name in tensors.keys() & cuts.keys():
        tensors[name] = _join_tensor([saved.tensors[name] for saved in each], cuts[name])
    return replace(each[0], ranks=sum(saved.ranks for saved in each), tensors=tensors)


def _join_tensor(slices: list[SavedTensor], cut: Cut) -> SavedTensor:
    """A parameter joined from the slices of the ranks that share it."""
    shape = cut.whole(slices[0].shape)

    def joined(stored: list[Stored]) -> Stored:
        return Stored(shape, slices=stored, dimension=cut.dimension)

    def read(reads: list[Read]) -> Read:
        return lambda: torch.cat([one() for one in reads], cut.dimension)

    seconds = [tensor.second_copy for tensor in slices if tensor.second_copy is not None]
    masters = [tensor.master for tensor in slices if tensor.master is not None]
    states = [tensor.state for tensor in slices if tensor.state is not None]
    second_copy = read(seconds) if len(seconds) == len(slices) else None
    master, state = joined(masters) if len(masters) == len(slices) else None, None
    if len(states) == len(slices):
        tensors = {key: joined([one.tensors[key] for one in states]) for key in states[0].tensors}
        state = OptimizerState(tensors, states[0].updates)
    return SavedTensor(shape, read([tensor.read for tensor in slices]), second_copy, master, state)


def _open_stage_0(folder: Path, read: ReadFile, rank: int) -> SavedModel:
    state = read(folder / _model_file(rank))
    saved = SavedModel(stage=0, ranks=1, buffers=_buffers(state))
    for name, weight in state["module"].items():
        if name not in saved.buffers:
            whole = Stored(weight.shape, [weight])
            master = whole if weight.dtype == torch.float32 else None
            saved.tensors[name] = SavedTensor(weight.shape, whole.read, master=master)
    optimizer = state.get("optimizer") or {"state": {}, "param_groups": []}
    for group in optimizer["param_groups"]:
        for index in group["params"]:
            state = optimizer["state"].get(index)
            shape = torch.Size([max((tensor.numel() for tensor in _tensors(state).values()), default=0)])
            saved.unnamed_states.append(_joined_state(folder, f"number {index}", [state], [slice(None)], shape))
    return saved


def _open_stages_1_and_2(folder: Path, states: list[dict[str, Any]], read: ReadFile, rank: int) -> SavedModel:
    """ZeRO-1 and 2: each rank's flat partition of a group, with the address of every parameter's part in it."""
    state = read(folder / _model_file(rank))
    second = "the weights in the model file, rounded alike"
    saved = SavedModel(stage=2, ranks=len(states), buffers=_buffers(state), second_source=second)
    module, shared = state["module"], state["shared_params"] or {}
    partitions = states[0].get("partition_count")
    optimizers = [_flat_states(partition["base_optimizer_state"]) for partition in states]
    for index, shapes in enumerate(state["param_shapes"]):
        # number of ranks that share a group's experts (`parallel.expert`): it has fewer partitions by this factor
        sharing = len(states) // partitions[index] if isinstance(partitions, list) else 1
        for name, shape in shapes.items():
            pieces: list[_Piece | None] = []
            for partition, kept in zip(states, optimizers, strict=True):
                flat, at = partition["single_partition_of_fp32_groups"][index], partition["param_slice_mappings"][index]
                # an address may end in the padding that was cut off the last rank's partition
                where = slice(at[name].start, at[name].start + at[name].numel) if name in at else None
                pieces.append((flat, kept[index], where) if where else None)
            second_copy = Stored(shape, [module[name]]).read if sharing == 1 else None
            saved.tensors[name] = _open_master(folder, name, shape, pieces, sharing, second_copy)
    for name, weight in module.items():
        if name not in saved.tensors and name not in saved.buffers and name not in shared:
            saved.frozen.add(name)
            saved.tensors[name] = SavedTensor(weight.shape, Stored(weight.shape, [weight]).read)
    return saved


def _open_master(
    folder: Path, name: str, shape: torch.Size, pieces: Sequence[_Piece | None], sharing: int, second_copy: Read | None
) -> SavedTensor:
    """A parameter, from its piece on each rank. sharing: the number of ranks that share its experts, each with a slice;
    only an unsliced parameter has a second copy in the files."""
    slices = []
    for first in range(sharing):
        own = [piece for piece in pieces[first::sharing] if piece is not None]
        master = Stored(shape, [flat[where] for flat, _, where in own])
        _require_size(folder, name, shape, master.parts)
        state = _joined_state(folder, name, [kept for _, kept, _ in own], [where for *_, where in own], shape)
        slices.append(SavedTensor(shape, master.read, second_copy, master, state))
    return slices[0] if sharing == 1 else _join_tensor(slices, Cut(0, (shape[0],) * sharing))


def _open_stage_3(
    folder: Path, states: list[dict[str, Any]], read: ReadFile, rank: int, *, upstream: bool
) -> SavedModel:
    """ZeRO-3: parameters are cut into equal parts, the last one padded. upstream: zero_to_fp32 may read it too."""
    files = [folder / f"zero_pp_rank_{part}_{_model_file(rank)}" for part in range(len(states))]
    models, groups = [read(path) for path in files], states[0].get("ds_zero_partition_groups")
    upstream = upstream and groups is None
    reader = "DeepSpeed's zero_to_fp32"
    second = reader if upstream else f"none: {reader} reads no encrypted files, and no slices"
    saved = SavedModel(stage=3, ranks=len(states), buffers=_buffers(models[0]), second_source=second)
    whole = cache(lambda: _zero_to_fp32(folder)) if upstream else None
    optimizers = [_flat_states(state["optimizer_state_dict"]) for state in states]
    for index, shapes in enumerate(models[0]["param_shapes"]):
        flats, start = [state["fp32_flat_groups"][index] for state in states], 0
        kept = [optimizer[index] for optimizer in optimizers]
        partitions = groups[index]["partition_count"] if groups is not None else len(states)
        sharing = len(states) // partitions  # ranks that share experts
        for name, shape in shapes.items():
            length = math.ceil(shape.numel() / partitions)
            where = slice(start, start + length)
            start += length
            pieces = [(flat, state, where) for flat, state in zip(flats, kept, strict=True)]
            second_copy = _read_by_deepspeed(whole, name) if sharing == 1 else None
            saved.tensors[name] = _open_master(folder, name, shape, pieces, sharing, second_copy)
        if any(flat.numel() != start for flat in flats):
            raise UserError(f"{folder}: group {index} holds more than its {len(shapes)} parameters; use another one")
    for name, shape in (models[0]["frozen_param_shapes"] or {}).items():
        parts = [model["frozen_param_fragments"][name] for model in models]
        _require_size(folder, name, shape, parts)
        saved.frozen.add(name)
        saved.tensors[name] = SavedTensor(shape, Stored(shape, parts).read, _read_by_deepspeed(whole, name))
    return saved


def _flat_states(optimizer: dict[str, Any]) -> list[dict[str, Any] | None]:
    """The state of each flat partition, group by group; None before its first step."""
    return [optimizer["state"].get(index) for group in optimizer["param_groups"] for index in group["params"]]


def _joined_state(
    folder: Path, name: str, states: list[Any], places: list[slice], shape: torch.Size
) -> OptimizerState | None:
    """Combine the ranks' states, each at the place of the parameter's part in it. None before the first step."""
    if not all(states):
        return None
    found = {(tuple(_tensors(state)), int(state.get(COUNT, 0))) for state in states}
    if len(found) > 1:
        raise UserError(f"{folder}: a file is of another save: the state of {name} is {sorted(found)} by rank")
    (keys, updates), tensors = found.pop(), {}
    for key in keys:
        parts = [state[key].view(-1)[where] for state, where in zip(states, places, strict=True)]
        _require_size(folder, name, shape, parts)
        tensors[key] = Stored(shape, parts)
    return OptimizerState(tensors, updates)


def _tensors(state: dict[str, Any] | None) -> dict[str, torch.Tensor]:
    """The state tensors of a parameter or a flat partition, whichever optimizer wrote them."""
    return {key: value for key, value in (state or {}).items() if key != COUNT and isinstance(value, torch.Tensor)}


def _zero_to_fp32(folder: Path) -> dict[str, Any]:
    """The checkpoint read lazily by DeepSpeed, which has no allow-list for pickles; these files have passed ours."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return get_fp32_state_dict_from_zero_checkpoint(str(folder.parent), tag=folder.name, lazy_mode=True)


def _read_by_deepspeed(whole: Callable[[], dict[str, Any]] | None, name: str) -> Read | None:
    return (lambda: whole()[name].contiguous()) if whole is not None else None


def _buffers(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: state["module"][name] for name in state["buffer_names"] or ()}


def _require_size(folder: Path, name: str, shape: torch.Size, parts: Sequence[torch.Tensor]) -> None:
    found = sum(part.numel() for part in parts)
    if found < shape.numel():
        raise UserError(
            f"{folder}: the partitions hold {found} of the {shape.numel()} values of {name}; masters that were "
            "offloaded to NVMe are not in the checkpoint, else a file is damaged"
        )


def _model_file(rank: int) -> str:
    """Name of a model file. rank: number of one of the ranks that share matrices; 0 if none do."""
    return f"mp_rank_{rank:02d}_model_states.pt"
