"""Liger's Triton kernels for a model's norms, rotary embeddings and gated activations: `model.kernels` liger or auto.

Liger's own patching (`apply_liger_kernel_to_llama`) replaces functions and classes of transformers, and so changes
every other model in the process, the FP32 reference included. So only its autograd functions are used. A module's class
becomes a subclass with another `forward`: its name, parameters, hooks and isinstance checks stay. Calls in a different
dtype than the run's, such as telemetry's pass over the FP32 masters, run the module's own code.

The rotary embedding overwrites the projections' outputs, and the gradients of a gated activation overwrite its inputs,
without telling autograd. Nothing reads those again in a pass that keeps its activations or recomputes whole modules;
`activation_checkpointing = ops` would, and the config refuses it.
"""

import copy
import os
import sysconfig
import types
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from shutil import which
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from config.errors import UserError, one_line

_ROTATION = "apply_rotary_pos_emb"
_ROWS = 8
"""Number of tokens that a kernel is tested with."""
_FLOOR = 1e-5
"""Relative error allowed in any dtype, for sums in a different order."""


@dataclass(frozen=True)
class Norm:
    """How an architecture's RMSNorm computes."""

    offset: float = 0.0
    """Added to the weight."""
    casting: str = "llama"
    """Liger's casting mode: llama rounds to the input's dtype before it multiplies with the weight, gemma after."""


ARCHITECTURES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3", "smollm3", "granite", "phi3"), Norm()),
    **dict.fromkeys(("gemma", "gemma2", "gemma3_text"), Norm(1.0, "gemma")),
    "olmo2": Norm(0.0, "gemma"),
}
"""Hugging Face model types that these kernels support."""


@dataclass(frozen=True)
class _Replacement:
    """A kernel for one class of modules, and the code that it replaces."""

    name: str
    forward: Callable[..., Any]
    own: Callable[..., Any]
    """The module's own code, as a function of tensors of `shapes`."""
    kernel: Callable[..., Any]
    """The same function, computed by the kernel."""
    shapes: tuple[tuple[int, ...], ...]


def unavailable_reason(device: torch.device) -> str | None:
    """Why Liger's kernels cannot run on this device; None: no reason is known."""
    if cannot_run_on(device):
        return "Triton kernels need a GPU, and this is a CPU"
    if find_spec("liger_kernel") is None:
        return "liger-kernel is not installed; pip install --no-deps liger-kernel==0.8.5"
    if find_spec("triton") is None:
        return "triton is not installed, which comes with torch for CUDA"
    return uncompilable_reason(device)


def uncompilable_reason(device: torch.device) -> str | None:
    """Why Triton, and with it torch.compile, cannot build its launcher for a GPU; None: no reason is known."""
    if device.type == "cpu":
        return None
    if not any(map(which, filter(None, (os.environ.get("CC"), "gcc", "clang", "cc")))):
        return "Triton needs a C compiler, and there is neither gcc nor clang; apt-get install gcc"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    return None if header.is_file() else f"Triton needs {header}, which is missing; apt-get install python3-dev"


def cannot_run_on(device: torch.device) -> bool:
    """Whether Triton cannot run on the device: a CPU, unless its interpreter is enabled."""
    return device.type == "cpu" and os.environ.get("TRITON_INTERPRET") != "1"


def require_liger(architecture: str, device: torch.device) -> None:
    """Raises UserError, with the reason, if Liger's kernels do not support this model type or device."""
    problem = unavailable_reason(device)
    if architecture not in ARCHITECTURES:
        problem = f"it is not supported for {architecture}, only for {', '.join(sorted(ARCHITECTURES))}"
    if problem is not None:
        raise UserError(f"model.kernels = liger: {problem}; or set model.kernels=torch")


@dataclass(frozen=True)
class Plan:
    """Kernels that were tested for a model but not applied yet."""

    modules: tuple[tuple[nn.Module, type, str], ...]
    """(module, its new class, name of what the kernel computes)."""

    def apply(self) -> str:
        """Switch the modules to the kernels, in place; returns a line to log."""
        for module, kind, _ in self.modules:
            module.__class__ = kind
        counts = sorted(Counter(what for *_, what in self.modules).items())
        kinds = ", ".join(f"{what} in {count} modules" for what, count in counts)
        return f"Liger {version('liger-kernel')} computes {kinds}"


def plan_liger(model: PreTrainedModel, *, dtype: torch.dtype, device: torch.device) -> Plan:
    """The modules that Liger's kernels can compute in `dtype`, each kernel tested on the device. Raises UserError."""
    architecture = model.config.model_type
    require_liger(architecture, device)
    made: dict[type, type] = {}
    modules: list[tuple[nn.Module, type, str]] = []
    for module in model.modules():
        own = type(module)
        make = next((make for ending, make in _REPLACEMENTS.items() if own.__name__.endswith(ending)), None)
        found = make and make(module, model.config.get_text_config(), dtype)
        if found is None:
            continue
        if own not in made:
            _compare_with_torch(found, own.__name__, dtype, device)
            made[own] = type(own.__name__, (own,), {"forward": found.forward, "__module__": own.__module__})
        modules.append((module, made[own], found.name))
    return Plan(tuple(modules))


def _norm(module: Any, config: Any, dtype: torch.dtype) -> _Replacement:
    from liger_kernel.ops import LigerRMSNormFunction

    own, norm = type(module).forward, ARCHITECTURES[config.model_type]
    name = "variance_epsilon" if hasattr(module, "variance_epsilon") else "eps"

    def forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.dtype != dtype:
            return own(self, hidden)
        # The False: not in place, because the incoming gradient may also go to another module.
        epsilon = getattr(self, name)
        return LigerRMSNormFunction.apply(hidden, self.weight, epsilon, norm.offset, norm.casting, False, None)

    def with_weight(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            stand_in = copy.copy(module)
            stand_in._parameters = {"weight": weight}
            return function(stand_in, hidden)

        return run

    width = getattr(module.weight, "ds_shape", module.weight.shape)[0]
    shapes = ((1, _ROWS, width), (width,))
    return _Replacement("RMSNorm", forward, with_weight(own), with_weight(forward), shapes)


def _gated(module: Any, config: Any, dtype: torch.dtype) -> _Replacement | None:
    from liger_kernel.ops import LigerFusedGateUpSiLUMulFunction, LigerGELUMulFunction, LigerSiLUMulFunction

    own, joined = type(module).forward, hasattr(module, "gate_up_proj")
    name = getattr(config, "hidden_activation", None) or config.hidden_act
    silu = name in ("silu", "swish")
    if not silu and (joined or name != "gelu_pytorch_tanh"):
        return None

    def fused(both: torch.Tensor) -> torch.Tensor:
        rows = both.flatten(0, -2)  # Liger 0.8.5 returns the gradient as rows whatever the input's shape
        return LigerFusedGateUpSiLUMulFunction.apply(rows).unflatten(0, both.shape[:-1])

    def by_torch(*given: torch.Tensor) -> torch.Tensor:
        gate, up = given[0].chunk(2, dim=-1) if joined else given
        return (module.activation_fn if joined else module.act_fn)(gate) * up

    product: Callable[..., torch.Tensor] = LigerSiLUMulFunction.apply if silu else LigerGELUMulFunction.apply
    kernel = fused if joined else product

    def forward(self: Any, hidden: torch.Tensor) -> torch.Tensor:
        if hidden.dtype != dtype:
            return own(self, hidden)
        given = [self.gate_up_proj(hidden)] if joined else [self.gate_proj(hidden), self.up_proj(hidden)]
        return self.down_proj(kernel(*given))

    width = config.intermediate_size
    shapes = ((1, _ROWS, 2 * width),) if joined else ((1, _ROWS, width),) * 2
    return _Replacement("SwiGLU" if silu else "GEGLU", forward, by_torch, kernel, shapes)


def _rotation(module: Any, config: Any, dtype: torch.dtype) -> _Replacement | None:
    from liger_kernel.ops import LigerRopeFunction

    own = type(module).forward
    rotate = own.__globals__.get(_ROTATION)
    if rotate is None or _ROTATION not in own.__code__.co_names:  # for example, wrapped by a decorator
        return None

    def rotate_by_kernel(
        query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if query.dtype != dtype:
            return rotate(query, key, cos, sin)
        return LigerRopeFunction.apply(query, key, cos, sin)

    # The attention's own code, with the kernel bound to the name of the function that it calls.
    forward = types.FunctionType(
        own.__code__, {**own.__globals__, _ROTATION: rotate_by_kernel}, own.__name__, own.__defaults__, own.__closure__
    )
    forward.__kwdefaults__ = own.__kwdefaults__
    share = (getattr(config, "rope_parameters", None) or {}).get("partial_rotary_factor", 1.0)
    width = int(module.head_dim * share)

    def at_positions(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(query: torch.Tensor, key: torch.Tensor) -> Any:
            angles = torch.outer(torch.arange(_ROWS), torch.logspace(0, -2, width // 2)).repeat(1, 2)[None]
            cos, sin = (values.to(query) for values in (angles.cos(), angles.sin()))
            return function(query.transpose(1, 2), key.transpose(1, 2), cos, sin)

        return run

    heads = (config.num_attention_heads, config.num_key_value_heads)
    query, key = ((1, _ROWS, count, module.head_dim) for count in heads)
    return _Replacement("rotary embedding", forward, at_positions(rotate), at_positions(rotate_by_kernel), (query, key))


_REPLACEMENTS: dict[str, Callable[[Any, Any, torch.dtype], _Replacement | None]] = {
    "RMSNorm": _norm,
    "MLP": _gated,
    "Attention": _rotation,
}
"""The end of a class's name to what makes the replacement of its modules."""


def _compare_with_torch(found: _Replacement, where: str, dtype: torch.dtype, device: torch.device) -> None:
    """Raises UserError unless the kernel's error is at most twice that of torch's own code in `dtype`."""
    generator = torch.Generator().manual_seed(0)
    given = [torch.randn(shape, generator=generator).to(device, dtype) for shape in found.shapes]
    exact = _outputs_and_gradients(found.own, [tensor.float() for tensor in given], dtype)
    try:
        own, kernel = (_outputs_and_gradients(function, given, dtype) for function in (found.own, found.kernel))
    except Exception as problem:  # whatever Triton and its compiler may raise
        raise UserError(
            f"model.kernels = liger: {found.name} in {where} cannot run on {device}: {one_line(problem, 200)}; "
            "set model.kernels=torch"
        ) from problem
    for reference, ours, theirs in zip(exact, own, kernel, strict=True):
        allowed, error = 2 * _distance(ours, reference) + _FLOOR, _distance(theirs, reference)
        if not error <= allowed:
            raise UserError(
                f"model.kernels = liger: {found.name} in {where} is {error:.1e} away from FP32 on {device}, where "
                f"torch's own code allows {allowed:.1e}; set model.kernels=torch"
            )


def _outputs_and_gradients(
    function: Callable[..., Any], given: Sequence[torch.Tensor], dtype: torch.dtype
) -> list[torch.Tensor]:
    """A function's outputs, then the gradients of its inputs for random upstream gradients in `dtype`."""
    leaves = [tensor.clone().requires_grad_() for tensor in given]
    found = function(*leaves)
    outputs = list(found) if isinstance(found, tuple) else [found]
    values = [output.detach().clone() for output in outputs]
    generator = torch.Generator().manual_seed(1)
    upstream = [torch.randn(value.shape, generator=generator).to(dtype).to(value) for value in values]
    return [*values, *(gradient.detach() for gradient in torch.autograd.grad(outputs, leaves, upstream))]


def _distance(tensor: torch.Tensor, reference: torch.Tensor) -> float:
    return float((tensor.double() - reference.double()).norm() / reference.double().norm())
