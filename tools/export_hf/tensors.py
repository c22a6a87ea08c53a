"""Write a model's tensors as safetensors shards, one shard in memory at a time, then read each back and compare."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from huggingface_hub import StateDictSplit, split_torch_state_dict_into_shards
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from config.errors import UserError
from config.files import flush
from training.checkpoint.partitions import SavedModel

PATTERN = "model{suffix}.safetensors"
INDEX = "model.safetensors.index.json"


class TensorsDiffer(Exception):
    """A tensor is not as expected; one line that names it, exit code 3."""


class Tensors:
    """The tensors to write, by their names in the files: masters rounded to one dtype, and unchanged buffers."""

    def __init__(self, saved: SavedModel, skeleton: PreTrainedModel, dtype: torch.dtype) -> None:
        """skeleton: the model on the meta device. Raises UserError if the checkpoint is from another model."""
        self._saved, self._skeleton, self.dtype = saved, skeleton, dtype
        parameters = {name: value.to(dtype) for name, value in skeleton.named_parameters()}
        _require_same_model(saved, skeleton)
        self._converts = _converts_separately(skeleton, parameters)
        self._source: dict[str, str] = {}
        """Name in the files -> parameter or buffer."""
        planned: dict[str, torch.Tensor] = {}
        for name, value in [*parameters.items(), *saved.buffers.items()]:
            for key, piece in self._pieces(name, value.to("meta")).items():
                self._source[key], planned[key] = name, piece
        self._planned = planned

    def plan(self, size: str) -> StateDictSplit:
        """The assignment of tensors to files."""
        try:
            return split_torch_state_dict_into_shards(self._planned, filename_pattern=PATTERN, max_shard_size=size)
        except ValueError as error:
            raise UserError(f"--shard-size {size}: not a size; write it as 5GB or 500MB") from error

    def read(self, keys: list[str]) -> Iterator[tuple[str, torch.Tensor]]:
        """The tensors with these names, rounded, in an order that reads each parameter once."""
        wanted = set(keys)
        for name in dict.fromkeys(self._source[key] for key in keys):
            value = self._saved.buffers.get(name)
            if value is None:
                value = rounded(name, self._saved.tensors[name].read(), self.dtype)
            for key, piece in self._pieces(name, value).items():
                if key in wanted:
                    yield key, piece

    def _pieces(self, name: str, value: torch.Tensor) -> dict[str, torch.Tensor]:
        return revert_weight_conversion(self._skeleton, {name: value}) if self._converts else {name: value}


def _converts_separately(model: PreTrainedModel, parameters: Mapping[str, torch.Tensor]) -> bool:
    """Whether each parameter can be converted by itself. parameters: all of them, on the meta device.

    False if a file's tensor combines several parameters: such a model is written under its in-memory names.
    """
    try:
        together = set(revert_weight_conversion(model, dict(parameters)))
        apart = {key for name, value in parameters.items() for key in revert_weight_conversion(model, {name: value})}
    except Exception:  # transformers raises whatever its conversion operations raise
        return False
    return together == apart


def untie(model: PreTrainedModel, saved: SavedModel) -> None:
    """Untie parameters of the model that transformers ties by the config but the checkpoint saves as two.

    T5 1.1, Flan-T5 and mT5 are saved with a separate head, which their configs do not mention. At ZeRO-0 a checkpoint
    has tied weights under each of their names, with equal values.
    """
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        other = first[id(parameter)]
        if name == other or not {name, other} <= saved.tensors.keys():
            continue
        if not torch.equal(saved.tensors[name].read(), saved.tensors[other].read()):
            module, _, own = name.rpartition(".")
            setattr(model.get_submodule(module), own, torch.nn.Parameter(torch.empty_like(parameter)))


def rounded(name: str, master: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The master in the dtype of the export, to nearest even.

    Raises TensorsDiffer if the master itself is not finite, UserError if it overflows the dtype.
    """
    if not bool(torch.isfinite(master).all()):
        raise TensorsDiffer(f"{name} holds values that are not finite; export an earlier checkpoint")
    value = master.to(dtype)
    if not bool(torch.isfinite(value).all()):
        largest = float(master.abs().max())
        limit = f"{torch.finfo(dtype).max:.6g} of {str(dtype).removeprefix('torch.')}"
        raise UserError(f"--dtype: {name} reaches {largest:.6g}, beyond the {limit}; use bf16 or fp32")
    return value


def compare_with_second_copy(saved: SavedModel) -> int:
    """Compare masters with the checkpoint's second copies; returns how many have one. Raises TensorsDiffer."""
    compared = 0
    for name, tensor in saved.tensors.items():
        if tensor.second_copy is None:
            continue
        master, other = tensor.read(), tensor.second_copy()
        if master.shape != other.shape or not _same(master.to(other.dtype), other):
            raise TensorsDiffer(f"{name}: the partitions of the masters and {saved.second_source} differ")
        compared += 1
    return compared


def write_shards(tensors: Tensors, folder: Path, shard_size: str) -> None:
    """Write, flush and read back. Raises TensorsDiffer if a tensor read back differs."""
    plan = tensors.plan(shard_size)
    for filename, keys in plan.filename_to_tensors.items():
        path = folder / filename
        save_file({key: value.contiguous() for key, value in tensors.read(keys)}, path, metadata={"format": "pt"})
        flush(path)
    if plan.is_sharded:
        index = {"metadata": plan.metadata, "weight_map": plan.tensor_to_filename}
        (folder / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    for filename, keys in plan.filename_to_tensors.items():
        _read_back(tensors, folder / filename, keys)


def _read_back(tensors: Tensors, path: Path, keys: list[str]) -> None:
    with safe_open(path, framework="pt") as file:
        if set(file.keys()) != set(keys):
            raise TensorsDiffer(f"{path.name} holds other tensors than were written to it")
        for key, expected in tensors.read(keys):
            if not _same(file.get_tensor(key), expected):
                raise TensorsDiffer(f"{key} in {path.name} is not what was written")


def _require_same_model(saved: SavedModel, skeleton: PreTrainedModel) -> None:
    wanted = dict(skeleton.named_parameters())
    known = dict(skeleton.named_parameters(remove_duplicate=False))
    for name, value in wanted.items():
        if name not in saved.tensors:
            raise UserError(f"the checkpoint is from another model: it has no {name}, which the run's config asks for")
        if saved.tensors[name].shape != value.shape:
            there, here = tuple(saved.tensors[name].shape), tuple(value.shape)
            raise UserError(f"the checkpoint is from another model: {name} is {there}, by the run's config {here}")
    for name in saved.tensors:
        if name not in known:
            raise UserError(f"the checkpoint is from another model: it has {name}, which the run's config does not")


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bitwise equality: nan equals itself, and 0 differs from -0."""
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(*(values.contiguous().reshape(-1).view(torch.uint8) for values in (one, other)))
