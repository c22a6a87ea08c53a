"""Finds the module in which a number stopped being finite, by repeating the pass under hooks.

The cause is the *first* non-finite tensor whose inputs were still finite. Outside of an `Inspector` there are no hooks
and no cost; inside, every tensor is checked and the host waits for each result.

Forward: if a module's inputs are finite, its output is not, and no submodule is the cause, it is the cause. A submodule
that *gets* a non-finite tensor although its parent got finite ones got the result of the parent's own code (a softmax
between two projections, a residual sum): the parent is the cause. Backward: the same rule with gradients. A tensor that
feeds several modules has one summed gradient, so every module gets its inputs through a private view, whose gradient is
this module's share alone.

Activation checkpointing runs a block a second time in the backward pass. Only the first run is checked; the second only
provides the tensors for the gradient hooks, since with the reentrant implementation the first run has no graph.
"""

from dataclasses import dataclass, field
from functools import partial
from typing import Any, Self

import torch
from torch import nn

from precision.findings import (
    LOSS,
    MOST_FINDINGS,
    Description,
    Finding,
    What,
    describe,
    first_bad,
    in_backward,
    largest_half,
    replace_tensors,
    tensors_of,
)


@dataclass(eq=False)
class _Call:
    module: nn.Module
    name: str
    parent: "_Call | None"
    replayed: bool
    """Run again in the backward pass by activation checkpointing."""
    micro_batch: int
    input_bad: bool = False
    output_bad: bool = False
    """Whether this call of the forward pass, or one inside it, had a non-finite result."""
    largest: float = 0.0
    """Largest finite magnitude of its FP16 inputs, and of the FP16 outputs of the calls inside it."""
    gradient_in_bad: bool = False
    """The gradient of its output was not finite, so its backward is not the cause."""
    gradient_cause: bool = False
    """Its backward, or that of a call inside it, was found to be the cause of a non-finite gradient."""
    views: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)
    """While the call runs: its inputs by id, each with the view passed in its place."""
    passed_through: set[int] = field(default_factory=set)
    """Ids of inputs that it returns unchanged."""


class Inspector:
    """Context manager: run forward and backward inside it once or several times, then read `findings`.

    Losses and random states are the same as without it; gradients too, up to rounding (those of a tensor that feeds
    several modules are added in a different order). Compiled modules and partitioned parameters are not inspected.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._names = {module: name or type(model).__name__ for name, module in model.named_modules()}
        self._owners: dict[nn.Parameter, list[nn.Module]] = {}
        for module in self._names:
            for parameter in module.parameters(recurse=False):
                self._owners.setdefault(parameter, []).append(module)
        self._parameter_names = {parameter: name for name, parameter in model.named_parameters()}
        self._found: list[Finding] = []
        self._handles: list[Any] = []
        self._parameter_handles: list[Any] = []
        self._stack: list[_Call] = []
        self._calls: dict[nn.Module, list[_Call]] = {}
        self._micro_batch = -1
        self._forward_bad = False

    @property
    def findings(self) -> list[Finding]:
        """Up to MOST_FINDINGS findings, first cause first; consequences of an earlier finding are left out."""
        return list(self._found)

    def __enter__(self) -> Self:
        for module in self._names:
            # Last on the inputs and first on the output: ZeRO-3's hooks have then gathered the parameters.
            self._handles.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._after, prepend=True, always_call=True))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self._handles + self._parameter_handles:
            handle.remove()
        self._handles, self._parameter_handles, self._stack, self._calls = [], [], [], {}

    def check_loss(self, loss: torch.Tensor) -> None:
        """Record the loss if it is not finite although the forward pass of this micro-batch was."""
        found = describe(loss)
        if found and not self._forward_bad:
            self._forward_bad = True
            self._record(LOSS, "loss", found, max(self._micro_batch, 0), "")

    def _record(self, name: str, what: What, found: Description, micro_batch: int, seen: str) -> None:
        if what == "gradient" and self._forward_bad:
            return  # it follows from the forward pass
        known = any(finding.module == name and finding.tensor == what for finding in self._found)
        if not known and len(self._found) < MOST_FINDINGS:
            self._found.append(Finding(name, what, *found, len(self._found), micro_batch, seen))

    # Forward

    def _before(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        if not (self._stack or torch.is_grad_enabled()):
            return args, kwargs  # a pass ahead of the step's own, which counts the tokens of each expert
        call = self._open(module)
        if not call.replayed:
            self._judge_input(call, args, kwargs)
        if torch.is_grad_enabled():
            view = partial(self._private_view, call)
            args, kwargs = replace_tensors(args, view), {key: replace_tensors(kwargs[key], view) for key in kwargs}
        return args, kwargs

    def _open(self, module: nn.Module) -> _Call:
        replayed = in_backward()
        if module is self._model and not replayed:
            self._micro_batch, self._forward_bad, self._calls = self._micro_batch + 1, False, {}
        calls = self._calls.setdefault(module, [])
        # A recomputed block runs outside its parent, so it gets the parent of its first run.
        parent = self._stack[-1] if self._stack else (calls[0].parent if replayed and calls else None)
        call = _Call(module, self._names[module], parent, replayed, max(self._micro_batch, 0))
        calls.append(call)
        self._stack.append(call)
        return call

    def _judge_input(self, call: _Call, args: tuple, kwargs: dict[str, Any]) -> None:
        given = [*tensors_of(args), *tensors_of({key: value for key, value in kwargs.items() if "mask" not in key})]
        found = first_bad(given)
        if not found:
            call.largest = largest_half(given)
            return
        call.input_bad = True
        parent = call.parent
        if parent is None:
            self._forward_bad = True
            self._record(call.name, "activation", found, call.micro_batch, f"given to {call.name}")
        elif not (parent.input_bad or parent.output_bad):
            self._record_forward(parent, found, f"given to {call.name}")

    def _after(self, module: nn.Module, args: tuple, output: Any) -> None:
        if not self._stack or self._stack[-1].module is not module:
            return  # an earlier hook raised, so `_before` did not run
        call = self._stack.pop()
        outputs = list(tensors_of(output))
        found = None if call.replayed else first_bad(outputs)
        if found and not (call.input_bad or call.output_bad):
            self._record_forward(call, found, "its output")
        if found and call.parent:
            call.parent.output_bad = True
        elif call.parent and not call.replayed:
            call.parent.largest = max(call.parent.largest, largest_half(outputs))
        for tensor in outputs:
            if tensor.requires_grad:
                self._watch_gradient(call, tensor)
        call.views.clear()

    def _record_forward(self, call: _Call, found: Description, seen: str) -> None:
        self._forward_bad = call.output_bad = True
        for name, parameter in call.module.named_parameters(recurse=False):
            whole = getattr(parameter, "ds_numel", parameter.numel()) == parameter.numel()
            bad = describe(parameter) if whole else None
            if bad:
                full = self._parameter_names.get(parameter, f"{call.name}.{name}")
                self._record(full, "parameter", bad, call.micro_batch, "used in the forward pass")
        kind, count, largest, dtype = found
        if dtype == "float16":
            largest = max(largest or 0.0, call.largest) or None
        self._record(call.name, "activation", (kind, count, largest, dtype), call.micro_batch, seen)

    # Backward

    def _private_view(self, call: _Call, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.requires_grad or not tensor.is_floating_point() or tensor.layout is not torch.strided:
            return tensor
        if id(tensor) not in call.views:
            view = tensor.view_as(tensor)
            key = id(view)
            view.register_hook(lambda gradient: self._input_gradient(call, key, gradient))
            call.views[id(tensor)] = (tensor, view)  # keeps the original alive, or another could get its id
        return call.views[id(tensor)][1]

    def _watch_gradient(self, call: _Call, tensor: torch.Tensor) -> None:
        """Register one hook per tensor for all calls that return it: a tensor's hooks run innermost call first."""
        call.passed_through.update(id(view) for _, view in call.views.values() if view is tensor)
        known = getattr(tensor, "_inspected", None)
        if known and known[0] == tensor._version and known[1] is self:
            known[2].append(call)
            return
        calls = [call]
        tensor._inspected = (tensor._version, self, calls)  # type: ignore[attr-defined]
        tensor.register_hook(lambda gradient: self._output_gradient(calls, gradient))

    def _output_gradient(self, calls: list[_Call], gradient: torch.Tensor) -> None:
        if not self._handles:
            return  # the graph outlived the Inspector
        if calls[-1].module is self._model:
            self._watch_parameters()
        found = describe(gradient)
        if not found:
            return
        for call in calls:
            call.gradient_in_bad = True
        outermost = calls[-1]
        if outermost.parent is None:
            self._record(LOSS, "gradient", found, outermost.micro_batch, f"flowing into {outermost.name}")
        elif not (outermost.parent.gradient_in_bad or outermost.parent.gradient_cause):
            self._record_backward(outermost.parent, found, f"flowing into {outermost.name}")

    def _input_gradient(self, call: _Call, key: int, gradient: torch.Tensor) -> None:
        if not self._handles or key in call.passed_through or call.gradient_in_bad or call.gradient_cause:
            return
        found = describe(gradient)
        if found:
            self._record_backward(call, found, "the gradient of its input")

    def _record_backward(self, call: _Call, found: Description, seen: str) -> None:
        self._record(call.name, "gradient", found, call.micro_batch, seen)
        ancestor: _Call | None = call
        while ancestor:
            ancestor.gradient_cause = True
            ancestor = ancestor.parent

    def _watch_parameters(self) -> None:
        """Hook the parameters as the backward pass begins, so that these hooks run after all others."""
        for handle in self._parameter_handles:
            handle.remove()
        self._parameter_handles = [
            parameter.register_hook(lambda gradient, parameter=parameter: self._parameter_gradient(parameter, gradient))
            for parameter in self._parameter_names
            if parameter.requires_grad
        ]

    def _parameter_gradient(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        found = describe(gradient)
        if not found:
            return
        calls = [call for module in self._owners[parameter] for call in self._calls.get(module, [])]
        inner = any(next(call.module.children(), None) is not None and call.gradient_cause for call in calls)
        if not inner and not any(call.gradient_in_bad for call in calls):
            name = self._parameter_names[parameter]
            self._record(name, "gradient", found, max(self._micro_batch, 0), "the gradient of a parameter")
