"""The page stands alone, holds every table, loses no peak and runs without an error in a real browser."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.page import Page
from tests.support.runs.compare_runs import write_run
from tests.support.servers.browser import Tab
from tracking.compare.command import main
from tracking.compare.curves import BUCKETS, band, curve, marks, means
from tracking.compare.divergence import Tolerance
from tracking.compare.html import data
from tracking.compare.html import page as page_of
from tracking.compare.result import Comparison, compare
from tracking.compare.sources import read_runs
from tracking.pages.render import script_json

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
        "CHARTS[0].element.dataset.edge",
    )
    assert page.value(charts) == page.value("drawn.length") == 7 + (count > 1)
    assert page.value("drawn[0].series.length") == count + 1 and page.value(marked) == "2", "both at the edge"
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
