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
    "coarse_half",
    "flushed_gradient",
    "lost_reduction",
    "stale_weight",
    "growing_activation",
)


class Defects:
    """The defects of one rank's engine. Costs nothing where there is none."""

    def __init__(self, defects: Sequence[Defect], *, rank: int, model: torch.nn.Module) -> None:
        """Raises UserError when a defect names a module that does not exist, or has to name one and does not."""
        self._kinds: dict[str, Defect] = {defect.kind: defect for defect in defects}
        self._step = 1
        self._stale: list[tuple[torch.nn.Parameter, list[torch.Tensor]]] = []
        self._stale_of: tuple[Defect, torch.nn.Module] | None = None
        for defect in defects:
            if defect.kind in _NEEDS_MODULE:
                self._inject(defect, _module(defect, model), rank)

    def begin(self, step: int) -> None:
        """Before the passes of a step, counted from 1 in the order of the data."""
        self._step = step

    @property
    def unclipped(self) -> bool:
        """Whether clipping is reported but not done."""
        return self._active("unclipped_update") is not None

    def weighted(self, weight: torch.Tensor, micro_batch: int) -> torch.Tensor:
        """The factor on the loss of a micro-batch, and so on its gradients: () as given, or a wrong one."""
        if micro_batch == 0 and self._active("skipped_accumulation"):
            return weight * 0.0
        wrong = self._active("wrong_unscaling")
        return weight / wrong.factor if wrong else weight

    def drops_step(self) -> bool:
        """Whether the update of this step is silently dropped."""
        silent = self._active("silent_skip")
        return silent is not None and self._since(silent) % 2 == 1

    def before_step(self) -> None:
        """Remember the weights that the step must not change."""
        self._stale = []
        if self._stale_of is not None and self._begun(self._stale_of[0]):
            parameters = self._stale_of[1].parameters()
            self._stale = [(p, [t.detach().clone() for t in _local_tensors(p)]) for p in parameters]

    def after_step(self) -> None:
        """Put them back."""
        for parameter, old in self._stale:
            for tensor, before in zip(_local_tensors(parameter), old, strict=True):
                tensor.copy_(before)

    def _active(self, kind: str) -> Defect | None:
        """The defect of that kind, if there is one and it has begun."""
        defect = self._kinds.get(kind)
        return defect if defect is not None and self._begun(defect) else None

    def _begun(self, defect: Defect) -> bool:
        return self._step >= defect.from_step

    def _since(self, defect: Defect) -> int:
        """[steps] Since the one in which it began."""
        return self._step - defect.from_step

    def _inject(self, defect: Defect, module: torch.nn.Module, rank: int) -> None:
        if defect.kind == "fp16_norm":
            self._replace_forward(defect, module, _fp16_norm(module, defect.factor))
        elif defect.kind == "coarse_output":
            # the first of all hooks, so that observers of the module see what its callers see
            module.register_forward_hook(
                lambda module, inputs, output: _straight_through(output) if self._begun(defect) else None, prepend=True
            )
        elif defect.kind == "coarse_half":
            original = module.forward  # inside the module's precision region, which converts what it returns
            self._replace_forward(defect, module, lambda *a, **k: _coarse_half(original(*a, **k)))
        elif defect.kind == "flushed_gradient":
            self._hook_gradients(defect, module, flushed)
        elif defect.kind == "lost_reduction" and rank > 0:
            self._hook_gradients(defect, module, torch.zeros_like)
        elif defect.kind == "stale_weight":
            self._stale_of = (defect, module)
        elif defect.kind == "growing_activation":
            small = module.forward  # a hook would come after those of observers
            self._replace_forward(
                defect, module, lambda *a, **k: _raised(small(*a, **k), defect.factor ** self._since(defect))
            )

    def _replace_forward(self, defect: Defect, module: torch.nn.Module, wrong: Callable[..., Any]) -> None:
        sound = module.forward
        module.forward = lambda *args, **kwargs: (wrong if self._begun(defect) else sound)(*args, **kwargs)

    def _hook_gradients(
        self, defect: Defect, module: torch.nn.Module, wrong: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        for parameter in module.parameters():
            parameter.register_hook(lambda gradient: wrong(gradient) if self._begun(defect) else None)


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


def _coarse_half(output: Any) -> Any:
    first = output if isinstance(output, torch.Tensor) else output[0]
    return output if first.dtype == torch.float32 else _straight_through(output)


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
