"""Twelve real runs, sound ones and each way to go wrong: what a reader of a page and of the overview sees first."""

import re
from pathlib import Path

import pytest

from tests.support.servers.serving import served
from tests.tracking.test_verdict import CONFIG, folder_of
from tracking.report.context import MeasureContext
from tracking.run_dir import RunDir
from tracking.serve.run_page import printed
from tracking.summary import read_run

FIRST_LOOK = 600  # pixels
RUNS = {
    "seed_0": ("healthy", "", {"run": {"seed": 0}}),
    "seed_1": ("healthy", "", {"run": {"seed": 1}}),
    "seed_2": ("healthy", "", {"run": {"seed": 2}}),
    "fp32": ("healthy", "", {"precision": {"compute": "fp32"}}),
    "one_step": ("healthy", "", {"run": {"steps": 1}}),
    "fp16_overflows": ("healthy", "", {"precision": {"compute": "fp16"}}),
    "nan_at_24": ("finished with warnings", "tools.replay runs/nan_at_24 --step 24", {}),
    "sigkill": ("killed", "run.resume=auto", {}),
    "learning_rate_x_1000": ("diverged", "optimizer.learning_rate=0.3", {"optimizer": {"learning_rate": 3.0}}),
    "aborted": ("failed", "tools.replay runs/aborted --step 21", {}),
    "every_step_skipped": ("not learning", "policy=adaptive", {"precision": {"compute": "fp16"}}),
    "stopped": ("stopped", "run.resume=auto", {}),
}
"""Recording to the word of its verdict, what is in its command, and its settings."""
ORDER = [
    *("What changed", "Curves", "Incidents and warnings", "Layers", "Measures", "Results", "Dtypes", "Config"),
    *("Environment and git", "Last lines", "Notes", "Sample", "Resume", "Memory and utilisation over time"),
]


@pytest.fixture(scope="module")
def twelve(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("runs")
    for name, (_, _, settings) in RUNS.items():
        run_dir = folder_of(root, name, **{key: CONFIG.get(key, {}) | value for key, value in settings.items()})
        run_dir.sample.write_text("def sampled():")
    return root


@pytest.fixture(scope="module")
def client(twelve: Path):
    with served(twelve) as found:
        yield found


def headings(page: str) -> list[str]:
    return [re.sub(r" against .*", "", title) for title in re.findall(r"<h2>(.*?)</h2>", page)]


@pytest.mark.parametrize("name", RUNS)
def test_the_served_page_and_the_printed_one_have_the_same_in_the_same_order(twelve, client, name) -> None:
    word, command, _ = RUNS[name]
    page, incidents, sections = (client.page(path, key=name) for path in ("/run", "/run/incidents", "/run/sections"))
    served_page = page.replace('<div id="incidents">', incidents).replace('<div id="sections">', sections)
    context = MeasureContext(read_run(twelve / name))
    printed_page = printed(context)
    for found in (served_page, printed_page):
        assert headings(found) == [title for title in ORDER if title in headings(found)]
        assert set(ORDER) - set(headings(found)) <= {"Dtypes", "Notes"}
        lead = found.partition("<h2>")[0]
        assert f"<b>{word}</b>" in lead and command in lead
        assert "Sample after" in found and "untrained text is expected" in found
    assert headings(served_page) == headings(printed_page)
    assert re.findall(r"<td>.*?</td>", served_page) == re.findall(r"<td>.*?</td>", printed_page)


def test_what_changed_is_against_the_sound_run_of_the_group_that_began_first(client) -> None:
    page = client.page("/run", key="learning_rate_x_1000").partition("<h2>Curves")[0]
    assert "What changed against fp16_overflows" in page, "it began before the seeds; this run did before it"
    assert re.search(r"<code>optimizer.learning_rate</code></th><td>0.003</td><td>3</td>", page)


def test_the_baseline_of_a_group_and_a_run_without_one_say_so(client, tmp_path) -> None:
    assert "it is the baseline: the first sound run of 12" in client.page("/run", key="fp16_overflows")
    folder_of(tmp_path, "seed_0")
    with served(tmp_path) as alone:
        assert "there is no other run of this task to compare it with" in alone.page("/run", key="seed_0")
        folder_of(tmp_path, "fp16_overflows", task="sft")
        assert "there is no other run of this task to compare it with" in alone.page("/run", key="seed_0")
    for name, size in (("seed_1", 64), ("seed_2", 128)):
        folder_of(tmp_path, name, model={"config": {"hidden_size": size}}, optimizer={"learning_rate": size / 1e5})
    folder_of(tmp_path, "stopped", model={"config": {"hidden_size": 256}}, optimizer={"learning_rate": 128 / 1e5})
    with served(tmp_path) as several:
        page = several.page("/run", key="stopped")
    assert "What changed against seed_2" in page and "the nearest sound run of this task; no other has" in page
    assert re.findall(r"<code>(.*?)</code></th><td>(.*?)</td>", page) == [("model.config.hidden_size", "128")]
    context = MeasureContext(read_run(tmp_path / "stopped"), baseline=read_run(tmp_path / "seed_0"))
    assert "What changed against seed_0" in printed(context)


@pytest.mark.parametrize("name", RUNS)
def test_verdict_and_command_are_seen_at_first_look(page, client, name) -> None:
    word, command, _ = RUNS[name]
    page.size(1280, 800)
    page.open(f"{client.address}/run?key={name}", ready="document.querySelector('#state .note')")
    for width in (1280, 390):
        page.size(width, 800)
        page.wait(f"window.innerWidth === {width}")
        note = "document.querySelector('#state .note')"
        assert word in page.value(f"{note}.innerText") and command in page.value(f"{note}.innerText")
        assert page.value(f"{note}.getBoundingClientRect().bottom") <= FIRST_LOOK, width


def test_a_nan_is_drawn_at_its_step_and_a_step_is_an_integer(page, client) -> None:
    page.size(1280, 800)
    page.open(f"{client.address}/run?key=nan_at_24", ready="document.body.dataset.sections === 'drawn'")
    mark = "marksOf(CHARTS[0]).find((mark) => mark.kind === 'nan')"
    assert page.value(f"spot(drawn[0], CHARTS[0], {mark}).x === drawn[0].valToPos(24, 'x', true)") is True
    assert "first in layer 1 mlp, at step 24; 1 in all" in page.value("document.querySelector('#lines').innerText")
    assert "within their healthy range" in page.value("document.querySelector('#healthy summary').innerText")
    search = "document.querySelector('[data-filter=settings]')"
    page.value(f"{search}.value = 'optimizer rate'; {search}.dispatchEvent(new Event('input', {{ bubbles: true }}))")
    rows = "[...document.querySelectorAll('#settings tr')].filter((row) => !row.hidden).map((row) => row.innerText)"
    assert [row.split()[0] for row in page.value(rows)] == ["optimizer.learning_rate"]
    page.open(f"{client.address}/run?key=one_step", ready="document.body.dataset.curves === '1'")
    assert page.value("drawn[0].axes[0]._values") == ["0", "1", "2"]


def with_a_huge_config(run_dir: RunDir) -> None:
    more = "".join(f"  key_{number}: {'v' * 1000}\n" for number in range(300))
    run_dir.config.write_text(f"{run_dir.config.read_text()}extra:\n{more}")


ODD = {
    "without a config": (lambda run_dir: run_dir.config.unlink(), "no config.yaml was recorded"),
    "without an environment": (lambda run_dir: run_dir.environment.unlink(), "Environment and git"),
    "with a config that is none": (lambda run_dir: run_dir.config.write_text("a: [1, 2\n"), "cannot be read"),
    "with a huge config": (with_a_huge_config, "of 3"),
}


@pytest.mark.parametrize("case", ODD)
def test_the_page_of_an_odd_run_says_what_there_is(tmp_path, case) -> None:
    damage, said = ODD[case]
    damage(folder_of(tmp_path, "seed_0"))
    (tmp_path / "seed_0").rename(tmp_path / 'ünïcode 日本 "&<b>')
    with served(tmp_path) as client:
        parts = [client.page(path, key='ünïcode 日本 "&<b>') for path in ("/run", "/run/incidents", "/run/sections")]
        assert client.data("/run/curves", key='ünïcode 日本 "&<b>')["steps"] >= 8
    assert said in "".join(parts) and "ünïcode 日本 &#34;&amp;&lt;b&gt;" in parts[0]
