"""Applies a precision manifest: every matmul region computes in a `torch.autocast` region of its own.

Parameters stay FP32: they are the masters. A region's `forward` is replaced, on the instance, by one that enters
`torch.autocast` with the region's dtype, calls the original and casts the result for its caller. `Module.__call__`
still runs all hooks around it, so ZeRO-3 has gathered the parameters when it starts. docs/manifest.md says which dtype
flows where.

Autocast's weight cache is off, because it is keyed by the parameter alone, not by the dtype: a tied weight used in a
BF16 and an FP16 region would get the first one's copy in both. It would also keep a 16-bit copy of each weight that
ZeRO-3 has gathered until the forward pass ends.

Both of torch's checkpointing implementations recompute by calling the modules again, so the same `forward` enters the
same region. `set` must therefore be called between two steps, never between a forward and its backward pass.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.nn.utils import parametrize

from config.errors import UserError
from config.schema import Fp8Section
from precision.dtypes import DTYPES
from precision.findings import tensors_of
from precision.fp8 import Count, linear_fp8
from precision.manifest import (
    COMPUTES,
    FP8_FOR,
    Assignment,
    Compute,
    Manifest,
    RegionKind,
    assign,
    can_be_fp8,
    find_regions,
    is_slice,
    nearest,
    router_regions,
)
from precision.shared_inputs import SharedInputs, cast_once

_FLOATS = tuple(DTYPES.values())


class Regions:
    """The regions of one model. Changes the model in place until `close`."""

    def __init__(self, model: torch.nn.Module, manifest: Manifest, fp8: Fp8Section | None = None) -> None:
        """fp8: how modules in FP8 compute. Raises UserError like `precision.manifest.assign`."""
        self.manifest = manifest
        self.fp8 = fp8 or Fp8Section()
        self.fp8_count: Callable[[str], Count] | None = None
        """While set, maps a region's name to the function that receives its operands; for telemetry."""
        self.assignments: dict[str, Assignment] = assign(manifest, model)
        """The manifest's dtypes, with rule and reason; `dtypes` has the current ones."""
        self._model = model
        self._shared = SharedInputs()
        self._kinds = find_regions(model)
        self._compute: dict[str, str] = {name: given.compute for name, given in self.assignments.items()}
        head: Any = getattr(model, "get_output_embeddings", lambda: None)()
        self._patched: list[tuple[torch.nn.Module, Any]] = []
        modules, routers = dict(model.named_modules()), router_regions(model)
        for name, kind in self._kinds.items():
            module = modules[name]
            inside = routers.get(name, name) != name  # a router, which has yet to choose by what it gets
            self._patch(module, self._wrap(name, kind, module, returns_own_dtype=module is head or inside))
        for name in set(routers.values()) - self._kinds.keys():  # LongCat's does not call the layer inside it
            self._patch(modules[name], _inside(lambda device_type: _autocast(device_type, "fp32"), modules[name]))
        self._patch(model, _inside(lambda device_type: self.ambient(), model))

    @property
    def dtypes(self) -> dict[str, str]:
        """Module name to its current dtype: fp32, bf16, fp16 or fp8. A copy."""
        return dict(self._compute)

    @property
    def may_idle(self) -> frozenset[str]:
        """Regions that may show no matmul in a healthy pass: norms, modules found by their parameters, experts, and
        what `peft` trains a copy of, which computes while the adapter is off."""
        return frozenset(
            name
            for name, kind in self._kinds.items()
            if kind in ("norm", "functional") or "expert" in name or "original_module" in name.split(".")
        )

    def uses(self, compute: str) -> bool:
        """Whether the ambient dtype or any region is `compute`. True for fp16 means that the loss needs a scale."""
        return compute == self.manifest.default or compute in self._compute.values()

    @property
    def suspects(self) -> tuple[str, ...]:
        """Regions to promote if no module is known as the cause."""
        return self.names_in("fp16")

    def names_in(self, compute: str) -> tuple[str, ...]:
        return tuple(name for name, now in self._compute.items() if now == compute)

    def usual(self, name: str) -> str:
        """The manifest's dtype of a region."""
        return self.assignments[name].compute

    def set(self, name: str, compute: str) -> None:
        """Change a region's dtype from the next pass on, identically on every rank."""
        self._check(name, compute)
        self._compute[name] = compute

    def state_dict(self) -> dict[str, str]:
        """Region name to dtype, of the regions whose dtype is no longer the manifest's."""
        return {name: now for name, now in self._compute.items() if now != self.assignments[name].compute}

    def load_state_dict(self, state: dict[str, str]) -> None:
        """The manifest's dtypes, with a checkpoint's changes applied; raises UserError before any change."""
        for name, compute in state.items():
            self._check(name, compute)
        self._compute = {name: given.compute for name, given in self.assignments.items()} | state

    def ambient(self) -> torch.autocast:
        """Context in which parts outside every region run in the manifest's default dtype; for calls of parts of the
        model. The backward pass belongs outside: autograd sums gradients with `add`, which refuses to mix BF16 and FP16
        there."""
        return _autocast(next(self._model.parameters()).device.type, self.manifest.default)

    @contextmanager
    def in_fp32(self) -> Iterator[None]:
        """Context manager: every region computes in FP32, and what is around it; for calls of parts of the model."""
        compute, manifest = self._compute, self.manifest
        self._compute, self.manifest = dict.fromkeys(compute, "fp32"), replace(manifest, default="fp32")
        try:
            yield
        finally:
            self._compute, self.manifest = compute, manifest

    def close(self) -> None:
        for module, before in reversed(self._patched):
            if before is None:
                del module.forward
            else:
                module.forward = before
        self._patched.clear()

    def _check(self, name: str, compute: str) -> None:
        if name not in self._compute:
            raise UserError(f"{name}: no region of this model has that name{nearest(name, list(self._compute))}")
        if compute not in COMPUTES:
            raise UserError(f"{name}: {compute} is not one of {', '.join(COMPUTES)}")
        if compute == "fp8" and not can_be_fp8(self._model, name):
            raise UserError(f"{name}: {FP8_FOR}")

    def fp8_layer(self, name: str) -> tuple[tuple[int, ...], torch.dtype]:
        """(out, in) of a linear layer's weight, in full even if ZeRO-3 partitions it, and the dtype around it."""
        weight: Any = self._model.get_submodule(name).weight
        return tuple(getattr(weight, "ds_shape", weight.shape)), DTYPES[self.ambient_of(name)]

    def ambient_of(self, name: str) -> str:
        """The dtype around a region: that of the region which consumes its output."""
        enclosing = self._enclosing(name)
        return self._compute[enclosing] if enclosing is not None else self.manifest.default

    def _patch(self, module: torch.nn.Module, forward: Callable[..., Any]) -> None:
        self._patched.append((module, module.__dict__.get("forward")))
        module.forward = forward

    def _wrap(
        self, name: str, kind: RegionKind, module: torch.nn.Module, *, returns_own_dtype: bool
    ) -> Callable[..., Any]:
        original = module.forward
        if kind == "norm":

            @functools.wraps(original)
            def norm_forward(*args: Any, **kwargs: Any) -> Any:
                return _run_norm(module, original, DTYPES[self._compute[name]], args, kwargs)

            return norm_forward

        own_names: tuple[str, ...] | None = None  # parameters that autocast would leave in FP32
        if kind == "functional":
            own_names = tuple(own for own, _ in module.named_parameters(recurse=False))
        elif getattr(module, "bias", None) is not None and not (returns_own_dtype and is_slice(module)):
            own_names = ("bias",)  # slices and DeepSpeed's linear layer at ZeRO-3 add it by themselves

        @functools.wraps(original)
        def forward(*args: Any, **kwargs: Any) -> Any:
            compute = self._compute[name]
            device_type = _device_type(args, kwargs)
            if compute == "fp8":
                return self._in_fp8(name, module, device_type, *args, **kwargs)
            dtype = DTYPES[compute]
            if compute == "fp32":
                args, kwargs = cast((args, kwargs), (torch.bfloat16, torch.float16), dtype)
            elif kind == "functional":  # autocast does not know the grouped matmuls of fused experts
                args, kwargs = cast((args, kwargs), _FLOATS, dtype)
            elif kind == "attention":  # type promotion must not meet the other 16-bit dtype: widen, which loses nothing
                other = torch.float16 if compute == "bf16" else torch.bfloat16
                args, kwargs = cast((args, kwargs), (other,), torch.float32)
            elif kind == "matmul" and not is_slice(module) and args and args[0].dtype == torch.float32:
                # not left to autocast: a recomputed layer must save for its backward pass what it saved at first
                args = (cast_once(self._shared.at(name, args[0], dtype), args[0], dtype), *args[1:])
            own = nullcontext() if own_names is None else own_parameters_in(module, dtype, own_names)
            with own, _autocast(device_type, compute):
                output = original(*args, **kwargs)
            back = self.ambient_of(name)
            if back == compute or returns_own_dtype:
                return output
            return cast(output, (dtype,), DTYPES[back])

        return forward

    def _in_fp8(self, name: str, module: Any, device_type: str, input: torch.Tensor) -> torch.Tensor:
        """A linear layer's forward pass in FP8. input: named as in torch."""
        count = self.fp8_count(name) if self.fp8_count is not None else None
        with _autocast(device_type, "fp32"):
            ambient = DTYPES[self.ambient_of(name)]
            kept, weight = self._shared.at(name, input, ambient), module.weight
            return linear_fp8(input, weight, module.bias, ambient=ambient, section=self.fp8, count=count, kept=kept)

    def _enclosing(self, name: str) -> str | None:
        """The nearest region around `name`, which consumes its output."""
        parent = name
        while parent:
            parent = parent.rpartition(".")[0]
            if parent in self._kinds:
                return parent
        return None


def _autocast(device_type: str, compute: Compute | str) -> torch.autocast:
    enabled = compute != "fp32"  # a dtype must be given even if autocast is off
    dtype = DTYPES[compute] if enabled else torch.bfloat16
    return torch.autocast(device_type, dtype=dtype, enabled=enabled, cache_enabled=False)


def _inside(context: Callable[[str], torch.autocast], module: torch.nn.Module) -> Callable[..., Any]:
    """The module's forward, run in the context for the type of its inputs' device."""
    original = module.forward

    @functools.wraps(original)
    def forward(*args: Any, **kwargs: Any) -> Any:
        with context(_device_type(args, kwargs)):
            return original(*args, **kwargs)

    return forward


def _run_norm(
    module: torch.nn.Module, original: Callable[..., Any], dtype: torch.dtype, args: tuple, kwargs: dict[str, Any]
) -> Any:
    """Run a norm on inputs and weights in `dtype`, with autocast off; returns it in the dtype of its first input."""
    given = next((item.dtype for item in tensors_of((args, kwargs)) if item.dtype in _FLOATS), dtype)
    device_type = _device_type(args, kwargs)
    args, kwargs = cast((args, kwargs), _FLOATS, dtype)
    with own_parameters_in(module, dtype), _autocast(device_type, "fp32"):
        output = original(*args, **kwargs)
    return cast(output, _FLOATS, given)


@contextmanager
def own_parameters_in(
    module: torch.nn.Module, dtype: torch.dtype, names: tuple[str, ...] | None = None
) -> Iterator[None]:
    """Context manager: the module's code sees its parameters in `dtype`; gradients still reach the FP32 parameters.

    names: the parameters to cast; None: all. An instance attribute hides the parameter of the same name from
    `self.weight` only: hooks, state_dict and ZeRO still see the parameter. A weight that `peft` replaces by W + BA
    while it calls the module is a property, whose value torch keeps until `peft` takes it away again.
    """
    own = [item for item in module.named_parameters(recurse=False) if names is None or item[0] in names]
    shadows = {name: item.to(dtype) for name, item in own if item.dtype in _FLOATS and item.dtype != dtype}
    module.__dict__.update(shadows)
    for name, added in getattr(module, "parametrizations", {}).items():
        if parametrize._cache_enabled and (names is None or name in names):
            whole = added.original.to(torch.promote_types(added.original.dtype, dtype))
            for factors in added:
                whole = factors(whole)
            parametrize._cache[id(module), name] = whole.to(dtype)
    try:
        yield
    finally:
        for name in shadows:
            del module.__dict__[name]


def _device_type(args: tuple, kwargs: dict[str, Any]) -> str:
    return next((item.device.type for item in tensors_of((args, kwargs))), "cpu")


def cast(value: Any, sources: tuple[torch.dtype, ...], target: torch.dtype) -> Any:
    """`value` with every tensor of a source dtype in `target`; looks into tuples, lists and dicts."""
    if isinstance(value, torch.Tensor):
        return value.to(target) if value.dtype in sources else value
    if type(value) in (tuple, list):
        return type(value)(cast(item, sources, target) for item in value)
    if type(value) is dict:
        return {key: cast(item, sources, target) for key, item in value.items()}
    return value
