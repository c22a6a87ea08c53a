"""A trial's losses and state, read from its events.jsonl while that is being written."""

import math
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from config.errors import UserError
from launch.sweep.rule import Hopeless, Report
from tracking.figures import followed

LAST_STEPS = 20
"""Number of last steps that a run's training loss is averaged over."""


@dataclass
class History:
    """A run so far. If a resumed run repeats steps, the last attempt counts."""

    path: Path
    losses: dict[int, float | None] = field(default_factory=dict)
    """Step to training loss, or to the negated reward for a run followed by its reward; None if it was not applied."""
    evaluations: dict[int, float] = field(default_factory=dict)
    """Step to validation loss."""
    speeds: list[float] = field(default_factory=list)
    """[tokens/s] Throughput of each step."""
    world_size: int | None = None
    began: float = 0.0
    """[seconds since the epoch] Start of the last session."""
    ended: dict[str, Any] | None = None
    """The last run_end, unless a new session started after it."""

    def __post_init__(self) -> None:
        from tracking.jsonl import Follower  # imports orjson, which is not needed to start

        self._file = Follower(self.path)

    def refresh(self) -> bool:
        """Read new events; returns whether there were any. Damaged lines are skipped."""
        before = self._file.offset
        with suppress(UserError):
            for event in self._file.events("run_start", "step", "eval", "run_end"):
                self._take(event)
        return self._file.offset > before

    def _take(self, event: dict[str, Any]) -> None:
        match event["event"]:
            case "run_start":
                self.world_size, self.began, self.ended = event["world_size"], event["time"], None
            case "step":
                for later in range(event["step"] + 1, self.steps + 1):
                    self.losses.pop(later, None)
                name, value = followed(event)
                self.losses[event["step"]] = None if not event["applied"] else value if name == "loss" else -value
                self.speeds.append(math.nan if event["tokens_per_second"] is None else event["tokens_per_second"])
            case "eval":
                self.evaluations[event["step"]] = math.nan if event["loss"] is None else event["loss"]
            case "run_end":
                self.ended = event

    def reports(self, rule: Hopeless) -> list[Report]:
        """Losses for the stopping rule, in step order."""
        if rule.loss == "validation":
            return [Report(step, self.evaluations[step]) for step in sorted(self.evaluations)]
        blocks: dict[int, list[float]] = {}
        for step, loss in sorted(self.losses.items()):
            end = step + -step % rule.every_steps
            if loss is not None and end <= self.steps:
                blocks.setdefault(end, []).append(loss)
        return [Report(end, fmean(losses)) for end, losses in blocks.items()]

    @property
    def steps(self) -> int:
        """[steps] Highest step attempted, which is the last in `losses`."""
        return next(reversed(self.losses), 0)

    @property
    def training_loss(self) -> float | None:
        """[nats] Mean over the last LAST_STEPS applied steps; None before the first."""
        known = [loss for _, loss in sorted(self.losses.items()) if loss is not None]
        return fmean(known[-LAST_STEPS:]) if known else None

    @property
    def validation_loss(self) -> float | None:
        """[nats] Loss of the last evaluation; None without one."""
        return self.evaluations[max(self.evaluations)] if self.evaluations else None

    @property
    def tokens_per_second(self) -> float | None:
        """[tokens/s] Median over steps; None without any."""
        known = [speed for speed in self.speeds if math.isfinite(speed)]
        return median(known) if known else None


def read_history(path: Path) -> History:
    """History of a run folder so far; empty without events."""
    history = History(path / "events.jsonl")
    history.refresh()
    return history
