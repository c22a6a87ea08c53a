"""A new run's masters are the FP32 values of its weights, bit for bit, whether drawn or read from files.

DeepSpeed makes masters from the weights that compute, which are rounded: a BF16 run would lose the lower 16 bits of
every FP32 weight (measured on normal weights: a median relative distance of 1.4e-3). So models are built in FP32, at
ZeRO-3 in FP32 partitions. `hold_fp32` keeps the values that are trained while DeepSpeed gets them rounded, and
`start_masters` writes each rank's part of them into its masters.
"""

from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.accelerator import get_accelerator
from safetensors import safe_open

from modeling.adapter import base_name
from modeling.disk_names import equivalent_names
from modeling.quantised_base import quantised_parameters
from precision.dtypes import DTYPES
from training.distributed import World
from training.engine import tensors
from training.engine.engine import Engine
from training.engine.ledger import PrecisionError
from training.engine.masters import Start
from training.engine.tensor_slices import own_slice

Held = Mapping[str, tuple[torch.Tensor, int]]
"""Maps a parameter to FP32 values, all of it or this rank's partition, and the index of the first of them."""


class StaleMaster(PrecisionError):
    """A master and the weight that computes are not the same number; a step would undo what was loaded."""


def hold_fp32(model: torch.nn.Module, compute: str, world: World) -> Held:
    """Round a model to the compute dtype in place, as DeepSpeed would, and return the trained FP32 values: at ZeRO-3
    those of this rank's partitions, none if the dtype is FP32."""
    dtype, held = DTYPES[compute], dict[str, tuple[torch.Tensor, int]]()
    parameter: Any
    for name, parameter in model.named_parameters():
        if parameter.dtype != torch.float32 or dtype == torch.float32:
            continue
        partition = getattr(parameter, "ds_tensor", None)
        if parameter.requires_grad:
            held[name] = parameter.data, 0
            if partition is not None:
                held[name] = partition.data, parameter.ds_zero_partition_rank * partition.numel()
        for tensor in filter(torch.is_tensor, (partition, getattr(parameter, "ds_secondary_tensor", None))):
            rounded = tensor.data.to(dtype)
            tensor.data = get_accelerator().pin_memory(rounded) if tensor.is_pinned() else rounded
        # DeepSpeed moves it next, unless it first cuts matrices in host memory
        parameter.data = parameter.data.to(parameter.device if world.tensor else world.device, dtype)
    return held


@torch.no_grad()
def start_masters(engine: Engine, held: Held, name_or_path: str | None = None) -> None:
    """Give every master the value that was held for it, and compare all with the folder of safetensors they came from,
    if any. A collective. Raises StaleMaster, on every rank, naming the first parameter whose weight is not its rounded
    master, or whose master is not the folder's."""
    parts: dict[str, torch.Tensor] = {}
    with engine.whole_masters():
        for name, parameter, shard in tensors.own_shards(engine):
            if name in held:
                parts[name] = _part(engine, parameter, shard, *held[name])
                # not safe_set_full_fp32_param: at ZeRO-3 it fails if the ranks do not divide the parameter's size
                shard.of(shard.flat).copy_(parts[name])
    checksums = tensors.checksums_of(engine, parts)["master"]
    require_fresh_masters(engine)
    source = "drawn in float32"
    if name_or_path is not None:
        folder = Path(name_or_path)
        dtypes = compare_with_files(engine, folder) if engine.world.from_main(folder.is_dir()) else set()
        if dtypes or not engine.has_frozen_base:
            source = " and ".join(sorted(dtypes)) + " files" if dtypes else "as loaded in float32"
    engine.start = Start(source, checksums)


@torch.no_grad()
def compare_with_files(engine: Engine, folder: Path) -> set[str]:
    """Compare every master, or weight without one, with the folder's value, unless that is in another shape, in pieces
    or transposed; a quantised weight must be near it. Returns the dtypes of masters' files. A collective. Raises
    StaleMaster, on every rank."""
    problems, dtypes = list[str](), set[str]()
    coded = quantised_parameters(engine.model)
    where = engine.world.from_main(_find(engine, folder) if engine.world.is_main else None)
    with ExitStack() as stack:
        names = sorted({file for file, _ in where.values()})
        files = {name: stack.enter_context(safe_open(folder / name, framework="pt")) for name in names}
        for name, parameter in engine.model.named_parameters():
            if name not in where:
                continue
            file, key = where[name]
            saved = files[file].get_tensor(key)
            if id(parameter) in coded:
                value = saved.to(device=engine.world.device, dtype=torch.float32)
                problems += _distance(engine, name, coded[id(parameter)], value, f"{folder} has")
                continue
            if not parameter.requires_grad:
                problems += _difference(name, tensors.whole_weight(engine, parameter), saved, 0, f"{folder} has")
                continue
            dtypes.add(str(saved.dtype).removeprefix("torch."))
            if (shard := tensors.shard_of(engine, parameter)) is not None:
                part = _part(engine, parameter, shard, saved)
                problems += _difference(name, shard.master(), part, shard.start, f"{folder} has")
    engine.world.raise_first(next(iter(problems), None), StaleMaster)
    return dtypes


def _part(engine: Engine, parameter: Any, shard: tensors.Shard, values: torch.Tensor, first: int = 0) -> torch.Tensor:
    """(shard.length,) view of this rank's part of values that begin at index `first` of the parameter."""
    if values.shape != tensors.shape_of(parameter):
        values = own_slice(values, parameter, engine.world)
    return values.reshape(-1)[shard.start - first :][: shard.length]


@torch.no_grad()
def require_fresh_masters(engine: Engine) -> None:
    """Require cast(master) == weight for every trainable parameter, bit for bit. A collective. Raises StaleMaster."""
    problems: list[str] = []
    for name, parameter, shard in tensors.own_shards(engine):
        weight = tensors.local_weight(parameter, shard, engine.stage)
        problems += _difference(name, weight, shard.master(), shard.start, "its master has")
    engine.world.raise_first(next(iter(problems), None), StaleMaster)


def _find(engine: Engine, folder: Path) -> dict[str, tuple[str, str]]:
    """Maps a parameter to a file of the folder and its name there, for those that are stored in one piece."""
    shapes: dict[str, tuple[str, torch.Size]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for key in list(file.keys()):
                shapes[key] = path.name, torch.Size(file.get_slice(key).get_shape())
    found, coded = {}, quantised_parameters(engine.model)
    for name, parameter in engine.model.named_parameters():
        layer = coded.get(id(parameter))
        if layer is not None and getattr(layer, "source_cls", torch.nn.Linear) is not torch.nn.Linear:
            continue  # GPT-2's layer, which is transposed in the files
        shape = tensors.whole_shape_of(parameter) if layer is None else layer.whole_shape
        own = base_name(name)
        inner = own.removeprefix(f"{engine.model.base_model_prefix}.")  # as in a folder of the model without a head
        for key in (*equivalent_names(engine.model, own, shape), inner):
            if name not in found and key in shapes and shapes[key][1] == shape:
                found[name] = shapes[key][0], key
    return found


_FARTHEST = 0.4
"""[fraction] Relative L2 distance of quantised weights from their own values. NF4 is 0.09 away for normal weights and
0.34 at most (a block of one large weight and 63 at half the distance to the smallest code); unrelated weights are 1.4
apart."""


def _distance(engine: Engine, name: str, layer: Any, value: torch.Tensor, whose: str) -> list[str]:
    """One line if a layer's codes represent weights far from `value`, (outputs, inputs) FP32. A collective."""
    with deepspeed.zero.GatheredParameters([layer.weight]) if engine.stage == 3 else nullcontext():
        apart = layer.rebuilt(torch.float32) - value
    distance = float(apart.norm()) / max(float(value.norm()), torch.finfo(torch.float32).tiny)
    if distance <= _FARTHEST:
        return []
    return [f"{name}: its codes stand for weights at a relative distance of {distance:.3g} from what {whose}"]


def _difference(name: str, mine: torch.Tensor, other: torch.Tensor, start: int, whose: str) -> list[str]:
    """One line if `other`, rounded to the dtype of `mine`, is not the same. start: their index in the parameter."""
    mine, other = mine.flatten(), other.flatten()
    differ = other.to(mine) != mine
    if not bool(differ.any()):
        return []
    first = int(differ.int().argmax())
    return [
        f"{name}: {int(differ.sum()):,} of {len(mine):,} weights are not what they should be at the start: the "
        f"model has {float(mine[first]):.9g} at index {start + first}, {whose} {float(other[first]):.9g}"
    ]
