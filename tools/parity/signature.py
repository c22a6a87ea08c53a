"""Every module of a run computed four times on the same inputs, for `tools.parity.rounding` to judge.

In the forward pass of a step's first micro-batch, as soon as a module of the run has returned, the same module of the
reference (`tools.parity.reference`: freshly built by transformers, never patched by the engine, by regions or by
kernels) is called on the inputs of the run's module: in FP64, which counts as exact, in FP32, and in the planned dtype.
Its weights are the masters, rounded as planned, so that the rounding of a weight counts as nobody's error.

A module with submodules is compared without their errors: submodules return what they returned in the run, and what it
passes to them is compared, besides its own output. So each part has only a handful of roundings: for attention the
rotation, the scores, the softmax and its product with the values, as the input of `o_proj`.

`tools.parity.backward` does the same with the backward pass and the loss, once the pass is over, and
`tools.parity.own_code` calls the run's own module in FP32. Nothing here depends on changes to the run's model, but
everything on transformers' code: a constant that is wrong there is wrong in all. A narrowing cast there is skipped in
the FP64 computation, so that it shows in FP32's error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from transformers import PretrainedConfig

from config.errors import one_line
from modeling.embedding_noise import has_noise
from modeling.tensor_parallel import cut
from precision.regions import Regions
from tools.parity.backward import Backward
from tools.parity.own_code import own_code
from tools.parity.recompute import (
    COMPUTED_IN,
    Call,
    Plan,
    again,
    bias_last,
    by_halves,
    distinct_rows,
    fewer_rows,
    floats_of,
    is_off,
    parts_of,
    row_of,
    terms_of,
)
from tools.parity.rounding import ROUNDOFF_FP8, findings, further_off, pooled, size_of, summed, sums_of
from tools.parity.slices import Slices
from training.distributed import World


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
        slices: Slices | None = None,
    ) -> None:
        """reference: in FP32, its weights the masters. compute: the planned dtype on the cast path.

        regions: those of the manifest path, whose dtypes are the plan; None on the cast path. world: ranks that each
        have a part of the step; None if this process has all of it. slices: ranks that each have a part of a module;
        None if each has all of it.
        """
        self._slices = slices or Slices(None)
        cuts = {name: how for name, each in candidate.named_parameters() if (how := cut(each)) is not None}
        self._plan = Plan(reference, compute, regions, cuts, self._slices.given)
        self._candidate = {name: module for name, module in candidate.named_modules() if name in self._plan.modules}
        self._adapted = [module for module in self._candidate.values() if hasattr(module, "_disable_adapters")][:1]
        """A layer that shows whether the candidate computes as its base, which is its reference in DPO."""
        self._world = world
        self._running: list[Call] = []
        self._done: set[str] = set()
        self._rows: list[dict[str, Any]] = []
        self._not_measured: dict[str, str] = {}
        self._backward = Backward(self._plan, candidate, self._slices)
        self.watch_loss = self._backward.watch_loss

    @contextmanager
    def of_candidate(self) -> Iterator[None]:
        """Context manager around the candidate's passes, forward and backward; gradients are compared at the end."""
        with self._attending_alike():
            with ExitStack() as stack:
                stack.enter_context(self._backward.watching())
                for name, module in self._candidate.items():
                    enter = partial(self._enter, name)
                    stack.enter_context(module.register_forward_pre_hook(enter, with_kwargs=True))
                    # always_call: checkpointing ends a recomputation early with an exception
                    stack.enter_context(module.register_forward_hook(self._leave, with_kwargs=True, always_call=True))
                yield
            self._running.clear()
            rows, blind = self._backward.compared()
        self._rows += rows
        self._not_measured |= blind

    @contextmanager
    def _attending_alike(self) -> Iterator[None]:
        """Context manager: the reference's modules have the run's attention, since they get what it gets as masks."""
        shared = self._world is not None and self._world.sequence is not None  # each model has an attention of its own
        with ExitStack() as stack:
            for name, module in self._candidate.items() if not shared else ():
                own, of_run = (getattr(each, "config", None) for each in (self._plan.modules[name], module))
                wanted = getattr(of_run, "_attn_implementation", None)
                if wanted and isinstance(own, PretrainedConfig) and own._attn_implementation != wanted:
                    stack.callback(setattr, own, "_attn_implementation_internal", own._attn_implementation)
                    own._attn_implementation_internal = wanted
            yield

    def measured(self) -> dict[str, Any]:
        """{"parts": rows for `tools.parity.rounding.pooled`, "ranks": [..], "not_measured": reason by module}.

        ranks: for each in order, the `findings` of its own rows, as {module: why}. A collective.
        """
        ranks = [self._rows] if self._world is None else self._world.gather_objects(self._rows)
        group = self._slices.group
        ranks = ranks[:: group.size] if group is not None else ranks  # each of a group has measured the same
        alone = [{item.module: item.why for item in reversed(findings(pooled([{"parts": rows}])))} for rows in ranks]
        parts = summed(row for rows in ranks for row in rows)
        return {"parts": parts, "ranks": alone, "not_measured": self._not_measured}

    def _enter(self, name: str, module: torch.nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        call = Call(name, args, kwargs)
        if not any(map(is_off, self._adapted)):
            self._backward.use(name)
            if name not in self._done:
                self._backward.enter(call)
        call.versions = call.now()
        self._running.append(call)
        return call.args, call.kwargs

    def _leave(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        call = self._running.pop()
        if any(map(is_off, self._adapted)):  # the reference's adapter is on
            return output
        in_place = call.versions != call.now()
        call.output = output
        call.versions = call.now()
        if self._running and self._running[-1].name not in self._done:
            self._running[-1].inside.append(call)
        if call.name not in self._done and output is not None:
            self._done.add(call.name)  # neither later micro-batches nor a recomputation
            self._backward.leave(call)
            if in_place:
                self._not_measured[call.name] = "it changes its inputs in place"
            elif has_noise(module):
                self._not_measured[call.name] = "noise is added to what it returns; see task_loss"
            elif call.name:
                self._compare(call)
        call.inside = []
        return call.output

    @_disable_current_modes()  # a block that keeps its matmuls' results must not count these
    @torch.no_grad()
    def _compare(self, call: Call) -> None:
        call = self._slices.call(call)
        changed = next((inner.name for inner in call.inside if inner.versions != inner.now()), None)
        if changed is not None:
            self._not_measured[call.name] = f"it changes in place what {changed} got or returned"
            return
        kind = self._plan.kind(call.name)
        if kind == "functional":  # implementations may call submodules any number of times
            call.inside = []
        if kind == "linear" and not call.inside:
            call = distinct_rows(fewer_rows(call))
        try:
            computed_as = [again(self._plan, call, dtype) for dtype in COMPUTED_IN]
        except Exception as error:
            if call.inside:  # the reference's code cannot use what they returned
                self._compare(dataclasses.replace(call, inside=[]))
            else:  # a module whose inputs cannot be converted is left out, by name
                self._not_measured[call.name] = one_line(error, 200)
            return
        module = self._plan.modules[call.name]
        if kind == "linear" and isinstance(module, torch.nn.Linear):
            if type(module) is torch.nn.Linear and module.bias is not None:
                with self._plan.computed_by(call.name, bias_last):
                    other = again(self._plan, call, None)
                computed_as[0] = max(computed_as[0], other, key=partial(_alike, call.output))
            planned, exact = (found["output"] for found in (computed_as[0], computed_as[-1]))
            if further_off(call.output, planned, exact, self._plan.roundoff(call.name, planned)):
                with self._plan.computed_by(call.name, by_halves):
                    computed_as[0] = again(self._plan, call, None)
        own = None if self._slices.group is not None else own_code(self._plan, self._candidate, call)
        terms = terms_of(kind, call)
        for part, found in parts_of(call).items():
            computed = [floats_of(tree.get(part)) for tree in computed_as]
            if floats_of(found) and not all(computed):
                self._not_measured[call.name] = f"{part}: the reference makes nothing to compare it with"
            for index, values in enumerate(zip(floats_of(found), *computed, strict=False)):  # some kernels return more
                if len({value.shape for value in values}) > 1:
                    self._not_measured[call.name] = f"{part}: what it makes cannot be compared"
                    continue
                mine = floats_of(own.get(part)) if own else []
                in_fp32 = mine[index] if index < len(mine) and mine[index].shape == values[0].shape else None
                of_part = f"{part}, {index}" if index else part
                roundoff = self._plan.roundoff(call.name, values[1])
                sums = sums_of(*values, roundoff=roundoff, width=self._plan.width(call.name), own=in_fp32)
                self._rows += row_of(call.name, of_part, kind, roundoff, terms, sums)


def _alike(output: torch.Tensor, found: Mapping[str, Any]) -> int:
    """How many values a module has computed as the run did."""
    return int((found["output"] == output).sum()) if found["output"].shape == output.shape else 0


def own_errors(signature: Mapping[str, Any]) -> dict[str, Any]:
    """{"order", "own_error", "planned_error"} of a step's parts: by module the relative error of its first output on
    its actual inputs, and for modules in FP8 that of their plan, both against FP64.

    order: modules in the order of execution. inf if a value is not finite or only the exact ones are zero.
    """
    outputs = {part.module: part for part in pooled([signature]) if part.part == "output" and part.kind != "loss"}
    in_fp8 = {name: part for name, part in outputs.items() if part.roundoff == ROUNDOFF_FP8}
    return {
        "order": list(outputs),
        "own_error": {name: size_of(part, "run") for name, part in outputs.items()},
        "planned_error": {name: size_of(part, "plan") for name, part in in_fp8.items()},
    }
