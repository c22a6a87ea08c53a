"""The actual dtype of everything in training, read from the engine and compared with the config."""

from dataclasses import dataclass, replace

import torch

from config.errors import UserError
from modeling.quantised_base import quantised_parameters, stored_tensors
from precision.dtypes import DTYPES
from training.engine.engine import Engine
from training.engine.masters import local_masters, local_states
from training.engine.tensors import checksums_of, shape_of


class PrecisionError(UserError):
    """A tensor is not in the dtype that the config promises; continuing would be silently wrong."""


@dataclass(frozen=True)
class Entry:
    what: str
    dtype: str
    bytes: int
    """Bytes on this rank; 0 if nothing is held yet."""


def read_ledger(engine: Engine, *, reduce: str) -> list[Entry]:
    """The ledger of this rank. reduce: precision.reduce. Raises PrecisionError unless parameters are in the compute
    dtype, masters, moments (from the first update on) and accumulated gradients in FP32, and buffers as in the model's
    own code."""
    optimizer = engine.deepspeed.optimizer
    compute = DTYPES[engine.compute]
    coded = quantised_parameters(engine.model)
    floats = [p for p in engine.model.parameters() if id(p) not in coded]
    parameters = [getattr(p, "ds_tensor", p).data for p in floats]
    frozen = [getattr(p, "ds_tensor", p).data for p in floats if not p.requires_grad]
    _require_no_state_of_frozen(engine)
    masters = local_masters(optimizer)
    states = engine.optimizer_spec.states
    moments = [tensor for name in states for tensor in local_states(engine.deepspeed.basic_optimizer, name)]
    accumulation = torch.float32
    if engine.stage > 0:
        accumulation = getattr(optimizer, "gradient_accumulation_dtype", None) or optimizer.grad_acc_dtype
    communication = engine.deepspeed.communication_data_type
    _require("parameters", parameters, compute)
    _require("masters", masters, torch.float32)
    of_masters = _entry("masters", masters)
    if engine.split_masters is not None:
        parts = [tensor for split in engine.split_masters.of.values() for tensor in split.tensors]
        of_masters = replace(_entry("masters", parts), dtype="float32, less their weights")
    _require("moments", moments, torch.float32)
    buffers = {name: buffer for name, buffer in engine.model.named_buffers() if buffer.is_floating_point()}
    for name, buffer in buffers.items():
        own = _name(engine.buffer_dtypes.get(name, buffer.dtype))
        if _name(buffer.dtype) != own:
            raise PrecisionError(f"buffer {name} is in {_name(buffer.dtype)}, the model's own code has it in {own}")
    if accumulation != torch.float32:
        raise PrecisionError(f"gradients accumulate in {_name(accumulation)}, the config promises fp32")
    promised = torch.float32 if reduce == "fp32" else compute
    if communication != promised:
        raise PrecisionError(f"gradients are reduced in {_name(communication)}, the config promises {_name(promised)}")
    matmul = torch.backends.cuda.matmul
    if matmul.allow_bf16_reduced_precision_reduction or matmul.allow_fp16_reduced_precision_reduction:
        raise PrecisionError("torch lets cuBLAS add parts of a product in 16 bits, which a run turns off at its start")
    stored = {"quantised base": [*stored_tensors(engine.model)] if coded else [], "buffers": [*buffers.values()]}
    held = {"parameters": parameters, "of these frozen": frozen, **stored}
    return [
        *(_entry(what, tensors) for what, tensors in held.items() if tensors),
        of_masters,
        *([_entry("teacher, without masters", engine.teacher.weights)] if engine.teacher is not None else []),
        _entry("moments", moments, absent="float32, from the first step on" if states else "none"),
        Entry("gradients of a micro-batch", _name(compute), 0),
        Entry("gradients accumulated", _name(accumulation), 0),
        Entry("gradients reduced", _name(communication), 0),
        Entry("sums within a product", _name(torch.float32), 0),
    ]


def read_start(engine: Engine) -> Entry:
    """The masters' row before this session's first step. A collective. Raises PrecisionError if one has changed."""
    assert engine.start is not None
    found = checksums_of(engine)["master"]
    other = next((name for name, text in engine.start.checksums.items() if found[name] != text), None)
    if other is not None:
        raise PrecisionError(f"{other}: its master differs from its initial value ({engine.start.source})")
    return Entry("masters at the start", str(engine.start), 0)


def _require_no_state_of_frozen(engine: Engine) -> None:
    """A frozen parameter is held once: without master, moments and gradient."""
    frozen = [(name, p) for name, p in engine.model.named_parameters() if not p.requires_grad]
    if not frozen:
        return
    for name, parameter in frozen:
        if parameter.grad is not None or getattr(parameter, "_hp_mapping", None):
            raise PrecisionError(f"{name} is frozen, but has a gradient or a master")
    trained = sum(shape_of(p).numel() for p in engine.model.parameters() if p.requires_grad)
    held = sum(master.numel() for master in local_masters(engine.deepspeed.optimizer))
    ranks = engine.world.world_size if engine.stage else 1
    if held * ranks > trained + _LARGEST_PADDING * ranks * ranks:
        raise PrecisionError(f"{held:,} masters on {ranks} ranks each, where {trained:,} parameters are trained")


_LARGEST_PADDING = 1024
"""[values] Allowed excess of a rank's partition over its share, for each rank of the run."""


def _require(what: str, tensors: list[torch.Tensor], dtype: torch.dtype) -> None:
    wrong = {tensor.dtype for tensor in tensors} - {dtype}
    if wrong:
        raise PrecisionError(f"{what} are in {', '.join(map(_name, wrong))}, the config promises {_name(dtype)}")


def _entry(what: str, tensors: list[torch.Tensor], absent: str = "none") -> Entry:
    names = sorted({_name(tensor.dtype) for tensor in tensors})
    return Entry(what, ", ".join(names) or absent, sum(t.numel() * t.element_size() for t in tensors))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
