"""The page stands alone, holds every table, loses no peak and runs without an error in a real browser."""

import json
import math
import re
import shutil
import subprocess
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.runs.compare_runs import write_run
from tracking.compare.command import main
from tracking.compare.curves import BUCKETS, band, curve, gap, gap_means, marks, means
from tracking.compare.divergence import Tolerance
from tracking.compare.html import data, page
from tracking.compare.result import Comparison, compare
from tracking.compare.sources import read_runs
from tracking.pages.render import script_json

SECRET = "hf_" + "a" * 30
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


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


class _Reader(HTMLParser):
    """The URLs that a browser would load, and the text of each script."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.tags: list[str] = []
        self.scripts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.loaded += [value for name, value in attrs if name in ("src", "href") and value]
        if tag == "script":
            self.scripts.append("")

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1] == "script" and self.scripts:
            self.scripts[-1] += data


def test_the_page_stands_alone_and_escapes_what_runs_brought(comparison: Comparison) -> None:
    text = page(comparison)
    reader = _Reader()
    reader.feed(text)
    assert reader.loaded == [] and "img" not in reader.tags and len(reader.scripts) == 4
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


def test_a_step_without_a_finite_loss_has_a_mark_though_there_is_no_value_to_put_it_at(tmp_path: Path) -> None:
    broken = write_run(tmp_path, "broken", change=lambda step, _: {"loss": math.nan} if step in (7, 8) else None)
    found = [mark for mark in marks(read_runs([str(broken.path)])[0]) if mark["kind"] == "nan"]
    assert [(mark["step"], mark["loss"], mark["text"]) for mark in found] == [
        (7, None, "the loss is nan"),
        (8, None, "the loss is nan"),
    ]


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


def test_smoothing_averages_the_signed_gap(comparison: Comparison) -> None:
    found = gap_means(comparison.pairs[0].divergence)
    assert found["gap"] == pytest.approx(gap(comparison.pairs[0].divergence)["gap"])  # short runs: a segment is a step


def in_a_browser(html: Path, script: str, *, width: int = 1400, height: int = 900) -> tuple[str, dict[str, Any]]:
    """The page's body after it was drawn and `script` was run, which fills `found`; and what it found."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("no Chromium on this machine")
    page = html.with_suffix(".tested.html")
    probe = (
        f"<script>const found = {{}}; {script}; document.body.dataset.found = JSON.stringify(found);</script></body>"
    )
    page.write_text(html.read_text().replace("</body>", probe))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--virtual-time-budget=8000"]
    flags += [f"--user-data-dir={html.parent / 'profile'}", "--disable-background-networking", "--dump-dom"]
    flags += [f"--window-size={width},{height}"]
    done = subprocess.run([browser, *flags, page.as_uri()], capture_output=True, text=True, timeout=120, check=False)
    body = done.stdout[done.stdout.rindex("<body") :] if "<body" in done.stdout else ""
    assert 'data-drawn="yes"' in body, done.stderr[-500:]
    assert "CONSOLE" not in done.stderr, done.stderr[-500:]
    return body, json.loads(unescape(re.findall(r'data-found="(.*?)"', body)[0]))


PROBE = """
found.charts = drawn.length;
found.series = drawn.map((u) => u.series.length - 1);
found.edge = Number(CHARTS[0].element.dataset.edge || 0);
found.bar = document.querySelector("nav").offsetHeight;
found.row = Math.max(...[...document.querySelectorAll("#runs tbody tr")].map((row) => row.offsetHeight));
found.page = document.documentElement.scrollWidth;
found.looks = new Set(data.runs.map((_, run) => colour(run) + dash(run))).size;
found.points = Number(document.getElementById("points")?.dataset.points ?? 0);
const loss = drawn[0], before = [loss.scales.y.min, loss.scales.y.max];
const left = loss.valToPos(30, "x");
loss.setSelect({ left, width: loss.valToPos(40, "x") - left, top: 0, height: 10 });
"""
# A timer and no animation frame: virtual time waits for timers, but a headless browser may draw no further frame.
LATER = """
setTimeout(() => {
  found.zoom = [before, [loss.scales.y.min, loss.scales.y.max]];
  found.linked = drawn.map((u) => [u.scales.x.min, u.scales.x.max]);
  if (table) {
    const search = document.getElementById("search");
    search.value = "run1"; search.dispatchEvent(new Event("input"));
    found.searched = drawn[0].series.length - 1;
    document.getElementById("all").click();
    table.querySelectorAll(".only")[3].click();
    found.only = visible();
  }
  const slider = document.getElementById("smoothing");
  slider.value = 0.5;
  slider.dispatchEvent(new Event("input"));
  setTimeout(() => {
    const [raw, smooth] = CHARTS[0].series.filter((one) => one.run === 3 % data.runs.length).map((one) => one.data[1]);
    found.smoothed = [raw.slice(0, 3), smooth.slice(0, 3), document.getElementById("smoothed").textContent];
    document.body.dataset.found = JSON.stringify(found);
  }, 100);
}, 50);
"""


@pytest.mark.parametrize(("count", "width"), [(1, 1400), (24, 390)])
def test_a_real_browser_draws_it_without_an_error(tmp_path: Path, count: int, width: int) -> None:
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
    body, found = in_a_browser(html, PROBE + LATER, width=width, height=844)
    assert len(re.findall(r'class="chart[" ]', body)) == found["charts"] == 7 + (count > 1)
    assert found["series"][0] == count and found["edge"] == 2, "both steps are marked, at the edge of the chart"
    assert found["bar"] < 844 / 4 and found["page"] <= max(width, 500), "the bar leaves room, nothing is wider than it"
    assert found["looks"] == count
    first, *_ = raw = found["smoothed"][0]
    debiased = [first, (raw[1] + first / 2) / 1.5, (raw[2] + raw[1] / 2 + first / 4) / 1.75]
    assert found["smoothed"][1:] == [pytest.approx(debiased, rel=1e-5), "0.5"]
    assert found["points"] == (count if count > 1 else 0)
    (low, high), (low_zoomed, high_zoomed) = found["zoom"]
    assert high - low > 5 and high_zoomed - low_zoomed < 2.6 + count / 10, "the height is that of what is shown"
    assert {tuple(round(end) for end in ends) for ends in found["linked"]} == {(30, 40)}
    if count > 1:
        assert found["searched"] == 11 and found["only"] == [3]
        assert found["row"] < 130, "a name takes a few lines, not one of each letter"
