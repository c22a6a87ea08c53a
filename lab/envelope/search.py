"""The largest learning rate of a setting: when a run has failed, when it is within parity with FP32, and the search.

A setting is a depth, a global batch and a precision (with a loss-scale policy for FP16). A trial is one short run of a
setting at one peak learning rate. `DivergenceWatch` detects whether it failed by itself, `parity_failure` whether it
departs from FP32's trial of the same setting and rate. `climb` tries rates from the smallest up until two in a row
fail: the largest rate is the last one below the first failure; larger ones that passed between failures are lucky.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median

from config.schema import ParitySection
from tools.parity.judge_runs import Trajectory, first_departure

RISE = 0.1
"""[fraction] A running median this far above the lowest one so far counts as divergence. The loss of a batch varies by
a few per cent from step to step; its running median stays far below this in a run that learns."""
CONTROL = "control"
"""A control in FP32, at a learning rate larger by NUDGE. Runs diverge by themselves at large rates: if the control is
not within parity with FP32, a 16-bit run that is not either says nothing about its precision."""
PATIENCE = 2
"""[rates] Consecutive failures that end the search."""


@dataclass(frozen=True, order=True)
class Setting:
    """One point of the envelope, without the learning rate."""

    depth: int
    """[layers]"""
    batch: int
    """[sequences] Size of one optimizer step over all ranks."""
    precision: str
    """fp32, control, bf16 or fp16"""
    policy: str | None = None
    """Loss-scale policy of FP16."""

    @property
    def label(self) -> str:
        """Precision and policy as one word."""
        return f"{self.precision}/{self.policy}" if self.policy else self.precision

    @property
    def compute(self) -> str:
        """Dtype of forward and backward."""
        return "fp32" if self.precision == CONTROL else self.precision

    @property
    def reference(self) -> "Setting":
        """This setting in FP32."""
        return Setting(self.depth, self.batch, "fp32")


@dataclass(frozen=True)
class Trial:
    """The result of one short run."""

    losses: tuple[float, ...]
    """[nats] Mean loss of each attempted step; shorter than planned if the run failed."""
    validation_loss: float | None
    """[nats] After the last step; None if the run failed or nothing is held out."""
    skipped: int
    """[steps] Steps that did not change the weights."""
    failed_step: int | None = None
    """[step] Attempted step, from 1, at which the run failed by itself."""
    why: str | None = None
    """The reason of the failure."""


Failure = tuple[int, str]
"""The first step at which a rate fails, and why it is not in the envelope."""


@dataclass(frozen=True)
class Tried:
    """One rate of a setting."""

    rate: float
    step: int | None
    """[step] First step at which a failure showed; None: the rate is in the envelope."""
    why: str | None
    skipped: int
    """[steps] Skipped steps."""
    steps: int
    """[steps] Attempted steps."""


@dataclass(frozen=True)
class Cell:
    """The results of a setting."""

    setting: Setting
    tried: tuple[Tried, ...]
    """Results in ascending order of the rate."""

    @property
    def largest(self) -> float | None:
        """The largest rate below the first failure; None if the smallest fails, or none was tried."""
        largest = None
        for item in self.tried:
            if item.why:
                break
            largest = item.rate
        return largest

    @property
    def lucky(self) -> list[float]:
        """Rates that passed above one that failed."""
        failed = [item.rate for item in self.tried if item.why]
        return [item.rate for item in self.tried if failed and not item.why and item.rate > failed[0]]


class DivergenceWatch:
    """Follows a run step by step and reports when it has failed."""

    def __init__(self, *, window: int, most_skips: int) -> None:
        """window: steps of the running median. most_skips: number of consecutive skipped steps that is too many."""
        self._window, self._most_skips = window, most_skips
        self._losses: list[float] = []
        self._lowest = math.inf
        self._skips = 0

    def failure(self, loss: float, *, grad_norm: float, routine: bool, applied: bool) -> str | None:
        """Why the run has failed at this step; None if it has not.

        loss: [nats]. grad_norm: of the unscaled gradient. routine: a smaller loss scale could handle an overflow
        of this step. applied: whether the weights changed.
        """
        if not math.isfinite(loss):
            return f"the loss is {loss}"
        if not math.isfinite(grad_norm) and not routine:
            return "the gradient is not finite"
        self._skips = 0 if applied else self._skips + 1
        if self._skips >= self._most_skips:
            return f"{self._skips} steps in a row were skipped"
        self._losses.append(loss)
        center = median(self._losses[-self._window :])
        self._lowest = min(self._lowest, center)
        if center > (1 + RISE) * self._lowest:
            return f"the running median of the loss rose from {self._lowest:.3f} to {center:.3f}"
        return None


def parity_failure(trial: Trial, reference: Trial, bounds: ParitySection) -> Failure | None:
    """Why `trial` is not within parity with `reference`, the stable FP32 trial of the same setting and rate.

    Both must have the same number of planned steps. The validation loss is compared if both have one.
    """
    if trial.failed_step is not None:
        return trial.failed_step, trial.why or "it failed"
    departure = first_departure(_trajectory(trial), _trajectory(reference), bounds.loss_gap)
    if departure is not None:
        return departure, f"the running median of the loss is more than {bounds.loss_gap:.2%} from FP32's"
    if trial.validation_loss is not None and reference.validation_loss is not None:
        delta = abs(trial.validation_loss - reference.validation_loss) / abs(reference.validation_loss)
        if not delta <= bounds.validation_delta:
            return len(trial.losses), f"the validation loss is {delta:.2%} from FP32's"
    return None


def _trajectory(trial: Trial) -> Trajectory:
    steps, losses = range(1, len(trial.losses) + 1), trial.losses
    return Trajectory(steps, losses, (), skipped=trial.skipped, nonfinite=0, validation=trial.validation_loss)


def climb(rates: Sequence[float], attempt: Callable[[float], Tried]) -> tuple[Tried, ...]:
    """Try ascending `rates` from the smallest up, until PATIENCE of them in a row fail."""
    tried: list[Tried] = []
    for rate in rates:
        tried.append(attempt(rate))
        if len(tried) >= PATIENCE and all(item.why for item in tried[-PATIENCE:]):
            break
    return tuple(tried)


def explore(
    settings: Sequence[Setting], rates: Sequence[float], bounds: ParitySection, run: Callable[[Setting, float], Trial]
) -> Iterator[Cell]:
    """The cells of every setting, each FP32 cell before those compared with it; `run` runs a trial or recalls it.

    settings: FP32 is added where missing. rates: ascending. Other settings are tried only up to FP32's largest rate,
    since above it there is nothing to compare with.
    """

    def attempt(setting: Setting, rate: float) -> Tried:
        trial = run(setting, rate)
        reference = trial if setting == setting.reference else run(setting.reference, rate)
        step, why = parity_failure(trial, reference, bounds) or (None, None)
        return Tried(rate, step, why, trial.skipped, len(trial.losses))

    for fp32 in dict.fromkeys(setting.reference for setting in settings):
        cell = Cell(fp32, climb(rates, partial(attempt, fp32)))
        yield cell
        stable = [rate for rate in rates if cell.largest is not None and rate <= cell.largest]
        for setting in settings:
            if setting.reference == fp32 and setting != fp32:
                yield Cell(setting, climb(stable, partial(attempt, setting)))
