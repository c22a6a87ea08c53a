"""Resume from a checkpoint of another layout: ranks, ZeRO stage or compute dtype differ (docs/elastic.md).

Every master and its optimizer state are read by parameter name from the shards, whichever ranks wrote them, and copied
into this run's partitions. Then the checksums are recomputed and compared with those of the engine that saved.
"""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from config.errors import UserError
from modeling.tensor_parallel import cut
from training.checkpoint.contents import TAG
from training.checkpoint.partitions import SavedModel, SavedTensor, Stored, open_saved_model
from training.checkpoint.reader import PLAIN, Opener, Reader
from training.engine import Engine, tensors
from training.engine.masters import Start
from training.engine.tensor_slices import own_slice


def restore(
    engine: Engine, path: Path, *, recorded: tensors.Checksums | None, change: str | None, opener: Opener
) -> str | None:
    """Restore a checkpoint and compare every checksum with the `recorded` ones; returns a line about a changed layout.

    change: how the layout differs; None if it does not: DeepSpeed then loads its own files, bit for bit, unless the
    optimizer's groups differ. A collective. Raises UserError like `load_resharded`.
    """
    kept = {kind: texts for kind, texts in (recorded or {}).items() if kind != "master"}
    parameters = tensors.trainable_parameters(engine) if kept else {}  # before the first update there is no state
    differences = (
        _optimizer_difference(engine, parameter, path, [kind for kind, texts in kept.items() if name in texts])
        for name, parameter in parameters.items()
    )
    engine.world.raise_first(next(filter(None, differences), None), UserError)
    change = change or engine.world.on_main(lambda: _group_difference(engine, path / TAG, opener))
    line = None
    if change is None:
        engine.load(path, TAG, Reader(opener))
        engine.world.raise_first(_difference(engine, path, recorded or {}), UserError)
    else:
        line = f"checkpoint {path}: {change}; {load_resharded(engine, path / TAG, recorded=recorded, opener=opener)}"
    engine.start = Start(f"those of {path.name}", (recorded or tensors.checksums_of(engine))["master"])
    return line


@torch.no_grad()
def load_resharded(engine: Engine, folder: Path, *, recorded: tensors.Checksums | None, opener: Opener = PLAIN) -> str:
    """Restore masters, optimizer state, frozen weights and buffers from a `deepspeed/` folder of any layout; returns
    counts of what was restored, human-readable.

    recorded: `checksums_of` the engine that saved; None computes them from the files, which then detects only errors of
    loading itself. The optimizer's settings, the loss scale and the random generators are not changed. A collective;
    each rank reads the files itself, at most one whole parameter at a time. Raises UserError, on every rank, naming the
    first parameter that is missing, has another shape, or differs from what was saved.
    """
    try:
        saved, problem = _with_named_states(engine, open_saved_model(folder, opener), folder), None
    except UserError as error:
        saved, problem = SavedModel(stage=0, ranks=0), str(error)
    if problem is None:
        problem = _mismatch(engine, saved, folder)
    engine.world.raise_first(problem, UserError)
    updates = max((tensor.state.updates for tensor in saved.tensors.values() if tensor.state), default=0)
    with engine.whole_masters():
        with tensors.partitioned(engine):
            for name, parameter in engine.model.named_parameters():
                if parameter.requires_grad or not engine.has_frozen_base:
                    _restore(engine, parameter, saved.tensors[name])
        flats = {id(shard.flat) for _, _, shard in tensors.own_shards(engine)}
        for flat, names in tensors.states_of_flat_masters(engine) if engine.stage else ():
            if id(flat) not in flats:  # only padding on this rank, whose state is in later checkpoints all the same
                tensors.state_after(engine, flat, names, updates)
    buffers = dict(engine.model.named_buffers())
    for name in saved.buffers.keys() & buffers.keys():
        buffers[name].copy_(saved.buffers[name])
    recorded = recorded or _checksums_of_files(engine, saved)
    engine.world.raise_first(_difference(engine, folder, recorded), UserError)
    compared = sum(len(recorded.get(kind, {})) for kind in tensors.tensor_kinds(engine))
    after = f" after {updates} updates" if engine.optimizer_spec.counts_updates else ""
    return f"{len(tensors.trainable_parameters(engine))} masters carried over{after}, {compared} checksums agree"


def _group_difference(engine: Engine, folder: Path, opener: Opener) -> str | None:
    """How the optimizer's groups, or their order, differ from those saved at the same ZeRO stage; None if they do not.
    Raises UserError instead at ZeRO-0, whose files do not name parameters."""
    of_rank = "zero_pp_rank_0_" if engine.stage == 3 else ""
    state = opener.read(folder / f"{of_rank}mp_rank_00_model_states.pt", mmap=True)
    own = tensors.names_by_group(engine)
    if engine.stage > 0:
        same = [list(shapes) for shapes in state["param_shapes"]] == own
        return None if same else "the optimizer's groups have other parameters"
    counts = [len(group["params"]) for group in (state.get("optimizer") or {}).get("param_groups", ())]
    own_counts = [len(names) for names in own]
    if counts and counts != own_counts:
        raise UserError(
            f"{folder}: its optimizer groups have {counts} parameters, this run's {own_counts}; use the "
            "optimizer.groups and the version of Mantissa that saved it, or start anew with run.resume=never or "
            "another run.name"
        )
    return None


def _optimizer_difference(engine: Engine, parameter: Any, where: Path, saved: Collection[str]) -> str | None:
    """An error message if a parameter's saved state tensors differ from this run's by name; else None."""
    mine = tensors.states_of(engine, parameter)
    if set(saved) == set(mine):
        return None
    there, here = (", ".join(names) or "nothing" for names in (saved, mine))
    return (
        f"{where}: its optimizer kept {there} of each parameter, this run's keeps {here}; use the same "
        "optimizer.name, or start anew with run.resume=never or another run.name"
    )


def _with_named_states(engine: Engine, saved: SavedModel, folder: Path) -> SavedModel:
    """Assign ZeRO-0's optimizer state to parameter names: it is in the order of the optimizer's groups."""
    if not saved.unnamed_states:
        return saved
    names = {id(parameter): name for name, parameter in engine.model.named_parameters()}
    order = [names[parameter] for parameter in engine.group_of]
    if len(order) != len(saved.unnamed_states):
        counts = f"{len(saved.unnamed_states)} parameters, this run's {len(order)}"
        raise UserError(f"{folder}: its optimizer has {counts}; freeze the same parameters")
    for name, state in zip(order, saved.unnamed_states, strict=True):
        tensor = saved.tensors.get(name)
        if tensor is None:
            continue
        if state is not None and any(one.shape.numel() != tensor.shape.numel() for one in state.tensors.values()):
            raise UserError(f"{folder}: the state of {name} has the wrong size; use its own layout")
        saved.tensors[name] = replace(tensor, state=state)
    for name in (set(saved.tensors) - set(order)) & set(names.values()):
        saved.tensors[name] = replace(saved.tensors[name], master=None)
    return saved


def _mismatch(engine: Engine, saved: SavedModel, folder: Path) -> str | None:
    """Why the checkpoint does not fit the engine, or None."""
    counts: dict[int, tuple[int, str]] = {}
    for name, parameter in engine.model.named_parameters():
        tensor, shape = saved.tensors.get(name), tensors.whole_shape_of(parameter)
        if engine.has_frozen_base and not parameter.requires_grad:
            continue  # no checkpoint has it
        if tensor is None or tensor.shape != shape:
            there = "is missing" if tensor is None else f"has shape {list(tensor.shape)}"
            return f"{folder}: {name} {there}, and shape {list(shape)} in this run; it belongs to another model"
        if parameter.requires_grad is (tensor.master is None):
            here = "trains" if parameter.requires_grad else "is frozen"
            return f"{folder}: {name} {here} in this run and not there; freeze the same parameters"
        problem = _optimizer_difference(engine, parameter, folder, tensor.state.tensors) if tensor.state else None
        if problem is not None:
            return problem
        shard = tensors.shard_of(engine, parameter) if parameter.requires_grad else None
        if shard is not None:
            count = tensor.state.updates if tensor.state else 0
            before, other = counts.setdefault(id(shard.flat), (count, name))
            if before != count:
                problem = f"the optimizer updated {name} {count} times and {other} {before} times"
                return f"{folder}: {problem}; use its own layout"
    return None


def _restore(engine: Engine, parameter: Any, tensor: SavedTensor) -> None:
    """Restore a parameter's weight and, if it trains, this rank's part of its master and optimizer state."""
    _restore_weight(engine, parameter, tensor)
    shard = tensors.shard_of(engine, parameter) if tensor.master else None
    if shard is None or tensor.master is None:
        return
    shard.of(shard.flat).copy_(_own(engine, parameter, tensor.master, shard.start, shard.length))
    saved = tensor.state
    state = tensors.state_after(engine, shard.flat, tensors.states_of(engine, parameter), saved.updates if saved else 0)
    for name in tensors.states_of(engine, parameter):
        if saved is None:
            shard.of(state[name]).zero_()
        else:
            shard.of(state[name]).copy_(_own(engine, parameter, saved.tensors[name], shard.start, shard.length))


def _restore_weight(engine: Engine, parameter: Any, tensor: SavedTensor) -> None:
    """Restore the weight that computes: the rounded master or, at ZeRO-3, this rank's partition of it."""
    if engine.stage < 3:
        parameter.data.copy_(own_slice(tensor.read(), parameter, engine.world))
        return
    part = parameter.ds_tensor
    numel, length = tensors.shape_of(parameter).numel(), part.numel()
    start = min(parameter.ds_zero_partition_rank * length, numel)
    length = min(length, numel - start)
    whole = tensor.master or Stored(tensor.shape, [tensor.read()])
    part.data.view(-1)[:length].copy_(_own(engine, parameter, whole, start, length))


def _own(engine: Engine, parameter: Any, whole: Stored, start: int, length: int) -> torch.Tensor:
    """(length,) values from `start` on, of a tensor or, if ranks share it, of this rank's slice."""
    if cut(parameter) is None:
        return whole.values(start, length)
    return own_slice(whole.read(), parameter, engine.world).reshape(-1)[start : start + length]


def _checksums_of_files(engine: Engine, saved: SavedModel) -> tensors.Checksums:
    """The checksums of the files' tensors; each rank computes those of some parameters."""
    world, found = engine.world, []
    for index, name in enumerate(tensors.trainable_parameters(engine)):
        tensor = saved.tensors[name]
        if index % world.world_size != world.rank or tensor.master is None:
            continue
        pieces = {"master": tensor.master}
        if tensor.state is not None:
            pieces |= tensor.state.tensors
        found += [
            (kind, name, tensors.as_text(tensors.checksum(one.read().view(-1), 0).tolist()))
            for kind, one in pieces.items()
        ]
    result: tensors.Checksums = {}
    for kind, name, text in (row for rows in world.gather_objects(found) for row in rows):
        result.setdefault(kind, {})[name] = text
    return result


def _difference(engine: Engine, folder: Path, recorded: tensors.Checksums) -> str | None:
    """An error message for the first master or state tensor that differs from the `recorded` one, or None. A
    collective."""
    found = tensors.checksums_of(engine)
    for kind, texts in recorded.items():
        for name, text in texts.items():
            here = found.get(kind, {}).get(name)
            if here != text:
                what = "the master" if kind == "master" else f"the optimizer's {kind}"
                sums = f"checksum {here} here, {text} when saved"
                return f"{folder}: {what} of {name} differs from the saved one ({sums}); use another checkpoint"
    return None
