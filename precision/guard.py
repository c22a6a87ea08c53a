"""Judge the health of a run. Decides, never acts; needs no process group."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from config.schema import GuardSection


class Verdict(Enum):
    """What the training loop should do next."""

    STEP = "STEP"
    ABORT = "ABORT"


@dataclass(frozen=True)
class Judgement:
    """A verdict and, when it is not STEP, the reason in words."""

    verdict: Verdict
    reason: str = ""


def judge(section: GuardSection, *, consecutive_skips: int, scale_at_minimum: bool, loss: float) -> Judgement:
    """Whether the run can go on after a step.

    consecutive_skips: steps in a row that changed nothing, in any dtype. scale_at_minimum: the last step overflowed
    although the loss scale could not get smaller. loss: the raw loss of the step, in nats per token.
    """
    if scale_at_minimum:
        return Judgement(
            Verdict.ABORT,
            f"gradients overflow at the smallest loss scale (precision.loss_scale.minimum); the loss is {loss}. FP16 "
            "cannot hold this model's gradients: use precision.compute=bf16, or lower the learning rate",
        )
    if consecutive_skips >= section.max_consecutive_skips:
        return Judgement(
            Verdict.ABORT,
            f"{consecutive_skips} steps in a row were skipped because their gradients were not finite "
            f"(guard.max_consecutive_skips); the loss is {loss}. Lower the learning rate or look at the data",
        )
    return Judgement(Verdict.STEP)
