"""Every module of a run computed four times on the same inputs: what `precision.signature` judges.

In the forward pass of a step's first micro-batch, as soon as a module of the run has returned, the same module of the
reference (`training.parity.reference`: freshly built by transformers, never patched by the engine, by regions or by
kernels) is called on what the run's module got: in FP64, which counts as exact, in FP32, and in the dtype that the plan
says. Its weights are the masters, rounded as the plan says, so that the rounding of a weight is nobody's error.

A module with modules inside is compared without their errors: those inside return what they returned in the run, and
what it hands to them is compared, besides its own output. So each part has but a handful of roundings: of attention
the rotation, the scores, the softmax and its product with the values, as what `o_proj` gets.

All three are independent of what was changed in the run's model. They are not independent of transformers' code: a
constant that is wrong there is wrong in all. A narrowing there is left out of the FP64 computation, so that it shows in
FP32's error (see `precision.signature`).
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from modeling.adapter import is_off
from precision import fp8_reference
from precision.dtypes import DTYPES
from precision.findings import tensors_of
from precision.manifest import RegionKind, find_regions
from precision.regions import Regions
from precision.signature import FIELDS, ROUNDOFF_FP8, Kind, sums_of
from precision.tolerance import unit_roundoff
from training.distributed import World

MOST_VALUES = 2**22
"""Of a linear layer's output, at most so many values are compared, those of evenly spread rows."""

_KINDS: dict[RegionKind, Kind] = {
    "matmul": "linear",
    "attention": "attention",
    "functional": "functional",
    "norm": "norm",
}


_FLOATS = frozenset(DTYPES.values())
_CASTS = (torch.Tensor.float, torch.Tensor.bfloat16, torch.Tensor.half)


@dataclass
class _Call:
    """A module's call in the run."""

    name: str
    args: tuple
    kwargs: dict[str, Any]
    output: Any = None
    inside: list[_Call] = field(default_factory=list)
    """The calls of modules inside, while it is wanted."""
    versions: list[int] = field(default_factory=list)
    """Of all tensors when it was called, then when it returned: one that has changed since is not what it was."""

    def now(self) -> list[int]:
        """`versions`, as they are now."""
        return [tensor._version for tensor in tensors_of((self.args, self.kwargs, self.output))]


class Signatures:
    """One step's parts of all modules that a reference and a run's model share."""

    def __init__(
        self,
        reference: torch.nn.Module,
        candidate: torch.nn.Module,
        *,
        compute: torch.dtype,
        regions: Regions | None = None,
        world: World | None = None,
    ) -> None:
        """reference: in FP32, its weights the masters. compute: the dtype that the plan says on the cast path.

        regions: those of the manifest path, whose dtypes are the plan; None on the cast path. world: whose ranks each
        have a part of the step; None where this process has all of it.
        """
        self._modules = dict(reference.named_modules())
        self._plan = _Plan(reference, compute, regions)
        self._candidate = {name: module for name, module in candidate.named_modules() if name in self._modules}
        self._adapted = [module for module in self._candidate.values() if hasattr(module, "_disable_adapters")][:1]
        """A layer that tells whether the candidate computes as its base, which is what it is compared with in DPO."""
        self._world = world
        self._running: list[_Call] = []
        self._done: set[str] = set()
        self._rows: list[dict[str, Any]] = []
        self._not_measured: dict[str, str] = {}

    @contextmanager
    def of_candidate(self) -> Iterator[None]:
        """Around the candidate's pass."""
        with ExitStack() as stack:
            for name, module in self._candidate.items():
                before = module.register_forward_pre_hook(self._entering(name), with_kwargs=True)
                # always_call: checkpointing ends a recomputation early with an exception
                after = module.register_forward_hook(self._leaving, with_kwargs=True, always_call=True)
                stack.callback(before.remove)
                stack.callback(after.remove)
            yield
        self._running.clear()

    def measured(self) -> dict[str, Any]:
        """{"parts": rows for `precision.signature.pooled`, "not_measured": reason by module}. A collective."""
        ranks = [self._rows] if self._world is None else self._world.gather_objects(self._rows)
        found: dict[tuple[str, str], dict[str, Any]] = {}
        for row in (row for rows in ranks for row in rows):
            known = found.setdefault((row["module"], row["part"]), row)
            if known is not row:
                known["sums"] = [a + b for a, b in zip(known["sums"], row["sums"], strict=True)]
        return {"parts": list(found.values()), "not_measured": self._not_measured}

    def _entering(self, name: str) -> Any:
        def enter(module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
            call = _Call(name, args, kwargs)
            call.versions = call.now()
            self._running.append(call)

        return enter

    def _leaving(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        call = self._running.pop()
        if any(map(is_off, self._adapted)):  # the reference's adapter is on
            return
        in_place = call.versions != call.now()
        call.output = output
        call.versions = call.now()
        if self._running and self._running[-1].name not in self._done:
            self._running[-1].inside.append(call)
        if call.name and call.name not in self._done and output is not None:
            self._done.add(call.name)  # neither later micro-batches nor a recomputation
            if in_place:
                self._not_measured[call.name] = "it changes in place what it got"
            else:
                self._compare(call)
        call.inside.clear()

    @torch.no_grad()
    def _compare(self, call: _Call) -> None:
        changed = next((inner.name for inner in call.inside if inner.versions != inner.now()), None)
        if changed is not None:
            self._not_measured[call.name] = f"it changes in place what {changed} got or returned"
            return
        kind = self._plan.kind(call.name)
        if kind == "functional":  # another implementation calls what is inside as often as it likes
            call.inside.clear()
        if kind == "linear" and not call.inside:
            call = _fewer_rows(call)
        try:
            exact = self._again(call, torch.float64)
            fp32 = self._again(call, torch.float32)
            plan = self._again(call, None)
        except Exception as error:  # a module whose inputs cannot be converted is left out, by name
            self._not_measured[call.name] = " ".join(str(error).split())[:200]
            return
        terms = _terms(kind, call)
        for part, found in _parts(call).items():
            again = [_floats(tree.get(part)) for tree in (plan, fp32, exact)]
            if _floats(found) and not all(again):
                self._not_measured[call.name] = f"{part}: the reference makes nothing to compare it with"
            for index, values in enumerate(zip(_floats(found), *again, strict=False)):  # some kernels return more
                if len({value.shape for value in values}) > 1:
                    self._not_measured[call.name] = f"{part}: what it makes cannot be compared"
                    continue
                sums = sums_of(*values, width=self._plan.width(call.name))
                if part != "output" and not any(sums[FIELDS.index(f"{who}_rr")] for who in ("run", "plan")):
                    continue  # handed on as it was
                row: dict[str, Any] = {"module": call.name, "part": f"{part}, {index}" if index else part, "kind": kind}
                row |= {"roundoff": self._plan.roundoff(call.name, values[1]), "terms": terms}
                self._rows.append({**row, "sums": sums})

    def _again(self, call: _Call, dtype: torch.dtype | None) -> dict[str, Any]:
        """The call on the reference's module, in `dtype` or as the plan says: by part what came out."""
        module, name = self._modules[call.name], call.name
        given: dict[str, Any] = {}
        left: dict[str, deque[_Call]] = defaultdict(deque)
        for inner in call.inside:
            left[inner.name].append(inner)

        def returning(inside: str, original: Any) -> Any:
            def forward(*args: Any, **kwargs: Any) -> Any:
                if not left[inside]:
                    return original(*args, **kwargs)
                inner = left[inside].popleft()
                given[_into(name, inside, given)] = (args, kwargs)
                return _converted(inner.output, dtype)

            return forward

        with ExitStack() as stack:
            for inside in list(left):
                inner_module: Any = self._modules[inside]
                stack.enter_context(_replaced_forward(inner_module, returning(inside, inner_module.forward)))
            own = self._plan.tensors(name, dtype, without=tuple(f"{inside}." for inside in left))
            device = next((tensor.device.type for tensor in tensors_of((call.args, call.kwargs))), "cpu")
            if dtype is None:
                args, kwargs = _converted((call.args, call.kwargs), None)
                output = self._plan.call(name, module, own, args, kwargs, device)
            else:
                stack.enter_context(torch.autocast(device, enabled=False))
                if dtype is torch.float64:
                    stack.enter_context(_AllAsFp64())
                    stack.enter_context(_experts_one_by_one(module))
                inputs = _converted((call.args, call.kwargs), dtype)
                output = functional_call(module, own, *inputs)
        return {"output": output, **given}


class _Plan:
    """What the plan says of the dtype of each module."""

    def __init__(self, reference: torch.nn.Module, compute: torch.dtype, regions: Regions | None) -> None:
        self._modules = dict(reference.named_modules())
        self._kinds = find_regions(reference)
        self._compute, self._regions = compute, regions
        self._dtypes = regions.dtypes if regions else {}
        find_head: Any = getattr(reference, "get_output_embeddings", lambda: None)
        head = find_head()
        self._heads = {name for name, module in self._modules.items() if module is head}

    def kind(self, name: str) -> Kind:
        module = self._modules[name]
        if name in self._kinds:
            return _KINDS[self._kinds[name]]
        words = type(module).__name__
        if "Rotary" in words:
            return "rotary"
        if isinstance(module, torch.nn.Embedding):
            return "embedding"
        return "activation" if next(module.children(), None) is None else "composite"

    def width(self, name: str) -> int:
        """Values that share a statistic: those of a head of attention; 0 for the last dimension."""
        head = getattr(self._modules[name], "head_dim", 0)
        return head if self.kind(name) == "attention" and isinstance(head, int) else 0

    def roundoff(self, name: str, planned: torch.Tensor) -> float:
        """u of the coarsest that a module rounds to. planned: what it made in the plan's dtype."""
        compute = self._compute
        if self._regions is not None:
            region = self._dtypes.get(name, self._regions.manifest.default)
            if region == "fp8":
                return ROUNDOFF_FP8
            compute = DTYPES[region]
        return max(unit_roundoff(compute), unit_roundoff(planned.dtype))

    def tensors(self, name: str, dtype: torch.dtype | None, *, without: tuple[str, ...]) -> dict[str, torch.Tensor]:
        """A module's parameters and buffers, rounded as the plan says; in `dtype`, where that is given.

        without: modules inside that are not run, and what their names begin with.
        """
        module, found = self._modules[name], {}
        for key, parameter in module.named_parameters():
            full = f"{name}.{key}"
            if full.startswith(without):
                continue
            rounded = (
                parameter.to(self._weights(full.rpartition(".")[0])) if parameter.is_floating_point() else parameter
            )
            found[key] = rounded if dtype is None else _converted(rounded, dtype)
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
                return functional_call(module, own, args, kwargs)
        compute = self._dtypes.get(name)
        if compute is None:
            with _autocast(device, regions.manifest.default):
                return functional_call(module, own, args, kwargs)
        ambient = DTYPES[regions.ambient_of(name)]
        if compute == "fp8":
            given = args[0] if args else kwargs["input"]
            return fp8_reference.linear(given, own["weight"], own.get("bias"), ambient=ambient, section=regions.fp8)
        dtype, kind = DTYPES[compute], self._kinds[name]
        given = next((item.dtype for item in tensors_of((args, kwargs)) if item.is_floating_point()), dtype)
        if kind in ("norm", "functional") or compute == "fp32":
            args, kwargs = _converted((args, kwargs), dtype)
        with _autocast(device, "fp32" if kind == "norm" else compute):
            output = functional_call(module, own, args, kwargs)
        if name in self._heads:
            return output
        return _converted(output, given if kind == "norm" else ambient)


class _AllAsFp64(TorchFunctionMode):
    """What asks for another float inside gets FP64: a norm's statistics, a softmax, a rotary table, a narrowing."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in _CASTS:
            return args[0].double()
        args, kwargs = tree_map(
            lambda item: torch.float64 if isinstance(item, torch.dtype) and item in _FLOATS else item,
            (args, kwargs or {}),
        )
        return function(*args, **kwargs)


@contextmanager
def _replaced_forward(module: torch.nn.Module, forward: Any) -> Iterator[None]:
    before = module.__dict__.get("forward")
    module.__dict__["forward"] = forward
    try:
        yield
    finally:
        if before is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = before


@contextmanager
def _experts_one_by_one(module: Any) -> Iterator[None]:
    """Without grouped matmuls, which do not take FP64."""
    config, key = getattr(module, "config", None), "_experts_implementation"
    before = getattr(config, key, None)
    if before is None:
        yield
        return
    setattr(config, key, "eager")
    try:
        yield
    finally:
        setattr(config, key, before)


def _autocast(device: str, compute: str) -> torch.autocast:
    enabled = compute != "fp32"
    return torch.autocast(device, dtype=DTYPES[compute] if enabled else None, enabled=enabled, cache_enabled=False)


def _parts(call: _Call) -> dict[str, Any]:
    """By part what the run made: its output, and what it handed to each call inside."""
    found: dict[str, Any] = {}
    for inner in call.inside:
        found[_into(call.name, inner.name, found)] = (inner.args, inner.kwargs)
    return {"output": call.output, **found}


def _into(name: str, inside: str, known: Collection[str]) -> str:
    """What the input of a module inside is called; `known` has those before."""
    part = f"into {inside.removeprefix(f'{name}.')}"
    number = next(
        number for number in itertools.count(1) if (part if number == 1 else f"{part} #{number}") not in known
    )
    return part if number == 1 else f"{part} #{number}"


def _fewer_rows(call: _Call) -> _Call:
    """A linear layer's call on as many rows as make MOST_VALUES."""
    given, output = call.args[0] if call.args else None, call.output
    if given is None or not isinstance(output, torch.Tensor) or output.numel() <= MOST_VALUES:
        return call
    every = -(-output.numel() // MOST_VALUES)
    rows = given.reshape(-1, given.shape[-1])[::every]
    return _Call(call.name, (rows, *call.args[1:]), call.kwargs, output.reshape(-1, output.shape[-1])[::every])


def _terms(kind: Kind, call: _Call) -> int:
    """Terms of the longest sum in a module, from the tensor it gets.

    For a rotary table the square of the positions: its angle has FP32's error times the position.
    """
    given = next((item for item in _floats((call.args, call.kwargs)) if item.dim() > 1), None)
    if given is None or kind in ("embedding", "activation"):
        return 1
    if kind == "rotary":
        return given.shape[-2] ** 2
    if kind == "attention":
        return max(given.shape[-2:])
    return given.shape[-1]


def _floats(tree: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_of(tree) if tensor.is_floating_point()]


def _converted(tree: Any, dtype: torch.dtype | None) -> Any:
    """A copy with all floating-point tensors in `dtype`; in their own without one."""

    def convert(value: Any) -> Any:
        if not (isinstance(value, torch.Tensor) and value.is_floating_point()):
            return value
        return value.detach().to(dtype or value.dtype, copy=True)  # some modules work in place

    return tree_map(convert, tree)
