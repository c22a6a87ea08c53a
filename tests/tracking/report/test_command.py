"""The command: exit codes, JSON, the pages, last lines of logs, no torch; service levels over many runs."""

import json
import random
import tracemalloc
from collections import Counter, defaultdict
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tests.support.page import Page
from tests.support.refusals import refused
from tests.support.runs.compare_runs import write_run
from tests.support.runs.report_runs import session, simple_run
from tests.support.servers.serving import served
from tracking.report.command import main
from tracking.report.context import LIMITS
from tracking.report.log import last_lines, log_files, newest_events
from tracking.report.service_levels import (
    OBJECTIVES,
    Level,
    Tally,
    format_budget,
    run_folders,
    service_levels,
)
from tracking.run_dir import RunDir
from tracking.summary import read_run_folder

TITLES = {limit.title for limit in LIMITS.values()}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that passes all but its utilisation, which is low on the synthetic device."""
    return simple_run(tmp_path / "run", seconds=0.3, evals=((20, 4.0), (40, 3.0)))


@pytest.fixture
def baseline(tmp_path: Path) -> Path:
    return simple_run(tmp_path / "fp32", compute="fp32", fields={"memory_bytes": 5 * 2**30})


def test_one_run_as_json(run: Path, baseline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), "--baseline", str(baseline), "--json", "--price", "2"]) == 0
    printed = json.loads(capsys.readouterr().out)
    measures = {item["key"]: item for item in printed["measures"]}
    assert list(measures) == list(LIMITS) and printed["failed"] and printed["baseline"] == str(baseline)
    assert measures["epoch_time"]["value"] == pytest.approx(0.6)
    assert measures["epoch_time"]["verdict"] == "pass" and measures["utilisation"]["verdict"] == "fail"
    assert measures["drift"]["value"] is None


def test_the_gate_ends_with_3_only_where_a_verdict_fails(run: Path, baseline: Path) -> None:
    command = [str(run), "--gate", "--limit", "utilisation=0"]
    assert main(command) == 0, "what is not measured does not fail"
    assert main([*command, "--baseline", str(baseline), "--limit", "epoch_time=0.59"]) == 3


def test_tables_and_report_tell_the_same(run: Path, baseline: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), "--baseline", str(baseline)]) == 0
    shown, page = capsys.readouterr().out, (run / "report.md").read_text()
    for part in ("time per epoch", "0.600x", "at most 0.7x the baseline's", "not measured: the loss is not"):
        assert part in shown and part in page, part
    assert "measures pass, 1 failed" in shown and "measures pass, 1 failed" in page
    assert "## Measures" in page and "How they were computed" in page and "| **fail** |" in page
    assert all(f"| {title} |" in page and f"- **{title}**: " in page for title in TITLES)


def test_the_page_of_a_run_stands_alone(run: Path, tmp_path: Path) -> None:
    (run / "config.yaml").unlink()
    file = tmp_path / "report.html"
    assert main([str(run), "--html", str(file)]) == 0
    page = Page(file.read_text())
    assert set(page.cells) >= TITLES and not page.open
    assert page.loads == [] and 'id="charts"' in file.read_text()


def test_many_runs(tmp_path: Path, run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with session(tmp_path / "lost", time=1.6e9) as run:
        run.steps(1)
    file, command = tmp_path / "levels.html", ["--runs", str(tmp_path / "*")]
    assert main([*command, "--html", str(file)]) == 0
    shown, page = capsys.readouterr().out, Page(file.read_text())
    for part in (
        "1 of 2",
        "overspent (1 of 0.02 spent)",
        "2023-W46",
        "2020-W37",
        ": no process has the run folder",
    ):
        assert part in shown, part
    assert {"2023-W46", "2020-W37", "jobs that ended as they should"} <= set(page.cells)
    assert not page.open and not page.loads
    assert main([*command, "--json", "--gate"]) == 3
    told_levels = json.loads(capsys.readouterr().out)
    level = told_levels["levels"][0]
    assert (level["good"], level["count"], level["error_budget_left"]) == (1, 2, pytest.approx(-49))
    assert level["weeks"]["2020-W37"]["burn_rate"] == pytest.approx(100)
    assert main([*command, "--gate", "--objective", "job_success=0.5"]) == 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "give a run folder, or --runs"),
        (["RUN", "--runs", "x"], "not both"),
        (["RUN", "--limit", "speed=1"], "--limit speed=1: unknown key"),
        (["RUN", "--limit", "drift=small"], "not a number"),
        (["RUN", "--limit", "drift=nan"], "not a number"),
        (["RUN", "--baseline", "absent"], "absent/events.jsonl: cannot read"),
        (["RUN", "--price", "0"], "0 is not a number above 0"),
        (["RUN", "--price", "cheap"], "cheap is not a number above 0"),
        (["RUN", "--html", "absent/page.html"], "--html absent/page.html: cannot be written"),
        (["--runs", "absent/*"], "no folder with an events.jsonl"),
        (["--runs", "RUN", "--objective", "jobs=0.9"], "unknown key"),
        (["--runs", "RUN", "--objective", "job_success=2"], "a share above 0"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(run, arguments, words, refusal) -> None:
    assert words in refusal(main, [str(run) if word == "RUN" else word for word in arguments])


def test_a_folder_that_may_only_be_read_still_gets_its_tables(run, monkeypatch, capsys) -> None:
    """The folder of the plot is a file, as root may write everywhere else."""
    (run / "plots").write_text("")
    assert main([str(run), "--json"]) == 0
    printed = capsys.readouterr()
    assert "plots/run.png was not written" in printed.err and len(json.loads(printed.out)["measures"]) == 12


def test_a_log_is_text_without_colours_movements_and_secrets(tmp_path: Path) -> None:
    secret = f"hf_{'a1B2' * 8}"
    lines = [f"line {number}" for number in range(100)]
    lines += ["\x1b[31mred\x1b[0m \x1b]0;title\x07<b>", "10%\r50%\r100% done\r", "", f"token={secret}", "\u202eltr"]
    (tmp_path / "a.log").write_bytes("\n".join(lines).encode() + b"\n\xff\xfe\n")
    found = last_lines(tmp_path / "a.log").split("\n")
    assert found[:2] == ["line 85", "line 86"] and len(found) == 20
    assert found[15:17] == ["red <b>", "100% done"] and found[18] == "\\u202eltr" and secret not in "".join(found)
    assert last_lines(tmp_path / "absent.log") == ""


def test_logs_of_a_run_a_sweep_and_a_tool_are_found(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "tool" / "runs" / "sweep-003")
    paths = [run_dir.path / "train.log", run_dir.path / "logs" / "rank0.log"]
    paths += [tmp_path / "tool" / "logs" / "sweep-003.log", tmp_path / "tool" / "runs" / "logs" / "003.log"]
    for path in [*paths, tmp_path / "tool" / "runs" / "logs" / "004.log"]:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    assert sorted(log_files(run_dir)) == sorted(paths)


@pytest.mark.parametrize("inside", [True, False])
def test_a_log_outside_of_the_served_folder_is_not_shown(tmp_path: Path, inside: bool) -> None:
    write_run(tmp_path / "runs", "mine")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "mine.log").write_text("printed by the run")
    with served(tmp_path if inside else tmp_path / "runs") as client:
        page = client.page("/run/sections", key="runs/mine" if inside else "mine")
    assert ("printed by the run" in page) is inside


def test_the_newest_events_are_sentences(tmp_path: Path) -> None:
    incident = {"event": "incident", "verdict": "SKIP", "reason": "the loss is nan", "modules": [], "replay": ""}
    check = {"event": "self_check", "checks": {}, "skipped": []}
    run_dir = write_run(tmp_path, "a", after={20: [incident, check]})
    found = [(event["step"], text) for event, text in newest_events(read_run_folder(run_dir, "a"))]
    assert (20, "SKIP: the loss is nan") in found and not any("{" in text for _, text in found)
    assert found[-1][0] == 40 and found[-1][1].startswith("done")


NOW = datetime(2026, 11, 21, tzinfo=UTC).timestamp()
DAY = 86400.0
KINDS = ("done", "preempted", "aborted", "diverged", "broken", "rescued", "replaced", "crashed", "running")


def _make(folder: Path, kind: str, ended: float) -> None:
    """A run that came to that end at `ended`."""
    code = {"done": 0, "preempted": 75, "aborted": 74, "diverged": 3, "broken": 71}
    if kind in ("rescued", "replaced"):
        with session(folder, time=ended - 100) as run:
            run.steps(1)
            run.save()
            run.incident("ABORT")
            run.end("aborted", 3 if kind == "rescued" else 71)
        with session(folder, time=ended, seconds=0.0, step=1, resumed_from="step-1") as run:
            run.end("done")
        return
    time = NOW - 60 if kind == "running" else ended
    with session(folder, time=time, seconds=0.0) as run:
        run.steps(1)
        if kind in ("diverged", "broken"):
            run.incident("ABORT")
        if kind in code:
            run.end("aborted" if code[kind] in (3, 71, 74) else kind, code[kind])


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
            good = kind in ("done", "preempted", "rescued", "replaced")
            jobs["good"] += good
            weeks[f"{year}-W{week:02d}"]["good"] += good
            weeks[f"{year}-W{week:02d}"]["count"] += 1
            numerics[kind] += 1
            failures += [ended] * (kind not in ("done", "preempted", "replaced"))
    found = service_levels(run_folders([str(tmp_path / "*")]), objectives=OBJECTIVES, now=NOW)
    job, divergence, restore = found.levels
    assert (job.total.good, job.total.count, found.ended) == (jobs["good"], jobs["count"], jobs["count"])
    assert found.running == 80 - jobs["count"]
    assert divergence.total.bad == numerics["diverged"] + numerics["rescued"]
    assert restore.total.good == restore.total.count == numerics["rescued"] + numerics["replaced"]
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
