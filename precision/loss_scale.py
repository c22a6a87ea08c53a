"""The loss-scale policies: how the scale of an FP16 run changes after an overflow and after clean steps.

docs/loss-scale.md explains why the loss is scaled and how the three differ. Scales are powers of two whenever the
config allows it: scaling then changes only the exponent and rounds nothing.

A policy only decides and counts; it needs neither torch nor DeepSpeed. `training/loss_scaler.py` passes it to
DeepSpeed. Every rank runs the same policy on the same sequence of overflows, so all hold one scale.
"""

from copy import copy
from typing import Any, ClassVar, Literal

from config.schema import LossScaleSection

Reason = Literal["overflow", "hysteresis", "growth"]

MOST_ESCALATIONS = 2
"""How often bursts may escalate the backoff and double the window: to factor^4 and 4 windows at most."""
LARGEST_BACKOFF = 256.0
"""Cap on the escalated factor. FP16 spans 2^40 with its subnormals: 2^8 a step finds any scale in five overflows."""


class ScalePolicy:
    """The loss scale and the rule that moves it, here none. `update` is called once for every attempted step."""

    name: ClassVar[str]
    scale: float
    """Factor on the loss of the next step."""
    consecutive_overflows: int
    """Overflows in a row, the last update included."""
    reason: Reason | None
    """Why the last update changed the scale or the hysteresis; None if it changed neither."""

    _COUNTERS: ClassVar[dict[str, str]] = {}
    """Maps a key in a checkpoint to the attribute stored under it: an int or a list of ints."""

    def __init__(self, section: LossScaleSection) -> None:
        self._minimum, self._maximum = section.minimum, section.largest_scale
        self._full_hysteresis = self.hysteresis = section.tolerated_overflows
        self.scale = section.initial_scale
        self.consecutive_overflows = 0
        self.reason = None

    def update(self, overflow: bool) -> None:
        """Decide the scale of the next step. overflow: this step's gradients were not finite on some rank."""
        scale, hysteresis = self.scale, self.hysteresis
        if overflow:
            self.consecutive_overflows += 1
            self._after_overflow()
        else:
            self.consecutive_overflows = 0
            self._after_clean_step()
        if self.scale != scale:
            self.reason = "overflow" if overflow else "growth"
        else:
            self.reason = "hysteresis" if self.hysteresis != hysteresis else None

    def state_dict(self) -> dict[str, Any]:
        """Everything but the config that the next decision depends on, as plain types."""
        shared = {"policy": self.name, "scale": self.scale, "consecutive_overflows": self.consecutive_overflows}
        return shared | {key: copy(getattr(self, name)) for key, name in self._COUNTERS.items()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict` within the config's limits; another policy's counters are ignored."""
        self.scale = min(max(float(state["scale"]), self._minimum), self._maximum)
        self.consecutive_overflows = int(state["consecutive_overflows"])
        self.reason = None
        if state["policy"] == self.name:
            for key, name in self._COUNTERS.items():
                saved = state[key]
                setattr(self, name, [int(item) for item in saved] if isinstance(saved, list) else int(saved))

    def _back_off(self, factor: float) -> None:
        self.scale = max(self.scale / factor, self._minimum)

    def _grow(self, factor: float) -> None:
        self.hysteresis = self._full_hysteresis
        self.scale = min(self.scale * factor, self._maximum)

    def _after_overflow(self) -> None: ...

    def _after_clean_step(self) -> None: ...


class DeepSpeedPolicy(ScalePolicy):
    """The scales of DeepSpeed 0.19.8's `DynamicLossScaler` (consecutive_hysteresis off) for any pattern of overflows.

    Hysteresis: the first `hysteresis - 1` overflows since the scale last grew skip their step but keep the scale. As
    upstream, the very first window and the first one after an overflow are one step longer than the others.
    """

    name = "deepspeed"
    _COUNTERS = {"iteration": "_iteration", "last_overflow_iteration": "_last_overflow", "hysteresis": "hysteresis"}
    _FACTOR = 2.0

    def __init__(self, section: LossScaleSection) -> None:
        super().__init__(section)
        self._window = section.window
        self._iteration = 0
        self._last_overflow = -1

    def _after_overflow(self) -> None:
        if self.hysteresis == 1:
            self._back_off(self._FACTOR)
        else:
            self.hysteresis -= 1
        self._last_overflow = self._iteration
        self._iteration += 1

    def _after_clean_step(self) -> None:
        stable = self._iteration - self._last_overflow - 1
        if stable > 0 and stable % self._window == 0:
            self._grow(self._FACTOR)
        self._iteration += 1


class AdaptivePolicy(ScalePolicy):
    """Starts low, backs off harder and regrows more slowly while overflows come in bursts.

    Every `escalate_after` overflows within `escalate_within` attempted steps escalate: from that overflow on the
    backoff factor squares (2, 4, 16), the growth window doubles, and hysteresis is overruled, until one clean window.
    """

    name = "adaptive"
    _COUNTERS = {
        "clean_steps": "_clean_steps",
        "escalation": "escalation",
        "overflow_ages": "_ages",
        "hysteresis": "hysteresis",
    }

    def __init__(self, section: LossScaleSection) -> None:
        super().__init__(section)
        self._factor, self._base_window = section.factor, section.window
        self._escalate_after, self._escalate_within = section.escalate_after, section.escalate_within
        self._clean_steps = 0
        self.escalation = 0
        # How many updates ago the overflows since the last escalation happened, oldest first.
        self._ages: list[int] = []

    @property
    def backoff(self) -> float:
        """The divisor of the scale at the next overflow, unless it escalates or is tolerated."""
        return max(self._factor, min(self._factor ** (2**self.escalation), LARGEST_BACKOFF))

    @property
    def window(self) -> int:
        """Clean steps in a row after which the scale grows."""
        return self._base_window * 2**self.escalation

    def _after_overflow(self) -> None:
        self._clean_steps = 0
        self._age()
        self._ages.append(0)
        burst = len(self._ages) >= self._escalate_after
        if burst:
            self.escalation = min(self.escalation + 1, MOST_ESCALATIONS)
            self._ages = []
        if burst or self.hysteresis == 1:
            self._back_off(self.backoff)
        else:
            self.hysteresis -= 1

    def _after_clean_step(self) -> None:
        self._age()
        self._clean_steps += 1
        if self._clean_steps >= self.window:
            self._clean_steps = self.escalation = 0
            self._grow(self._factor)

    def _age(self) -> None:
        self._ages = [age + 1 for age in self._ages if age + 1 < self._escalate_within]


class StaticPolicy(ScalePolicy):
    """Always `initial`. An overflow still skips its step, and is counted."""

    name = "static"

    def __init__(self, section: LossScaleSection) -> None:
        super().__init__(section)
        self._minimum = self._maximum = self.scale
        self._full_hysteresis = self.hysteresis = 1


POLICIES = (DeepSpeedPolicy, AdaptivePolicy, StaticPolicy)
"""Every policy; DeepSpeed pickles the one in use into its checkpoints, and the reader allows these."""


def make_policy(section: LossScaleSection) -> ScalePolicy:
    """The policy that precision.loss_scale asks for, at its initial scale."""
    return next(policy for policy in POLICIES if policy.name == section.policy)(section)
