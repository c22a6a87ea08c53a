"""Names, notes and settings of a run are text in everything that shows them: terminal, pages, Markdown, Prometheus."""

import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from markdown_it import MarkdownIt
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from rich.text import Text

from config.printable import line
from tests.support.page import Page
from tests.support.runs.compare_runs import whole_event, write_run
from tests.support.runs.hostile import HOSTILE, OBEYED
from tests.support.runs.report_runs import session, simple_run
from tracking.compare.command import main as compare
from tracking.compare.divergence import Tolerance
from tracking.compare.html import data
from tracking.compare.html import page as compare_page
from tracking.compare.result import Comparison
from tracking.compare.result import compare as compare_runs
from tracking.compare.sources import read_runs
from tracking.console import ConsoleSink
from tracking.pages.render import script_json
from tracking.prometheus.metrics import Metrics
from tracking.report.command import main as report
from tracking.run_dir import RunDir
from tracking.terminal import console
from tracking.watch.command import main as watch

SAID = pytest.mark.parametrize("said", HOSTILE.values(), ids=HOSTILE)
_STYLE = re.compile(r"\x1b\[[0-9;]*m")


def _folder_name(said: str) -> str:
    """The name of a folder as near to `said` as can be, past what the config refuses."""
    return said.replace("/", "∕")


def _inner(said: str) -> dict[str, Any]:
    lower = [{"what": said, "computed": said, "promised": said, "modules": [said]}]
    unobserved = [{"what": said, "why": said, "modules": [said]}]
    return {"computed": {said: {said: 1}}, "lower": lower, "unobserved": unobserved}


def _trouble(said: str) -> list[dict[str, Any]]:
    found = {"rank": 0, "tensor": "gradient", "kind": "nan", "count": 1, "module": said}
    return [
        {"event": "nonfinite", **found},
        {"event": "incident", "verdict": "SKIP", "reason": said, "modules": [said], "replay": said},
        {"event": "checkpoint", "path": said, "seconds": 1.0, "stall_seconds": 0.1, "bytes": 10, "verified": True},
        {"event": "note", "text": said},
        {"event": "precision", "flop_share": {said: 1.0}, "inner": _inner(said)},
    ]


@pytest.fixture
def hostile_run(tmp_path: Path) -> Iterator[Any]:
    def write(said: str) -> Path:
        folder = simple_run(tmp_path / _folder_name(said), steps=4, evals=(), config={"run": {"hypothesis": said}})
        with session(folder, step=4, model=said, hypothesis=said, regions={said: "bf16"}) as run:
            run.steps(1)
            for event in _trouble(said):
                run.event(event.pop("event"), **event)
            run.event("run_end", status="aborted", exit_code=3, reason=said)
        settings = {"run": {"hypothesis": said}, "model": {"name_or_path": said}, "data": {"path": said, "name": said}}
        ledger = [{"what": said, "dtype": "float32", "bytes": 10}]
        facts = {"hostname": said, "ledger": ledger, "versions": {"torch": said}, "resume_command": said}
        RunDir(folder).write_inputs(settings, {}, facts)
        return folder

    return write


def _terminal(output: str) -> str:
    """The printed text without the colours of our own."""
    assert not OBEYED.search(_STYLE.sub("", output).replace("\n", "")), "a control character reached the terminal"
    return output


@SAID
def test_the_console_shows_an_event_on_one_line_as_it_is(said: str) -> None:
    stream = io.StringIO()
    sink = ConsoleSink(10, log_every_steps=1, stream=stream)
    sink.write(whole_event("run_start", resumed_from=said))
    for event in _trouble(said)[:3]:
        sink.write({"step": 3, "time": 2.0, "tokens": 0, **event})
    printed = stream.getvalue()
    assert printed.count("\n") == 5 and not OBEYED.search(printed.replace("\n", ""))
    words = " ".join(line(said).split())
    assert [words in " ".join(row.split()) for row in printed.splitlines()] == [True] * 5


@pytest.fixture(scope="module")
def harmless(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """The page of a run of which nothing is strange."""
    folder = simple_run(tmp_path_factory.mktemp("harmless") / "run", steps=4, evals=())
    page = folder.parent / "page.html"
    assert report([str(folder), "--html", str(page)]) == 0
    return Page(page.read_text())


@pytest.mark.one_in(4)
@SAID
@pytest.mark.filterwarnings("ignore:Glyph")
def test_a_report_is_text(said, hostile_run, harmless, tmp_path, capsys) -> None:
    folder = hostile_run(said)
    assert report([str(folder), "--html", str(tmp_path / "page.html")]) == 0
    _terminal(capsys.readouterr().out)
    page = Page((tmp_path / "page.html").read_text())
    ours = {("h3", frozenset()), *((tag, frozenset()) for tag in ("br", "code", "ul", "li", "strong", "blockquote"))}
    assert set(page.tags) <= set(harmless.tags) | ours
    words = " ".join(line(_folder_name(said)).split())
    assert words in " ".join(page.text.split())
    assert not OBEYED.search((tmp_path / "page.html").read_text().replace("\n", ""))

    source = (folder / "report.md").read_text()
    assert not OBEYED.search(source.replace("\n", ""))
    tokens = MarkdownIt("commonmark").enable("table").parse(source)
    headings = [tokens[place + 1].content for place, token in enumerate(tokens) if token.type == "heading_open"]
    assert headings[1:] == ["What ran", "Results", "Measures", "Dtypes", "Inside the modules", "Notes", "Resume"]
    kinds = {item.type for token in tokens for item in token.children or []}
    assert "link_open" not in kinds and "html_inline" not in kinds
    assert [token.content.partition("\n")[0] for token in tokens if token.type == "html_block"] == [
        "<details><summary>How they were computed</summary>",
        "</details>",
    ]
    assert sum(item.type == "image" for token in tokens for item in token.children or []) == 1, "our own plot"


@SAID
def test_the_frame_of_watch_is_text(said: str, hostile_run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert watch([str(hostile_run(said)), "--once"]) == 0
    printed = _terminal(capsys.readouterr().out)
    assert " ".join(line(_folder_name(said)).split())[:20] in " ".join(printed.split())


@pytest.fixture
def comparison(tmp_path: Path) -> Any:
    def make(said: str) -> tuple[list[str], Comparison]:
        base = write_run(tmp_path / "a", "base")
        name = f"run {_folder_name(said)}"
        other = RunDir(tmp_path / "b" / name)
        write_run(
            tmp_path / "b",
            name,
            change=lambda step, _: {"loss": 4.0, "applied": step != 21} if step >= 20 else None,
            after={21: _trouble(said)},
            config={"data.path": said, f"model.config.{line(said)}": 3},
            environment={"hostname": said},
        )
        runs = [str(base.path), str(other.path)]
        return runs, compare_runs(read_runs(runs), tolerance=Tolerance(), price=None)

    return make


@SAID
def test_a_comparison_is_text(said: str, comparison: Any, capsys: pytest.CaptureFixture[str]) -> None:
    runs, found = comparison(said)
    assert compare(runs) == 0
    _terminal(capsys.readouterr().out)
    source = compare_page(found)
    (embedded,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', source, re.DOTALL)
    assert embedded == script_json(data(found)) and not re.search(r"[<>&]", embedded) and not OBEYED.search(embedded)
    assert json.loads(embedded)["runs"][1]["label"].endswith(line(_folder_name(said)).rstrip()[-4:])
    before_scripts = source.partition('<script type="application/json"')[0]
    allowed = {"html", "head", "meta", "title", "style", "body", "header", "h1", "h2", "button", "nav", "div", "label"}
    allowed |= {"select", "option", "input", "main", "section", "svg", "line", "ul", "li", "b", "br", "p", "details"}
    allowed |= {"summary", "table", "thead", "tbody", "tr", "th", "td", "code", "span"}
    page = Page(before_scripts)
    assert [tag for tag, _ in page.tags if tag not in allowed] == ["script"], "the theme's, and no other"
    assert not {name for _, names in page.tags for name in names if name.startswith("on")}
    body = before_scripts.partition("<body>")[2]
    assert not OBEYED.search(body.replace("\n", ""))


@SAID
def test_a_label_of_prometheus_is_text(said: str) -> None:
    metrics = Metrics(said, planned_steps=3, facts={"host": said, "scheduler_job": said})
    metrics.update(whole_event("run_start", model=said))
    metrics.update(whole_event("step", 1))
    metrics.update(whole_event("nonfinite", 1, rank=0, tensor=said, kind=said))
    families = list(text_string_to_metric_families(generate_latest(metrics.registry).decode()))
    samples = [sample for family in families for sample in family.samples]
    assert {sample.labels["run"] for sample in samples} == {said}
    assert [sample.labels["model"] for sample in samples if sample.name == "mantissa_info"] == [said]


def test_a_console_interprets_nothing() -> None:
    stream = io.StringIO()
    console(file=stream, force_terminal=True).print("[red]x[/red] [/y] :smile:", Text("[b]"))
    assert stream.getvalue() == "[red]x[/red] [/y] :smile: [b]\n"
