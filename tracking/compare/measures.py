"""All measures of each run, including losses at equal tokens and at equal time.

Single steps are noisy, so the training loss "at" a point is the mean over the applied steps in the window that ends
there. A validation loss is interpolated between the two evaluations around the point.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from tracking.compare.caveats import FAR, MOST_EARLY, last_tokens, split_early
from tracking.numbers import human, loss, mib, number, precise_duration, scale
from tracking.run_facts import RunFacts, median

WINDOW = 0.05
"""Length of the averaging window of a training loss, as a share of the tokens or time up to its end."""

FEWEST = 10
"""Minimum number of steps to average a training loss over, if the run has that many."""


@dataclass(frozen=True)
class Measure:
    """One row with a value per run, in order. better: lower, higher, or empty if neither is better.

    values: nan where nothing was recorded. noise: two standard errors of each mean loss; empty if unknown.
    kind: how a value is formatted: loss, count, seconds, bytes, rate, hours, money or text (then `values` are
    strings).
    """

    key: str
    title: str
    kind: str
    better: str
    values: tuple[float | str, ...]
    noise: tuple[float, ...] = ()
    withheld: str = ""
    """Why no value is marked as best; see `tracking.compare.winners`."""

    @property
    def best(self) -> tuple[int, ...]:
        """Indices of the runs with the best value; empty if all are equal, neither direction is better, or withheld."""
        known = [float(value) for value in self.values if finite(value)]
        if not self.better or self.withheld or len(set(known)) < 2:
            return ()
        best = (min if self.better == "lower" else max)(known)
        return tuple(index for index, value in enumerate(self.values) if value == best)


def measures(runs: Sequence[RunFacts], *, price: float | None) -> list[Measure]:
    """Every measure that at least one run has. price: per device-hour; None leaves costs out."""
    reaching, early = split_early(runs)
    tokens = _shared(reaching, lambda run: run.columns.tokens)
    seconds = _shared(reaching, lambda run: run.columns.seconds)
    goal = loss_at(runs[0], last_tokens(runs[0]), "tokens")[0]
    to_goal = f"time to the baseline's final loss, {loss(goal)}"

    def row(key: str, title: str, kind: str, better: str, value: Callable[[RunFacts], float]) -> Measure:
        return Measure(key, title, kind, better, _each(runs, value))

    rows = [
        Measure("verdict", "verdict", "text", "", tuple(run.verdict.word for run in runs)),
        _loss("loss_at_equal_tokens", f"at {tokens:,.0f} tokens{_whose(runs, tokens)}", runs, tokens, "tokens"),
        _loss("loss_at_equal_time", f"after {precise_duration(seconds)}", runs, seconds, "seconds"),
        *_validation(runs, reaching),
        *_where_they_ended(runs, early[:MOST_EARLY]),
        row("steps", "steps attempted", "count", "", lambda run: len(run.columns)),
        row("tokens", "tokens", "count", "", last_tokens),
        row("skipped", "skipped steps", "count", "lower", lambda run: (~run.columns.applied).sum()),
        Measure("scale", "loss scale", "text", "", tuple(_scale(run) for run in runs)),
        row("nonfinite", "non-finite tensors", "count", "lower", lambda run: run.counts["nonfinite"]),
        row("incidents", "incidents", "count", "lower", lambda run: run.counts["incident"]),
        row("tokens_per_second", "tokens/s (median)", "rate", "higher", lambda run: run.tokens_per_second),
        row("step_seconds", "seconds per step (median)", "seconds", "lower", _median_of("step_seconds")),
        row("data_seconds", "data wait per step (median)", "seconds", "lower", _median_of("data_seconds")),
        row("memory_bytes", "peak memory", "bytes", "lower", lambda run: run.peak_memory_bytes),
        row("sessions", "sessions", "count", "", lambda run: max(1, run.counts["run_start"])),
        row("abandoned", "repeated steps", "count", "lower", lambda run: run.abandoned),
        row("running_seconds", "time in steps", "seconds", "", lambda run: run.running_seconds),
        row("wall_seconds", "wall time", "seconds", "", lambda run: run.wall_seconds),
        row("seconds_to_baseline", to_goal, "seconds", "lower", lambda run: _reached(run, goal)),
        *_costs(runs, price),
    ]
    return [row for row in rows if any(value != "" if row.kind == "text" else finite(value) for value in row.values)]


def _whose(runs: Sequence[RunFacts], tokens: float) -> str:
    """Clause naming the runs that ended at this point, if the longest run went much further; else empty."""
    if not tokens or max(last_tokens(run) for run in runs) * FAR <= tokens:
        return ""
    there = [run for run in runs if last_tokens(run) == tokens]
    words = "ended" if all(run.verdict.over for run in there) else "is now"
    return f", where {' and '.join(run.label for run in there)} {words}" if there else ""


def _where_they_ended(runs: Sequence[RunFacts], early: Sequence[RunFacts]) -> list[Measure]:
    """Losses of all runs at the points where the runs in `early` ended."""
    rows = []
    for tokens in dict.fromkeys(last_tokens(run) for run in early):
        label = next(run.label for run in early if last_tokens(run) == tokens)
        where = f"at {tokens:,.0f} tokens{_whose(runs, tokens)}"
        rows.append(_loss(f"loss_where_ended_{label}", where, runs, tokens, "tokens"))
        evaluated = [run.evaluations[1] for run in early if last_tokens(run) == tokens]
        if place := max((float(at[-1]) for at in evaluated if len(at)), default=0.0):
            title = f"validation {_name(runs)} at {place:,.0f} tokens, the last of {label}"
            values = tuple(_interpolated(run.evaluations[1], run.evaluations[3], place) for run in runs)
            rows.append(Measure(f"validation_where_ended_{label}", title, "loss", "lower", values))
    return rows


def format_measure(kind: str, value: float | str) -> str:
    """A measure's value with its unit; `-` if nothing was recorded."""
    if isinstance(value, str):
        return value or "-"
    if math.isnan(value):
        return "-"
    return _FORMATS.get(kind, number)(value)


_FORMATS: dict[str, Callable[[float], str]] = {
    "loss": loss,
    "count": "{:,.0f}".format,
    "seconds": precise_duration,
    "bytes": mib,
    "rate": human,
    "hours": lambda value: f"{number(value)} h",
}


def relative_change(base: float, value: float) -> float:
    """(value - base) / |base|; nan if undefined, not finite or below 0.05%."""
    share = (value - base) / abs(base) if base else math.nan
    return share if math.isfinite(share) and abs(share) >= 0.0005 else math.nan


def _each(runs: Sequence[RunFacts], value: Callable[[RunFacts], float]) -> tuple[float, ...]:
    return tuple(float(value(run)) for run in runs)


def _shared(runs: Sequence[RunFacts], axis: Callable[[RunFacts], np.ndarray]) -> float:
    """Largest value on `axis` that every run with steps has reached; 0 when no run has steps."""
    return min((float(axis(run)[-1]) for run in runs if len(run.columns)), default=0.0)


def _loss(key: str, where: str, runs: Sequence[RunFacts], place: float, axis: str) -> Measure:
    reached = [len(run.columns) > 0 and getattr(run.columns, axis)[-1] >= place for run in runs]
    nothing = (math.nan, math.nan)
    found = [loss_at(run, place, axis) if far else nothing for run, far in zip(runs, reached, strict=True)]
    losses, noise = zip(*found, strict=True)
    return Measure(key, f"training {_name(runs)} {where}", "loss", "lower", losses, noise)


def _name(runs: Sequence[RunFacts]) -> str:
    return "loss (minus the reward)" if all(run.headline for run in runs) else "loss"


def short_unit(run: RunFacts) -> str:
    """Unit of a difference of losses, such as " nats"; empty if the loss has none, as the reward."""
    return f" {run.loss_unit.partition(' per ')[0]}".rstrip()


def _minimised(run: RunFacts) -> np.ndarray:
    """Loss of each step; the negated reward for a run that learns from rewards, like its validation loss."""
    metrics = run.columns.metrics
    return -metrics[run.headline] if run.headline in metrics else run.columns.loss


def loss_at(run: RunFacts, place: float, axis: str) -> tuple[float, float]:
    """(mean training loss, noise) over the window that ends at `place` on `axis` (tokens or seconds).

    Averages at least FEWEST applied steps, if there are that many. nan without an applied step; a non-finite loss makes
    the mean non-finite.
    """
    columns = run.columns
    at = getattr(columns, axis)
    until = np.flatnonzero((at <= place) & columns.applied)
    if not until.size:
        return math.nan, math.nan
    count = max(FEWEST, int(np.count_nonzero(at[until] > place * (1 - WINDOW))))
    losses = _minimised(run)[until[-count:]]
    if losses.size < 3 or not np.isfinite(losses).all():
        return float(np.mean(losses)), math.nan
    return float(np.mean(losses)), 2 * float(np.std(losses, ddof=1)) / math.sqrt(losses.size)


def _validation(runs: Sequence[RunFacts], reaching: Sequence[RunFacts]) -> list[Measure]:
    """Validation loss at the last tokens and time that all of `reaching` have evaluated, and the best of each run."""
    found = [run.evaluations for run in runs]
    if not any(len(losses) for *_, losses in found):
        return []
    rows = []
    for axis, key in ((1, "tokens"), (2, "time")):
        place = min((float(run.evaluations[axis][-1]) for run in reaching if len(run.evaluations[3])), default=math.inf)
        values = tuple(_interpolated(item[axis], item[3], place) for item in found)
        where = f"at {place:,.0f} tokens" if key == "tokens" else f"after {precise_duration(place)}"
        title = f"validation {_name(runs)} {where}"
        rows.append(Measure(f"validation_at_equal_{key}", title, "loss", "lower", values))
    best = tuple(float(np.nanmin(item[3])) if np.isfinite(item[3]).any() else math.nan for item in found)
    return [*rows, Measure("best_validation", "best validation loss", "loss", "lower", best)]


def _interpolated(at: np.ndarray, losses: np.ndarray, place: float) -> float:
    if not len(at) or not at[0] <= place <= at[-1]:
        return math.nan
    return float(np.interp(place, at, losses))


def _scale(run: RunFacts) -> str:
    """First and last loss scale and why it changed; empty for a run without loss scaling."""
    scales = run.columns.loss_scale[np.isfinite(run.columns.loss_scale)]
    if not scales.size or (np.all(scales == scales[0]) and not run.counts["scale"]):
        return "" if not scales.size or scales[0] == 1.0 else f"{scale(float(scales[0]))}, never changed"
    reasons = Counter(event["reason"] for event in run.rare_events.get("scale", ()))
    why = ", ".join(f"{count} x {reason}" for reason, count in sorted(reasons.items()))
    first, last = (scale(float(scales[index])) for index in (0, -1))
    return f"{first} -> {last} ({why or 'set by the config'})"


def _median_of(name: str) -> Callable[[RunFacts], float]:
    return lambda run: median(getattr(run.columns, name))


def _reached(run: RunFacts, goal: float) -> float:
    """Running time until the mean loss over a share of WINDOW of the run's steps reaches `goal`; nan if it does not."""
    columns = run.columns
    losses, seconds = _minimised(run)[columns.applied], columns.seconds[columns.applied]
    width = max(1, round(WINDOW * losses.size))
    if losses.size < width or not losses.size or not math.isfinite(goal):
        return math.nan
    finite = np.isfinite(losses)
    sums, broken = (np.concatenate([[0.0], np.cumsum(part)]) for part in (np.where(finite, losses, 0.0), ~finite))
    means = (sums[width:] - sums[:-width]) / width
    there = np.flatnonzero((means <= goal + 1e-9 * abs(goal)) & (broken[width:] == broken[:-width]))
    return float(seconds[width - 1 + there[0]]) if there.size else math.nan


def _costs(runs: Sequence[RunFacts], price: float | None) -> list[Measure]:
    hours = _each(runs, lambda run: run.device_hours)
    rows = [Measure("device_hours", "device hours", "hours", "", hours)]
    if price is not None:
        costs, tokens = tuple(hour * price for hour in hours), _each(runs, last_tokens)
        rows.append(Measure("cost", "cost", "money", "lower", costs))
        each = tuple(cost / count * 1e6 if count else math.nan for cost, count in zip(costs, tokens, strict=True))
        rows.append(Measure("cost_per_million_tokens", "cost per million tokens", "money", "lower", each))
    return rows


def finite(value: float | str) -> bool:
    """Whether a measure's value is a finite number."""
    return isinstance(value, float) and math.isfinite(value)
