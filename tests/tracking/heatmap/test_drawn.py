"""Heat maps as a picture, in the report and in compare's page, which are drawn by their script in a real browser."""

import math
import struct

import numpy as np
import pytest
from matplotlib.image import imread

from tests.support.refusals import refused
from tests.support.runs.heat_runs import growing, write_heat_run
from tracking.compare.command import main as compare
from tracking.heatmap.grid import HeatCollector, read_heat
from tracking.heatmap.page import difference_data, differences_of, panel_data
from tracking.heatmap.picture import draw_heat
from tracking.report.command import main as report


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A healthy run, and one of the same layers whose activations grow."""
    root = tmp_path_factory.mktemp("runs")
    steady = write_heat_run(root, "steady", layers=6, steps=300)
    return steady, write_heat_run(
        root, "grows", layers=6, steps=300, activation=growing([4, 5], limit_step=330, per_100=3)
    )


def test_a_report_has_the_picture_and_what_stands_out(runs, capsys):
    assert report([str(runs[1])]) == 0
    text = (runs[1] / "report.md").read_text(encoding="utf-8")
    assert "](plots/heatmap.png)" in text
    assert "layers 4-5 down_proj: activations at" in text.replace("\\", "")
    width, height = struct.unpack(">II", (runs[1] / "plots" / "heatmap.png").read_bytes()[16:24])
    assert width > 1200 and height > 500
    assert imread(runs[1] / "plots" / "heatmap.png")[:, -4:, :3].min() == 1, "a sentence runs out of the picture"


def test_nothing_is_drawn_without_telemetry(tmp_path):
    assert "no telemetry has been recorded" in refused(draw_heat, HeatCollector().heat(), tmp_path / "x.png", title="a")


def test_values_on_a_page_are_those_of_the_run(runs):
    heat = read_heat(runs[1] / "events.jsonl")
    found = panel_data(heat, "activation", "kinds")
    row = found["names"].index("model.layers.*.mlp.down_proj")
    rows = [index for index, name in enumerate(heat.rows) if name.endswith("mlp.down_proj")]
    wanted = np.log10(heat.panels["activation"][rows].max(axis=0))
    assert found["values"][row] == pytest.approx(wanted.tolist(), abs=1e-4)
    assert found["edges"] == heat.edges.tolist() and (found["low"], found["high"]) == (-5.0, 0.0)


def test_a_difference_is_of_the_same_module_and_step(runs):
    steady, grows = (read_heat(folder / "events.jsonl") for folder in runs)
    found = difference_data(grows, steady, "activation", "modules")
    row = found["names"].index("model.layers.5.mlp.down_proj")
    index = grows.rows.index("model.layers.5.mlp.down_proj")
    for column in (0, 14, 29):
        ratio = grows.panels["activation"][index, column] / steady.panels["activation"][index, column]
        assert found["values"][row][column] == pytest.approx(math.log10(ratio), abs=1e-4)
    lines = {panel["key"]: panel["line"] for panel in differences_of(grows, steady)}
    assert "down_proj" in lines["activation"] and "step 300" in lines["activation"]
    assert difference_data(grows, HeatCollector().heat(), "activation", "kinds") is None


def test_report_and_comparison_draw_them_in_a_browser(page, runs, tmp_path):
    one, two = tmp_path / "report.html", tmp_path / "compare.html"
    assert report([str(runs[1]), "--html", str(one)]) == 0
    assert compare([*map(str, runs), "--html", str(two)]) == 0
    page.messages.clear()
    page.size(1400, 900, dark=True)
    for path, title in ((one, "within their healthy range: Gradient RMS"), (two, "Layers of grows against steady")):
        page.open(path.as_uri(), ready="document.body.dataset.heat === 'drawn'")
        page.value("document.querySelector('#healthy').open = true")
        page.wait("document.querySelectorAll('#heat canvas').length === 4")
        assert title in page.value("document.querySelector('#heat').textContent")
        pixels = "document.querySelector('#panels canvas').getContext('2d').getImageData(0, 0, 400, 100).data"
        assert page.value(f"new Set({pixels}).size") > 10, "something is drawn"
        page.value("document.querySelector('#fold').value = 'blocks'")
        page.value("document.querySelector('#fold').dispatchEvent(new Event('change'))")
        assert "layers.0" in page.value("document.querySelector('#panels .chart').names.join(' ')")
    assert page.complaints() == []
