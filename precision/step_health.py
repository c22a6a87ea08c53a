"""Checks of a step's health on a few numbers that every rank shares.

Each function looks for one kind of trouble and returns its description, with the numbers, what to look at, and which of
the guard's reactions can help. precision/guard.py decides what is done.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from precision.corruption import Corruption
from precision.findings import Finding
from precision.robust_window import RobustWindow

_ANY = ("skip", "cut_lr", "promote", "rollback")
_ANY_BUT_PROMOTE = ("skip", "cut_lr", "rollback")


@dataclass(frozen=True)
class Health:
    """A step between its backward pass and its optimizer step; the same on every rank."""

    loss: float
    """Raw mean loss over the global batch, in nats per label token; may be inf or nan."""
    grad_norm: float
    """Global norm of the unscaled gradient before clipping; inf when any value on any rank is not finite."""
    step: int = 1
    """Attempted step, counted from 1."""
    consecutive_skips: int = 0
    """Steps right before this one that were not applied, for whatever reason."""
    scales_dynamically: bool = False
    """FP16 under a loss scale that adapts to overflows."""
    scale_at_minimum: bool = False
    """The loss scale could not get smaller if this step overflows."""
    memory_bytes: int = 0
    """Peak memory of the rank that needs most: device memory, or resident memory on a CPU."""
    by_rank: dict[str, Any] = field(default_factory=dict)
    """`memory_bytes` (the same measure) and `work_seconds` (data wait and forward passes), each as
    `training.engine.work_time.by_rank` gives it."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the task's objective over the global batch, by name."""
    counts_by_source: dict[str, int] = field(default_factory=dict)
    """Labels (or whatever the task counts) of each source of a mixture, over all ranks."""
    loss_by_source: dict[str, float] = field(default_factory=dict)
    """Mean loss of each source of a mixture that the step has examples of."""
    preempted: bool = False
    """Some rank was asked to stop."""
    save_ended: bool = False
    """A background checkpoint has been written on every rank."""
    checks: list[list[float]] = field(default_factory=list)
    """Numbers from the checks for silent corruption, by rank, if there are any."""
    disagreement: str = ""
    """Ranks whose gradient norm differs, if running the step again may tell why."""
    corruption: Corruption | None = None
    """Finding of the checks for silent corruption, if it could not be corrected."""
    overflowed: tuple[str, ...] = ()
    """Modules whose FP16 activations overflowed in the forward pass."""
    spoiled: tuple[str, ...] = ()
    """Parameters that were not finite before the step."""

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)

    @property
    def scale_overflowed(self) -> bool:
        """Whether only gradients are not finite: the loss scale takes effect after the forward pass."""
        return math.isfinite(self.loss) and not (self.finite or self.overflowed or self.spoiled)

    @property
    def routine_overflow(self) -> bool:
        """An overflow of FP16 gradients that a smaller loss scale handles: skipped without being an incident."""
        return self.scales_dynamically and not self.scale_at_minimum and self.scale_overflowed

    def with_causes(self, findings: Sequence[Finding]) -> Self:
        """A copy with the causes that were found for values that are not finite."""
        overflowed = dict.fromkeys(finding.module for finding in findings if finding.overflowed)
        spoiled = dict.fromkeys(finding.module for finding in findings if finding.tensor == "parameter")
        return replace(self, overflowed=tuple(overflowed), spoiled=tuple(spoiled))


@dataclass(frozen=True)
class Trouble:
    what: str
    """The problem, with the numbers."""
    look_at: str
    """The advice: a key to change, or where to read more; empty for none."""
    helps: tuple[str, ...]
    """The reactions of guard.reactions that can help."""
    routine: bool = False
    """An FP16 overflow that the loss scale handles."""

    def tell(self, done: str = "") -> str:
        """The problem, what is done about it, and the advice, in one line."""
        return "; ".join(filter(None, (self.what, done, self.look_at)))


def corrupted(health: Health) -> Trouble | None:
    """A machine fault. No reaction repairs it, but an older checkpoint has the state from before it."""
    found = health.corruption
    if found is None:
        return None
    return Trouble(found.what, found.look_at, () if found.state_is_good else ("rollback",))


def not_finite(health: Health) -> Trouble | None:
    """A loss or a gradient that is inf or nan. Skipping does not help if the same weights will overflow again."""
    if health.finite:
        return None
    what = f"the step is not finite (loss {health.loss:.4g}, gradient norm {health.grad_norm:.4g})"
    if health.spoiled:
        advice = "go back to an older checkpoint; if it exceeds FP16's range, use precision.compute=bf16"
        return Trouble(f"{health.spoiled[0]} holds values that are not finite: {what}", advice, ("rollback",))
    if health.overflowed:
        advice = (
            "no loss scale helps; use precision.compute=bf16, or promote these modules (fp32 in precision.manifest)"
        )
        after_an_update = health.step > 1 and not health.consecutive_skips
        return Trouble(
            f"an activation of {', '.join(health.overflowed)} exceeds FP16's 65,504: {what}",
            advice,
            ("skip", "promote", "rollback") if after_an_update else ("promote", "rollback"),
        )
    if health.scale_at_minimum and health.scale_overflowed:
        return Trouble(
            f"gradients overflow at the smallest loss scale (precision.loss_scale.minimum): {what}",
            "FP16 cannot hold this model's gradients, so use precision.compute=bf16 or lower the learning rate",
            ("promote", "rollback"),
        )
    if health.routine_overflow:
        advice = "nothing to do unless it keeps happening"
        return Trouble(f"FP16 overflow, handled by the loss scale: {what}", advice, _ANY, routine=True)
    return Trouble(what, "", _ANY)  # the attribution says where


def spike(
    health: Health, losses: RobustWindow, log_norms: RobustWindow, sigmas: float, *, bound: str = "guard.spike_sigmas"
) -> Trouble | None:
    """A loss or gradient norm more than `sigmas` robust standard deviations above its median; sigmas 0 finds none.
    bound: what sets `sigmas`."""
    if not sigmas:
        return None
    for name, value, measured, window in (
        ("loss", health.loss, health.loss, losses),
        ("gradient norm", health.grad_norm, log_norm(health.grad_norm), log_norms),
    ):
        score = window.score(measured)
        if score is not None and score > sigmas:
            center = window.median or 0.0
            usual = center if window is losses else math.exp(center)
            return Trouble(
                f"the {name} {value:.4g} is {score:.1f} robust standard deviations above its median {usual:.4g} "
                f"over {len(window)} healthy steps ({bound} = {sigmas:g})",
                f"look at the batch of step {health.step}, and lower the learning rate if spikes keep coming",
                _ANY,
            )
    return None


def wrong_update(ratio: float | None, low: float | None, high: float | None) -> Trouble | None:
    """An update-to-weight ratio of the previous step outside [low, high]; None: no bound."""
    if ratio is None:
        return None
    what = f"the last update was {ratio:.3g} of the weights' norm"
    if high is not None and not ratio <= high:
        advice = "look at the learning rate, the warm-up and the optimizer's settings"
        return Trouble(f"{what} (guard.max_update_ratio = {high:g})", advice, ("cut_lr", "rollback"))
    if low is not None and not ratio >= low:
        advice = "look at the learning rate and at the share of gradients that underflow"
        return Trouble(f"{what} (guard.min_update_ratio = {low:g})", advice, ("promote",))
    return None


def other_policy(metrics: Mapping[str, float]) -> Trouble | None:
    """Answers not sampled from the trainer's policy: sampler and trainer differ by more than rounding explains."""
    corrected = metrics.get("gap/corrected", 0.0) > 0.0
    if not metrics.get("gap/of_bound", 0.0) > 1.0 or (corrected and metrics["left_out"] <= 0.5):
        return None
    weighted = "clip_share" in metrics and not corrected  # opd has no weights to correct
    k1, k3, own, side = (metrics[f"gap/{name}"] for name in ("k1", "k3", "self_k3", "one_sided"))
    return Trouble(
        f"the sampler's policy is not the trainer's: k3 {k3:.3g} nats a token, k1 {k1:.3g}, one-sidedness {side:.2g}, "
        f"where the trainer is {own:.3g} from itself (grpo.max_gap)",
        "compare temperature, dtype and vocabulary of both sides (docs/rl.md)",
        ("skip", *(["correct"] * weighted), "promote", "rollback"),
    )


def early_warning(reason: str) -> Trouble | None:
    """An early warning, whose text ends with what to do. Skipping helps against a gradient that jumped, not against
    something that has been growing for long."""
    return Trouble(f"early warning: {reason}", "docs/early-warnings.md has more", _ANY_BUT_PROMOTE) if reason else None


def too_many_skips(skips: int, limit: int, last: Trouble | None) -> Trouble:
    """Too many skipped steps in a row. last: what is wrong with the current step; None: it looks healthy."""
    cause = last.what if last else "the optimizer refused steps that looked healthy"
    advice = last.look_at if last and not last.routine else ""
    return Trouble(
        f"{skips} steps in a row were skipped (guard.max_consecutive_skips = {limit}), the last one because: {cause}",
        advice or "lower the learning rate or look at the data",
        ("promote", "rollback"),
    )


def log_norm(norm: float) -> float:
    """Logarithm of a gradient norm; that of the smallest normal number for 0."""
    return math.log(max(norm, sys.float_info.min))
