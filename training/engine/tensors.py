"""Tensors of a parameter (master, optimizer state, gradient, computing weight): whole, or this rank's part of them.

Functions that return a whole tensor are collectives with the same result on every rank. They are for inspection, one
parameter at a time, and too slow for a training step.

A tensor's checksum does not depend on the layout: with b(i) the 32 bits of value i as a signed integer, the sums modulo
2**64 of b(i) and of (i + 1) b(i) (docs/elastic.md). Each rank sums over its own part, so nothing is gathered.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils import safe_get_full_fp32_param, safe_get_local_grad

from config.optimizers import COUNT
from modeling.tensor_parallel import Place, cut
from training.engine.engine import Engine
from training.engine.flips import halves
from training.engine.gradients import reduced_gradient
from training.engine.masters import local_masters, sum_of_squares
from training.engine.split_masters import SplitMaster
from training.engine.tensor_slices import counts_here, joined, slice_group


@dataclass(frozen=True)
class Shard:
    """This rank's part of one parameter: values `start` to `start + length` of it, at `at` in a flat FP32 tensor."""

    flat: torch.Tensor
    """Masters, and the key of their state in torch's optimizer. At ZeRO-0 the parameter itself."""
    at: int
    start: int
    length: int
    split: SplitMaster | None = None
    """The split master, if `flat` has no values."""

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """(length,) view of the part's values in a state tensor of the size of `flat`; in `flat` itself only to write a
        master, inside `Engine.whole_masters`."""
        return tensor.detach().view(-1)[self.at : self.at + self.length]

    def master(self, start: int = 0, length: int | None = None) -> torch.Tensor:
        """(length,) FP32, to read: the part's master from its value `start` on. A view, or a copy of a split master."""
        length = self.length - start if length is None else length
        if self.split is not None:
            return self.split.values(self.at + start, length)
        return self.of(self.flat)[start : start + length]

    def states(self, engine: Engine) -> dict[str, torch.Tensor]:
        """(length,) views of the part's state tensors by torch's keys; empty before the first update."""
        held = engine.deepspeed.basic_optimizer.state.get(self.flat, {})
        return {name: self.of(held[name]) for name in engine.optimizer_spec.states if torch.is_tensor(held.get(name))}

    def tensors(self, engine: Engine) -> dict[str, torch.Tensor]:
        """(length,) the part's tensors by kind (`tensor_kinds`), to read; state tensors from the first update on."""
        return {"master": self.master(), **self.states(engine)}


def shape_of(parameter: torch.nn.Parameter) -> torch.Size:
    """The parameter's shape on this rank (a slice's if ranks share matrices), even if ZeRO-3 left it empty."""
    return torch.Size(getattr(parameter, "ds_shape", parameter.shape))


def whole_shape_of(parameter: torch.nn.Parameter) -> torch.Size:
    """The parameter's shape without any sharing among ranks."""
    how, own = cut(parameter), shape_of(parameter)
    return own if how is None else how.whole(own)


def place_of(engine: Engine, parameter: torch.nn.Parameter) -> Place | None:
    """The place of this rank's slice in the whole parameter; None if the parameter is whole here."""
    how, group = cut(parameter), slice_group(parameter, engine.world)
    return None if how is None or group is None else how.place(shape_of(parameter), group.rank)


def first_of_slice(engine: Engine, parameter: torch.nn.Parameter) -> int:
    """Index of this rank's first value in the whole parameter, if its rows are cut, as those of shared experts."""
    place = place_of(engine, parameter)
    return 0 if place is None else place.first


def whole_gradient(engine: Engine, parameter: torch.nn.Parameter) -> torch.Tensor | None:
    """The reduced gradient, FP32, unscaled; between backward and step. None for a parameter without one."""
    gradient = reduced_gradient(parameter, engine.stage)
    if gradient is None:
        return None
    return joined(gradient.detach().float() / engine.loss_scale, parameter, engine.world)


def local_gradient(parameter: Any, shard: Shard, stage: int) -> torch.Tensor | None:
    """(shard.length,) this rank's part of the reduced gradient, still scaled, between backward and step; None without
    one. A view, except of offloaded gradients, which are on the CPU."""
    if parameter.grad is None and stage == 3:
        return safe_get_local_grad(parameter).view(-1)[: shard.length]
    mapping = getattr(parameter, "_hp_mapping", None)
    if parameter.grad is not None and getattr(parameter, "_hp_grad", None) is None:
        found = parameter.grad
    elif mapping is not None:
        found = mapping.get_lp_grad_fragment(parameter._index_in_param_group)
    else:
        return None
    flat: torch.Tensor = found.detach().reshape(-1)
    return flat if len(flat) == shard.length else flat[shard.start : shard.start + shard.length]


def local_weight(parameter: Any, shard: Shard, stage: int) -> torch.Tensor:
    """(shard.length,) this rank's part of the weight that modules compute with, in its own dtype."""
    if stage == 3:
        partition: torch.Tensor = parameter.ds_tensor.detach().view(-1)
        return partition[: shard.length]
    return parameter.detach().view(-1)[shard.start : shard.start + shard.length]


def whole_master(engine: Engine, parameter: torch.nn.Parameter) -> torch.Tensor:
    """A copy of the FP32 master in the parameter's shape."""
    shape = shape_of(parameter)
    if engine.split_masters is not None and parameter.requires_grad:
        shard = shard_of(engine, parameter)
        bits = torch.zeros(shape.numel(), dtype=torch.int32, device=engine.world.device)
        if shard is not None:
            bits[shard.start : shard.start + shard.length] = shard.master().view(torch.int32)
        return engine.world.sum(bits).view(torch.float32).view(shape)  # as integers, a sum with zeros keeps every bit
    master = parameter.data if engine.stage == 0 else safe_get_full_fp32_param(parameter)
    return joined(master.detach().float().clone().view(shape), parameter, engine.world)


def whole_weight(engine: Engine, parameter: Any) -> torch.Tensor:
    """A copy of the weight that the module computes with, in its own dtype."""
    if engine.stage == 3 and parameter.ds_status is ZeroParamStatus.INFLIGHT:  # for a backward pass that never came
        engine.deepspeed.optimizer.parameter_offload.get_param_coordinator().reset_step()
    with deepspeed.zero.GatheredParameters([parameter]) if engine.stage == 3 else nullcontext():
        own = parameter.data.detach().clone()
    return joined(own, parameter, engine.world)


_CHUNK, _CHUNK_ON_A_GPU = 1 << 16, 1 << 22
"""Values per pass: on a CPU their 64-bit copies stay in a core's cache, on a GPU few kernels are launched."""
_HALF, _WHOLE = 1 << 32, 1 << 64
Checksums = dict[str, dict[str, str]]
"""32 hexadecimal digits by tensor kind (`tensor_kinds`) and parameter name."""


def shard_of(engine: Engine, parameter: Any) -> Shard | None:
    """This rank's part of a trainable parameter; None if other ranks have all of it. At ZeRO-0 all of it."""
    optimizer: Any = engine.deepspeed.optimizer
    numel = shape_of(parameter).numel()
    if engine.stage == 0:
        return Shard(parameter, 0, 0, numel)
    if engine.stage == 3:
        group, at, padded = optimizer.grad_position[optimizer.get_param_id(parameter)]
        start = min(parameter.ds_zero_partition_rank * padded, numel)
        length = min(padded, numel - start)
    elif mapping := parameter._hp_mapping:
        here, there, group = mapping.lp_fragment_address, mapping.hp_fragment_address, mapping.param_group_index
        at, start, length = there.start, here.start, here.numel
    else:
        length = 0
    if not length:
        return None
    flat = local_masters(optimizer)[group]
    return Shard(flat, at, start, length, engine.split_masters.of[flat] if engine.split_masters is not None else None)


def momentum_norm(engine: Engine) -> float | None:
    """Global norm of the optimizer's momentum, in gradient units; None if it keeps none. A collective."""
    name, world = engine.optimizer_spec.momentum, engine.world
    if name is None:
        return None
    states = (shard.states(engine) for _, p, shard in own_shards(engine) if counts_here(p, world.tensor))
    squares = sum_of_squares((held[name] for held in states if name in held), world.device)
    if engine.stage > 0:
        world.sum(squares)
    elif world.tensor is not None:
        world.tensor.sum(squares)
    return float(squares) ** 0.5


def states_of(engine: Engine, parameter: torch.nn.Parameter) -> tuple[str, ...]:
    """torch's keys of the optimizer's state tensors of a parameter."""
    return engine.optimizer_spec.states_of(matrix=engine.group_of[id(parameter)]["matrix"])


def tensor_kinds(engine: Engine) -> tuple[str, ...]:
    """Kinds of FP32 tensors of trainable parameters: masters and, not for all, state tensors by torch's keys."""
    return ("master", *engine.optimizer_spec.states)


def names_by_group(engine: Engine) -> list[list[str]]:
    """Names of the optimizer's parameters, group by group, in the order in which checkpoints have them."""
    if engine.stage > 0:
        return [list(shapes) for shapes in engine.deepspeed._get_zero_param_shapes()]
    names = {id(parameter): name for name, parameter in engine.model.named_parameters()}
    return [[names[id(p)] for p in group["params"]] for group in engine.deepspeed.optimizer.param_groups]


def trainable_parameters(engine: Engine) -> dict[str, torch.nn.Parameter]:
    """The parameters that have masters, by name; a shared one under its first name."""
    return {name: parameter for name, parameter in engine.model.named_parameters() if parameter.requires_grad}


def own_shards(engine: Engine) -> Iterator[tuple[str, torch.nn.Parameter, Shard]]:
    """The parameters of which this rank has a part, with their names and that part."""
    for name, parameter in trainable_parameters(engine).items():
        if (shard := shard_of(engine, parameter)) is not None:
            yield name, parameter, shard


@torch.no_grad()
def checksums_of(engine: Engine, others: Mapping[str, torch.Tensor] | None = None) -> Checksums:
    """Checksums of every master and state tensor. others: FP32 values to use in a master's place. A collective."""
    parameters, names = trainable_parameters(engine), tensor_kinds(engine)
    sums = torch.zeros(len(parameters), len(names), 2, dtype=torch.int64)
    exists = torch.zeros(len(names), device=engine.world.device)
    exists[0] = 1.0  # masters are always there
    rows = dict(zip(parameters, sums, strict=True))
    for name, parameter, shard in own_shards(engine):
        if not counts_here(parameter, engine.world.tensor):
            continue
        given = {"master": others[name]} if others and name in others else {}
        for kind, values in (shard.tensors(engine) | given).items():
            column = names.index(kind)
            exists[column] = 1.0
            rows[name][column] = checksum(values, shard.start, place_of(engine, parameter))
    parts = halves(sums).to(engine.world.device)
    if engine.stage > 0:
        engine.world.sum(parts)
    elif engine.world.tensor is not None:
        engine.world.tensor.sum(parts)
    low, high = parts.tolist()
    anywhere = engine.world.sum(exists).tolist()
    return {
        kind: {
            name: as_text((lower[column][k] + lifted[column][k] * _HALF) for k in range(2))
            for (name, parameter), lower, lifted in zip(parameters.items(), low, high, strict=True)
            if kind == "master" or kind in states_of(engine, parameter)
        }
        for column, kind in enumerate(names)
        if anywhere[column]
    }


def checksum(values: torch.Tensor, start: int, place: Place | None = None) -> torch.Tensor:
    """(2,) int64 on the CPU: the two sums of FP32 `values`, which begin at index `start` of their tensor. place: that
    tensor's in the whole one, whose indices then count."""
    bits = values.detach().float().contiguous().view(torch.int32)
    size = _CHUNK if bits.device.type == "cpu" else _CHUNK_ON_A_GPU
    ramp = torch.arange(1, min(len(bits), size) + 1, dtype=torch.int64, device=bits.device)
    total = torch.zeros(2, dtype=torch.int64, device=bits.device)
    for first in range(0, len(bits), size):
        chunk = bits[first : first + size].long()
        plain, own = chunk.sum(), ramp[: len(chunk)]
        total[0] += plain
        if place is None:
            total[1] += chunk.mul_(own).sum() + plain * (start + first)
        else:
            total[1] += chunk.mul_(place.in_whole(own + (start + first - 1)) + 1).sum()
    return total.cpu()


def as_text(sums: Any) -> str:
    """32 hexadecimal digits of a checksum's two sums."""
    return "".join(f"{int(total) % _WHOLE:016x}" for total in sums)


def states_of_flat_masters(engine: Engine) -> list[tuple[torch.Tensor, tuple[str, ...]]]:
    """Each of `local_masters` with torch's keys of its state tensors; from ZeRO-1 on."""
    optimizer: Any = engine.deepspeed.optimizer
    groups = optimizer.param_groups
    of_flat = getattr(optimizer, "sub_group_to_group_id", range(len(groups)))  # ZeRO-3 may cut a group
    return [
        (flat, engine.optimizer_spec.states_of(matrix=groups[of_flat[index]]["matrix"]))
        for index, flat in enumerate(local_masters(optimizer))
    ]


def state_after(engine: Engine, flat: torch.Tensor, names: Iterable[str], updates: int) -> dict[str, Any]:
    """The optimizer's state of one flat tensor after `updates` updates, initialized as its first update would."""
    optimizer = engine.deepspeed.basic_optimizer
    state = optimizer.state[flat]
    for name in names:
        if state.get(name) is None:
            state[name] = torch.zeros_like(flat)
    if engine.optimizer_spec.counts_updates:  # torch counts in a tensor, DeepSpeed's kernels in a plain integer
        of_torch = isinstance(optimizer, torch.optim.AdamW)
        state[COUNT] = torch.tensor(float(updates), dtype=torch.float32, device=flat.device) if of_torch else updates
    return state


@contextmanager
def partitioned(engine: Engine) -> Iterator[None]:
    """Context in which no parameter is whole at ZeRO-3; afterwards the persistent ones are gathered again."""
    if engine.stage == 3:
        engine.deepspeed.optimizer.checkpoint_event_prologue()
    yield
    if engine.stage == 3:
        engine.deepspeed.optimizer.checkpoint_event_epilogue()
