"""The command as a person or a pipeline starts it: exit codes, JSON, the pages, and that it needs no torch."""

import json
from pathlib import Path

import pytest

from tests.support.page import Page
from tests.support.runs.report_runs import session, simple_run
from tracking.report.command import main
from tracking.report.context import LIMITS

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
