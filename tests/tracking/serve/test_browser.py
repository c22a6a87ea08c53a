"""The pages in a real browser: they are drawn, follow a run, obey nothing in a run's texts, and work offline.

With MANTISSA_SCREENSHOTS=FOLDER the pictures are kept there, to be looked at.
"""

import json
import math
import os
import shutil
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.marks import some_slow
from tests.support.runs.compare_runs import CONFIG, RunWriter, write_run
from tests.support.runs.heat_runs import growing, write_heat_run
from tests.support.servers.serving import served
from tracking.run_dir import RunDir
from tracking.serve.notes import NOTES

RECORDED = Path(__file__).parents[2] / "support" / "runs" / "verdicts"
SIZES = {"light": (1280, 900, False), "dark": (1280, 900, True), "phone": (390, 844, True)}
RUN_DRAWN = "document.body.dataset.sections === 'drawn'"
TABLE = "document.querySelector('.runs tbody tr')"
OVERFLOWING = "document.documentElement.scrollWidth - document.documentElement.clientWidth"


@pytest.fixture(scope="module")
def client(tmp_path_factory):
    """A healthy run, one with a loss that is nan, one that crashed, one whose activations grow."""
    root = tmp_path_factory.mktemp("runs")
    for seed in range(2):
        write_run(root, f"base-s{seed}", config={"run.seed": seed})
    broken = {"loss": math.nan, "grad_norm": math.inf, "applied": False, "skipped_total": 1}
    event = {"event": "incident", "verdict": "SKIP", "reason": "the loss is nan", "modules": [], "replay": "python x"}
    write_run(root, "nan", change=lambda step, fields: broken if step == 20 else fields, after={20: [event]})
    crashed = RunWriter(root, "crashed")
    crashed.run_dir.write_inputs(CONFIG, {}, {})
    crashed.start()
    crashed.steps(1, 19)
    rewarded = RunDir.create(root, "rewarded", fresh=False)
    shutil.copy(RECORDED / "rewards_learned.jsonl", rewarded.events)
    write_heat_run(root, "grows", layers=12, steps=600, activation=growing(range(8, 12), limit_step=660, per_100=1.6))
    with served(root) as client:
        yield client


def picture(page, tmp_path, name):
    folder = Path(os.environ.get("MANTISSA_SCREENSHOTS", tmp_path))
    assert page.picture(folder / f"{name}.png").stat().st_size > 10_000


@pytest.mark.parametrize("size", some_slow(SIZES, "light", "phone"))
def test_the_overview_and_a_run_are_drawn(page, client, tmp_path, size):
    width, height, dark = SIZES[size]
    page.size(width, height, dark=dark)
    page.messages.clear()
    page.open(client.address, ready=TABLE)
    assert page.value("document.querySelectorAll('.runs tbody tr').length") == 6
    assert page.value("document.documentElement.classList.contains('dark')") is dark
    assert page.value(OVERFLOWING) <= 0, "the page is wider than the window"
    assert page.value(f"{TABLE}.closest('.scroll').scrollWidth - {TABLE}.closest('.scroll').clientWidth") == 0
    picture(page, tmp_path, f"overview_{size}")
    for name in ("grows", "nan", "rewarded"):
        page.open(f"{client.address}/run?key={name}", ready=RUN_DRAWN)
        assert page.value("document.querySelectorAll('#charts canvas').length") > 3
        assert page.value(OVERFLOWING) <= 0
        picture(page, tmp_path, f"{name}_{size}")
    assert page.complaints() == []
    assert all(address.startswith((client.address, "data:", "blob:")) for address in page.requested())


def test_a_run_that_learns_from_rewards_leads_with_them(page, client):
    page.size(1280, 900)
    page.open(f"{client.address}/run?key=rewarded", ready=RUN_DRAWN)
    titles = page.value("[...document.querySelectorAll('.chart h3')].map((head) => head.firstChild.textContent)")
    assert titles[0] == "Reward" and titles.index("Training loss") > 5 and "nats per token" not in titles[0]
    assert {"Entropy of answers (nats per token)", "Sync of the sampler and its proof (seconds)"} <= set(titles)
    assert page.value("document.querySelector('.chart.wide small').textContent") == (
        "band: one standard deviation, dots: validation"
    )
    facts = page.value("document.querySelector('dl.facts').textContent")
    assert (
        facts.split()[:4] == ["reward0.0072", "\u2192", "0.9245", "\u00b1"] and "validation0.8600 at step 60" in facts
    )
    sample = page.value("document.querySelector('#sections').textContent")
    assert "Samples at evaluations" in sample and sample.count("00a: -> ") == 5 and "<details>" not in sample
    page.open(client.address, ready=TABLE)
    assert "reward 0.9245" in page.value("document.querySelector('.runs').textContent")
    assert page.complaints() == []


def test_marks_of_one_step_do_not_cover_each_other(page, client):
    """The skipped step, its loss that is nan and its incident, all at the upper edge."""
    page.size(1280, 900)
    page.open(f"{client.address}/run?key=nan", ready=RUN_DRAWN)
    page.value(
        """(() => {
          window.marks = [];
          CanvasRenderingContext2D.prototype.fillText = (text, x, y) => marks.push([text, x, y]);
          drawn[0].redraw(false);
        })()"""
    )
    page.wait("marks.length")
    found = page.value("marks.filter(([text]) => Object.values(GLYPHS).includes(text))")
    assert len(found) == 3 and len({x for _, x, _ in found}) == 1
    heights = sorted(y for *_, y in found)
    assert all(below - above >= 12 for above, below in pairwise(heights))


def test_an_evaluation_before_the_first_step_is_drawn(page, tmp_path):
    first = {"event": "eval", "at": 0, "loss": 9.0, "perplexity": 1.0}
    write_run(tmp_path, "a", after={1: [first]})
    with served(tmp_path) as client:
        page.open(f"{client.address}/run?key=a", ready=RUN_DRAWN)
        assert page.value("drawn.map((u) => u.scales.x.min)[0]") == 0
        assert page.value("drawn[CHARTS.findIndex((chart) => chart.name === 'validation')].scales.y.max") > 9


def test_the_only_finite_value_is_drawn(page, tmp_path):
    lost = {"loss": math.nan, "grad_norm": math.nan, "applied": False}
    write_run(tmp_path, "a", change=lambda step, fields: fields if step == 3 else fields | lost)
    with served(tmp_path) as client:
        page.open(f"{client.address}/run?key=a", ready=RUN_DRAWN)
        at_it = """(() => {
          const u = drawn[CHARTS.findIndex((chart) => chart.name === 'grad_norm')], [x, y] = u.data;
          const place = [u.valToPos(x[2], 'x', true), u.valToPos(y[2], 'y', true)].map(Math.round);
          return [...u.ctx.getImageData(...place, 1, 1).data];
        })()"""
        assert page.value(f"({at_it})[3]") == 255
        assert page.value(f"new Set({at_it}.slice(0, 3)).size") > 1, "grey, as the grid is"


def test_a_row_of_a_heat_map_is_unfolded(page, client):
    page.size(1400, 900)
    page.open(f"{client.address}/run?key=grows", ready=RUN_DRAWN)
    rows = "document.querySelector('#heat-activation').names.length"
    before = page.value(rows)
    page.value(
        """(() => {
          const canvas = document.querySelector('#heat-activation canvas'), place = canvas.getBoundingClientRect();
          const row = document.querySelector('#heat-activation').names.indexOf('model.layers.*.mlp.down_proj');
          const middle = { clientX: place.left + 200, clientY: place.top + 15 * (row + 0.5), bubbles: true };
          canvas.dispatchEvent(new MouseEvent('click', middle));
        })()"""
    )
    page.wait(f"{rows} === {before + 12}")
    assert (
        page.value("document.querySelector('#lines').textContent").count("layers 8-11 down_proj: activations at") == 1
    )
    page.value("document.querySelector('#fold').value = 'modules'")
    page.value("document.querySelector('#fold').dispatchEvent(new Event('change'))")
    page.wait(f"{rows} > 100")


def test_runs_are_searched_grouped_chosen_and_compared(page, client):
    page.size(1400, 900)
    page.open(client.address, ready=TABLE)
    page.value("asked.elements.group.click()")
    page.wait("document.querySelectorAll('.runs tbody tr').length === 3")
    page.value("asked.elements.q.value = 'base'; asked.dispatchEvent(new Event('input'))")
    page.wait("document.querySelectorAll('.runs tbody tr').length === 1")
    page.value("document.querySelector('.pick').click()")
    assert page.value("document.querySelector('#chosen').textContent") == "2 chosen"
    page.value("document.querySelector('#compare').click()")
    page.wait("location.pathname === '/compare' && document.title.includes('base-s0')")


def test_a_run_that_diverged_neither_sets_the_range_of_a_comparison_nor_hides_in_it(page, tmp_path):
    for name, loss in (("a", 4.0), ("b", 4.1), ("hot", 90.0)):
        write_run(
            tmp_path, name, change=lambda step, _, loss=loss: {"loss": loss if step > 10 else 4.2, "lr": loss / 1e4}
        )
    page.size(1280, 900)
    with served(tmp_path) as client:
        page.open(f"{client.address}/compare?run=a&run=b&run=hot", ready="document.body.dataset.drawn")
        assert page.value("drawn[0].scales.y.max") < 5
        assert page.value("drawn[CHARTS.findIndex((chart) => chart.name === 'lr')].scales.y.max") > 0.008
        assert page.value("document.querySelectorAll('.chip')[2].textContent").split() == ["hot", "diverged"]
        page.value("document.getElementById('cut').click()")
        assert page.value("drawn[0].scales.y.max") > 90


def test_columns_are_chosen_and_kept_and_a_note_is_written(page, tmp_path):
    folder = write_run(tmp_path, "a", config={"optimizer.learning_rate": 5e-5}).path
    write_run(tmp_path, "b")
    page.size(1280, 900)
    page.messages.clear()
    with served(tmp_path) as client:
        page.open(client.address, ready=TABLE)
        page.value("document.querySelector('[name=col][value=\".optimizer.learning_rate\"]').click()")
        page.wait("document.querySelectorAll('.c-own').length === 3 && location.search.includes('learning_rate')")
        assert page.value("document.getElementById('export').search") == page.value("location.search")
        page.open(f"{client.address}/", ready="document.querySelectorAll('.c-own').length === 3")
        page.value("document.querySelector('[data-key=a]').click()")
        page.wait("document.getElementById('edit').open")
        page.value("box.querySelector('[name=tags]').value = 'good, <b>'; box.querySelector('[value=save]').click()")
        page.wait("!box.open && document.querySelectorAll('.label').length === 2")
        assert json.loads((folder / NOTES).read_text())["tags"] == ["good", "<b>"]
        page.value("document.querySelector('.label').click()")
        page.wait("document.querySelectorAll('.runs tbody tr').length === 1 && document.querySelector('.label mark')")
        (folder / NOTES).write_text("{")
        page.value("document.querySelector('[data-key=a]').click()")
        page.wait("box.open && box.querySelector('.problem').textContent.includes('restore or remove it')")
        assert [said for said in page.complaints() if "400" not in said] == []
        page.value("document.getElementById('usual').click()")
        page.wait("document.querySelectorAll('.c-own').length === 0")


def test_a_page_follows_a_run_that_trains(page, tmp_path):
    writer = RunWriter(tmp_path, "live")
    writer.run_dir.write_inputs(CONFIG, {}, {})
    writer.start()
    writer.steps(1, 5)
    with served(tmp_path) as client:
        page.open(f"{client.address}/run?key=live", ready="document.body.dataset.curves === '5'")
        assert page.value("data.runs[0].curve.step.length") == 5
        writer.steps(6, 11)
        client.library.look()
        page.wait("data.runs[0].curve.step.length === 11")
        assert "11 of 40" in page.value("document.querySelector('#state').textContent")
