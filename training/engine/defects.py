"""Permanent defects injected by `defects:` of the config: what the parity gate has to find.

Each is a defect that trainers have had: a norm in too narrow a format, gradients divided once too often, micro-batches
or ranks left out, weights that are no longer copied from their masters, an update that is not the one reported.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from config.errors import UserError
from config.schema import Defect

_NEEDS_MODULE = (
    "fp16_norm",
    "coarse_output",
    "flushed_gradient",
    "lost_reduction",
    "stale_weight",
    "growing_activation",
)


class Defects:
    """The defects of one rank's engine. Costs nothing where there is none."""

    def __init__(self, defects: Sequence[Defect], *, rank: int, model: torch.nn.Module) -> None:
        """Raises UserError when a defect names a module that does not exist, or has to name one and does not."""
        self._kinds = {defect.kind: defect for defect in defects}
        self._steps = 0
        self._stale: list[tuple[torch.nn.Parameter, list[torch.Tensor]]] = []
        self._stale_of: torch.nn.Module | None = None
        for defect in defects:
            if defect.kind in _NEEDS_MODULE:
                self._inject(defect, _module(defect, model), rank)

    @property
    def unclipped(self) -> bool:
        """Whether clipping is reported but not done."""
        return "unclipped_update" in self._kinds

    def weighted(self, weight: torch.Tensor, micro_batch: int) -> torch.Tensor:
        """The factor on the loss of a micro-batch, and so on its gradients: () as given, or a wrong one."""
        if micro_batch == 0 and "skipped_accumulation" in self._kinds:
            return weight * 0.0
        wrong = self._kinds.get("wrong_unscaling")
        return weight / wrong.factor if wrong else weight

    def drops_step(self) -> bool:
        """Whether the next update is silently dropped."""
        self._steps += 1
        return "silent_skip" in self._kinds and self._steps % 2 == 0

    def before_step(self) -> None:
        """Remember the weights that the step must not change."""
        if self._stale_of is not None:
            self._stale = [(p, [t.detach().clone() for t in _local_tensors(p)]) for p in self._stale_of.parameters()]

    def after_step(self) -> None:
        """Put them back."""
        for parameter, old in self._stale:
            for tensor, before in zip(_local_tensors(parameter), old, strict=True):
                tensor.copy_(before)

    def _inject(self, defect: Defect, module: torch.nn.Module, rank: int) -> None:
        if defect.kind == "fp16_norm":
            module.forward = _fp16_norm(module, defect.factor)
        elif defect.kind == "coarse_output":
            # the first of all hooks, so that observers of the module see what its callers see
            module.register_forward_hook(lambda module, inputs, output: _straight_through(output), prepend=True)
        elif defect.kind == "flushed_gradient":
            for parameter in module.parameters():
                parameter.register_hook(flushed)
        elif defect.kind == "lost_reduction" and rank > 0:
            for parameter in module.parameters():
                parameter.register_hook(torch.zeros_like)
        elif defect.kind == "stale_weight":
            self._stale_of = module
        elif defect.kind == "growing_activation":
            original = module.forward  # a hook would come after those of observers
            module.forward = lambda *args, **kwargs: _raised(original(*args, **kwargs), defect.factor**self._steps)


def coarse(values: torch.Tensor) -> torch.Tensor:
    """`values` rounded to 3 stored bits of mantissa, as FP8 E4M3 has, without its narrow range."""
    mantissa, exponent = torch.frexp(values.float())  # 1/2 <= |mantissa| < 1
    return torch.ldexp(torch.round(mantissa * 16) / 16, exponent).to(values.dtype)


def flushed(values: torch.Tensor) -> torch.Tensor:
    """`values` with zeros for those below their median magnitude."""
    return torch.where(values.abs() < values.abs().median(), 0.0, values)


def _straight_through(output: Any) -> Any:
    first = output if isinstance(output, torch.Tensor) else output[0]
    rounded = first + (coarse(first.detach()) - first.detach())
    return rounded if isinstance(output, torch.Tensor) else (rounded, *output[1:])


def _raised(output: Any, amount: float) -> Any:
    """A module's output with `amount` added to its first channel."""
    first = output if isinstance(output, torch.Tensor) else output[0]
    raised = torch.cat([first[..., :1] + amount, first[..., 1:]], dim=-1)
    return raised if isinstance(output, torch.Tensor) else (raised, *output[1:])


def _fp16_norm(module: torch.nn.Module, factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """A norm that squares in FP16. A norm is the same for x and factor x, except that FP16 ends at 65504."""
    centred = getattr(module, "bias", None) is not None

    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        large = (hidden_states.float() * factor).half()
        if centred:
            large = large - large.mean(-1, keepdim=True)
        # float() of the mean: the sum has overflowed by then, rsqrt itself is not the defect
        normed = large.float() * torch.rsqrt(large.pow(2).mean(-1, keepdim=True).float() + 1e-6)
        weight: Any = module.weight
        normed = normed * weight.float()
        if centred:
            bias: Any = module.bias
            normed = normed + bias.float()
        return normed.to(hidden_states.dtype)

    return forward


def _local_tensors(parameter: Any) -> list[torch.Tensor]:
    """This rank's storage of a weight; at ZeRO-3 its partition and, of a persistent parameter, also the full tensor."""
    partition = [parameter.ds_tensor.data] if hasattr(parameter, "ds_tensor") else []
    return [*partition, parameter.data] if parameter.numel() else partition


def _module(defect: Defect, model: torch.nn.Module) -> torch.nn.Module:
    if defect.module is None:
        raise UserError(f"defects: kind = {defect.kind}: it needs a module; name one")
    for name, module in model.named_modules():
        if name == defect.module:
            return module
    raise UserError(f"defects: module = {defect.module}: the model has no such module")
