"""Permanent defects, each from a step on: what the parity gate, the canary and replay have to find.

Trainers have had each of them: a norm in too narrow a format, gradients divided once too often, micro-batches or ranks
left out, weights that are no longer copied from their masters, an update that is not the one reported.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from config import yaml_text
from config.errors import UserError
from lab.detection.plants.site import Change, Plant, Site, around, before_steps
from training.engine import Engine


@dataclass
class Permanent:
    """One of them on one rank, and the attempted step that its engine is in."""

    module: str | None = None
    factor: float = 2.0
    from_step: int = 1
    step: int = 1

    @property
    def begun(self) -> bool:
        """Whether this step has it."""
        return self.step >= self.from_step

    def module_of(self, model: torch.nn.Module) -> torch.nn.Module:
        """The module that has it. Raises UserError where none is named, or the model has none of that name."""
        if self.module is None:
            raise UserError("a planted defect: it needs a module; name one")
        try:
            return model.get_submodule(self.module)
        except AttributeError:
            raise UserError(f"a planted defect: module = {self.module}: the model has no such module") from None

    def replace_forward(self, module: torch.nn.Module, wrong: Callable[..., Any]) -> None:
        """Another forward once it has begun."""
        sound = module.forward
        module.forward = lambda *args, **kwargs: (wrong if self.begun else sound)(*args, **kwargs)


def permanent(text: str) -> Plant:
    """The plant that a YAML mapping stands for, such as `{kind: coarse_half, module: lm_head, from_step: 18}`.

    Raises UserError for another one.
    """
    try:
        given = yaml_text.parse(text)
        kind = KINDS[given.pop("kind")]
        Permanent(**given)
    except (ValueError, KeyError, TypeError, AttributeError):
        known = f"{{kind, module, factor, from_step}}, kind one of {', '.join(KINDS)}"
        raise UserError(f"{text} is no defect to plant; it is {known}") from None

    def plant(site: Site) -> None:
        defect = Permanent(**given)
        site.when_built(lambda engine: before_steps(engine, partial(setattr, defect, "step")))
        kind(site, defect)

    return plant


def coarse(values: torch.Tensor) -> torch.Tensor:
    """`values` rounded to 3 stored bits of mantissa, as FP8 E4M3 has, without its narrow range."""
    mantissa, exponent = torch.frexp(values.float())  # 1/2 <= |mantissa| < 1
    return torch.ldexp(torch.round(mantissa * 16) / 16, exponent).to(values.dtype)


def flushed(values: torch.Tensor) -> torch.Tensor:
    """`values` with zeros for those below their median magnitude."""
    return torch.where(values.abs() < values.abs().median(), 0.0, values)


def reweight(engine: Engine, factor: Callable[[int], torch.Tensor | float]) -> None:
    """Multiply the weight of each micro-batch's loss, and so that of its gradients. factor: by its index."""

    def add_micro_batch(
        right: Callable[..., Any], index: int, inputs: Any, labels: Any, share: torch.Tensor, *args: Any
    ) -> Any:
        return right(index, inputs, labels, share * factor(index), *args)

    around(engine, "add_micro_batch", add_micro_batch)


def _with_first(output: Any, change: Change) -> Any:
    """A module's output with its first tensor changed."""
    return change(output) if isinstance(output, torch.Tensor) else (change(output[0]), *output[1:])


def _straight_through(first: torch.Tensor) -> torch.Tensor:
    return first + (coarse(first.detach()) - first.detach())


def _fp16_norm(site: Site, defect: Permanent) -> None:
    """A norm works in FP16 on `factor` times its input."""
    site.before_regions(lambda model: _narrow(defect, defect.module_of(model)))


def _narrow(defect: Permanent, module: Any) -> None:
    centred = getattr(module, "bias", None) is not None

    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        large = (hidden_states.float() * defect.factor).half()
        if centred:
            large = large - large.mean(-1, keepdim=True)
        # float() of the mean: the sum has overflowed by then, rsqrt itself is not the defect
        normed = large.float() * torch.rsqrt(large.pow(2).mean(-1, keepdim=True).float() + 1e-6)
        normed = normed * module.weight.float()
        if centred:
            normed = normed + module.bias.float()
        return normed.to(hidden_states.dtype)

    defect.replace_forward(module, forward)


def _coarse_output(site: Site, defect: Permanent) -> None:
    """A module's output is rounded to 3 bits of mantissa."""

    def rounded(module: Any, inputs: Any, output: Any) -> Any:
        return _with_first(output, _straight_through) if defect.begun else None

    def plant(model: torch.nn.Module) -> None:
        # the first of all hooks, so that observers of the module see what its callers see
        defect.module_of(model).register_forward_hook(rounded, prepend=True)

    site.before_regions(plant)


def _coarse_half(site: Site, defect: Permanent) -> None:
    """The same where the module computes in 16 bits, as a kernel for these may be wrong."""

    def change(first: torch.Tensor) -> torch.Tensor:
        return first if first.dtype == torch.float32 else _straight_through(first)

    _output(site, defect, change)


def _growing_activation(site: Site, defect: Permanent) -> None:
    """One channel of a module's output has 1 added, and `factor` times as much each further step."""

    def change(first: torch.Tensor) -> torch.Tensor:
        amount = defect.factor ** (defect.step - defect.from_step)
        return torch.cat([first[..., :1] + amount, first[..., 1:]], dim=-1)

    _output(site, defect, change)


def _output(site: Site, defect: Permanent, change: Change) -> None:
    """Inside the module's precision region, which converts what it returns, and so before the hooks of observers."""

    def plant(model: torch.nn.Module) -> None:
        module = defect.module_of(model)
        right = module.forward
        defect.replace_forward(module, lambda *args, **options: _with_first(right(*args, **options), change))

    site.before_regions(plant)


def _flushed_gradient(site: Site, defect: Permanent) -> None:
    """The smaller half of a module's gradients is zero, as FP16 leaves it without enough of a loss scale."""
    _gradients(site, defect, flushed)


def _lost_reduction(site: Site, defect: Permanent) -> None:
    """The gradients of a module are lost on every rank but the first."""
    if site.rank > 0:
        _gradients(site, defect, torch.zeros_like)


def _gradients(site: Site, defect: Permanent, wrong: Change) -> None:
    def plant(model: torch.nn.Module) -> None:
        for parameter in defect.module_of(model).parameters():
            parameter.register_hook(lambda gradient: wrong(gradient) if defect.begun else None)

    site.before_regions(plant)


def _wrong_unscaling(site: Site, defect: Permanent) -> None:
    """Gradients are divided by `factor` too much."""
    site.when_built(lambda engine: reweight(engine, lambda index: 1 / defect.factor if defect.begun else 1.0))


def _skipped_accumulation(site: Site, defect: Permanent) -> None:
    """The first micro-batch's gradients are lost."""
    site.when_built(lambda engine: reweight(engine, lambda index: 0.0 if defect.begun and index == 0 else 1.0))


def _stale_weight(site: Site, defect: Permanent) -> None:
    """A module computes with weights that no longer follow their masters."""

    def plant(engine: Engine) -> None:
        module = defect.module_of(engine.model)

        def held() -> Iterator[torch.Tensor]:
            return (tensor for parameter in module.parameters() for tensor in _local_tensors(parameter))

        def apply(right: Callable[[], None]) -> None:
            before = [tensor.detach().clone() for tensor in held()] if defect.begun else []
            right()
            for tensor, old in zip(held(), before, strict=False):  # ZeRO-3 has gathered them into others by now
                tensor.copy_(old)

        around(engine, "_apply", apply)

    site.when_built(plant)


def _local_tensors(parameter: Any) -> list[torch.Tensor]:
    """This rank's storage of a weight; at ZeRO-3 its partition and, of a persistent parameter, also the full tensor."""
    partition = [parameter.ds_tensor.data] if hasattr(parameter, "ds_tensor") else []
    return [*partition, parameter.data] if parameter.numel() else partition


def _unclipped_update(site: Site, defect: Permanent) -> None:
    """Clipping is reported, not done."""

    def plant(engine: Engine) -> None:
        def apply(right: Callable[[], None]) -> None:
            if defect.begun:
                stop_clipping(engine)
            right()

        around(engine, "_apply", apply)

    site.when_built(plant)


def stop_clipping(engine: Engine) -> None:
    """Have DeepSpeed clip no gradients from now on."""
    engine.deepspeed._config.gradient_clipping = 0.0
    if engine.stage:
        engine.deepspeed.optimizer.clip_grad = 0.0


def _silent_skip(site: Site, defect: Permanent) -> None:
    """Every other step is lost and reported as applied."""

    def plant(engine: Engine) -> None:
        def apply(right: Callable[[], None]) -> None:
            lost = defect.begun and (defect.step - defect.from_step) % 2 == 1
            (engine.discard_gradients if lost else right)()

        around(engine, "_apply", apply)

    site.when_built(plant)


KINDS: dict[str, Callable[[Site, Permanent], None]] = {
    kind.__name__.removeprefix("_"): kind
    for kind in (
        *(_fp16_norm, _coarse_output, _coarse_half, _flushed_gradient, _wrong_unscaling, _skipped_accumulation),
        *(_lost_reduction, _stale_weight, _unclipped_update, _silent_skip, _growing_activation),
    )
}
PLANTED = (
    ("{{kind: fp16_norm, module: {norm}, factor: 30000}}", "module_error"),
    ("{{kind: coarse_output, module: {linear}}}", "module_error"),
    ("{{kind: flushed_gradient, module: {linear}}}", "sign_agreement"),
    ("{{kind: lost_reduction, module: {linear}}}", "gradient_error"),
    ("{{kind: stale_weight, module: {linear}}}", "weight_drift"),
    ("{{kind: wrong_unscaling, factor: 2}}", "gradient_error"),
    ("{{kind: skipped_accumulation}}", "gradient_error"),
    ("{{kind: unclipped_update}}", "update_error"),
    ("{{kind: silent_skip}}", "update_error"),
)
"""Defects that the gate has to find, with {norm} and {linear} for modules, and the check that finds each."""
