"""Service levels of many runs: how many ended as they should, and how much of the error budget is left.

Terms follow Google's SRE workbook. An indicator is the ratio of good to valid events; an objective is its minimum; the
error budget is the number of events that may fail: (1 - objective) x valid events. A burn rate of 1 spends exactly the
budget of its period. Runs that may still be running are not counted yet. Only one run at a time is held in memory.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from config.cli import DIVERGED
from config.errors import UserError
from tracking.numbers import number, percent
from tracking.pages.markdown import Table, code, page, section, text
from tracking.report.context import Verdict as Passed
from tracking.report.files import matching, numbers_given
from tracking.report.measures import GOOD_ENDINGS
from tracking.run_dir import RunDir
from tracking.run_facts import RunFacts
from tracking.summary import read_run

OBJECTIVES = {"job_success": 0.99, "no_divergence": 0.99, "restore_success": 1.0}
"""Minimum share of good events by level. Job success and restores follow industry practice; the other was chosen."""

TITLES = {
    "job_success": "jobs that ended as they should",
    "no_divergence": "runs without numeric divergence",
    "restore_success": "restores that succeeded",
}
_MAX_FAILURES = 20
_MARKS: dict[Passed, str] = {"pass": "✓ pass", "fail": "**✗ fail**", "not measured": "not measured"}


@dataclass
class Tally:
    """Number of good events and of all events."""

    good: int = 0
    count: int = 0

    @property
    def bad(self) -> int:
        return self.count - self.good

    def __str__(self) -> str:
        return f"{self.good:,} of {self.count:,}"


@dataclass
class Level:
    """One service level: its objective and its counts, in total and by the ISO week in which runs ended."""

    key: str
    objective: float
    total: Tally = field(default_factory=Tally)
    weeks: dict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))

    @property
    def reached(self) -> float | None:
        """Share of good events; None without events."""
        return self.total.good / self.total.count if self.total.count else None

    @property
    def allowed(self) -> float:
        """The total error budget, in events."""
        return (1.0 - self.objective) * self.total.count

    @property
    def budget_left(self) -> float | None:
        """Unspent share of the error budget, negative if overspent; None if there is no budget."""
        return 1.0 - self.total.bad / self.allowed if self.allowed > 0 else None

    @property
    def verdict(self) -> Passed:
        """Whether the objective is met."""
        if self.reached is None:
            return "not measured"
        return "pass" if self.reached >= self.objective - 1e-12 else "fail"

    def burn_rate(self, tally: Tally) -> float | None:
        """Share of bad events in a period relative to the share that the objective allows; None if it allows none."""
        if not tally.count or self.objective >= 1.0:
            return None
        return tally.bad / tally.count / (1.0 - self.objective)


class Failure(NamedTuple):
    """A run that spent error budget."""

    time: float
    run: str
    what: str

    @property
    def day(self) -> str:
        """Date in UTC."""
        return datetime.fromtimestamp(self.time, UTC).strftime("%Y-%m-%d")


@dataclass
class ServiceLevels:
    levels: list[Level]
    ended: int = 0
    running: int = 0
    left_out: int = 0
    """Number of runs that ended before the requested period."""
    failures: list[Failure] = field(default_factory=list)
    """Up to _MAX_FAILURES of the most recent failures, newest first."""
    more_failures: int = 0
    unreadable: list[str] = field(default_factory=list)

    @property
    def missed(self) -> int:
        return sum(level.verdict == "fail" for level in self.levels)

    @property
    def remarks(self) -> list[str]:
        """Sentences about runs that were not counted, and about budgets below one failure."""
        found = [f"{self.running:,} runs may still be running and are not counted"] if self.running else []
        if self.left_out:
            found.append(f"{self.left_out:,} runs ended before the period and are not counted")
        small = [level for level in self.levels if 0 < level.allowed < 1]
        if small and self.ended:
            most = max(math.ceil(1 / (1 - level.objective) - 1e-9) for level in small)
            found.append(f"below {most:,} runs a single failure overspends the budget")
        return found + [f"left out: {line}" for line in self.unreadable]

    def as_dict(self) -> dict[str, Any]:
        """Everything as plain values, for JSON."""
        return {
            "ended": self.ended,
            "running": self.running,
            "levels": [
                {
                    "key": level.key,
                    "title": TITLES[level.key],
                    "objective": level.objective,
                    **asdict(level.total),
                    "level": level.reached,
                    "allowed_failures": level.allowed,
                    "error_budget_left": level.budget_left,
                    "verdict": level.verdict,
                    "weeks": {
                        week: {**asdict(tally), "burn_rate": level.burn_rate(tally)}
                        for week, tally in sorted(level.weeks.items())
                    },
                }
                for level in self.levels
            ],
            "troubles": [item._asdict() for item in self.failures],
            "more_troubles": self.more_failures,
            "remarks": self.remarks,
        }


def service_levels(
    folders: Iterable[Path], *, objectives: Mapping[str, float], now: float, since: float = -math.inf
) -> ServiceLevels:
    """Service levels of the runs in `folders` that ended after `since`. now, since: seconds since the epoch."""
    found = ServiceLevels([Level(key, objective) for key, objective in objectives.items()])
    newest: list[Failure] = []
    for folder in folders:
        try:
            run = read_run(folder, now)
        except UserError as error:
            found.unreadable.append(str(error))
            continue
        ended = run.sessions[-1].last
        if not run.verdict.over:
            found.running += 1
        elif ended < since:
            found.left_out += 1
        else:
            found.ended += 1
            failures = _count(found.levels, run, ended)
            newest = sorted([*newest, *(Failure(ended, str(folder), what) for what in failures)], reverse=True)
            found.more_failures += len(newest[_MAX_FAILURES:])
            del newest[_MAX_FAILURES:]
    found.failures = newest
    return found


def _count(levels: Sequence[Level], run: RunFacts, ended: float) -> list[str]:
    """Count a run in every level; returns a line for each kind of failure."""
    good, (restored, due) = run.verdict.word in GOOD_ENDINGS, run.restores
    aborted = next(filter(None, (session.stopped_on_numerics for session in run.sessions)), None)
    stopped = any(session.end is not None and session.end["exit_code"] == DIVERGED for session in run.sessions)
    diverged = run.verdict.word == "diverged" or aborted is not None or stopped
    counted = {
        "job_success": (int(good), 1),
        "no_divergence": (int(not diverged), 1),
        "restore_success": (restored, due),
    }
    week = datetime.fromtimestamp(ended, UTC).strftime("%G-W%V")
    for level in levels:
        good_ones, count = counted[level.key]
        if not count:
            continue
        for tally in (level.total, level.weeks[week]):
            tally.good += good_ones
            tally.count += count
    lines = [] if good else [run.verdict.text]
    if good and diverged:
        lines = [f"stopped on numerics in an earlier session: {aborted or 'no reason recorded'}"]
    return lines + ([f"{due - restored} of {due} restores failed"] if restored < due else [])


def run_folders(patterns: Sequence[str]) -> list[Path]:
    """The run folders that paths and globs name, without duplicates. Raises UserError if there are none."""
    found: dict[Path, None] = {}
    for pattern in patterns:
        found |= {path: None for path in matching(pattern) if RunDir(path).events.is_file()}
    if not found:
        raise UserError(
            f"--runs {' '.join(patterns)}: no folder with an events.jsonl; give run folders such as 'runs/*'"
        )
    return list(found)


def objectives_from(arguments: Sequence[str]) -> dict[str, float]:
    """OBJECTIVES, overridden by KEY=SHARE `arguments`. Raises UserError for a wrong argument."""
    given = numbers_given("--objective", arguments, OBJECTIVES, "job_success=0.99")
    for key, value in given.items():
        if not 0.0 < value <= 1.0:
            wrong = f"--objective {key}={number(value)}"
            raise UserError(f"{wrong}: a share above 0 and at most 1 is needed; example: {key}=0.99")
    return OBJECTIVES | given


def levels_tables(found: ServiceLevels, mark: Callable[[Passed], object]) -> list[Table]:
    """Tables of the levels, in total and by week. mark: makes the cell of a verdict."""
    rows = [
        (
            TITLES[level.key],
            f"at least {percent(level.objective)}",
            level.total,
            "-" if level.reached is None else percent(level.reached),
            format_budget(level),
            mark(level.verdict),
        )
        for level in found.levels
    ]
    weeks = sorted({week for level in found.levels for week in level.weeks})
    by_week = [(week, *(_week(level, week) for level in found.levels)) for week in weeks]
    return [
        Table(
            ("level", "objective", "good", "level reached", "error budget left", "verdict"),
            rows,
            title=f"Service levels of {found.ended:,} ended runs",
        ),
        Table(("week", *TITLES.values()), by_week, title="By week (UTC, of a run's end)"),
    ]


def levels_page(found: ServiceLevels) -> str:
    from tracking.pages.document import document  # imports Jinja2

    levels, weeks = levels_tables(found, _MARKS.__getitem__)
    failures = [(failure.day, code(failure.run), text(failure.what)) for failure in found.failures]
    missed = f"{found.missed} of {len(found.levels)} objectives missed" if found.missed else "No objective is missed"
    content = page(
        f"# {levels.title}",
        f"**{missed}**",
        [text(remark) for remark in found.remarks],
        section("Levels", levels),
        section(weeks.title, weeks),
        section(
            "What went wrong",
            Table(("day", "run", "what"), failures) if failures else "",
            f"And {found.more_failures:,} older ones." if found.more_failures else "",
        ),
    )
    return document(content, Path(), tone="bad" if found.missed else "good")


def _week(level: Level, week: str) -> str:
    tally = level.weeks.get(week)
    if tally is None:
        return "-"
    burn = level.burn_rate(tally)
    rate = "" if burn is None or not tally.bad else f", burn rate {number(burn, 3)}"
    return f"{tally}{rate}"


def format_budget(level: Level) -> str:
    if not level.total.count:
        return "-"
    if level.budget_left is None:
        return "the objective allows no failure"
    spent = f"{level.total.bad:,} of {number(level.allowed, 3)} spent"
    return f"{percent(level.budget_left)} ({spent})" if level.budget_left >= 0 else f"overspent ({spent})"
