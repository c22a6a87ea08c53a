"""The page of a comparison loses no peak; run folders are read in one pass, and what wandb holds like them."""

import json
import math
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from config.cli import REPOSITORY
from tests.support.page import Page
from tests.support.refusals import refused
from tests.support.runs.compare_runs import CONFIG as PLAIN_CONFIG
from tests.support.runs.compare_runs import ENVIRONMENT, RunWriter, facts_of, merged, whole_event, write_run
from tests.support.runs.report_runs import session
from tests.support.servers import wandb_files
from tests.support.servers.browser import Tab
from tests.support.servers.wandb_server import StandIn, stand_in
from tracking import run_facts
from tracking.compare.command import main
from tracking.compare.curves import BUCKETS, band, curve, marks, means
from tracking.compare.divergence import Tolerance
from tracking.compare.html import data
from tracking.compare.html import page as page_of
from tracking.compare.result import Comparison, compare
from tracking.compare.sources import read_runs
from tracking.compare.surviving import read_events, surviving
from tracking.compare.wandb_runs import as_events, read_wandb
from tracking.events import REQUIRED_FIELDS
from tracking.jsonl import encode
from tracking.pages.render import script_json
from tracking.run_dir import RunDir
from tracking.run_facts import read_facts
from tracking.wandb.charts import Rows
from tracking.wandb.sink import WandbSink

SECRET = "hf_" + "a" * 30


@pytest.fixture
def comparison(tmp_path: Path) -> Comparison:
    """Two runs, the second with a hostile name, a skip, an incident and a secret in its config."""
    incident = {"event": "incident", "verdict": "CUT_LR", "reason": "</script><b>", "modules": [], "replay": SECRET}
    skip = {"applied": False, "grad_norm": math.inf}
    base = write_run(tmp_path, "base")
    other = write_run(
        tmp_path,
        "<img src=x>",
        change=lambda step, _: {"loss": 4.0 + step / 100, **(skip if step == 30 else {})} if step >= 20 else None,
        after={25: [incident]},
        config={"hub_token": SECRET, "data.path": "a&b</script>"},
    )
    return compare(read_runs([str(base.path), str(other.path)]), tolerance=Tolerance(), price=None)


def test_the_page_stands_alone_and_escapes_what_runs_brought(comparison: Comparison) -> None:
    text = page_of(comparison)
    reader = Page(text)
    assert reader.loads == [] and "img" not in dict(reader.tags) and len(reader.scripts) == 4
    assert json.loads(reader.scripts[1])["divergences"] == [{"run": 1, "step": 20, "beyond": 20}]
    assert """content="default-src 'none';""" in text, "the browser would load nothing, whatever a run is called"
    assert SECRET not in text and "&lt;img src=x&gt;" in text and "diverge at step 20" in text
    for word in ("Which is better", "What differs", "hub_token", "steps attempted", "show step 20"):
        assert word in text


def test_short_runs_are_drawn_whole_and_long_ones_keep_every_extreme(tmp_path: Path) -> None:
    short = read_runs([str(write_run(tmp_path, "short").path)])[0]
    assert curve(short)["loss"] == pytest.approx(short.columns.loss.tolist(), rel=1e-6)
    spikes = {1234: 50.0, 2345: 0.25, 3456: math.nan}

    def spiked(step: int, _: dict[str, Any]) -> dict[str, Any]:
        return {"loss": spikes.get(step, 3.0), "loss_scale": 2.0 ** (step // 1000)}

    long = write_run(tmp_path, "long", steps=4000, change=spiked)
    run = read_runs([str(long.path)])[0]
    drawn = curve(run)
    assert len(drawn["step"]) <= 9 * BUCKETS and drawn["step"][0] == 1 and drawn["step"][-1] == 4000
    at = dict(zip(drawn["step"], drawn["loss"], strict=True))
    assert at[1234] == 50.0 and at[2345] == 0.25
    scales = dict(zip(drawn["step"], drawn["loss_scale"], strict=True))
    assert [scales[step] for step in (999, 1000, 1999, 2000)] == [1, 2, 2, 4]
    mean = means(run)
    assert len(mean["loss"]) == BUCKETS
    low, high = 1233 // 8 * 8, 1233 // 8 * 8 + 8
    assert mean["loss"][1233 // 8] == pytest.approx(np.mean(run.columns.loss[low:high]), rel=1e-6)


def test_what_happened_is_marked_where_it_happened(comparison: Comparison) -> None:
    found = {(mark["kind"], mark["step"]) for mark in marks(comparison.runs[1])}
    assert found == {("incident", 25), ("skip", 30)}
    drawn = json.loads(script_json(data(comparison)))
    (incident,) = [mark for mark in drawn["runs"][1]["marks"] if mark["kind"] == "incident"]
    assert incident["loss"] == pytest.approx(4.25) and "***" in incident["text"]
    gaps = drawn["gaps"][0]
    assert gaps["gap"][:19] == [0] * 19 and gaps["step"] == list(range(1, 41))
    a, b = (run.columns.loss[29] for run in comparison.runs)
    assert gaps["gap"][29] == pytest.approx(100 * (b - a) / a, rel=1e-6)


def test_repeats_have_a_mean_and_a_band(tmp_path: Path) -> None:
    runs = [
        write_run(tmp_path, f"seed{n}", change=lambda step, _, n=n: {"loss": 2.0 + n / 10}, config={"run.seed": n})
        for n in range(3)
    ]
    found = band(read_runs([str(run.path) for run in runs]))
    assert found["step"] == list(range(1, 41))
    for part, level in (("low", 2.0), ("mean", 2.1), ("high", 2.2)):
        assert found["loss"][part] == pytest.approx([level] * 40)
    assert band(read_runs([str(runs[0].path)])) == {}


@pytest.mark.parametrize(("count", "width"), [(1, 1400), (24, 390)])
def test_a_real_browser_draws_it_without_an_error(page: Tab, tmp_path: Path, count: int, width: int) -> None:
    """One run on a desktop, 24 on a phone; the first has two steps whose loss is nan. Zoom, search and `only this`."""

    def rate(number: int) -> dict[str, Any]:
        return {"optimizer.learning_rate": 10.0 ** -(number % 5)}

    def change(step: int, number: int) -> dict[str, Any]:
        return {"loss": math.nan if number == 0 and step in (20, 21) else 3 + number / 10 + 10 / step}

    runs = [
        str(write_run(tmp_path, f"a-long-name-of-a-run{n}", change=lambda s, _, n=n: change(s, n), config=rate(n)).path)
        for n in range(count)
    ]
    html = tmp_path / "page.html"
    assert main([*runs, "--html", str(html)]) == 0
    page.messages.clear()
    page.size(width, 844)
    page.open(html.as_uri(), ready="document.body.dataset.drawn === 'yes'")
    charts, marked = (
        "document.querySelectorAll('[class=chart], [class^=\"chart \"]').length",
        "marksOf(CHARTS[0]).filter((mark) => spot(drawn[0], CHARTS[0], mark)?.edge).length",
    )
    assert page.value(charts) == page.value("drawn.length") == 7 + (count > 1)
    assert page.value("drawn[0].series.length") == count + 1 and page.value(marked) == 2, "both at the edge"
    assert page.value("document.querySelector('nav').offsetHeight") < 844 / 4, "the bar leaves room"
    assert page.value("document.documentElement.scrollWidth") <= max(width, 500), "nothing is wider than the page"
    assert page.value("new Set(data.runs.map((_, run) => colour(run) + dash(run))).size") == count
    points = page.value("Number(document.getElementById('points')?.dataset.points ?? 0)")
    assert points == (count if count > 1 else 0)
    low, high = page.value("[drawn[0].scales.y.min, drawn[0].scales.y.max]")
    page.value(
        """(() => {
          const left = drawn[0].valToPos(30, "x");
          drawn[0].setSelect({ left, width: drawn[0].valToPos(40, "x") - left, top: 0, height: 10 });
        })()"""
    )
    page.wait("drawn.every((u) => Math.round(u.scales.x.min) === 30 && Math.round(u.scales.x.max) === 40)")
    low_zoomed, high_zoomed = page.value("[drawn[0].scales.y.min, drawn[0].scales.y.max]")
    assert high - low > 5 and high_zoomed - low_zoomed < 2.6 + count / 10, "the height is that of what is shown"
    if count > 1:
        height = "Math.max(...[...document.querySelectorAll('#runs tbody tr')].map((row) => row.offsetHeight))"
        assert page.value(height) < 130, "a name takes a few lines, not one of each letter"
        page.value("search.value = 'run1'; search.dispatchEvent(new Event('input'))")
        page.wait("drawn[0].series.length - 1 === 11")
        page.value("document.getElementById('all').click(); table.querySelectorAll('.only')[3].click()")
        assert page.value("visible()") == [3]
    page.value("smoothing.value = 0.5; smoothing.dispatchEvent(new Event('input'))")
    page.wait("document.getElementById('smoothed').textContent === '0.5'")
    lines = f"CHARTS[0].series.filter((one) => one.run === {3 % count})"
    page.wait(f"{lines}.length === 2")
    raw, smooth = page.value(f"{lines}.map((one) => one.data[1].slice(0, 3))")
    first = raw[0]
    debiased = [first, (raw[1] + first / 2) / 1.5, (raw[2] + raw[1] / 2 + first / 4) / 1.75]
    assert smooth == pytest.approx(debiased, rel=1e-5)
    assert page.complaints() == []


_SESSION = st.tuples(
    st.integers(0, 12),  # the step it goes back to, as far as there is one
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["step", "scale", "eval", "checkpoint", "incident"]))),
    st.booleans(),  # announced by a run_start, or a rollback within the session
)


def _history(sessions: list[Any]) -> list[dict[str, Any]]:
    """Events of a run that goes back now and then; every one bears a mark of its own as its loss."""
    events, reached, mark = [{"event": "run_start", "step": 0}], 0, 0
    for back, recorded, announced in sessions:
        reached = min(back, reached)
        if announced:
            events.append({"event": "run_start", "step": reached})
        for _, kind in recorded:
            mark += 1
            reached += kind == "step"
            events.append({"event": kind, "step": reached, "loss": float(mark), "reason": "growth"})
    return [
        {**dict.fromkeys(REQUIRED_FIELDS[event["event"]]), "time": 10.0 + 3 * n, "tokens": event["step"] * 7, **event}
        for n, event in enumerate(events)
    ]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(_SESSION, min_size=1, max_size=6))
def test_the_history_is_the_one_that_surviving_tells(tmp_path: Path, sessions: list[Any]) -> None:
    events = _history(sessions)
    path = tmp_path / "events.jsonl"
    lines = [encode(event) for event in events]
    path.write_bytes(b"".join(lines))
    facts, kept = read_facts(path, "x"), surviving(read_events(path))
    steps = [event for event in kept if event["event"] == "step"]
    assert facts.columns.step.tolist() == [event["step"] for event in steps]
    assert facts.columns.loss.tolist() == [event["loss"] for event in steps]
    for kind in ("scale", "eval", "checkpoint", "incident", "run_start"):
        assert facts.rare_events.get(kind, []) == [event for event in kept if event["event"] == kind]
    assert facts.abandoned == sum(event["event"] == "step" for event in events) - len(steps)


def test_numbers_that_are_not_finite_or_missing_are_kept_apart(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, "x")
    writer.start()
    for step, loss in enumerate((math.inf, -math.inf, math.nan, 2.5), start=1):
        writer.step(step, loss=loss, grad_norm=None, applied=step != 2, sample_ids_sha256="ab" * 32)
    columns = read_facts(writer.end().events, "x").columns
    assert np.array_equal(columns.loss, [math.inf, -math.inf, math.nan, 2.5], equal_nan=True)
    assert np.isnan(columns.grad_norm).all() and columns.applied.tolist() == [True, False, True, True]
    assert columns.order.tolist() == [int(("ab" * 32)[:15], 16)] * 4


def test_running_time_counts_every_attempt_and_wall_time_no_pause(tmp_path: Path) -> None:
    """Killed after step 6, resumed from step 4 an hour later: 6 + 4 attempts of 2 s, sessions of 12 s and 8 s."""
    writer = RunWriter(tmp_path, "x")
    for begin, end, pause in ((0, 6, 0), (4, 8, 3600)):
        writer.time += pause
        writer.start(begin)
        writer.steps(begin + 1, end, step_seconds=2.0)
    facts = read_facts(writer.end(8).events, "x")
    assert facts.columns.seconds.tolist() == [2.0, 4.0, 6.0, 8.0, 14.0, 16.0, 18.0, 20.0]
    assert (facts.running_seconds, facts.wall_seconds, facts.abandoned) == (20.0, 12.0 + 8.0, 2)


def test_a_torn_last_line_is_left_out_and_another_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    good = encode(whole_event("step", 1))
    path.write_bytes(good + good[:40])
    assert len(read_facts(path, "x").columns) == 1
    no_number = good.replace(b'"loss":', b'"loss":"much","x":')
    for bad in (b"{}\n", b"[1]\n", b"\0\n", b'{"event":"step","step":2}\n', no_number):
        path.write_bytes(good + bad + good)
        assert "line 2 is not an event" in refused(read_facts, path, "x")
    path.write_bytes(good[:20])
    assert "nothing was recorded" in refused(read_facts, path, "x")


def test_of_too_many_rare_events_the_first_and_the_newest_are_kept(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(run_facts, "MAX_RARE_EVENTS", 10)
    writer = RunWriter(tmp_path, "x")
    writer.start()
    for step in range(1, 101):
        writer.event("eval", step, loss=float(step), perplexity=1.0)
    facts = read_facts(writer.end(100).events, "x")
    assert [event["step"] for event in facts.rare_events["eval"]] == [1, 2, 3, 4, 5, 96, 97, 98, 99, 100]
    assert facts.counts["eval"] == 100


def test_memory_is_a_few_numbers_a_step(tmp_path: Path) -> None:
    """Large telemetry is not kept, nor parsed: the lines here are no JSON beyond their beginning."""
    path = tmp_path / "events.jsonl"
    with path.open("wb") as file:
        for step in range(1, 20_001):
            file.write(encode(whole_event("step", step)))
            if step % 100 == 0:
                file.write(b'{"event":"telemetry",' + b"x" * 10_000 + b"\n")
    tracemalloc.start()
    facts = read_facts(path, "x")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(facts.columns) == 20_000 and facts.counts["telemetry"] == 200
    assert peak < 20_000 * 200 + 2 * (1 << 20), f"{peak / 20_000:.0f} bytes a step, the read buffer included"


LONG = "falls " * 12_000  # more than two blocks of wandb's log
CONFIG = merged(PLAIN_CONFIG, {"run.hypothesis": LONG, "tracking.project": "p", "tracking.log_every_steps": 1})


class Serving(StandIn):
    """Answers what wandb's public API asks for about the one run team/p/abc."""

    def __init__(self, rows: list[dict[str, Any]], config: dict[str, Any]) -> None:
        super().__init__()
        self.rows, self.kept = rows, config

    def on_GetDefaultEntity(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"viewer": {"id": "u1", "entity": "team"}}

    def on_Run(self, variables: dict[str, Any]) -> dict[str, Any]:
        if variables["name"] != "abc":
            return {"project": {"run": None}}
        config = json.dumps({key: {"value": value} for key, value in self.kept.items()})
        run = {"id": "r1", "name": "abc", "state": "finished", "config": config, "projectId": 1, "tags": []}
        empty = {"systemMetrics": "{}", "summaryMetrics": "{}", "user": {"name": "me", "username": "me"}}
        return {"project": {"run": run | empty | {"historyKeys": self._keys()}}}

    def _keys(self) -> dict[str, Any]:
        return {"lastStep": self.rows[-1]["_step"], "keys": {}}

    def on_RunHistoryKeys(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"project": {"run": {"historyKeys": self._keys()}}}

    def on_RunParquetHistory(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"project": {"run": {"parquetHistory": {"parquetUrls": [], "liveData": self.rows}}}}

    def on_HistoryPage(self, variables: dict[str, Any]) -> dict[str, Any]:
        wanted = range(variables["minStep"], variables["maxStep"])
        return {"project": {"run": {"history": [json.dumps(row) for row in self.rows if row["_step"] in wanted]}}}


@pytest.fixture
def server(recorded: RunDir) -> Iterator[Serving]:
    """Up, with what the offline run holds; what is not finite as the words that wandb sends."""
    words, stored = {"nan": "NaN", "inf": "Infinity"}, wandb_files.rows(recorded.wandb)
    rows = [{key: words.get(str(value), value) for key, value in row.items()} for row in stored if "step" in row]
    with stand_in(Serving(rows, wandb_files.config(recorded.wandb))) as served:
        yield served


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> RunDir:
    """A run that wandb recorded offline: 6 steps, each logged, an overflow at step 3, a rollback from 5 to 4."""
    run_dir = RunDir.create(tmp_path_factory.mktemp("runs") / "x", "demo", fresh=False)
    run_dir.write_inputs(CONFIG, {}, ENVIRONMENT)
    config = {"run": CONFIG, "deepspeed": {}, "environment": ENVIRONMENT}
    with session(run_dir.path, WandbSink(run_dir, config, mode="offline")) as run:
        run.steps(2)
        run.overflow(loss=math.nan)
        run.steps(2)
        run.step = 4
        run.steps(2, metrics={"accuracy": 0.5, "rewards/margin": math.inf}, loss_by_source={"code": 1.0})
        run.event("eval", loss=2.5, perplexity=12.2, metrics={"accuracy": 0.75}, by_source={"code": 2.0}, sample="x")
        run.end("done")
    return run_dir


def test_the_columns_of_what_wandb_holds_are_those_of_the_run_folder(recorded: RunDir, server: Serving) -> None:
    (local,) = read_runs([str(recorded.path)])
    kept = facts_of(as_events(wandb_files.rows(recorded.wandb), server.kept))
    assert kept.columns.step.tolist() == local.columns.step.tolist() == [1, 2, 3, 4, 5, 6]
    for name in ("loss", "grad_norm", "lr", "loss_scale", "tokens", "applied", "memory_bytes"):
        a, b = (getattr(run.columns, name).tolist() for run in (local, kept))
        assert a == pytest.approx(b, nan_ok=True), name
    for one, other in ((kept.columns.metrics, local.columns.metrics), (kept.evaluated, local.evaluated)):
        assert {name: pytest.approx(values, nan_ok=True) for name, values in one.items()} == other and other
    assert kept.abandoned == local.abandoned == 1
    assert [event["loss"] for event in kept.rare_events["eval"]] == [2.5]
    assert [(event["from"], event["to"]) for event in kept.rare_events["scale"]] == [(1024.0, 512.0)]


def test_sessions_and_warnings_of_what_wandb_holds_are_those_of_the_run_folder(run_dir: RunDir) -> None:
    """A run that was preempted and goes on a day later."""
    warning = {"signal": "adam_rms", "module": "m", "value": 9.0, "bound": 3.5, "modules": ["m"], "reason": "RMS 9"}
    wrong = {"found_by": "copies", "ranks": [1], "hosts": ["a"], "module": "m", "tensor": "p", "bits": 1}
    again = {"ranks": [], "hosts": [], "why": "the loss is nan", "suspicion": "nan", "seconds": 1.0}
    with session(run_dir.path, time=1e9) as run:
        run.steps(20)
        run.event("warning", **warning)
        run.event("corruption", **wrong, repaired=True, text="a copy differs")
        for outcome in ("transient", "numeric"):
            run.event("reexecution", outcome=outcome, **again)
        run.event("note", text="no space left", failed="checkpoint")
        run.event("note", text="a sink failed")
        run.end("preempted", 75)
    with session(run_dir.path, time=1e9 + 86400, step=20, resumed_from="step-20") as run:
        run.steps(20)
    local = read_facts(run_dir.events, "local")
    kept = facts_of(as_events(map(Rows().row, read_events(run_dir.events)), {}))
    for run in (local, kept):
        assert (run.verdict.word, run.verdict.warnings, len(run.sessions)) == ("running", 4, 2)
        assert run.wall_seconds == 13.5 + 10.0, "without the pause"
    assert [event["reason"] for event in kept.rare_events["warning"]] == ["RMS 9"]


def test_the_server_s_run_is_its_run_folder(recorded: RunDir, server: Serving, tmp_path: Path) -> None:
    """The test runs in a process of its own, which holds the only login."""
    variables = {**os.environ, "HOME": str(tmp_path), "WANDB_API_KEY": "a" * 40, "WANDB_BASE_URL": server.url}
    variables |= {"WANDB_CACHE_DIR": str(tmp_path / "cache"), "WANDB_ERROR_REPORTING": "false"}
    command = [sys.executable, "-m", "tracking.compare", str(recorded.path)]
    options: dict[str, Any] = {"cwd": REPOSITORY, "env": variables, "capture_output": True, "text": True}
    done = subprocess.run([*command, "wandb:team/p/abc", "--json", "--tolerance", "0"], **options)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert printed["partings"][0]["step"] is None and printed["partings"][0]["identical_to"] == 6
    assert {run["verdict"]["word"] for run in printed["runs"]} == {"healthy"} and printed["differences"] == []
    missing = subprocess.run([*command, "wandb:team/p/other"], **options)
    assert missing.returncode == 2 and missing.stderr.startswith("error: wandb:team/p/other: cannot be read")


def test_what_cannot_be_read_is_printed_in_one_line(tmp_path, monkeypatch, capsys) -> None:
    for name in ("WANDB_API_KEY", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for source, why in (("wandb:me/p/abc", "wandb login"), (f"wandb:{tmp_path}", "run folder")):
        assert main([source]) == 2
        printed = capsys.readouterr().err.strip().splitlines()
        assert len(printed) == 1 and printed[0].startswith("error: wandb:") and why in printed[0]
    assert "entity/project/run" in refused(read_wandb, "me/p", "x")
