"""The heat maps: events into arrays, names into blocks, sentences under the panels, and pictures in a real browser."""

import json
import math
import random
import re
import struct
from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.image import imread

from config.cli import DONE, PREEMPTED
from config.schema import Config, RunSection
from tests.support.refusals import refused
from tests.support.runs.compare_runs import RunWriter
from tests.support.runs.heat_runs import growing, modules, telemetry, write_heat_run
from tracking.compare.command import main as compare
from tracking.heatmap import grid
from tracking.heatmap.blocks import draw_blocks
from tracking.heatmap.grid import HeatCollector, merged, read_heat
from tracking.heatmap.modules import folded_name, in_words, leaves
from tracking.heatmap.page import difference_data, differences_of, panel_data
from tracking.heatmap.panels import DTYPES
from tracking.heatmap.picture import draw_heat
from tracking.heatmap.still import still_of_run, still_sentence
from tracking.heatmap.trend import trend
from tracking.heatmap.words import sentences
from tracking.report.command import main as report
from tracking.summary import read_run
from tracking.watch.command import main as watch
from training.finish import _judge


def collected(events):
    collector = HeatCollector()
    for event in events:
        collector.add(event)
    return collector.heat()


def measured(step, activation=1.0, **fields):
    names = ("model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj")
    empty = {"gradients": {}, "update_ratios": {}, "activation_max": dict.fromkeys(names, activation)}
    fields = {**telemetry(step, 0), **empty, **fields}
    return {"event": "telemetry", "step": step, "time": 1.0, "tokens": 0, **fields}


def start(step=0, **fields):
    return {"event": "run_start", "step": step, "time": 1.0, "tokens": 0, "compute": "fp16", **fields}


def test_a_run_becomes_rows_in_forward_order_and_columns_of_steps(tmp_path):
    heat = read_heat(write_heat_run(tmp_path, "a", layers=2, steps=40, every=10) / "events.jsonl")
    assert heat.rows == tuple(modules(2))
    assert heat.steps.tolist() == [10, 20, 30, 40]
    assert heat.panels["activation"].shape == (len(heat.rows), 4)
    wanted = telemetry(20, 2)
    row = heat.rows.index("model.layers.1.mlp.down_proj")
    own = wanted["gradients"]["model.layers.1.mlp.down_proj"]
    for key, value in (
        ("activation", wanted["activation_max"]["model.layers.1.mlp.down_proj"] / 65504),
        ("gradient", own["rms"]),
        ("underflow", own["below_normal"]),
        ("update", wanted["update_ratios"]["model.layers.1.mlp.down_proj"]),
        ("drift", 0.0),
        ("nonfinite", 0.0),
        ("dtype", 3.0),
    ):
        assert heat.panels[key][row, 1] == pytest.approx(value, rel=1e-6), key
    assert math.isnan(heat.panels["gradient"][heat.rows.index("model.layers.1"), 1])  # has no parameters of its own


def test_of_a_step_measured_twice_the_last_attempt_counts():
    heat = collected([start(), measured(10, 1.0), measured(20, 2.0), start(10), measured(20, 8.0)])
    assert heat.steps.tolist() == [10, 20]
    assert heat.panels["activation"][0] * 65504 == pytest.approx([1.0, 8.0])
    rolled_back = collected([start(), measured(10, 1.0), measured(20, 2.0), measured(15, 3.0)])
    assert rolled_back.steps.tolist() == [10, 15]


def test_what_was_not_finite_and_what_changed_its_dtype_is_where_it_happened():
    name = "model.layers.1.mlp.down_proj"
    found = {"event": "nonfinite", "step": 25, "time": 1.0, "tokens": 0, "module": name, "tensor": "activation"}
    promoted = {"event": "incident", "step": 25, "time": 1.0, "tokens": 0, "promoted_to": "fp32", "modules": [name]}
    demoted = {"event": "note", "step": 35, "time": 1.0, "tokens": 0, "text": "", "demoted": {name: "fp16"}}
    events = [start(regions={name: "fp16"}), measured(10), measured(20), {**found, "count": 7}, promoted]
    heat = collected([*events, measured(30), demoted, measured(40)])
    assert heat.panels["nonfinite"].tolist() == [[0, 0, 0, 0], [0, 0, 7, 0]]
    assert heat.panels["dtype"].tolist() == [[1, 1, 1, 1], [3, 3, 1, 3]]
    lines = sentences(heat)
    assert lines["nonfinite"] == "first in layer 1 down_proj, at step 25; 7 in all, most in layer 1 down_proj."
    assert "changed: layer 1 down_proj, to fp32 by step 30" in lines["dtype"]


def test_a_rollback_takes_back_the_promotions_since_its_checkpoint():
    first, second = "model.layers.0.mlp.down_proj", "model.layers.1.mlp.down_proj"
    incident = {"event": "incident", "time": 1.0, "tokens": 0}
    early, late = (
        incident | {"step": step, "promoted_to": "fp32", "modules": [name]} for step, name in ((5, first), (25, second))
    )
    back = incident | {"step": 35, "modules": [], "rolled_back_to": "runs/a/checkpoints/step-20"}
    events = [start(regions=dict.fromkeys((first, second), "fp16")), early, measured(20), late, measured(30)]
    dtypes = [collected(found).panels["dtype"][:, -1].tolist() for found in (events, [*events, back, measured(30)])]
    fp32, fp16 = DTYPES.index("fp32"), DTYPES.index("fp16")
    assert dtypes == [[fp32, fp32], [fp32, fp16]]


def test_a_module_known_only_from_a_finding_has_a_row():
    found = {"event": "nonfinite", "step": 5, "time": 1.0, "tokens": 0, "tensor": "gradient", "count": 2}
    heat = collected([start(), {**found, "module": "model.norm"}])
    assert heat.rows == ("model.norm",) and heat.panels["nonfinite"].tolist() == [[2.0]]


def test_a_gradient_of_zero_is_drawn_without_numpys_warning(recwarn):
    """It would stand in the middle of a live screen."""
    rms = {"gradients": {name: {"rms": value} for name, value in (("a", 0.0), ("b", 1e-6), ("c", 1e-3))}}
    drawn = draw_blocks(collected([start(), measured(10, **rms)]), "gradient", width=40, height=10, ascii_only=True)
    rows = {line.split()[0]: line[24:].strip() for line in drawn.plain.splitlines()[:-1]}
    assert (rows["a"], {*rows["b"]}, {*rows["c"]}) == ("", {"."}, {"%"}) and not list(recwarn)


def test_many_measurements_are_merged_and_no_peak_is_lost(monkeypatch):
    monkeypatch.setattr(grid, "MOST_COLUMNS", 10)
    values = [1.0] * 100
    values[57] = 1000.0
    heat = collected([start(), *(measured(10 * (n + 1), value) for n, value in enumerate(values))])
    assert heat.measured == 100 and len(heat.steps) <= 10 and heat.steps[-1] == 1000
    peak = int(np.argmax(heat.panels["activation"][0]))
    assert heat.edges[peak] < 580 <= heat.edges[peak + 1]
    assert heat.panels["activation"][0, peak] * 65504 == pytest.approx(1000.0)
    assert len(heat.narrowed(3).steps) == 3 and np.nanmax(heat.narrowed(3).panels["activation"]) * 65504 > 999


def test_a_folded_row_holds_its_modules_and_opens_again():
    heat = collected([start(), measured(10, 2.0)])
    for fold, names in (
        ("kinds", ("model.layers.*.mlp.down_proj",)),
        ("blocks", ("model.layers.0", "model.layers.1")),
        ("modules", heat.rows),
    ):
        assert heat.folded(fold).rows == names
    opened = heat.folded("kinds", ["model.layers.*.mlp.down_proj"])
    assert opened.rows == ("model.layers.*.mlp.down_proj", *heat.rows)
    two = np.array([[1.0], [np.nan], [4.0]], np.float32)
    assert [float(merged(key, two, axis=0)[0]) for key in ("activation", "gradient", "nonfinite")] == [4, 2, 5]


def test_names_in_few_words():
    assert in_words([f"model.layers.{n}.mlp.down_proj" for n in (20, 21, 22, 5)]) == "layers 5, 20-22 down_proj"
    assert in_words(["model.layers.3.mlp.up_proj"]) == "layer 3 up_proj"
    assert in_words(["model.layers.3.mlp.up_proj.lora_B.default"]) == "layer 3 up_proj.lora_B"
    assert in_words(["model.layers.3.mlp.up_proj.base_layer"]) == "layer 3 up_proj.base_layer"
    assert in_words(["lm_head", "model.norm", "a", "b"]) == "lm_head, norm, a and 1 more"
    assert folded_name("model.layers.3.mlp.experts.7.up_proj", "kinds") == "model.layers.*.mlp.experts.*.up_proj"
    assert folded_name("a.99999999999999999999.b", "kinds") == "a.99999999999999999999.b"
    assert leaves(("m.layers.0.mlp.up", "m.layers.0.mlp", "m.layers.0", "m", "Llama", "lm.x")) == [
        *(True, False, False, False, False, True)
    ]


@pytest.mark.parametrize("linear", [False, True])
@pytest.mark.parametrize("until", [0.4, 0.7, 0.9])
def test_a_forecast_is_within_a_tenth_of_the_truth(linear, until):
    """Random noise and spikes over exponential and straight growth towards 1 at step 10,000."""
    noise = random.Random(1)
    for _ in range(20):
        steps = np.arange(50, int(10_000 * until), 50)
        truth = 0.2 + 0.8 * steps / 10_000 if linear else 0.01 ** (1 - steps / 10_000)
        values = truth * np.array([noise.lognormvariate(0, 0.03) for _ in steps])
        values[::17] *= noise.uniform(1, 3)
        found = trend(steps, values)
        assert found is not None and found.linear is linear
        assert found.reaches(1.0) == pytest.approx(10_000, rel=0.1)


def test_what_does_not_grow_has_no_forecast():
    noise, steps = random.Random(2), np.arange(0, 1000, 10)
    flat = np.array([noise.lognormvariate(0, 0.3) for _ in steps])
    assert trend(steps, flat) is None
    assert trend(steps, 2.0 - steps / 1000) is None
    assert trend(steps[:3], np.array([1.0, 2.0, 4.0])) is None
    assert trend(steps, np.full(len(steps), np.nan)) is None


def test_the_sentence_names_layers_growth_and_step(tmp_path):
    activation = growing(range(20, 32), limit_step=5300, per_100=1.02)
    heat = read_heat(
        write_heat_run(tmp_path, "a", layers=32, steps=5000, every=50, activation=activation) / "events.jsonl"
    )
    line = sentences(heat)["activation"]
    growth, step = re.search(r"growing (.*)% per 100 steps: overflow expected near step (5,\d+)\.$", line).groups()
    assert line.startswith("layers 20-31 down_proj: activations at ")
    assert float(growth) == pytest.approx(2, abs=0.4) and int(step.replace(",", "")) == pytest.approx(5300, rel=0.1)


def test_a_run_in_bf16_is_told_what_fp16_would_do(tmp_path):
    activation = growing([1], limit_step=450, per_100=1.5)
    folder = write_heat_run(tmp_path, "a", layers=2, steps=400, activation=activation, compute="bf16")
    assert "bf16 has a wider one" in (line := sentences(read_heat(folder / "events.jsonl"))["activation"])
    assert "FP16 would overflow near step 4" in line


def test_a_healthy_run_is_said_to_be_one(tmp_path):
    lines = sentences(read_heat(write_heat_run(tmp_path, "a", layers=2) / "events.jsonl"))
    assert "none is near it" in lines["activation"]
    assert lines["drift"] == "every 16-bit weight equals its rounded master, at every measured step."
    assert lines["nonfinite"] == "none." and lines["dtype"] == "fp16 everywhere."


def test_a_weight_that_left_its_master_is_named():
    name = "model.layers.1.mlp.down_proj"
    gradients = {name: {"rms": 1.0, "below_normal": 0.0}, "lm_head": {"rms": 1.0, "below_normal": 0.25}}
    apart = {"maximum": 0.5, "rms": 0.1, "by_module": {name: 0.5}}
    clean = {"maximum": 0.0, "rms": 0.0, "by_module": {}}
    heat = collected(
        [start(), measured(10, gradients=gradients, drift=clean), measured(20, gradients=gradients, drift=apart)]
    )
    lines = sentences(heat)
    assert lines["drift"] == "layer 1 down_proj: differ from their rounded masters since step 20, up to 0.5 away."
    assert lines["underflow"] == "lm_head: 25% of the gradient values at step 20."


def test_damaged_and_strange_telemetry_is_left_out(tmp_path):
    strange = [
        measured(10, activation_max=[1, 2]),
        measured(20, activation_max={"a": "inf", "b": None, "e": 1e300, "f": 2.0}),
        measured(30, activation_max={"c": {"d": 1}}),
        measured(40, gradients={"a": 3, "b": {"rms": "nan"}}, drift=7, update_ratios="x"),
    ]
    run = RunWriter(tmp_path, "a")
    run.start()
    folder = run.end(1).path
    with (folder / "events.jsonl").open("ab") as file:
        for event in strange:
            file.write(json.dumps(event).encode() + b"\n")
        file.write(b'{"event":"telemetry","step":50,"ti\n{"event":"telemetry"}\n{"event":"telemetry"')
    heat = read_heat(folder / "events.jsonl")
    assert heat.steps.tolist() == [20]
    values = dict(zip(heat.rows, heat.panels["activation"][:, 0] * 65504, strict=True))
    assert values["a"] == values["e"] == math.inf and values["f"] == pytest.approx(2.0) and math.isnan(values["b"])
    sentences(heat)


def test_a_run_without_telemetry_has_nothing_to_draw():
    assert not collected([start()])
    assert sentences(collected([start()])) == {}
    assert not HeatCollector().heat()


def losing(shares):
    """Telemetry events of made-up modules every 10 steps; each module's shares one after another, None for no entry."""
    counts = {len(values) for values in shares.values()}
    return [
        measured(10 * (n + 1), lost_updates={k: v[n] for k, v in shares.items() if v[n] is not None})
        for n in range(counts.pop())
    ]


def test_a_run_that_does_not_move_is_named_module_by_module_worst_first():
    late, none = [0.2] * 4 + [0.99, 0.995, 1.0] * 2, [None] + [0.5] * 3 + [0.998] * 6
    heat = collected(
        [
            start(compute="bf16"),
            *losing({"m.layers.0.up": late, "m.layers.1.up": late, "lm_head": none, "a": [0.1] * 10}),
        ]
    )
    line = sentences(heat)["lost"]
    assert "BF16 weights: 99.8% of the updates of lm_head were lost to rounding, since step 50, " in line
    assert "99.5% of the updates of layers 0-1 up since step 50; reported from 99% on." in line


@pytest.mark.parametrize(
    ("shares", "after"),
    [
        ({"a.input_layernorm": [1.0] * 9, "h.0.ln_1": [1.0] * 9, "transformer.ln_f": [1.0] * 9, "a.up": [0.9] * 9}, 0),
        ({"a.up": [0.98] * 6 + [1.0] * 5}, 0),  # the end of a schedule
        ({"a.up": [1.0] * 3 + [0.5] + [1.0] * 2}, 0),
        ({"a.up": [1.0] * 2}, 0),
        ({"a.up": [1.0] * 4}, 20),  # the start of one
        ({"a.up": [1.0] * 9, "a.down": [0.3] * 9, "a.gate": [0.3] * 9}, 0),
    ],
)
def test_a_run_that_moves_is_left_alone(shares, after):
    heat = collected([start(compute="bf16"), *losing(shares)])
    assert still_sentence(heat, after=after) == ""
    if not after:
        assert "hardly" not in sentences(heat)["lost"]


def test_a_preempted_run_records_its_end_without_reading_telemetry(tmp_path):
    write_heat_run(tmp_path, "still", layers=1, steps=60, compute="bf16", lost=lambda name, step: 0.996)
    parts = SimpleNamespace(resolved=SimpleNamespace(config=Config(run=RunSection(dir=str(tmp_path), name="still"))))

    def found(status, code):
        return _judge(parts, {"step": 60, "tokens": 1, "status": status, "exit_code": code, "reason": ""})[1]

    assert "lost to rounding" in found("done", DONE)["standstill"]
    assert found("preempted", PREEMPTED)["standstill"] == ""
    assert found("preempted", PREEMPTED)["verdict"] == "stopped"


def test_report_and_watch_say_that_a_run_does_not_move(tmp_path, capsys):
    """Markdown, page, console and live view agree; a run that warms up is not named."""

    def lost(name, step):
        return 0.996 if step > 20 else 0.2

    still = write_heat_run(tmp_path, "still", layers=1, steps=60, compute="bf16", lost=lost)
    page = tmp_path / "still.html"
    assert report([str(still), "--html", str(page)]) == watch([str(still), "--once"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    measures = (still / "report.md").read_text(encoding="utf-8").partition("## Measures")[2]
    warned = page.read_text(encoding="utf-8").partition("<h2>Measures")[2].partition("<h2>Config")[0]
    line = "99.6% of the updates of embed_tokens were lost to rounding, since step 30"
    for text, times in ((shown, 2), (measures.replace("\\", ""), 1), (warned, 1)):
        assert text.count("the model hardly moves") == text.count(line) == times
    warm = {"schedule.warmup_steps": 50}
    warms = write_heat_run(tmp_path, "warms", layers=1, steps=60, compute="bf16", lost=lost, config=warm)
    assert still_of_run(read_run(warms)) == "" and watch([str(warms), "--once"]) == 0
    assert "hardly moves" not in capsys.readouterr().out


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
