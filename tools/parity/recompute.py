"""A module's call in a run, and its recomputation on the reference's module in any dtype.

The reference is freshly built by transformers, never patched by the engine, by regions or by kernels. Its weights are
the masters, rounded as planned. Submodules return what they returned in the run.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import Context
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import torch
from torch.func import functional_call
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from modeling.tensor_parallel import Cut
from precision.dtypes import DTYPES
from precision.findings import tensors_of
from precision.inner_dtypes import is_float
from precision.manifest import find_regions
from precision.regions import Regions
from precision.tolerance import unit_roundoff
from tools.parity import fp8_linear
from tools.parity.plain_flex import plain_flex
from tools.parity.rounding import FIELDS, ROUNDOFF_FP8, Kind
from training.corruption.plain import own_code

COMPUTED_IN = (None, torch.float32, torch.float64)
"""Dtypes in which the reference recomputes a call: the plan's (None), FP32, and FP64, which counts as exact."""
MOST_VALUES = 2**22
"""Largest number of values compared of a linear layer's output, taken from evenly spread rows."""

_HALVES = (torch.float16, torch.bfloat16)
_FLOATS = frozenset(DTYPES.values())
_CASTS = (torch.Tensor.float, torch.Tensor.bfloat16, torch.Tensor.half)


@dataclass
class Call:
    """A module's call in the run."""

    name: str
    args: tuple
    kwargs: dict[str, Any]
    output: Any = None
    inside: list[Call] = field(default_factory=list)
    """Calls of submodules, while they are needed."""
    versions: list[int] = field(default_factory=list)
    """Version counters of all tensors at the call, then at the return: a higher one later shows a change in place."""
    came: dict[int, torch.Tensor] = field(default_factory=dict)
    """Gradients that arrived in the backward pass, by the number of the output among its float tensors."""
    made: dict[int, torch.Tensor] = field(default_factory=dict)
    """Gradients that it computed for its inputs, by the number of the input among its float tensors."""
    followed: bool = False
    """Whether the call's gradients are recorded."""

    def now(self) -> list[int]:
        """The current `versions`."""
        return [tensor._version for tensor in tensors_of((self.args, self.kwargs, self.output))]


Kernel = Callable[[Any, torch.Tensor], torch.Tensor]
"""Computes a linear layer from its parameters by name and its input."""


@dataclass
class Leaves:
    """The float tensors to differentiate with respect to; of the inputs, those that required gradients in the run.

    Masks are excluded: for their gradient torch uses another attention kernel.
    """

    inputs: list[torch.Tensor] = field(default_factory=list)
    returned: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """Outputs of submodules, by their place in `Call.inside`."""
    own: dict[str, torch.Tensor] = field(default_factory=dict)
    """Parameters of the module, by their names in it."""
    handed: dict[int, Any] = field(default_factory=dict)
    """Inputs of submodules that this computation makes, by their place."""

    def of(self, tree: Any, found: list[torch.Tensor]) -> Any:
        """`tree` with its float tensors as leaves, added to `found`; those that required gradients still do."""

        def take(value: torch.Tensor) -> torch.Tensor:
            found.append(value.detach().requires_grad_(value.requires_grad))
            return found[-1]

        return map_floats(take, tree)


def is_off(layer: torch.nn.Module) -> bool:
    """Whether an adapted layer now computes as in the base, inside `modeling.adapter.adapter_off`."""
    return bool(getattr(layer, "_disable_adapters", False))


def again(
    plan: Plan,
    call: Call,
    dtype: torch.dtype | None,
    leaves: Leaves | None = None,
    *,
    code: Mapping[str, torch.nn.Module] | None = None,
) -> dict[str, Any]:
    """Recompute a call on the reference's module, in `dtype` or as planned; returns its results by part.

    leaves: filled, for differentiation. code: other modules under the same names, called with the reference's weights
    and their own buffers, without checkpointing around them.
    """
    # Outside the run's context, in which transformers collects modules' outputs, such as router logits, to return.
    return Context().run(_again, plan, call, dtype, leaves, code)


def _again(
    plan: Plan, call: Call, dtype: torch.dtype | None, leaves: Leaves | None, code: Mapping[str, torch.nn.Module] | None
) -> dict[str, Any]:
    modules = plan.modules if code is None else code
    module, name = modules[call.name], call.name
    given: dict[str, Any] = {}
    left: dict[str, deque[tuple[int, Call]]] = defaultdict(deque)
    for number, inner in enumerate(call.inside):
        left[inner.name].append((number, inner))

    def returning(inside: str, original: Any) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            if not left[inside]:
                return original(*args, **kwargs)
            number, inner = left[inside].popleft()
            given[_into(name, inside, given)] = (args, kwargs)
            output = _converted(inner.output, dtype)
            if leaves is None:
                return output
            leaves.handed[number], leaves.returned[number] = (args, kwargs), []
            return leaves.of(output, leaves.returned[number])

        return forward

    with ExitStack() as stack:
        for inside in list(left):
            inner_module: Any = modules[inside]
            stack.enter_context(patch.object(inner_module, "forward", returning(inside, inner_module.forward)))
        own = plan.tensors(name, dtype, without=tuple(f"{inside}." for inside in left))
        stack.enter_context(plain_flex(module))
        device = next((tensor.device.type for tensor in tensors_of((call.args, call.kwargs))), "cpu")
        args, kwargs = _converted((call.args, call.kwargs), dtype)
        if leaves is not None:
            trained = {key for key, _ in module.named_parameters(remove_duplicate=False)}
            leaves.own = {key: item.detach().requires_grad_() for key, item in own.items() if key in trained}
            own |= leaves.own
            args, kwargs = leaves.of((args, kwargs), leaves.inputs)
        if dtype is None:
            stack.enter_context(products_in_fp32())
            output = plan.call(name, module, own, args, kwargs, device)
        else:
            stack.enter_context(torch.autocast(device, enabled=False))
            if dtype is torch.float64:
                stack.enter_context(as_fp64())
                config: Any = getattr(module, "config", None)
                experts = getattr(config, "_experts_implementation", None)
                if experts is not None:  # grouped matmuls do not support FP64
                    stack.callback(setattr, config, "_experts_implementation", experts)
                    config._experts_implementation = "eager"
            if code is None:
                output = functional_call(module, own, args, kwargs)
            else:
                named = {key for key, _ in module.named_parameters(remove_duplicate=False)}
                output = own_code(module, {key: item for key, item in own.items() if key in named}, args, kwargs)
    return {"output": output, **given}


class Plan:
    """The planned dtype of each module."""

    def __init__(
        self,
        reference: torch.nn.Module,
        compute: torch.dtype,
        regions: Regions | None,
        cuts: Mapping[str, Cut],
        given: Mapping[str, tuple[int, list[int]]],
    ) -> None:
        """cuts: how the run's ranks share parameters, by name. given: by module the dimension along which each rank has
        a slice of the input, and the sizes of all slices."""
        self._cuts, self._given = cuts, given
        self._kernel: tuple[str, Kernel] | None = None
        self.modules = dict(reference.named_modules())
        self._kinds = find_regions(reference)
        self._compute, self._regions = compute, regions
        self._dtypes = regions.dtypes if regions else {}
        find_head: Any = getattr(reference, "get_output_embeddings", lambda: None)
        head = find_head()
        self.head = next((name for name, module in self.modules.items() if module is head), None)
        """Name of the output embedding; None if there is none."""

    @contextmanager
    def computed_by(self, name: str, kernel: Kernel) -> Iterator[None]:
        """Context manager: a linear layer rounds to the plan's dtype where another sound kernel does."""
        self._kernel = name, kernel
        try:
            yield
        finally:
            self._kernel = None

    @property
    def in_16_bits(self) -> bool:
        """Whether the run computes in 16 bits throughout, without a manifest."""
        return self._regions is None and self._compute != torch.float32

    def computes_as_default(self, name: str) -> bool:
        """Whether a module computes in the default dtype."""
        regions = self._regions
        return regions is None or self._dtypes.get(name, regions.manifest.default) == regions.manifest.default

    def roundoff_of_gradient(self, name: str, planned: torch.Tensor) -> float:
        """`roundoff` for the backward pass, where FP8 may have another format. name: need not be a module's."""
        fp8 = self._regions is not None and self._dtypes.get(name) == "fp8"
        if fp8 and self._regions is not None and self._regions.fp8.gradient == "e5m2":
            return 2 * ROUNDOFF_FP8
        return self.roundoff(name, planned) if name in self.modules else unit_roundoff(planned.dtype)

    def kind(self, name: str) -> Kind:
        module = self.modules[name]
        if name in self._kinds:
            region = self._kinds[name]
            return "linear" if region == "matmul" else region
        words = type(module).__name__
        if "Rotary" in words:
            return "rotary"
        if isinstance(module, torch.nn.Embedding):
            return "embedding"
        return "activation" if next(module.children(), None) is None else "composite"

    def width(self, name: str) -> int:
        """Number of values that share a statistic: those of a head of attention; 0 for the last dimension."""
        if name not in self.modules or self.kind(name) != "attention":
            return 0
        head = getattr(self.modules[name], "head_dim", 0)
        return head if isinstance(head, int) else 0

    def roundoff(self, name: str, planned: torch.Tensor) -> float:
        """u of the coarsest dtype that a module rounds to. planned: its result in the plan's dtype."""
        compute = self._compute
        if self._regions is not None:
            region = self._dtypes.get(name, self._regions.manifest.default)
            if region == "fp8":
                return ROUNDOFF_FP8
            compute = DTYPES[region]
        return max(unit_roundoff(compute), unit_roundoff(planned.dtype))

    def tensors(self, name: str, dtype: torch.dtype | None, *, without: tuple[str, ...]) -> dict[str, torch.Tensor]:
        """A module's parameters, a shared one by one name, and buffers, rounded as planned; in `dtype`, if given.

        without: name prefixes of submodules that are not run. Their vectors are kept, by whose dtype some code, such as
        Mamba's blocks, rounds what it passes to them.
        """
        module, prefix, found = self.modules[name], f"{name}." if name else "", {}
        named = module.named_parameters(remove_duplicate=False)
        run = ((key, item) for key, item in named if item.dim() < 2 or not f"{prefix}{key}".startswith(without))
        for key, parameter in {id(item): (key, item) for key, item in run}.values():
            if parameter.is_floating_point():
                parameter = parameter.to(self._weights(f"{prefix}{key}".rpartition(".")[0]))
            found[key] = parameter if dtype is None else _converted(parameter, dtype)
        if dtype is not None:
            found |= {key: _converted(item, dtype) for key, item in module.named_buffers()}
        return found

    def _weights(self, owner: str) -> torch.dtype:
        if self._regions is None:
            return self._compute
        compute = self._dtypes.get(owner, "fp32")
        return torch.float32 if compute == "fp8" else DTYPES[compute]

    def call(self, name: str, module: Any, own: Any, args: tuple, kwargs: dict[str, Any], device: str) -> Any:
        """A module in plain torch and the plan's dtypes, as `precision.regions` has them; FP8 by its definition."""
        regions = self._regions
        if regions is None:
            with torch.autocast(device, enabled=False):
                return self._by_ranks(name, module, own, args, kwargs)
        compute = self._dtypes.get(name)
        if compute is None:
            with _autocast(device, regions.manifest.default):
                return functional_call(module, own, args, kwargs)
        ambient = DTYPES[regions.ambient_of(name)]
        if compute == "fp8":
            given = args[0] if args else kwargs["input"]
            return fp8_linear.linear(given, own["weight"], own.get("bias"), ambient=ambient, section=regions.fp8)
        dtype, kind = DTYPES[compute], self._kinds[name]
        given = next((item.dtype for item in tensors_of((args, kwargs)) if item.is_floating_point()), dtype)
        if kind in ("norm", "functional") or compute == "fp32":
            args, kwargs = _converted((args, kwargs), dtype)
        with _autocast(device, "fp32" if kind == "norm" else compute):
            output = self._by_ranks(name, module, own, args, kwargs)
        return output if name == self.head else _converted(output, given if kind == "norm" else ambient)

    def _by_ranks(self, name: str, module: Any, own: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A module's result, composed as by ranks that each have a slice of it."""
        if self._kernel is not None and name == self._kernel[0]:
            return self._kernel[1](own, args[0] if args else kwargs["input"])
        how = self._cuts.get(f"{name}.weight")
        if how is not None:
            return _by_slices(how, own, args[0] if args else kwargs["input"])
        if name in self._given and self.kind(name) == "norm":  # over heads: each rank sums the gradient of its own
            dim, sizes = self._given[name]
            parts = args[0].split(sizes, dim)
            return torch.cat([functional_call(module, own, (part, *args[1:]), kwargs) for part in parts], dim)
        return functional_call(module, own, args, kwargs)


def _by_slices(how: Cut, own: Any, given: torch.Tensor) -> torch.Tensor:
    """A linear layer whose weight ranks share: sums over ranks add up what each has rounded.

    The forward pass sums if each rank has columns; the backward pass sums gradients of inputs if each has rows.
    """
    weights, bias = own["weight"].split(how.sizes, how.dimension), own.get("bias")
    if how.dimension == 0:
        biases = bias.split(how.sizes) if bias is not None else [None] * len(weights)
        return torch.cat([functional.linear(given, *both) for both in zip(weights, biases, strict=True)], -1)
    parts = zip(given.split(how.sizes, -1), weights, strict=True)
    output = sum(functional.linear(values, weight) for values, weight in parts)
    assert isinstance(output, torch.Tensor)
    return output if bias is None else output + bias


def bias_last(own: Any, given: torch.Tensor) -> torch.Tensor:
    """A linear layer that rounds its product before the bias is added, as DeepSpeed's does once it ran ZeRO-3."""
    output = functional.linear(given, own["weight"])
    return output if own.get("bias") is None else output + own["bias"]


def by_halves(own: Any, given: torch.Tensor) -> torch.Tensor:
    """A linear layer that sums in two halves: over inputs, in the backward pass over outputs, and over rows."""
    bias, found = own.get("bias"), []
    for rows in given.reshape(-1, given.shape[-1]).chunk(2):
        columns = []
        for weight in own["weight"].chunk(2):
            parts = zip(rows.chunk(2, -1), weight.chunk(2, -1), strict=True)
            first, *second = (functional.linear(values, part) for values, part in parts)  # one input has no halves
            columns.append(sum(second, first))
        found.append(torch.cat(columns, -1))
    output = torch.cat(found).unflatten(0, given.shape[:-1])
    return output if bias is None else output + bias


class as_fp64(TorchFunctionMode):
    """Gives FP64 wherever another float dtype is requested: a norm's statistics, a softmax, a rotary table, a cast."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _CASTS:
            return args[0].double()
        args, kwargs = tree_map(
            lambda item: torch.float64 if isinstance(item, torch.dtype) and item in _FLOATS else item,
            (args, kwargs or {}),
        )
        if function is functional.rms_norm and len(args) < 4 and kwargs.get("eps") is None:
            kwargs["eps"] = torch.finfo(torch.float32).eps  # the same as in 16-bit computations
        return function(*args, **kwargs)


@contextmanager
def products_in_fp32() -> Iterator[None]:
    """Context manager: 16-bit linear layers on a CPU compute in FP32 and round once, as kernels with FP32 sums do.

    It is as accurate as torch's own, which takes up to 4 times as long in BF16 and 20 times in FP16 if the processor
    has no such instructions. A patch, since a recomputation in the backward pass would be outside a mode.
    """
    own = functional.linear

    def linear(given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        in_halves = given.is_cpu and given.dtype == weight.dtype in _HALVES
        return (_RoundedLinear.apply if in_halves else own)(given, weight, bias)

    with patch.object(functional, "linear", linear):
        yield


class _RoundedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        ctx.save_for_backward(given, weight)
        return functional.linear(given.float(), weight.float(), None if bias is None else bias.float()).to(given.dtype)

    @staticmethod
    def backward(ctx: Any, *came: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (given, weight), rows = ctx.saved_tensors, came[0].float().flatten(0, -2)
        wanted = ctx.needs_input_grad
        of_given = (rows @ weight.float()).view(given.shape).to(given.dtype) if wanted[0] else None
        of_weight = (rows.T @ given.float().flatten(0, -2)).to(weight.dtype) if wanted[1] else None
        return of_given, of_weight, *(rows.sum(0).to(weight.dtype) if want else None for want in wanted[2:])


def _autocast(device: str, compute: str) -> torch.autocast:
    enabled = compute != "fp32"
    return torch.autocast(device, dtype=DTYPES[compute] if enabled else None, enabled=enabled, cache_enabled=False)


def parts_of(call: Call) -> dict[str, Any]:
    """The run's results by part: its output, and what it passed to each submodule's call."""
    found: dict[str, Any] = {}
    for inner in call.inside:
        found[_into(call.name, inner.name, found)] = (inner.args, inner.kwargs)
    return {"output": call.output, **found}


def _into(name: str, inside: str, known: Collection[str]) -> str:
    """Name of the part that goes into a submodule; `known` has the names given before."""
    part = f"into {inside.removeprefix(f'{name}.')}"
    names = itertools.chain([part], (f"{part} #{number}" for number in itertools.count(2)))
    return next(each for each in names if each not in known)


def fewer_rows(call: Call) -> Call:
    """A linear layer's call, with its gradients, reduced to evenly spread rows of at most about MOST_VALUES values."""
    given, output = call.args[0] if call.args else None, call.output
    if given is None or not isinstance(output, torch.Tensor) or output.numel() <= MOST_VALUES:
        return call
    every = -(-output.numel() // MOST_VALUES) | 1  # odd, or rows of one position alone might be left
    args, output, came, made = map_floats(
        lambda values: values.reshape(-1, values.shape[-1])[::every], ((given,), output, call.came, call.made)
    )
    return Call(call.name, (*args, *call.args[1:]), call.kwargs, output, came=came, made=made)


def fewer_outputs(call: Call) -> tuple[Call, slice]:
    """A linear layer's call with all rows and evenly spread outputs, at most MOST_VALUES values; and which outputs."""
    rows = call.output.numel() // call.output.shape[-1]
    chosen = slice(None, None, -(-call.output.shape[-1] // max(1, MOST_VALUES // rows)))
    came = {number: gradient[..., chosen] for number, gradient in call.came.items()}
    return replace(call, output=call.output[..., chosen], came=came, made={}), chosen


def distinct_rows(call: Call) -> Call:
    """A linear layer's call with each distinct input row once. Rows of a repeated token are equal in layers that see no
    position, and so are their errors, which statistics over rows would take for independent."""
    given, output = call.args[0] if call.args else None, call.output
    if given is None or not isinstance(output, torch.Tensor):
        return call
    _, group = torch.unique(given.reshape(-1, given.shape[-1]), dim=0, return_inverse=True)
    order = torch.arange(len(group), device=group.device)
    first = order.new_full((int(group.max()) + 1,), len(group)).scatter_reduce_(0, group, order, "amin")
    if len(first) == len(group):
        return call
    args, output = map_floats(lambda values: values.reshape(-1, values.shape[-1])[first], ((given,), output))
    return replace(call, args=(*args, *call.args[1:]), output=output)


def rounded(call: Call) -> Call:
    """The call in FP64, with all its values and incoming gradients randomly off by FP32's unit roundoff, up or down."""
    chance = _Chance()

    def off(value: torch.Tensor) -> torch.Tensor:
        return chance.off(value.detach()).requires_grad_(value.requires_grad)

    inside = [
        replace(inner, output=map_floats(off, inner.output), made=map_floats(off, inner.made)) for inner in call.inside
    ]
    args, kwargs, came = map_floats(off, (call.args, call.kwargs, call.came))
    return replace(call, args=args, kwargs=kwargs, came=came, inside=inside)


class Redrawn(TorchDispatchMode):
    """Monte Carlo arithmetic (Parker 1997): each result in `dtype` is randomly off by FP32's unit roundoff, up or down.

    It changes a computation by as much as FP32's roundings do, including terms that cancel inside it.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype
        self._chance = _Chance()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if not any(item.alias_info for item in func._schema.returns):  # neither a view nor in place
            for value in leaves_of(made):
                if value.dtype == self._dtype:
                    value.copy_(self._chance.off(value))
        return made


class _Chance:
    """Random signs, the same for the same tensors."""

    def __init__(self) -> None:
        self._generators: dict[torch.device, torch.Generator] = {}

    def off(self, value: torch.Tensor) -> torch.Tensor:
        """The values in FP64, each off by FP32's unit roundoff, up or down."""
        if value.device not in self._generators:
            self._generators[value.device] = torch.Generator(value.device).manual_seed(0)
        drawn: Any = {"generator": self._generators[value.device], "device": value.device, "dtype": torch.int8}
        u = unit_roundoff(torch.float32)
        return torch.randint(2, value.shape, **drawn).double().mul_(2 * u).add_(1 - u).mul_(value)


def row_of(name: str, part: str, kind: Kind, roundoff: float, terms: int, sums: list[float]) -> list[dict[str, Any]]:
    """The row of a module's part for `tools.parity.rounding.pooled`; none for a part passed on without any error."""
    if part != "output" and not any(sums[FIELDS.index(f"{who}_rr")] for who in ("run", "plan", "own")):
        return []
    return [{"module": name, "part": part, "kind": kind, "roundoff": roundoff, "terms": terms, "sums": sums}]


def terms_of(kind: Kind, call: Call) -> int:
    """Number of terms of the longest sum in a module, from its input tensor.

    For a rotary table, the number of positions squared: its angle has FP32's error times the position.
    """
    given = next((item for item in floats_of((call.args, call.kwargs)) if item.dim() > 1), None)
    if given is None or kind in ("embedding", "activation"):
        return 1
    if kind == "rotary":
        return given.shape[-2] ** 2
    return max(given.shape[-2:]) if kind == "attention" else given.shape[-1]


def floats_of(tree: Any) -> list[torch.Tensor]:
    """The floating-point tensors of a tree, in order."""
    return [tensor for tensor in tensors_of(tree) if tensor.is_floating_point()]


def _converted(tree: Any, dtype: torch.dtype | None) -> Any:
    """A copy whose floating-point tensors are in `dtype`, or in their own dtype for None."""
    return map_floats(lambda value: value.to(dtype or value.dtype, copy=True), tree)  # some modules work in place


def map_floats(change: Callable[[torch.Tensor], torch.Tensor], tree: Any) -> Any:
    """A tree with its floating-point tensors changed, which are visited in the order of `leaves_of`."""
    return tree_map(lambda value: change(value) if is_float(value) else value, tree)


def leaves_of(tree: Any) -> list[torch.Tensor]:
    """The floating-point tensors of a tree, those of a cache or a mask included, in order."""
    return [item for item in tree_leaves(tree) if is_float(item)]
