"""Fault injection: `faults:` of the config, each at exactly one step, rank and module.

A fault strikes in the last micro-batch of its step, and again when that step is rerun or replayed; a flipped bit once,
unless it persists. Faults wrap methods of the engine: an engine without faults is not touched.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch

from config.errors import UserError
from config.schema import Fault
from data.batches.loader import Batch
from modeling.objectives.objective import Scored
from precision.step_health import Health
from training.engine.engine import Engine
from training.engine.flips import flip_bit, flipped
from training.engine.health import Outcome, Update
from training.engine.tensors import local_gradient, shard_of

_HELD = ("weight", "master", "moment", "second_moment")
"""Places of a flipped bit that exist before the passes."""


def attach_faults(engine: Engine, faults: Sequence[Fault]) -> None:
    """Attach the faults to this engine. Raises UserError when one names no module, or a module without parameters."""
    attached = _Faults(engine, faults)
    for name in ("forward_backward", "add_micro_batch", "score", "step"):
        owner = engine.loss_path if name == "score" else engine
        setattr(owner, name, partial(getattr(attached, name), getattr(owner, name)))


class _Faults:
    """The faults of one rank, and the methods of its engine with these faults."""

    def __init__(self, engine: Engine, faults: Sequence[Fault]) -> None:
        self._engine = engine
        self._targets = [(fault, *_target(fault, engine.model)) for fault in faults]
        self._step = 0
        self._struck: set[int] = set()
        self._armed: set[int] = set()
        self._corrupts_loss = False
        self._stuck: dict[int, bool | None] = {}
        for fault, _, parameters in self._targets:
            if fault.kind == "flipped_bit" and fault.place == "gradient" and fault.rank == engine.world.rank:
                # from the start, so that it runs before any hook that reads the gradient
                parameters[0].register_hook(partial(self._flip_armed, fault))

    def forward_backward(self, right: Callable[..., Outcome], batch: Batch, *, step: int, **options: Any) -> Outcome:
        """Flip bits of held tensors before the step's passes, and of the reduced gradients after them."""
        self._step = step
        self._strike(reduced=False)
        outcome = right(batch, step=step, **options)
        self._strike(reduced=True)
        return outcome

    def add_micro_batch(self, right: Callable[..., None], index: int, *given: Any) -> None:
        """Corrupt activations, loss and gradients of the last micro-batch."""
        sums: Outcome = given[3]
        with self._injected() if index == sums.micro_batches - 1 else nullcontext():
            right(index, *given)

    def score(self, right: Callable[..., Scored], *args: Any, **options: Any) -> Scored:
        """Corrupt the loss of the last micro-batch."""
        scored = right(*args, **options)
        for fault, _, _ in self._due_here() if self._corrupts_loss else ():
            if fault.kind == "nan_loss":
                scored = scored._replace(loss=scored.loss * math.nan)
            elif fault.kind == "loss_spike":
                scored = scored._replace(loss=scored.loss * fault.factor)
        return scored

    def step(self, right: Callable[..., Update], health: Health, lr: float, *, apply: bool = True) -> Update:
        """Lose the update on all ranks, whichever rank the fault names."""
        lost = any(fault.kind == "lost_update" and fault.step == self._step for fault, _, _ in self._targets)
        return right(health, lr, apply=apply and not lost)

    @contextmanager
    def _injected(self) -> Iterator[None]:
        with ExitStack() as stack:
            for fault, module, parameters in self._due_here():
                for handle in self._inject(fault, module, parameters):
                    stack.callback(handle.remove)
            self._corrupts_loss = True
            yield
        self._corrupts_loss = False
        self._armed.clear()

    def _strike(self, *, reduced: bool) -> None:
        for fault, _, parameters in self._due_here():
            due = fault.place == "collective" if reduced else fault.place in _HELD
            if fault.kind == "flipped_bit" and due and self._strikes(fault):
                # recomputed values are flipped again; held ones have a stuck bit
                stuck_at = None if reduced else self._stuck.get(id(fault))
                self._stuck[id(fault)] = _flip_held(self._engine, fault, parameters[0], stuck_at)

    def _strikes(self, fault: Fault) -> bool:
        """Whether a fault strikes now: once, unless it persists."""
        again = id(fault) in self._struck
        self._struck.add(id(fault))
        return fault.persists or not again

    def _flip_armed(self, fault: Fault, gradient: torch.Tensor) -> torch.Tensor | None:
        return flipped(gradient, fault.bit) if id(fault) in self._armed else None

    def _inject(self, fault: Fault, module: torch.nn.Module, parameters: list[torch.nn.Parameter]) -> list[Any]:
        if fault.kind in ("inf_gradient", "nan_gradient"):
            value = math.inf if fault.kind == "inf_gradient" else math.nan
            return [parameters[0].register_hook(partial(overwritten, value))]
        if fault.kind == "gradient_spike":
            return [parameter.register_hook(lambda gradient: gradient * fault.factor) for parameter in parameters]
        if fault.kind == "nan_activation":
            return [_on_output(module, partial(overwritten, math.nan))]
        if fault.kind == "flipped_bit" and fault.place == "gradient" and self._strikes(fault):
            self._armed.add(id(fault))
        if fault.kind == "flipped_bit" and fault.place == "activation" and self._strikes(fault):
            return [_on_output(module, lambda output: flipped(output, fault.bit))]
        return []

    def _due_here(self) -> list[tuple[Fault, torch.nn.Module, list[torch.nn.Parameter]]]:
        rank = self._engine.world.rank
        return [target for target in self._targets if target[0].step == self._step and target[0].rank == rank]


@torch.no_grad()
def _flip_held(engine: Engine, fault: Fault, parameter: Any, stuck_at: bool | None) -> bool | None:
    """Flip the bit of the middle value of this rank's part of the parameter's tensor, or set it to `stuck_at`; returns
    its new value, None if this rank has no such tensor, as moments before the first update."""
    if fault.place == "weight":
        held = parameter.ds_tensor.data if engine.stage == 3 and not parameter.numel() else parameter.data
        return flip_bit(held, held.numel() // 2, fault.bit, stuck_at=stuck_at)
    shard = shard_of(engine, parameter)
    if shard is None:
        return None
    if fault.place == "collective":
        found = local_gradient(parameter, shard, engine.stage)
    elif fault.place == "master":
        found = shard.of(shard.flat)
    else:
        states = list(shard.states(engine).values())
        found = next(iter(states[fault.place == "second_moment" :]), None)
    return None if found is None else flip_bit(found, len(found) // 2, fault.bit, stuck_at=stuck_at)


def _on_output(module: torch.nn.Module, corrupt: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Hook that corrupts the first tensor of the module's output; it runs first: others see what callers see."""

    def first(module: torch.nn.Module, inputs: Any, output: Any) -> Any:
        return corrupt(output) if isinstance(output, torch.Tensor) else (corrupt(output[0]), *output[1:])

    return module.register_forward_hook(first, prepend=True)


def _target(fault: Fault, model: torch.nn.Module) -> tuple[torch.nn.Module, list[torch.nn.Parameter]]:
    for name, module in model.named_modules():
        whole = fault.module is not None or fault.kind == "gradient_spike"
        parameters = [parameter for parameter in module.parameters(recurse=whole) if parameter.requires_grad]
        if not parameters and fault.module == name and fault.kind == "nan_activation":
            return module, []  # a frozen module has activations too
        if parameters and fault.module in (None, name):
            return module, parameters
    raise UserError(f"faults: module = {fault.module}: the model has no such module with parameters")


def overwritten(value: float, tensor: torch.Tensor) -> torch.Tensor:
    """A copy whose first value is `value`."""
    corrupted = tensor.clone()
    corrupted.view(-1)[0] = value
    return corrupted
