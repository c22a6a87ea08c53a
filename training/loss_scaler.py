"""The loss scaler that DeepSpeed gets: one of Mantissa's policies, with two upstream bugs worked around.

DeepSpeed 0.19.8 calls `update_scale` between the gradient norm and the unscaling of the gradients. When the scale
grows, ZeRO-1, 2 and 3 then divide the gradients by the new scale, so that an unclipped update sees half its gradient
(and ZeRO-3 reports half the norm). Here a change takes effect after the step, and an overflow at the minimum is left to
the guard instead of raising a bare Exception.

`precision/loss_scale.py` decides how the scale changes. The class is a `DynamicLossScaler` only so that DeepSpeed
accepts it, and pickles it into its checkpoints; of the parent's state only `cur_scale` is used.
"""

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

from config.schema import LossScaleSection
from precision.loss_scale import make_policy


@dataclass(frozen=True)
class ScaleChange:
    """One change of the loss scale or of its hysteresis."""

    old: float
    new: float
    reason: str
    """overflow, hysteresis or growth."""
    consecutive_overflows: int


class LossScaler(DynamicLossScaler):
    """Loss scale of one ZeRO optimizer, for every policy. Call `apply_change()` after every optimizer step."""

    cur_scale: float
    """Factor by which DeepSpeed scales the loss and unscales the gradients; only `apply_change` changes it."""

    def __init__(self, section: LossScaleSection) -> None:
        self.policy = make_policy(section)
        super().__init__(
            init_scale=self.policy.scale,
            scale_window=section.window,
            min_scale=section.minimum,
            delayed_shift=section.tolerated_overflows,
            consecutive_hysteresis=False,
            raise_error_at_min_scale=False,
        )
        self._reason: str | None = None
        self._discarding = False

    def update_scale(self, overflow: bool) -> None:
        """Called by DeepSpeed inside its step. Raises RuntimeError if it applies a step that was to be discarded."""
        if self._discarding and not overflow:
            raise RuntimeError("DeepSpeed applies a step that was to be discarded: its overflow path was not taken")
        if not self._discarding:
            self.policy.update(bool(overflow))
        self._reason = None if self._discarding else self.policy.reason

    def ignoring_overflow(self) -> AbstractContextManager[Any]:
        """Context in which the policy does not see the overflow that DeepSpeed is told of to discard a step. Not for a
        step that really overflowed: the scale would never decrease."""
        return patch.object(self, "_discarding", True)

    def apply_change(self) -> ScaleChange | None:
        """Make the last update take effect; returns what changed, or None."""
        reason, self._reason = self._reason, None
        old, self.cur_scale = self.cur_scale, self.policy.scale
        return ScaleChange(old, self.cur_scale, reason, self.policy.consecutive_overflows) if reason else None

    def state_dict(self) -> dict[str, Any]:
        """Everything the next decision depends on, as plain types."""
        return self.policy.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`; limits and window stay those of the config."""
        self.policy.load_state_dict(state)
        self.cur_scale, self._reason = self.policy.scale, None
