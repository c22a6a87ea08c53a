"""Early warnings: figures that leave their healthy range before the loss does (docs/early-warnings.md).

Nothing here reads a tensor or talks to other ranks: all ranks see the same numbers and judge alike. A broken bound
gives one warning; the next one follows only after REARM consecutive in-range measurements.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Self

import numpy as np
import torch

from config.schema import WarningsSection
from precision.robust_window import RobustWindow
from precision.step_health import Health
from tracking.heatmap.trend import trend
from tracking.verdict import SETTLING_SIGNALS, solved

_KURTOSIS_WINDOW = 16  # measured steps
_UPDATES_WINDOW = 64  # measured steps: long enough to remember the usual ratio before a slow rise
REARM = 8
"""Consecutive in-range measurements before a signal warns again: near its bound it would warn at every other one."""
_POINTS = 60  # of an activation's history
_ANSWERS = ("entropy", "reward/no_signal", "truncated", "reward/mean", "reward/spread")
_ANSWERS_WINDOW = 8  # steps: a single one has the answers to few prompts
_LARGEST = float(torch.finfo(torch.float16).max)
_SMALL = 0.004  # share of FP16's range below which an activation's growth is not tracked

_NAMES = {
    "attention_logit": "largest attention logit",
    "attention_entropy": "normalized attention entropy",
    "adam_rms": "RMS of the gradient over the root of Adam's second moment",
    "gradient_jump": "gradient norm relative to Adam's second moment",
    "signal_share": "share of signal in the gradients",
    "embedding_share": "the embedding's share of the squared gradient norm",
    "kurtosis_growth": "growth of the channels' kurtosis",
    "update_growth": "growth of the update-to-weight ratio",
    "overflow_steps": "steps until an activation overflows FP16",
    "router_entropy": "normalized entropy of the expert load",
    "answer_entropy": "answer entropy in nats per token",
    "no_signal": "share of prompts whose answers all have the same reward",
    "truncated": "share of answers cut off at grpo.max_new_tokens",
    "router_z": "z-loss of the routers",
}
"""Signal to its name in a message."""
_ADVICE = {
    "attention_logit": "softmax saturates: lower the learning rate, or use a model that normalises queries and keys",
    "attention_entropy": "attention collapses onto single keys: lower the learning rate or lengthen the warm-up",
    "adam_rms": (
        "the next steps are too large: lower optimizer.betas[1], use optimizer.name=stable_adamw, or cut the rate"
    ),
    "gradient_jump": (
        "the next steps are too large: lower optimizer.betas[1] or use optimizer.name=stable_adamw; look at the batch"
    ),
    "signal_share": "updates add up in one direction, as before a divergence: lower the learning rate",
    "embedding_share": "clipping now starves the other modules: lower the learning rate, or scale embeddings up",
    "kurtosis_growth": (
        "single channels take over: 16-bit and FP8 formats lose the others; look at the heat map of activations"
    ),
    "update_growth": "the learning rate is higher than before in this run: cut it, or set guard.max_update_ratio",
    "overflow_steps": (
        "compute this module in bf16 or fp32 by a rule of the manifest, or let guard.reactions promote it"
    ),
    "router_entropy": "few experts do the work: raise model.balance_loss",
    "answer_entropy": (
        "the policy has collapsed onto single answers: lower the learning rate, raise grpo.beta or grpo.clip_high"
    ),
    "no_signal": "nothing is learned from them: they are solved, too hard, or the reward does not tell answers apart",
    "truncated": "rewards judge halves of answers: raise it, or reward shorter ones (grpo.rewards=[..., length])",
    "router_z": (
        "router logits would be too large for 16 bits: set or raise model.router_z_loss, and leave routers in FP32"
    ),
}
_METRICS = {
    "router_entropy": "router/entropy",
    "router_z": "router/z_loss",
    "answer_entropy": "entropy",
    "no_signal": "reward/no_signal",
    "truncated": "truncated",
}
_AT_LEAST = ("attention_entropy", "router_entropy", "answer_entropy", "overflow_steps")
"""Signals whose bound is the smallest healthy value; for the others it is the largest."""


@dataclass(frozen=True)
class EarlyWarning:
    """A bound that was broken; the fields of a `warning` event."""

    signal: str
    """The key in `warnings` that bounds it."""
    module: str
    """The module that is furthest out; empty for a figure of the whole run."""
    value: float
    bound: float
    modules: tuple[str, ...]
    """All modules that break the bound, the worst first."""
    reason: str
    """The human-readable reason: what, where, its bound and what to do."""


@dataclass(frozen=True)
class SecondMomentMemory:
    """The squared global gradient norm that Adam's second moment, an average by beta2, remembers."""

    squares: float = 0.0
    aged: float = 0.0
    """[updates] `squares`, each weighted by its age."""
    count: int = 0

    def jump(self, norm: float, beta2: float) -> float:
        """A new gradient's norm over the root of the memory with itself included: RMS_t (engine/adam_signals.py)."""
        corrected = self.after(norm, beta2).squares / (1 - beta2 ** (self.count + 1))
        return norm / math.sqrt(corrected) if corrected > 0 else 1.0

    @property
    def age(self) -> float:
        """[updates] Mean age of the memory."""
        return self.aged / self.squares if self.squares else 0.0

    def after(self, norm: float, beta2: float) -> Self:
        """The memory once a gradient was applied."""
        squares, aged = beta2 * self.squares + (1 - beta2) * norm**2, beta2 * (self.aged + self.squares)
        return type(self)(squares, aged, self.count + 1)


class EarlyWarnings:
    """Judges the figures of one run. Call per step `before_step`, `after_step` and, if due, `after_telemetry`."""

    def __init__(
        self, section: WarningsSection, *, beta2: float | None, clipping: float, in_fp16: Callable[[str], bool]
    ) -> None:
        """beta2: that of the optimizer's second moment; None if it has none. clipping: gradient norm at which it
        begins; 0: never. in_fp16: whether a module computes in FP16 now."""
        self._section, self._beta2, self._clipping, self._in_fp16 = section, beta2, clipping, in_fp16
        self._memory = SecondMomentMemory()
        self.jumps: list[EarlyWarning] = []
        """The gradient jump of this step, told or not, which the guard may refuse."""
        self._active: dict[str, int] = {}  # signals that have warned, and how often in a row they were in range since
        self._kurtosis: dict[str, RobustWindow] = {}
        self._updates = RobustWindow(_UPDATES_WINDOW)
        self._growing: dict[str, list[tuple[int, float]]] = {}
        self._first_reward: float | None = None
        self._answers: list[dict[str, float]] = []

    def before_step(self, health: Health) -> list[EarlyWarning]:
        """The warning about the gradient before it is applied, `gradient_jump`, or none."""
        self.jumps = []
        if self._beta2 is None or not health.finite or self._solved():
            return []
        jump = self._memory.jump(self._clipped(health.grad_norm), self._beta2)
        about = "gradient_jump", {"": jump}, f", {self._memory.age:.3g} updates old"
        self.jumps = self._breaches(*about)
        return self._judge(*about)

    def after_step(self, health: Health, *, applied: bool, warm: bool) -> list[EarlyWarning]:
        """Judge balanced routers and sampled answers. applied: whether the weights changed. warm: whether the warm-up
        is over, before which routers, gradients and channels have not settled even in healthy runs."""
        if applied and self._beta2 is not None:
            self._memory = self._memory.after(self._clipped(health.grad_norm), self._beta2)
        found: list[EarlyWarning] = []
        metrics = health.metrics
        if own := {name: metrics[name] for name in _ANSWERS if name in metrics}:
            self._first_reward = own.get("reward/mean") if self._first_reward is None else self._first_reward
            self._answers = [*self._answers, own][-_ANSWERS_WINDOW:]
            metrics = {name: value for name, value in metrics.items() if name not in own} | self._of_answers()
        settled = SETTLING_SIGNALS if self._solved() else ()
        for signal, metric in _METRICS.items():
            if warm and metric in metrics and health.finite and signal not in settled:
                found += self._judge(signal, {"": metrics[metric]})
        return found

    def _of_answers(self) -> dict[str, float]:
        """Means of the figures of sampled answers over the last steps; empty before there are enough."""
        if len(self._answers) < _ANSWERS_WINDOW:
            return {}
        return {name: fmean(step.get(name, 0.0) for step in self._answers) for name in self._answers[-1]}

    def _solved(self) -> bool:
        """Whether the prompts are solved, so that answers are alike and an occasional gradient follows many zeros."""
        known = self._of_answers()
        if "reward/spread" not in known or self._first_reward is None:
            return False
        reward, spread = known["reward/mean"], known["reward/spread"]
        return reward - self._first_reward > spread and solved(self._first_reward, reward, spread)

    @property
    def memory_age(self) -> float | None:
        """[updates] Mean age of what the second moment remembers; None if there is no second moment."""
        return self._memory.age if self._beta2 is not None else None

    def after_telemetry(self, step: int, fields: Mapping[str, Any], *, warm: bool) -> list[EarlyWarning]:
        """The warnings of a measured step. fields: those of its `telemetry` event. warm: as in `after_step`."""
        by_signal: dict[str, dict[str, float]] = defaultdict(dict)
        for module, figures in fields["attentions"].items():
            by_signal["attention_logit"][module] = figures["logit"]
            by_signal["attention_entropy"][module] = figures["entropy"]
        for module, figures in fields["adam"].items():
            by_signal["adam_rms"][module] = figures["rms"]
            if warm and "signal" in figures:
                by_signal["signal_share"][module] = figures["signal"]
        if warm and fields["embedding_share"] is not None:
            by_signal["embedding_share"][""] = fields["embedding_share"]
        for module, figures in fields["channels"].items():
            window = self._kurtosis.setdefault(module, RobustWindow(_KURTOSIS_WINDOW))
            if warm and window.median is not None:
                by_signal["kurtosis_growth"][module] = figures["kurtosis"] / window.median
            if math.isfinite(figures["kurtosis"]):
                window.push(figures["kurtosis"])
        update = fields["update_ratio"]
        if warm and update is not None and math.isfinite(update):
            if self._updates.median:
                by_signal["update_growth"][""] = update / self._updates.median
            self._updates.push(update)
        if fields["activation_max"]:  # empty where only the gradients of a jump were looked at
            by_signal["overflow_steps"] = dict(self._overflows(step, fields["activation_max"]))
        return [warning for signal, values in by_signal.items() for warning in self._judge(signal, values)]

    def _clipped(self, norm: float) -> float:
        return min(norm, self._clipping) if self._clipping > 0 else norm

    def _overflows(self, step: int, maxima: Mapping[str, float]) -> Iterator[tuple[str, float]]:
        """Modules in FP16 whose activations grow, and the steps until they overflow."""
        for module, value in maxima.items():
            if not self._in_fp16(module) or not _SMALL * _LARGEST < value < _LARGEST:
                self._growing.pop(module, None)
                continue
            points = self._growing.setdefault(module, [])
            points[:] = [*(point for point in points if point[0] < step), (step, value)][-_POINTS:]
            growth = trend(*np.array(points, dtype=float).T)
            if growth is not None and growth.value < _LARGEST:
                yield module, max(0.0, growth.reaches(_LARGEST) - step)

    def _judge(self, signal: str, values: Mapping[str, float], further: str = "") -> list[EarlyWarning]:
        """A warning if a figure has just left its bound. values: by module."""
        found, spoken = self._breaches(signal, values, further), signal in self._active
        if found:
            self._active[signal] = 0
        elif spoken and (values or signal == "overflow_steps"):
            self._active[signal] += 1
            if self._active[signal] >= REARM:
                del self._active[signal]
        return [] if spoken else found

    def _breaches(self, signal: str, values: Mapping[str, float], further: str) -> list[EarlyWarning]:
        """The warning about figures that are out of their bound, told before or not."""
        bound, sign = getattr(self._section, signal), -1 if signal in _AT_LEAST else 1
        if bound is None:
            return []
        broken = {module: value for module, value in values.items() if sign * (value - bound) > 0}
        if not broken:
            return []
        order = sorted(broken, key=lambda module: sign * broken[module], reverse=True)
        worst = order[0]
        where = f"{worst}: " if worst else ""
        healthy = f"{'at least' if signal in _AT_LEAST else 'at most'} {bound:g} is healthy, warnings.{signal}"
        more = f"; and {len(order) - 1} more module{'s' * (len(order) > 2)}" if len(order) > 1 else ""
        reason = f"{where}{_NAMES[signal]} {broken[worst]:.3g}{further} ({healthy}){more}; {_ADVICE[signal]}"
        return [EarlyWarning(signal, worst, float(f"{broken[worst]:.6g}"), float(bound), tuple(order), reason)]

    def state_dict(self) -> dict[str, Any]:
        """Everything the next judgements depend on, as plain types."""
        return {
            "memory": asdict(self._memory) if self._beta2 is not None else None,
            "active": dict(self._active),
            "kurtosis": {module: window.state_dict() for module, window in self._kurtosis.items()},
            "updates": self._updates.state_dict(),
            "growing": {module: [list(point) for point in points] for module, points in self._growing.items()},
            "first_reward": self._first_reward,
            "answers": list(self._answers),
        }

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """The inverse of `state_dict`; what an older checkpoint lacks starts afresh."""
        state = state or {}
        self._memory = SecondMomentMemory(**(state.get("memory") or {}))
        self._active = dict(state.get("active", {}))
        self._kurtosis = {module: RobustWindow(_KURTOSIS_WINDOW) for module in state.get("kurtosis", {})}
        for module, window in self._kurtosis.items():
            window.load_state_dict(state["kurtosis"][module])
        self._updates = RobustWindow(_UPDATES_WINDOW)
        self._updates.load_state_dict(state.get("updates", {"values": []}))
        self._growing = {module: [*map(tuple, points)] for module, points in state.get("growing", {}).items()}
        self._first_reward, self._answers = state.get("first_reward"), state.get("answers", [])
