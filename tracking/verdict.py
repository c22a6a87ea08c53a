"""The verdict on a run, computed from its events and its process: what went wrong, since when, and what to do next.

All tools show the same verdict. docs/verdict.md has the rules and the runs on which each was tested.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from config.cli import DIVERGED
from config.deepspeed.choice import FOLDER
from config.printable import line
from tracking.events import Event, describe_event
from tracking.figures import followed, headline_of
from tracking.numbers import number, percent
from tracking.run_dir import setting
from tracking.status import Status

Bad = Literal["diverged", "not learning", "failed", "crashed", "killed"]
Warn = Literal["stalled", "stopped", "finished with warnings"]
Word = Literal[Bad, Warn, "running", "healthy"]
Tone = Literal["bad", "warn", "live", "good"]
TONES: dict[Word, Tone] = {
    **dict.fromkeys(get_args(Bad), "bad"),
    **dict.fromkeys(get_args(Warn), "warn"),
    "running": "live",
    "healthy": "good",
}
"""Verdict word to its tone, worst first."""
WORDS = tuple(TONES)
STYLES: dict[Tone, str] = {"bad": "bold red", "warn": "bold yellow", "live": "bold green", "good": "bold green"}
"""Tone to terminal style."""

RISE = 0.25
"""Minimum rise of the loss above its minimum, as a share of the minimum, for a run to count as diverged."""
LOST = 0.3
"""Minimum share of the preceding fall of the loss that has to be undone."""
SIGMAS = 5.0
"""Minimum rise of a window's mean log loss, in standard errors."""
FEWEST = 10
"""Minimum number of losses or rewards needed to judge their course."""
FLAT = 0.02
"""A run from scratch whose loss has not fallen by this share after FLAT_STEPS applied steps is not learning."""
FLAT_STEPS = 50
ERRORS = 3.0
"""Minimum rise of a reward in standard errors, from its first window to its last or on held-out prompts."""
NO_SIGNAL = 0.95
"""A run without a rise had no signal if on average this share of prompts gave the same reward to all answers."""
SOLVED = 0.25
"""Prompts count as solved if the reward left to gain is at most this share of the reward gained."""
SETTLING_SIGNALS = ("answer_entropy", "no_signal")
"""Early warnings that are meaningless once the prompts are solved."""
SKIPPED = 0.05
"""Share of skipped steps that is a warning if more than _SETTLING were skipped, which a loss scale needs to settle."""
_SETTLING = 10  # a running run that has applied no step is undecided below this many, too
_EXCURSION = 2.0  # as a multiple of the loss before and after
_WINDOWS = (5, 50)  # minimum and maximum losses per window; a twentieth of all in between
_FEW = 10  # with so few losses twice SIGMAS are required, since the noise itself is uncertain
_SMALLEST = 1e-3  # smaller losses are raised to this before taking logarithms
_MOST_LOSSES = 4096


@dataclass(frozen=True)
class Verdict:
    """The outcome of a run, or its state while it is training."""

    word: Word
    cause: str
    """One printable sentence; empty if there is nothing to say."""
    step: int | None
    """First step to which the verdict applies; None for a sound run."""
    command: str
    """Command to run next; empty if there is nothing to do."""
    warnings: int
    """Number of incidents, early warnings, machine faults, failed saves and validations that are not finite,
    over all sessions."""
    over: bool

    @property
    def tone(self) -> Tone:
        return TONES[self.word]

    @property
    def text(self) -> str:
        """Word, step and cause on one line."""
        since = "" if self.step is None else f" since step {self.step:,}"
        return f"{self.word}{since}{f': {self.cause}' if self.cause else ''}"


class Evidence:
    """The evidence for a verdict, accumulated event by event in bounded memory."""

    def __init__(self) -> None:
        self.start: Event = {}
        """The first session's `run_start`."""
        self.attempts = self.applied = self.warnings = 0
        self.skipped_since: int | None = None
        """First step of the current streak of skipped steps; None if the newest was applied."""
        self.not_finite_since: int | None = None
        """First step of the current streak of non-finite losses; None if the newest is finite."""
        self.largest_lr = 0.0
        self.warned: dict[str, list[Any]] = {}
        """Signal, or else kind of event, to [first event, count], for everything counted in `warnings`."""
        self.refused: Event | None = None
        """The newest incident, with the first non-finite tensor of its step in its reason."""
        self._cause: Event | None = None
        """First `nonfinite` event of the newest step that has any."""
        self.rewarded = False
        """Whether `curve` holds rewards of sampled answers rather than the loss, which is about 0 in such runs."""
        self.without_signal = self.spread = 0.0
        """Sum of reward/no_signal over the applied steps, and reward/spread of the newest one."""
        self.held_out: list[float] = []
        """First and newest reward on the validation set."""
        self._steps: list[int] = []
        self._losses: list[float] = []  # means of `_stride` values each
        self._stride, self._pending = 1, list[tuple[int, float]]()

    def add(self, event: Event) -> None:
        """Add one event; numbers of a step may be the strings "inf", "-inf" and "nan"."""
        kind = event["event"]
        if kind == "incident" and self._cause and self._cause["step"] == event["step"]:
            event = event | {"reason": f"{event['reason']}; {describe_event(self._cause)}"}
        if kind == "step":
            self._add_step(event)
        elif kind == "nonfinite" and (self._cause or {}).get("step") != event["step"]:
            self._cause = event
        elif kind == "run_start":
            self.start = self.start or event
            self._cut(event["step"] + 1)
        elif is_warning(event):
            self.warnings += 1
            self.warned.setdefault(str(event.get("signal") or kind), [event, 0])[1] += 1
            self.refused = event if kind == "incident" else self.refused
        elif kind == "eval" and headline_of(event.get("metrics") or ()):
            self.held_out = [*self.held_out[:1], followed(event)[1]]

    def _add_step(self, event: Event) -> None:
        step, applied = event["step"], bool(event.get("applied", True))
        loss = math.nan if event.get("loss") is None else float(event["loss"])
        if self._pending or self._steps:
            self._cut(step)
        self._cause = None  # that of an earlier attempt at this step
        self.attempts += 1
        self.applied += applied
        self.skipped_since = None if applied else self.skipped_since or step
        self.not_finite_since = None if math.isfinite(loss) else self.not_finite_since or step
        if not applied or not math.isfinite(loss):
            return
        self.largest_lr = max(self.largest_lr, float(event.get("lr") or 0.0))
        metrics = event.get("metrics") or {}
        self.rewarded = self.rewarded or bool(headline_of(metrics))
        self.without_signal += float(metrics.get("reward/no_signal") or 0.0)
        self.spread = float(metrics.get("reward/spread") or 0.0)
        if math.isfinite(value := followed(event)[1]):
            self._pending.append((step, value))
        if len(self._pending) == self._stride:
            self._steps.append(self._pending[0][0])
            self._losses.append(sum(loss for _, loss in self._pending) / self._stride)
            self._pending.clear()
        if len(self._losses) > _MOST_LOSSES:
            self._steps = self._steps[::2]
            pairs = zip(self._losses[::2], self._losses[1::2], strict=False)
            self._losses = [(first + second) / 2 for first, second in pairs]
            del self._steps[len(self._losses) :]
            self._stride *= 2

    def _cut(self, step: int) -> None:
        """Drop the losses from `step` on, which a resume or rollback has discarded."""
        while self._steps and self._steps[-1] >= step:
            del self._steps[-1], self._losses[-1]
        self._pending = [(at, loss) for at, loss in self._pending if at < step]

    @property
    def first_step(self) -> int:
        """First step of the first session."""
        return int(self.start.get("step", 0)) + 1

    @property
    def surviving(self) -> int:
        """Applied steps with a finite loss that no resume or rollback has discarded."""
        return self._stride * len(self._losses) + len(self._pending)

    def curve(self) -> tuple[np.ndarray, np.ndarray]:
        """(steps, losses or rewards) of the applied steps, in order, each of shape (losses,)."""
        return np.array(self._steps, int), np.array(self._losses)


def is_warning(event: Event) -> bool:
    """Whether the event is counted in `Verdict.warnings`."""
    kind = event["event"]
    return (
        kind in ("incident", "warning", "corruption")
        or (kind == "note" and event.get("failed") == "checkpoint")
        or (kind == "reexecution" and event["outcome"] != "numeric")
        or (kind == "eval" and not math.isfinite(followed(event)[1]))
    )


def judge(
    evidence: Evidence,
    status: Status,
    *,
    folder: Path | None = None,
    config: Mapping[str, Any] | None = None,
    resume_command: str = "",
) -> Verdict:
    """The verdict on a run. folder: its run folder; config: its resolved config, as far as known."""
    config = config or {}
    refused = evidence.refused
    replay = str(refused.get("replay") or "") if refused is not None else ""

    def verdict(word: Word, cause: str, step: int | None = None, command: str = "") -> Verdict:
        return Verdict(word, line(cause), step, command, evidence.warnings, status.over)

    course, reward = _course(evidence), _reward(evidence)
    diverged, again = _diverged(evidence, course, reward), resume_command
    if diverged is not None:
        again = _anew(resume_command, config, 0.1, checkpoint=_checkpoint(folder, diverged[2]))
    if status.state in ("killed", "crashed"):
        by_signal = "was killed by SIG" in status.cause or "(SIGINT)" in status.cause
        killed = status.state == "killed" or by_signal
        before = f"; before that {diverged[0]}" if diverged is not None else ""
        return verdict("killed" if killed else "crashed", status.cause + before, status.step, again)
    if diverged is not None:
        return verdict("diverged", diverged[0], diverged[1], again)
    if (not_learning := _not_learning(evidence, course, status, config)) is not None:
        cause, step = not_learning
        if evidence.applied:
            command = replay or _anew(resume_command, config, 10.0, least=1e-4)
        elif evidence.start.get("compute") == "fp16":
            command = _changed(resume_command, {"precision.loss_scale.policy": "adaptive"}) or replay
        else:
            command = replay
        return verdict("not learning", cause, step, command)
    if reward is not None and (unrewarded := _unrewarded(evidence, reward, status, config)) is not None:
        cause, step, factor = unrewarded
        return verdict("not learning", cause, step, _anew(resume_command, config, factor) if factor else "")
    if status.state == "silent":
        return verdict("stalled", status.cause, status.step, resume_command)
    if status.state == "running":
        return verdict("running", "")
    if status.state == "preempted":
        return verdict("stopped", status.cause, status.step, resume_command)
    if status.state != "done":
        command = resume_command
        if status.exit_code == DIVERGED and refused is not None:
            narrow = "use precision.compute=bf16" in status.cause
            command = (_in_bf16(resume_command, config) if narrow else "") or replay
        return verdict("failed", status.cause, status.step, command)
    if (warned := _warned(evidence, course, reward)) is not None:
        return verdict("finished with warnings", *warned, replay)
    short = f"too short to judge its {'reward' if evidence.rewarded else 'loss'}: fewer than {FEWEST} applied steps"
    return verdict("healthy", short if evidence.surviving < FEWEST else "")


def _not_learning(
    evidence: Evidence, course: _Course | None, status: Status, config: Mapping[str, Any]
) -> tuple[str, int] | None:
    """(cause, first step) if a run did not train or its loss has not fallen; else None."""
    attempts, since = evidence.attempts, evidence.first_step
    if attempts and not evidence.applied and (status.over or attempts >= _SETTLING):
        why = f": {status.cause}" if status.cause else ""
        return f"none of its {attempts:,} steps was applied{why}", since
    if status.exit_code == DIVERGED and evidence.skipped_since and "so the run did not train" in status.cause:
        return status.cause, evidence.skipped_since
    if evidence.applied >= FEWEST and evidence.largest_lr == 0.0 and status.over:
        return "the learning rate was 0 in every applied step", since
    if course is None or course.fallen >= FLAT or status.state == "aborted":
        return None
    if lost := (status.end or {}).get("standstill"):
        return f"its loss has not fallen, and {lost}", since
    warmup = setting(config, "schedule.warmup_steps") or 0
    scratch = config.get("model") and setting(config, "model.name_or_path") is None
    if scratch and since == 1 and evidence.surviving - warmup >= FLAT_STEPS:
        steps = f"in {evidence.surviving:,} applied steps from random weights"
        return f"its loss has not fallen by {percent(FLAT)} {steps}: look at the learning rate and the data", since
    return None


@dataclass(frozen=True)
class _Course:
    """The loss in windows. level: the first loss, then the geometric mean of each window; shape (windows + 1,)."""

    level: np.ndarray
    opening: float
    """Geometric mean of the first few losses, which may lie in no window."""
    since: np.ndarray
    """First step of each window."""
    until: np.ndarray
    bound: np.ndarray
    """Level from which the loss counts as risen too far, given the earlier levels."""
    risen: np.ndarray
    """Whether a level and the next are beyond its bound and by more than noise explains."""

    @property
    def fallen(self) -> float:
        """Relative drop of the lowest window below the first loss or the first few, whichever is lower."""
        return float(1 - self.level[1:].min() / min(self.level[0], self.opening))


def _course(evidence: Evidence) -> _Course | None:
    """Course of the loss over the applied steps; None with fewer than FEWEST, or in a run followed by its reward.

    Noise of log losses is the larger of two estimates: successive differences within a window (at least half their mean
    over all windows but the noisiest), and the typical step between windows, which grows if noise is correlated.
    """
    steps, losses = evidence.curve()
    if evidence.rewarded or len(losses) < FEWEST:
        return None
    least, most = _WINDOWS
    size = max(least, min(most, len(losses) // 20))
    count = len(losses) // size
    logs = np.log(np.maximum(losses, _SMALLEST))
    windows = logs[len(logs) - count * size :].reshape(count, size)
    inside = np.square(np.diff(windows, axis=1)).mean(axis=1) / 2
    usual = float((inside.sum() - inside.max()) / (count - 1))
    means = np.concatenate([logs[:1], windows.mean(axis=1)])
    moves = np.diff(means[1:])
    between = _typical(moves) if len(moves) >= least else 0.0
    squares = np.concatenate([[usual], np.maximum(inside, usual / 2) / size])
    level = np.exp(means)
    bound, risen = np.full(count + 1, math.inf), np.zeros(count + 1, bool)
    sigmas = SIGMAS * (1 + _FEW / len(losses))
    for at in range(1, count + 1):
        low = int(np.argmin(level[:at]))
        bound[at] = level[low] + max(RISE * level[low], LOST * (level[: low + 1].max() - level[low]))
        pair = slice(at, at + 2)
        chance = max(math.sqrt(squares[low] + squares[pair].mean() / 2), between * math.sqrt(0.75))
        risen[at] = level[pair].min() >= bound[at] and means[pair].mean() - means[low] >= sigmas * chance
    risen[-1] = risen[-2]  # the last window belongs to the last full pair
    begins = len(losses) - count * size + size * np.arange(count)
    since, until = steps[np.concatenate([[0], begins])], steps[np.concatenate([[0], begins + size - 1])]
    return _Course(level, math.exp(logs[:least].mean()), since, until, bound, risen)


def _typical(moves: np.ndarray) -> float:
    """Typical step between windows beyond their trend, a standard deviation. moves: shape (windows - 1,)."""
    return 1.4826 * float(np.median(np.abs(moves - np.median(moves))))


@dataclass(frozen=True)
class _Reward:
    """The reward of the applied steps in windows. level: mean of each window, shape (windows,)."""

    level: np.ndarray
    since: np.ndarray
    """First step of each window."""
    error: float
    """Standard error of the difference of two windows, the larger of two estimates as in `_course`."""
    risen: bool
    """Whether the last window exceeds the first, or held-out prompts their first evaluation, by more than noise."""
    solved: bool


def solved(first: float, reward: float, spread: float) -> bool:
    """Whether little is left to gain for a mean reward that has risen, so that all answers become alike.

    The maximum of non-negative rewards exceeds their mean by at least variance / mean, which estimates what is left.
    """
    return spread**2 <= SOLVED * (reward - first) * reward


def _reward(evidence: Evidence) -> _Reward | None:
    """Course of the reward of sampled answers; None for other tasks and for fewer than FEWEST steps."""
    steps, rewards = evidence.curve()
    if not evidence.rewarded or len(rewards) < FEWEST:
        return None
    size = max(_WINDOWS[0], min(_WINDOWS[1], len(rewards) // 8))
    windows = rewards[len(rewards) % size :].reshape(-1, size)
    level, noise = windows.mean(axis=1), float(np.square(np.diff(windows, axis=1)).mean()) / 2
    error, held_out = math.sqrt(2 * noise / size), evidence.held_out
    risen = level[-1] - level[0] > ERRORS * error
    risen |= len(held_out) == 2 and held_out[1] - held_out[0] > ERRORS * math.sqrt(2 * noise)
    done = risen and solved(level[0], level[-1], evidence.spread)
    if len(level) >= _WINDOWS[0]:
        error = max(error, _typical(np.diff(level)))
    return _Reward(level, steps[len(rewards) % size :: size], error, bool(risen), bool(done))


def _unrewarded(
    evidence: Evidence, reward: _Reward, status: Status, config: Mapping[str, Any]
) -> tuple[str, int, float] | None:
    """(cause, first step, learning-rate factor to try or 0) if the reward has not risen; else None."""
    warmup = setting(config, "schedule.warmup_steps") or 0
    enough, silent = evidence.surviving - warmup >= FLAT_STEPS, evidence.without_signal / evidence.applied
    if reward.risen or status.state == "aborted" or not (status.over or enough):
        return None
    if silent >= NO_SIGNAL:
        cause = f"in {percent(silent)} of its prompts all answers had one reward ({percent(NO_SIGNAL)} is the bound)"
        advice = "look at the checker, take prompts that are neither solved nor too hard, or raise grpo.group_size"
        return f"{cause}: {advice}", evidence.first_step, 0.0
    held_out, level = evidence.held_out, reward.level
    if not (status.over and enough) or evidence.spread <= SOLVED * level[-1]:  # near its maximum from the start
        return None
    first, last = held_out if len(held_out) == 2 else (float(level[0]), float(level[-1]))
    cause = f"its reward has not risen beyond its noise, {number(first)} at first and {number(last)} at last"
    for signal in ("incident", *SETTLING_SIGNALS, "truncated"):
        if signal in evidence.warned:
            event = evidence.warned[signal][0]
            return f"{cause}; {describe_event(event)}", event["step"], 0.1 if signal == "answer_entropy" else 0.0
    return f"{cause}: look at the learning rate, the checker and how hard the prompts are", evidence.first_step, 10.0


def _diverged(evidence: Evidence, course: _Course | None, reward: _Reward | None) -> tuple[str, int, int] | None:
    """(cause, first step, last sound step) if the loss rose, or the reward fell, and stayed there; else None.

    The last two windows have to be out of bounds: a single spike is not a divergence.
    """
    steps, _ = evidence.curve()
    since = evidence.not_finite_since
    if since is not None and evidence.skipped_since is None and evidence.attempts >= FEWEST:
        newest = int(steps[-1]) if steps.size else 0
        return "its loss is not finite, and its steps are applied", since, newest
    if reward is not None:
        level, best = reward.level, int(np.argmax(reward.level))
        top, first, last = (float(level[at]) for at in (best, 0, -1))
        floor = top - max(RISE * abs(top), LOST * (top - first), SIGMAS * reward.error)
        if not (level[-2:] < floor).all():
            return None
        at = len(level) - int(np.argmin(level[::-1] < floor))
        cause = f"its reward fell from {number(top)} at step {reward.since[best]:,} to {number(last)}"
        return f"{cause}; {number(floor)} is the bound", int(reward.since[at]), int(reward.since[best])
    if course is None or not course.risen[-2:].all():
        return None
    at = len(course.risen) - int(np.argmin(course.risen[::-1]))  # start of the final stretch of risen levels
    low = int(np.argmin(course.level[:at]))
    first, least, last = (float(course.level[index]) for index in (0, low, -1))
    where = f"steps {course.since[low]:,} to {course.until[low]:,}" if low else "step 1"
    start = f"{'above' if last > first else 'after'} {number(first)} at its start"
    bound = number(float(course.bound[at]))
    cause = f"its loss rose from {number(least)} ({where}) to {number(last)}, {start}; {bound} is the bound"
    return cause, int(course.since[at]), int(course.until[low])


def _warned(evidence: Evidence, course: _Course | None, reward: _Reward | None) -> tuple[str, int] | None:
    """(cause, first step) of the warning about a run that nevertheless ended well; None if there is nothing to say."""
    skipped = evidence.attempts - evidence.applied
    done = reward is not None and reward.solved  # all answers to a prompt become alike
    warned = [found for name, found in evidence.warned.items() if not (done and name in SETTLING_SIGNALS)]
    warned.sort(key=lambda found: found[0].get("signal") != "answer_entropy")  # it ends learning, so it comes first
    if warned:
        first, count = warned[0][0], sum(count for _, count in warned)
        more = f"; {count - 1} more" if count > 1 else ""
        return f"{first['text'] if first['event'] == 'note' else describe_event(first)}{more}", int(first["step"])
    if course is not None:
        level, up = course.level, np.flatnonzero(course.risen[:-1] & course.risen[1:])
        if level[-1] > _EXCURSION * level[:-1].max():
            return f"its loss rose to {number(float(level[-1]))} at its end", int(course.since[-1])
        if up.size or level.max() > _EXCURSION * max(level[0], level[-1]):
            at = int(up[0]) if up.size else int(level.argmax())
            return f"its loss rose to {number(float(level[at]))} there, and came down again", int(course.since[at])
    if skipped > max(_SETTLING, SKIPPED * evidence.attempts) or 2 * skipped > evidence.attempts:
        share = percent(SKIPPED if skipped > _SETTLING else 0.5)
        return f"{skipped:,} of {evidence.attempts:,} steps were skipped, more than {share}", evidence.first_step
    return None


def _checkpoint(folder: Path | None, step: int) -> Path | None:
    """The run's newest checkpoint at or before a step; None if there is none."""
    if folder is None:
        return None
    named = ((path.name.removeprefix("step-"), path) for path in (folder / "checkpoints").glob("step-*"))
    sound = {int(number): path for number, path in named if number.isdigit() and int(number) <= step}
    return sound[max(sound)] if sound else None


def _anew(
    command: str, config: Mapping[str, Any], factor: float, *, least: float = 0.0, checkpoint: Path | None = None
) -> str:
    """Command for another run, from `checkpoint` or from scratch, with `factor` times the learning rate."""
    rate, name = setting(config, "optimizer.learning_rate"), setting(config, "run.name")
    if not isinstance(rate, int | float) or not name:
        return ""
    start, rate = "never" if checkpoint is None else str(checkpoint), number(max(least, rate * factor), 3)
    return _changed(command, {"run.resume": start, "run.name": f"{name}-again", "optimizer.learning_rate": rate})


def _in_bf16(command: str, config: Mapping[str, Any]) -> str:
    """The command of an FP16 run in BF16; empty where a manifest or the user's own JSON decides the dtype."""
    json = setting(config, "deepspeed.config")
    if setting(config, "precision.path") == "manifest" or (json and Path(json).parent != Path(FOLDER)):
        return ""
    other = command.replace(json, json.replace("_fp16", "_bf16")) if json else command
    return _changed(other, {"precision.compute": "bf16"})


def _changed(command: str, changes: Mapping[str, str]) -> str:
    """The command with its overrides of the same keys replaced by `changes`; empty without a command."""
    if not command:
        return ""
    kept = [word for word in shlex.split(command) if word.partition("=")[0] not in changes]
    return shlex.join([*kept, *(f"{key}={value}" for key, value in changes.items())])
