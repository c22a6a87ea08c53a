"""Compares a run's loss of a micro-batch, and its gradient at the logits, with FP64 from those same logits.

The definitions are the oracle's (`tools.parity.oracle.tasks`) with the constants of the config, so that a wrong one
shows even if the model's own roundings would hide it: for preferences, a teacher's divergence, classes and numbers, and
the cross-entropy of labels and rows. The gradient reveals constants that the loss does not: while a model still equals
its reference, every beta gives a loss of log 2. A loss computed in chunks has no logits; it is judged as `(loss)`
(`tools.parity.backward`). NEFTune's noise is the difference of embeddings' outputs with and without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch.nn import functional

from config.schema import Config, ModelSection
from modeling.embedding_noise import KEYS, LENGTHS
from modeling.objectives.divergence import IDS, LOG_PROBS
from modeling.objectives.policy import ADVANTAGE, OLD, REFERENCE, SAMPLER
from precision.tolerance import relative, tolerance, unit_roundoff
from tools.parity.constants import named, variants
from tools.parity.oracle.rules import IGNORED, unit_interval
from tools.parity.oracle.tasks import divergence_loss, margin_loss, on_known, policy_loss
from tools.parity.recompute import is_off
from training.engine import Engine

_CURVATURE = {"sigmoid": lambda beta: beta**2 / 4, "ipo": lambda beta: 2.0, "hinge": lambda beta: 0.0}
"""Largest second derivative of a loss with respect to the margin."""
_CONSTANTS = {
    "dpo": ("preference", ("beta", "label_smoothing", "sft_weight")),
    "distill": ("distill", ("beta", "temperature", "ce_weight")),
    "grpo": ("grpo", ("beta", "temperature", "clip_low", "clip_high", "correction_high")),
}
_ROUTED = 1e-5
"""Largest relative error of balancing terms, which are sums over tokens in FP32; 2.7e-7 was measured."""
_NOISE_VALUES = 4096
"""Number of values whose noise is regenerated."""
_SURE = 6.0
"""Standard errors beyond which chance is no explanation."""
_IN_FP32 = 16
"""[factor] Largest error of a gradient, in units of its definition's in FP32, measured on the actual logits: an
objective that computes with logarithms rounds in other places (2.3 at most in sound runs of all tasks)."""
_FEW = 8
"""Number of roundings of a gradient's values by an objective that multiplies them in another order."""


class _Loss(NamedTuple):
    """A loss by its definition."""

    value: torch.Tensor
    size: float
    """Sum of the magnitudes of its terms."""
    condition: float = 0.0
    """The factor by which the gradient amplifies the roundings of those terms, such as a margin's."""


class _Passed(NamedTuple):
    """Inputs of a loss."""

    own: torch.Tensor
    """Logits of the trained model."""
    reference: torch.Tensor | None
    """Logits of the model as its base, if the loss requested them."""
    teacher: torch.Tensor | None


def loss_errors(
    engine: Engine, config: Config, inputs: dict[str, Any], labels: torch.Tensor
) -> tuple[dict[str, float], str]:
    """Errors of this rank in units of what FP32 explains, and the constant that differs. Changes no weight.

    A collective. Empty for a loss in chunks, and if ranks share sequences or matrices.
    """
    found, note = _of_noise(engine, config, inputs, labels) if KEYS in inputs else ({}, "")
    world = engine.world
    if engine.loss_path.chunked or world.sequence is not None or world.tensor is not None:
        return found, note
    outputs: list[tuple[torch.Tensor, bool]] = []
    taught: list[Any] = []
    layers = [module for module in engine.model.modules() if hasattr(module, "_disable_adapters")][:1]

    def keep(module: Any, args: Any, output: Any) -> None:
        outputs.append((output.logits.detach(), any(map(is_off, layers))))

    def teach(**given: Any) -> Any:
        taught.append(engine.teacher(**given))  # type: ignore[misc]
        return taught[-1]

    with torch.no_grad(), _teaching(engine, teach), engine.model.register_forward_hook(keep):
        loss = engine.loss_path.score(inputs, labels, 1.0).loss
    own = [logits for logits, off in outputs if not off]
    reference = [logits for logits, off in outputs if off]
    if not loss.isfinite():  # as after FP16 values overflowed
        return found, note
    if len(own) != 1 or getattr(engine.objective, "_adapter_off", None) and not reference:
        return found | {"(loss)": math.inf}, "the reference is not the model without its adapter"
    leaf = own[0].float().requires_grad_()
    again = iter([SimpleNamespace(logits=logits if off else leaf) for logits, off in outputs])
    with torch.enable_grad(), _teaching(engine, lambda **_: taught[0]):
        repeated = engine.loss_path.score(inputs, labels, 1.0, forward=lambda **_: next(again)).loss
        [gradient] = torch.autograd.grad(repeated, leaf)
    passed = _Passed(own[0], reference[0] if reference else None, taught[0].logits if taught else None)
    exact, of_logits = _differentiated(config, inputs, labels, passed)
    plain = _differentiated(config, inputs, labels, passed, torch.float32)[1].double()
    rounded = float((plain - of_logits).nan_to_num(0.0, 0.0, 0.0).norm())
    step = tolerance(math.ceil(16 * math.log2(max(2, own[0].shape[-1]))), torch.float32)
    of_factors = step * exact.condition + _FEW * unit_roundoff(torch.float32)
    allowed = _IN_FP32 * rounded + of_factors * float(of_logits.norm())
    found["(loss)"] = relative(abs(float(loss) - float(exact.value.detach())), step * exact.size)
    found["(gradient of logits)"] = relative(float((gradient.double() - of_logits).norm()), allowed)
    if max(found.values()) > 1 and config.task in _CONSTANTS:
        key, names = _CONSTANTS[config.task]
        taken = of_logits.abs().flatten().topk(min(1 << 16, of_logits.numel())).indices

        def vector(section: Any) -> torch.Tensor:
            other = SimpleNamespace(**{**vars(config), key: section})
            return _differentiated(other, inputs, labels, passed)[1].flatten()[taken]

        whole = {f"{key}.{name}": make for name, make in variants(getattr(config, key), names, vector).items()}
        other = named(gradient.double().flatten()[taken], whole, rounding=rounded)
        note = "; ".join(filter(None, (note, other)))
    return found, note


def _teaching(engine: Engine, teach: Callable[..., Any]) -> Any:
    """Context manager: a student with a live teacher asks this one instead."""
    if getattr(engine.objective, "teacher", None) is None:
        return nullcontext()
    return patch.object(engine.objective, "teacher", teach)


def _differentiated(
    config: Any, inputs: Mapping[str, Any], labels: torch.Tensor, passed: _Passed, dtype: torch.dtype = torch.float64
) -> tuple[_Loss, torch.Tensor]:
    """The definition's loss, and its gradient at the logits, computed in `dtype`."""
    logits = passed.own.to(dtype).requires_grad_()
    with torch.enable_grad():
        loss = _defined(config, inputs, labels, passed._replace(own=logits))
        [gradient] = torch.autograd.grad(loss.value, logits)
    return loss, gradient


@torch.enable_grad()
def router_errors(
    engine: Engine, section: ModelSection, inputs: dict[str, Any], labels: torch.Tensor
) -> dict[str, float]:
    """The error of this rank's balancing terms and of their gradients at the routers' logits, in units of `_ROUTED`;
    empty without any. Fedus et al. 2021, equations 4 to 6; Zoph et al. 2022, equation 5. A collective."""
    router = engine.router
    if router is None:
        return {}
    with torch.no_grad():
        engine.loss_path.score(inputs, labels, 0.0)
    router.routed = [(logits.detach().float().requires_grad_(), chosen) for logits, chosen in router.routed]
    own, [*leaves] = router.loss(router.counts())[0], (logits for logits, _ in router.routed)
    wide = [logits.detach().double().requires_grad_() for logits in leaves]
    exact, sizes = torch.zeros((), dtype=torch.float64, device=own.device), []
    for x, (_, chosen) in zip(wide, router.routed, strict=True):
        tokens, experts = x.shape
        share = torch.bincount(chosen.flatten(), minlength=experts).double() / tokens  # adds up to k
        p, z, total = x.softmax(-1), x.logsumexp(-1)[:, None], tokens * len(wide)
        weights = section.balance_loss * experts * share / total, section.router_z_loss / total
        exact = exact + (weights[0] * p).sum() + (weights[1] * z**2).sum()
        sizes.append(float((p * (weights[0] + 2 * weights[1] * z.abs())).detach().norm()))  # may cancel if balanced
    off = [relative(abs(float(own) - float(exact)), float(exact))]
    found, expected = (torch.autograd.grad(*pair) for pair in ((own, leaves), (exact, wide)))
    off += [relative(float((a - b).norm()), size) for a, b, size in zip(found, expected, sizes, strict=True)]
    return {"(balancing loss)": max(off) / _ROUTED}


def _defined(config: Any, inputs: Mapping[str, Any], labels: torch.Tensor, passed: _Passed) -> _Loss:
    if config.task == "dpo":
        return _of_pairs(config.preference, inputs, labels, passed)
    if config.task == "classify" and config.classify.kind == "regression":
        counts, there = labels.flatten() != IGNORED, inputs["targets"].to(passed.own.dtype).flatten()
        predicted = passed.own.flatten()
        off, sizes = (predicted - there)[counts], (predicted.abs() + there.abs())[counts]
        return _Loss(off.square().sum(), float(2 * (off.detach().abs() * sizes.detach()).sum()))
    if config.task == "grpo":
        return _of_answers(config.grpo, inputs, labels, passed.own)
    counts = labels.flatten() != IGNORED
    logits, there = passed.own.reshape(-1, passed.own.shape[-1])[counts], labels.flatten()[counts]
    losses = functional.cross_entropy(logits, there, reduction="none")
    if config.task in ("distill", "opd"):
        return _of_teacher(config.distill, inputs, counts, logits, losses.sum(), passed.teacher)
    weights = torch.ones_like(losses)
    if config.task == "sft" and config.sft.loss == "row":
        positions = inputs.get("position_ids")
        places = torch.arange(labels.shape[-1], device=labels.device).expand_as(labels)
        row = ((places if positions is None else positions) == 0).flatten().cumsum(0)[counts]
        weights = 1.0 / torch.bincount(row)[row].to(losses.dtype)
    terms = losses.detach() + 1  # a sum of exponentials near 1 has a logarithm that is off by a rounding of 1
    return _Loss((losses * weights).sum(), float((terms * weights).sum()))


def _of_pairs(section: Any, inputs: Mapping[str, Any], labels: torch.Tensor, passed: _Passed) -> _Loss:
    targets = inputs["targets"].flatten(0, 1)
    answered = targets != IGNORED
    row, real = answered.nonzero()[:, 0], labels != IGNORED

    def summed(logits: torch.Tensor) -> torch.Tensor:
        of_all = torch.log_softmax(logits[answered].to(passed.own.dtype), -1)
        found = of_all.gather(-1, targets[answered][:, None])[:, 0]
        return found.new_zeros(len(targets)).index_add(0, row, found).view(-1, 2)

    own = summed(passed.own)
    before = inputs["reference"].to(own.dtype) if passed.reference is None else summed(passed.reference)
    lengths = answered.sum(-1).view(-1, 2)[:, 0].clamp(min=1)
    ratios = own - before
    losses = margin_loss(section, ratios[:, 0] - ratios[:, 1], own[:, 0] / lengths)[real]
    sizes = (own.abs() + before.abs()).sum(-1).detach()[real]
    [slope] = torch.autograd.grad(losses.sum(), own, retain_graph=True)
    curved = _CURVATURE[section.loss](section.beta) * sizes
    size = float((slope.abs().amax(-1)[real] * sizes).sum() + losses.detach().abs().sum())
    return _Loss(losses.sum(), size, relative(float(curved.norm()), float(slope.norm())))


def _of_answers(section: Any, inputs: Mapping[str, Any], labels: torch.Tensor, logits: torch.Tensor) -> _Loss:
    total, size = logits.sum() * 0, 0.0
    for row in (labels != IGNORED).any(-1).nonzero()[:, 0].tolist():
        real = labels[row] != IGNORED
        of_all = torch.log_softmax(logits[row][real] / section.temperature, -1)
        now = of_all.gather(-1, labels[row][real][:, None])[:, 0]
        known = {name: inputs[name][row][real].to(now.dtype) for name in (OLD, SAMPLER, REFERENCE) if name in inputs}
        loss = policy_loss(section, now, known, inputs[ADVANTAGE][row].to(now.dtype))
        [slope] = torch.autograd.grad(loss, now, retain_graph=True)
        total = total + loss
        size += float((slope.abs() * (now.abs() + known[OLD].abs() + 1)).sum().detach())
    return _Loss(total, size)


def _of_teacher(
    section: Any,
    inputs: Mapping[str, Any],
    counts: torch.Tensor,
    logits: torch.Tensor,
    entropy: torch.Tensor,
    teacher: torch.Tensor | None,
) -> _Loss:
    q = torch.softmax(logits / section.temperature, -1)
    if teacher is not None:
        p = torch.softmax(teacher.flatten(0, 1)[counts].to(logits.dtype) / section.temperature, -1)
    else:
        known = inputs[IDS].flatten(0, 1)[counts].long()
        p, q = inputs[LOG_PROBS].flatten(0, 1)[counts].to(logits.dtype).exp(), on_known(q, known)
    far = (p.clamp(min=1e-30).log().abs() + q.detach().clamp(min=1e-30).log().abs()) * (p + q.detach())
    share = (1 - section.ce_weight) * section.temperature**2
    size = share * float(far.sum()) + section.ce_weight * float(entropy.detach())
    return _Loss(divergence_loss(section, p, q, entropy), size)


def _of_noise(
    engine: Engine, config: Config, inputs: dict[str, Any], labels: torch.Tensor
) -> tuple[dict[str, float], str]:
    """The distance of the noise on embeddings from its definition, in standard errors of its size; and that size."""
    made: list[torch.Tensor] = []
    embedding, asked = engine.model.get_input_embeddings(), config.sft.neftune_alpha
    keep = embedding.register_forward_hook(lambda module, args, output: made.append(output.detach().double()))
    with torch.no_grad(), keep:
        engine.model.train()
        engine.loss_path.score(inputs, labels, 0.0)
        engine.loss_path.score({name: item for name, item in inputs.items() if name != KEYS}, labels, 0.0)
    noise, width = (made[0] - made[1]).flatten(0, -2), made[0].shape[-1]
    keys, lengths = inputs[KEYS].flatten(), inputs[LENGTHS].flatten()
    tokens = (lengths > 0).nonzero()[:, 0][: max(1, _NOISE_VALUES // width)]
    drawn = [
        [2 * unit_interval(int(keys[token]) % (1 << 64), place) - 1 for place in range(width)]
        for token in tokens.tolist()
    ]
    expected = torch.tensor(drawn, dtype=torch.float64, device=noise.device)
    expected *= (asked / (lengths[tokens] * width).double().sqrt())[:, None]
    found, size = noise[tokens], float(expected.square().sum())
    if not size:
        return {}, ""
    ratio = float((found * expected).sum()) / size
    rounded = (found - ratio * expected).square().mean()
    error = max(float((rounded / size).sqrt()), 2.0**-22)
    off = abs(ratio - 1) / (_SURE * error)
    alike = float(rounded.sqrt()) < 0.1 * float(expected.square().mean().sqrt())
    note = f"sft.neftune_alpha {asked * ratio:.5g} where {asked:g} is asked" if off > 1 and alike else ""
    return {"(noise)": off if alike else math.inf}, note
