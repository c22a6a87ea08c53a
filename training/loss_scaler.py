"""DeepSpeed's dynamic loss scaler with its state in plain sight, and two upstream faults of its use repaired.

DeepSpeed 0.19.8 calls `update_scale` in the middle of the step, between the gradient norm and the unscaling of the
gradients. On a step where the scale grows, ZeRO-1, 2 and 3 then divide the gradients by the new scale, so that an
unclipped update sees half its gradient (and ZeRO-3 also reports half the norm). Here a change of the scale takes
effect when the step is over. And an overflow at the minimum is reported, not raised as a bare Exception: the guard
decides what to do about it, with a diagnosis.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

from config.schema import LossScaleSection


@dataclass(frozen=True)
class ScaleChange:
    """One change of the loss scale or of its hysteresis."""

    old: float
    new: float
    reason: str
    """overflow, hysteresis, growth or resumed."""


class LossScaler(DynamicLossScaler):
    """Loss scale of one ZeRO optimizer. `settle()` has to be called after every optimizer step."""

    cur_scale: float
    cur_hysteresis: int

    def __init__(self, section: LossScaleSection) -> None:
        super().__init__(
            init_scale=float(section.initial),
            scale_window=section.window,
            min_scale=float(section.minimum),
            delayed_shift=section.hysteresis,
            consecutive_hysteresis=False,
            raise_error_at_min_scale=False,
        )
        self.consecutive_overflows = 0
        self.at_minimum = False
        self._next_scale = self.cur_scale
        self._next_reason: str | None = None

    def update_scale(self, overflow: bool) -> None:
        """Upstream's rule, with the resulting scale held back until `settle`."""
        scale, hysteresis = self.cur_scale, self.cur_hysteresis
        super().update_scale(overflow)
        self._next_scale, self.cur_scale = self.cur_scale, scale
        self.consecutive_overflows = self.consecutive_overflows + 1 if overflow else 0
        self.at_minimum = bool(overflow) and scale == self.min_scale and hysteresis == 1
        if self._next_scale != scale:
            self._next_reason = "overflow" if overflow else "growth"
        elif overflow and self.cur_hysteresis != hysteresis:
            self._next_reason = "hysteresis"
        else:
            self._next_reason = None

    def settle(self) -> ScaleChange | None:
        """Let the last update take effect; says what changed, if anything did."""
        reason, self._next_reason = self._next_reason, None
        old, self.cur_scale = self.cur_scale, self._next_scale
        return ScaleChange(old, self.cur_scale, reason) if reason else None

    def state_dict(self) -> dict[str, Any]:
        """Everything the next decision depends on, as plain types."""
        return {
            "scale": float(self.cur_scale),
            "iteration": self.cur_iter,
            "last_overflow_iteration": self.last_overflow_iter,
            "hysteresis": self.cur_hysteresis,
            "consecutive_overflows": self.consecutive_overflows,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`; limits and window stay those of the config."""
        self.cur_scale = self._next_scale = float(state["scale"])
        self.cur_iter = int(state["iteration"])
        self.last_overflow_iter = int(state["last_overflow_iteration"])
        self.cur_hysteresis = int(state["hysteresis"])
        self.consecutive_overflows = int(state["consecutive_overflows"])
