"""A run that starts from a Hugging Face folder starts from exactly its weights, masters included.

DeepSpeed makes the masters from the computing weights, which are rounded: a BF16 run that starts from an FP32 folder
would lose the lower 16 bits of every weight (measured on normal weights: a median relative distance of 1.4e-3). So the
masters are refreshed from the folder. Then, on every start from weights, each master rounded to the computing dtype has
to equal the computing weight. Where it does not, the first step would restore the stale master's value.
"""

from __future__ import annotations

from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import torch
from safetensors import safe_open

from config.schema import AdapterSection
from modeling.adapter import base_name, initial_value
from modeling.disk_names import equivalent_names
from modeling.quantised_base import quantised_parameters
from modeling.tensor_parallel import cut
from training.engine.engine import Engine
from training.engine.ledger import PrecisionError
from training.engine.tensor_slices import slice_group
from training.engine.tensors import shape_of, shard_of, whole_master, whole_shape_of, whole_weight


class StaleMaster(PrecisionError):
    """A master and the weight computed with are not the same number; a step would undo what was loaded."""


def start_from_weights(
    engine: Engine, name_or_path: str, *, adapter: AdapterSection | None = None, seed: int = 0
) -> int:
    """Refresh the masters from a folder of safetensors, then require that all are fresh; how many were refreshed.

    A hub id, or a folder in another format, is not read again: its masters are the rounded weights. adapter: drawn with
    `seed`; its masters become the values before rounding. A collective. Raises StaleMaster.
    """
    folder = Path(name_or_path).expanduser()
    with engine.whole_masters():
        refreshed = refresh_masters(engine, folder) if engine.world.from_main(folder.is_dir()) else 0
        if adapter is not None:
            _refresh_adapter(engine, adapter, seed=seed)
        require_fresh_masters(engine)
    return refreshed


@torch.no_grad()
def refresh_masters(engine: Engine, folder: Path) -> int:
    """Give every master the value that the folder's files have for it, unrounded; how many were found there.

    Parameters that the files have in another shape, in pieces or transposed keep their masters. What a quantised weight
    stands for has to be near the folder's. Raises StaleMaster, on
    every rank, when the model computes with other weights than the folder's. A collective; holds one whole parameter at
    a time.
    """
    problems: list[str] = []
    coded = quantised_parameters(engine.model)
    where = engine.world.from_main(_find(engine, folder) if engine.world.is_main else None)
    with ExitStack() as stack:
        names = sorted({file for file, _ in where.values()})
        files = {name: stack.enter_context(safe_open(folder / name, framework="pt")) for name in names}
        for name, parameter in engine.model.named_parameters():
            if name not in where:
                continue
            file, key = where[name]
            value = files[file].get_tensor(key).to(device=engine.world.device, dtype=torch.float32)
            if id(parameter) in coded:
                problems += _distance(engine, name, coded[id(parameter)], value, f"{folder} has")
                continue
            problems += _difference(name, whole_weight(engine, parameter), value, f"{folder} has")
            _set_master(engine, parameter, value)
    engine.world.raise_first(next(iter(problems), None), StaleMaster)
    return len(where)


@torch.no_grad()
def _refresh_adapter(engine: Engine, section: AdapterSection, *, seed: int) -> None:
    for name, parameter in engine.model.named_parameters():
        value = initial_value(section, name, shape_of(parameter), seed=seed)
        if value is not None:
            _set_master(engine, parameter, value.to(engine.world.device))


def _set_master(engine: Engine, parameter: torch.nn.Parameter, value: torch.Tensor) -> None:
    """Give this rank's part of a parameter's master its value; a frozen one has none, at ZeRO-0 it is the parameter."""
    shard = shard_of(engine, parameter) if parameter.requires_grad else None
    how, group = cut(parameter), slice_group(parameter, engine.world)
    if group is not None and how is not None:
        value = how.slice_of(value, group.rank)
    if shard is not None and engine.stage > 0:
        # not safe_set_full_fp32_param: at ZeRO-3 it fails where the ranks do not divide the parameter's size
        shard.of(shard.flat).copy_(value.reshape(-1)[shard.start : shard.start + shard.length])


@torch.no_grad()
def require_fresh_masters(engine: Engine) -> None:
    """Require cast(master) == weight for every trainable parameter, bit for bit.

    A collective; holds one whole parameter at a time. Raises StaleMaster naming the first one, on every rank.
    """
    problems: list[str] = []
    for name, parameter in engine.model.named_parameters():
        if parameter.requires_grad:
            weight, master = whole_weight(engine, parameter), whole_master(engine, parameter)
            problems += _difference(name, weight, master, "its master has")
    engine.world.raise_first(next(iter(problems), None), StaleMaster)


def _find(engine: Engine, folder: Path) -> dict[str, tuple[str, str]]:
    """Parameter -> file of the folder and name in it, for those that are stored there in one piece."""
    shapes: dict[str, tuple[str, torch.Size]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for key in list(file.keys()):
                shapes[key] = path.name, torch.Size(file.get_slice(key).get_shape())
    found, coded = {}, quantised_parameters(engine.model)
    for name, parameter in engine.model.named_parameters():
        layer = coded.get(id(parameter))
        if layer is not None and getattr(layer, "source_cls", torch.nn.Linear) is not torch.nn.Linear:
            continue  # GPT-2's, which is transposed in the files
        shape = whole_shape_of(parameter) if layer is None else layer.whole_shape
        own = base_name(name)
        inner = own.removeprefix(f"{engine.model.base_model_prefix}.")  # as in a folder of the model without a head
        for key in (*equivalent_names(engine.model, own, shape), inner):
            if name not in found and key in shapes and shapes[key][1] == shape:
                found[name] = shapes[key][0], key
    return found


_FARTHEST = 0.4
"""[fraction] Relative L2 distance of quantised weights from their own values. NF4 is 0.09 away for normal weights and
0.34 at most (a block of one large weight and 63 of half the distance to the least code); weights that have nothing to
do with each other are 1.4 apart."""


def _distance(engine: Engine, name: str, layer: Any, value: torch.Tensor, whose: str) -> list[str]:
    """One line when what a layer's codes stand for is not near `value`, (outputs, inputs) FP32. A collective."""
    with deepspeed.zero.GatheredParameters([layer.weight]) if engine.stage == 3 else nullcontext():
        apart = layer.rebuilt(torch.float32) - value
    distance = float(apart.norm()) / max(float(value.norm()), torch.finfo(torch.float32).tiny)
    if distance <= _FARTHEST:
        return []
    return [f"{name}: its codes stand for weights at a relative distance of {distance:.3g} from what {whose}"]


def _difference(name: str, weight: torch.Tensor, other: torch.Tensor, whose: str) -> list[str]:
    """One line when `other`, rounded to the weight's dtype, is not the weight."""
    differ = (other.to(weight.dtype) != weight).flatten()
    if not bool(differ.any()):
        return []
    first = int(differ.int().argmax())
    mine, theirs = float(weight.flatten()[first]), float(other.flatten()[first])
    return [
        f"{name}: {int(differ.sum()):,} of {weight.numel():,} weights are not what they should be at the start: the "
        f"model computes with {mine:.9g} at index {first}, {whose} {theirs:.9g}"
    ]
