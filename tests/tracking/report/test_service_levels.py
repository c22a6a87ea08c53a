"""Service levels over many runs, against counts made by hand and at random."""

import random
import tracemalloc
from collections import Counter, defaultdict
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.support.refusals import refused
from tests.support.runs.report_runs import session
from tracking.report.service_levels import (
    OBJECTIVES,
    Level,
    Tally,
    format_budget,
    run_folders,
    service_levels,
)

NOW = datetime(2026, 11, 21, tzinfo=UTC).timestamp()
DAY = 86400.0
KINDS = ("done", "preempted", "aborted", "diverged", "rescued", "crashed", "running")


def _make(folder: Path, kind: str, ended: float) -> None:
    """A run that came to that end at `ended`."""
    code = {"done": 0, "preempted": 75, "aborted": 74, "diverged": 3, "rescued": 0}
    if kind == "rescued":
        with session(folder, time=ended - 100) as run:
            run.steps(1)
            run.save()
            run.incident("ABORT")
            run.end("aborted", 3)
        with session(folder, time=ended, seconds=0.0, step=1, resumed_from="step-1") as run:
            run.end("done")
        return
    time = NOW - 60 if kind == "running" else ended
    with session(folder, time=time, seconds=0.0) as run:
        run.steps(1)
        if kind == "diverged":
            run.incident("ABORT")
        if kind in code:
            run.end("aborted" if code[kind] in (3, 74) else kind, code[kind])


def _levels(folders: list[Path], **options: float) -> dict[str, Level]:
    return {level.key: level for level in service_levels(folders, objectives=OBJECTIVES, now=NOW, **options).levels}


@pytest.mark.parametrize("seed", range(3))
def test_many_runs_are_counted_by_level_and_week(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    jobs, numerics, weeks = Counter[str](), Counter[str](), defaultdict(Counter)
    failures: list[float] = []
    for number in range(80):
        kind, ended = draw.choice(KINDS), NOW - DAY * draw.uniform(1, 60)
        _make(tmp_path / f"run-{number}", kind, ended)
        if kind != "running":
            year, week, _ = datetime.fromtimestamp(ended, UTC).isocalendar()
            jobs["count"] += 1
            jobs["good"] += kind in ("done", "preempted", "rescued")
            weeks[f"{year}-W{week:02d}"]["good"] += kind in ("done", "preempted", "rescued")
            weeks[f"{year}-W{week:02d}"]["count"] += 1
            numerics[kind] += 1
            failures += [ended] * (kind not in ("done", "preempted"))
    found = service_levels(run_folders([str(tmp_path / "*")]), objectives=OBJECTIVES, now=NOW)
    job, divergence, restore = found.levels
    assert (job.total.good, job.total.count, found.ended) == (jobs["good"], jobs["count"], jobs["count"])
    assert found.running == 80 - jobs["count"]
    assert divergence.total.bad == numerics["diverged"] + numerics["rescued"]
    assert (restore.total.good, restore.total.count) == (numerics["rescued"], numerics["rescued"])
    assert {week: (tally.good, tally.count) for week, tally in job.weeks.items()} == {
        week: (count["good"], count["count"]) for week, count in weeks.items()
    }
    assert len(found.failures) + found.more_failures == len(failures) > 20
    assert [item.time for item in found.failures] == sorted(failures, reverse=True)[:20]


def test_the_error_budget_is_what_may_go_wrong() -> None:
    """The workbook's arithmetic: 99 % of 200 runs allows two failures."""
    level = Level("job_success", 0.99, Tally(good=199, count=200))
    assert level.allowed == pytest.approx(2) and level.budget_left == pytest.approx(0.5) and level.verdict == "pass"
    assert format_budget(level) == "50% (1 of 2 spent)"
    assert level.burn_rate(Tally(good=9, count=10)) == pytest.approx(10)
    spent = Level("job_success", 0.99, Tally(good=99, count=100))
    assert spent.budget_left == pytest.approx(0) and spent.verdict == "pass", "exactly at the objective it is met"
    over = Level("job_success", 0.99, Tally(good=97, count=100))
    assert over.budget_left == pytest.approx(-2) and over.verdict == "fail"
    assert format_budget(over) == "overspent (3 of 1 spent)"
    strict = Level("restore_success", 1.0, Tally(good=9, count=10))
    assert strict.budget_left is None and strict.burn_rate(strict.total) is None and strict.verdict == "fail"
    empty = Level("restore_success", 1.0)
    assert empty.verdict == "not measured" and format_budget(empty) == "-"


def test_runs_that_ended_before_the_period_are_not_counted(tmp_path: Path) -> None:
    for days in (1, 5, 20):
        _make(tmp_path / f"{days}", "done" if days < 20 else "crashed", NOW - DAY * days)
    folders = run_folders([str(tmp_path / "*")])
    assert _levels(folders)["job_success"].total == Tally(2, 3)
    assert _levels(folders, since=NOW - DAY * 7)["job_success"].total == Tally(2, 2)


def test_a_run_that_ended_just_now_counts_and_one_that_diverged_without_a_word_diverged(tmp_path: Path) -> None:
    _make(tmp_path / "just-now", "done", NOW - 60)
    with session(tmp_path / "lost", time=NOW - DAY) as run:
        run.incident("ABORT")
    levels = _levels(run_folders([str(tmp_path / "*")]))
    assert levels["job_success"].total == levels["no_divergence"].total == Tally(1, 2)


def test_a_week_that_two_years_share_is_one(tmp_path: Path) -> None:
    for day in (31, 32):
        _make(tmp_path / f"{day}", "done", datetime(2020, 12, 1, 12, tzinfo=UTC).timestamp() + (day - 1) * DAY)
    assert _levels(run_folders([str(tmp_path / "*")]))["job_success"].weeks == {"2020-W53": Tally(2, 2)}


def test_what_cannot_be_read_is_named_and_the_rest_is_counted(tmp_path: Path) -> None:
    _make(tmp_path / "good", "done", NOW - DAY)
    for name, text in (("torn", '{"event":"run_start"}\n'), ("empty", "")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "events.jsonl").write_text(text)
    found = service_levels(run_folders([f"{tmp_path}/*"]), objectives=OBJECTIVES, now=NOW)
    assert found.ended == 1 and len(found.unreadable) == 2
    for words in ("empty/events.jsonl: nothing was recorded", "torn"):
        assert any(words in line for line in found.remarks)


def test_globs_and_folders_name_each_run_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a/run-1", "a/run-2", "b/run-1"):
        _make(tmp_path / name, "done", NOW)
    (tmp_path / "a" / "no-run").mkdir()
    monkeypatch.chdir(tmp_path)
    assert run_folders(["a/*", "a/run-2", "*/run-1"]) == [Path("a/run-1"), Path("a/run-2"), Path("b/run-1")]
    assert run_folders([f"{tmp_path}/*/run-1"]) == [tmp_path / "a/run-1", tmp_path / "b/run-1"]
    assert "no folder with an events.jsonl" in refused(run_folders, ["c/*"])


def test_memory_does_not_grow_with_the_number_of_runs_or_their_length(tmp_path: Path) -> None:
    """Hundreds of runs are one run read hundreds of times; a long run is one with its steps repeated."""
    with session(tmp_path / "short", time=NOW - 10 * DAY) as run:
        run.steps(200)
    start, *steps = (tmp_path / "short/events.jsonl").read_bytes().splitlines(keepends=True)
    (tmp_path / "long").mkdir()
    (tmp_path / "long/events.jsonl").write_bytes(start + b"".join(steps) * 60)
    assert (tmp_path / "long/events.jsonl").stat().st_size > 3 * 2**20
    peaks = []
    for folder, count in (("short", 1), ("short", 20), ("short", 120), ("long", 1)):
        tracemalloc.start()
        service_levels((tmp_path / folder for _ in range(count)), objectives=OBJECTIVES, now=NOW)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert max(peaks[1:]) < 1.1 * peaks[1] and peaks[1] < 2 * 2**20
