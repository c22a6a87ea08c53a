"""Judges the health of a step. Decides but does not act; all ranks decide alike, without communication.

A step is judged between its backward pass and its optimizer step, on a few numbers that all ranks share. Only a healthy
step is applied (STEP). Every other verdict discards its gradients, so that masters, moments and the learning rate
schedule stay unchanged, and then reacts. docs/numerics.md lists what is unhealthy and which reaction helps.

Budgets are per run and finite, and each reaction has `guard.max_consecutive_skips` steps to work before the next one
is chosen, so a run that never becomes healthy ends after at most max_consecutive_skips x (1 + the other budgets)
steps. `judge` only reads and `note` writes, so judging twice gives the same answer.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from config.schema import GuardSection
from precision import step_health
from precision.robust_window import RobustWindow
from precision.step_health import Health, Trouble

_BUDGETED = ("skip", "cut_lr", "correct", "promote", "rollback")
_MOST_DOUBLINGS = 6
_SUSPICIOUS_SIGMAS = 6.0
"""[robust standard deviations] Spike size at which a step is worth repeating if guard.spike_sigmas is 0."""


class Verdict(Enum):
    """The training loop's action for this step. Only STEP applies its gradients."""

    STEP = "STEP"
    SKIP = "SKIP"
    CUT_LR = "CUT_LR"
    CORRECT = "CORRECT"
    PROMOTE = "PROMOTE"
    ROLLBACK = "ROLLBACK"
    ABORT = "ABORT"


@dataclass(frozen=True)
class Judgement:
    """A verdict and, when it is not STEP, the reason in one sentence."""

    verdict: Verdict
    reason: str = ""
    routine: bool = False
    """An FP16 overflow that the loss scale handles: not an incident, and on no budget."""


class Guard:
    """Judges the steps of one run. On every step call `judge`, act on it, then call `note` with the outcome."""

    def __init__(self, section: GuardSection) -> None:
        self._section = section
        self._budgets = {name: getattr(section, f"{name}_budget") for name in _BUDGETED}
        self._used = dict.fromkeys(self._budgets, 0)
        self._losses = RobustWindow(section.spike_window)
        self._log_norms = RobustWindow(section.spike_window)
        self._cuts: list[int] = []
        self._probation: dict[int, int] = {}
        self._answered_skips = 0
        self._warned = ""
        self.update_ratio: float | None = None
        """Norm of the last update, a routine overflow being none, over norm of the weights. None when it was not
        applied or not measured, and during the warm-up, where the ratio is small by design."""

    @property
    def lr_factor(self) -> float:
        """The factor on the scheduled learning rate at the next step: 1, or the product of the active cuts."""
        return self._section.cut_lr_factor ** len(self._cuts)

    @property
    def used(self) -> dict[str, int]:
        """How often each reaction was taken in this run."""
        return dict(self._used)

    def warn(self, warnings: Iterable[tuple[str, str]]) -> None:
        """Let the next `judge` consider those early warnings (signal and reason) that guard.warnings names."""
        chosen = [reason for signal, reason in warnings if signal in self._section.warnings]
        self._warned = chosen[0] if chosen else self._warned

    def judge(self, health: Health, *, can_promote: bool = False, can_roll_back: bool = False) -> Judgement:
        """Decide on a step without changing any state. can_promote, can_roll_back: whether that is possible now."""
        skips, limit = health.consecutive_skips, self._section.max_consecutive_skips
        streak = max(skips - self._answered_skips, 0)
        trouble = self._trouble(health)
        if trouble is None and streak < limit:
            return Judgement(Verdict.STEP)
        if trouble is None:
            trouble = step_health.too_many_skips(skips, limit, None)
        elif "skip" in trouble.helps and streak + 1 >= limit:
            trouble = step_health.too_many_skips(skips + 1, limit, trouble)
        elif trouble.routine:
            return Judgement(Verdict.SKIP, trouble.tell(), routine=True)
        return self._react(trouble, {"promote": can_promote, "rollback": can_roll_back})

    def suspicion(self, health: Health) -> str | None:
        """The reason to repeat a step, to tell a machine fault from a numeric event; None if there is none."""
        if health.disagreement:
            return health.disagreement
        found = step_health.not_finite(health)
        if found is not None:
            return None if found.routine else found.what
        own = self._section.spike_sigmas
        sigmas, bound = (own, "guard.spike_sigmas") if own else (_SUSPICIOUS_SIGMAS, "the bound of guard.reexecute")
        found = step_health.spike(health, self._losses, self._log_norms, sigmas, bound=bound)
        return found.what if found is not None else None

    def note(self, health: Health, judgement: Judgement, *, applied: bool, update_ratio: float | None = None) -> None:
        """Record a step once it is over; on ROLLBACK before the checkpoint is loaded. applied: the weights changed."""
        verdict, section = judgement.verdict, self._section
        if not judgement.routine:  # which answers nothing
            self.update_ratio, self._warned = update_ratio, ""
        if applied and verdict is not Verdict.STEP:
            raise ValueError(f"step {health.step} was applied although the verdict was {verdict.value}")
        if applied:
            self._losses.push(health.loss)
            self._log_norms.push(step_health.log_norm(health.grad_norm))
            self._cuts = [left - 1 for left in self._cuts if left > 1]
            self._probation = {step: max(left - 1, 0) for step, left in self._probation.items()}
            self._answered_skips = 0
        if verdict is Verdict.STEP or judgement.routine:
            return
        # Probation restarts, unless it is over and only waits for `take_due_demotions`.
        self._probation = {step: section.probation_steps if left else 0 for step, left in self._probation.items()}
        if verdict is not Verdict.ABORT:
            self._used[verdict.value.lower()] += 1
        if verdict is Verdict.CUT_LR:
            self._cuts.append(section.cut_lr_steps)
        if verdict in (Verdict.CORRECT, Verdict.PROMOTE) and section.probation_steps:
            self._probation[health.step] = section.probation_steps
        if verdict is not Verdict.SKIP:
            self._answered_skips = health.consecutive_skips + 1

    def take_due_demotions(self) -> list[int]:
        """The steps whose promotions have passed probation and are undone now; each is returned once."""
        due = [step for step, left in self._probation.items() if left == 0]
        for step in due:
            del self._probation[step]
        return due

    def roll_back(self, state: dict[str, Any]) -> None:
        """Return to the guard's `state_dict` in a checkpoint, but keep the used budgets."""
        used = self._used
        self.load_state_dict(state)
        self._used = {name: max(used[name], self._used[name]) for name in used}
        self.update_ratio, self._warned = None, ""  # the rollback has answered them

    def state_dict(self) -> dict[str, Any]:
        """Everything the next judgements depend on, as plain types."""
        return {
            "used": dict(self._used),
            "loss": self._losses.state_dict(),
            "log_norm": self._log_norms.state_dict(),
            "cuts": list(self._cuts),
            "probation": [[step, left] for step, left in self._probation.items()],
            "answered_skips": self._answered_skips,
            "warned": self._warned,
            "update_ratio": self.update_ratio,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`; budgets, window size and factors stay those of the config."""
        self._used = {name: int(state["used"].get(name, 0)) for name in self._budgets}
        self._losses.load_state_dict(state["loss"])
        self._log_norms.load_state_dict(state["log_norm"])
        self._cuts = [int(left) for left in state["cuts"]]
        left_of = state["probation"] if self._section.probation_steps else ()  # one that has begun does not end either
        self._probation = {int(step): int(left) for step, left in left_of}
        self._answered_skips = int(state["answered_skips"])
        self._warned = str(state.get("warned", ""))
        self.update_ratio = state.get("update_ratio")  # older checkpoints lack it

    def _trouble(self, health: Health) -> Trouble | None:
        section = self._section
        return (
            step_health.corrupted(health)
            or step_health.not_finite(health)
            or step_health.other_policy(health.metrics)
            or step_health.spike(health, self._losses, self._log_norms, section.spike_sigmas)
            or step_health.wrong_update(self.update_ratio, section.min_update_ratio, section.max_update_ratio)
            or step_health.early_warning(self._warned)
        )

    def _react(self, trouble: Trouble, possible: Mapping[str, bool]) -> Judgement:
        passed_over = []
        for name in self._section.reactions:
            if name == "abort":
                break
            if name not in trouble.helps:
                passed_over.append(f"{name} would not help")
            elif self._used[name] >= self._budgets[name]:
                passed_over.append(f"{name} is used up, guard.{name}_budget = {self._budgets[name]}")
            elif not possible.get(name, True):
                passed_over.append(f"{name} has no {'module to promote' if name == 'promote' else 'checkpoint'}")
            else:
                return Judgement(Verdict(name.upper()), trouble.tell(self._describe(name)))
        left = "no recovery left in guard.reactions" + (f" ({'; '.join(passed_over)})" if passed_over else "")
        return Judgement(Verdict.ABORT, trouble.tell(left))

    def _describe(self, name: str) -> str:
        section = self._section
        texts = {
            "skip": "weights unchanged",
            "cut_lr": f"the step is skipped and the learning rate multiplied by {section.cut_lr_factor:g} for "
            f"{section.cut_lr_steps} applied steps",
            "correct": "the step is skipped, and tokens beyond grpo.correction_high are left out from now on",
            "promote": f"the step is skipped and the blamed modules go to {section.promote_to}",
            "rollback": "the run goes back to its last good checkpoint and leaves out the batches since",
        }
        return f"{texts[name]}, {self._used[name] + 1} of {self._budgets[name]} (guard.{name}_budget)"


def rollback_skip(n_used: int, since_checkpoint: int) -> int:
    """The number of batches after the checkpoint's position that the n-th rollback of a run skips.

    The first skips everything seen since the checkpoint (`since_checkpoint`, which counts skipped batches too); the
    n-th 2^(n-1) times as much, at most 64 times, so that a longer stretch of bad data is passed sooner or later.
    """
    return since_checkpoint * 2 ** min(n_used - 1, _MOST_DOUBLINGS)
