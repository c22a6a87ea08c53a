"""Each measure's value against one computed by hand, its verdict, and the objective as its task defines it."""

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from config.load import load_config, to_dict
from config.task import loss_unit, settle_task
from tests.support.runs.compare_runs import TELEMETRY, TOKENS_PER_STEP
from tests.support.runs.report_runs import CONFIG, ENVIRONMENT, report_of, session, simple_run
from tracking.compare.measures import measures
from tracking.compare.surviving import read_events
from tracking.report.command import limits_from
from tracking.report.context import LIMITS, Finding, MeasureContext
from tracking.report.measures import all_measures, caveats, peak_flops
from tracking.run_dir import RunDir
from tracking.serve.run_page import curves
from tracking.summary import read_run

NOW = 2e9


def _context(run: Path, baseline: Path | None = None, **changes: Any) -> MeasureContext:
    now = changes.pop("now", NOW)
    base = read_run(baseline, now) if baseline else None
    return replace(MeasureContext(read_run(run, now), base, LIMITS, price=None, peak=None), **changes)


def _found(run: Path, baseline: Path | None = None, **changes: Any) -> dict[str, Finding]:
    return {finding.key: finding for finding in all_measures(_context(run, baseline, **changes))}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """BF16: 0.3 s a step, 3 GiB, validation loss 3.01 at step 40."""
    return simple_run(tmp_path / "run", seconds=0.3, evals=((20, 4.0), (40, 3.01)))


@pytest.fixture
def baseline(tmp_path: Path) -> Path:
    """FP32: 0.5 s a step, 5 GiB, validation loss 3.0 at step 40."""
    return simple_run(tmp_path / "fp32", compute="fp32", fields={"memory_bytes": 5 * 2**30})


def test_relative_measures_hold_the_run_against_its_baseline(run: Path, baseline: Path) -> None:
    found = _found(run, baseline, price=2.0)
    assert found["epoch_time"].value == pytest.approx(0.6) and found["epoch_time"].verdict == "pass"
    epoch = 8e6 / TOKENS_PER_STEP * 0.3
    assert epoch == pytest.approx(585.94, abs=0.01) and "9m46s for an epoch" in found["epoch_time"].shown
    assert found["peak_memory"].value == pytest.approx(0.6) and found["peak_memory"].verdict == "pass"
    delta = found["validation_delta"]
    assert delta.value == pytest.approx(3.01 / 3.0 - 1) and delta.verdict == "pass"
    events = 1 + 60 + 2 + 1 + 1  # each 0.3 s after the one before, on two devices
    cost = (events - 1) * 0.3 / 3600 * 2 * 2.0 / (60 * TOKENS_PER_STEP) * 8e6
    assert found["epoch_cost"].value == pytest.approx(0.6) and f"({cost:.4g} for an epoch" in found["epoch_cost"].shown
    assert found["norm_variance"].value == pytest.approx(1.0) and found["norm_variance"].verdict == "pass"


@pytest.mark.parametrize(
    ("key", "fields", "evals"),
    [
        ("epoch_time", {"tokens_per_second": TOKENS_PER_STEP / 0.36}, ()),
        ("peak_memory", {"memory_bytes": int(3.6 * 2**30)}, ()),
        ("validation_delta", {}, ((20, 4.0), (40, 3.0151))),
        ("validation_delta", {}, ((20, 4.0), (40, math.nan))),
    ],
)
def test_just_beyond_its_limit_a_relative_measure_fails(tmp_path, baseline, key, fields, evals) -> None:
    with session(tmp_path / "worse") as run:
        for step in range(1, 61):
            run.steps(1, **fields)
            for _, loss in (item for item in evals if item[0] == step):
                run.evaluate(loss)
    assert _found(tmp_path / "worse", baseline)[key].verdict == "fail"


def test_without_a_baseline_relative_measures_say_so_and_give_what_is_known(run: Path) -> None:
    found = _found(run)
    for key in ("epoch_time", "peak_memory", "validation_delta", "epoch_cost", "norm_variance"):
        assert (found[key].verdict, found[key].value) == ("not measured", None)
        assert "--baseline" in found[key].reason and found[key].shown


def test_without_the_length_of_an_epoch_a_million_tokens_stand_for_it(tmp_path: Path, baseline: Path) -> None:
    plain = {"accelerator": ENVIRONMENT["accelerator"], "data": {"fingerprint": "aa"}}
    run = simple_run(tmp_path / "plain", seconds=0.3, environment=plain)
    found = _found(run, baseline)["epoch_time"]
    assert found.value == pytest.approx(0.6) and "73.2 s for a million tokens" in found.shown
    assert "not recorded" in found.how


@pytest.mark.parametrize(
    ("config", "environment", "keys", "words"),
    [
        ({}, {"accelerator": {"device": "NVIDIA L4"}}, {"epoch_time", "peak_memory", "epoch_cost"}, "different device"),
        ({}, {"data": {"fingerprint": "bb"}}, {"validation_delta", "norm_variance"}, "different training set"),
        ({"batch": {"micro_size": 4}}, {}, {"peak_memory"}, "different micro-batch: 4, not 2"),
        (
            {"data": {"sequence_length": 9}},
            {},
            {"epoch_time", "peak_memory", "epoch_cost", "validation_delta", "norm_variance"},
            "different sequence length: 9, not 512",
        ),
    ],
)
def test_a_baseline_of_other_work_is_refused_where_that_matters(tmp_path, run, config, environment, keys, words):
    settings, place = CONFIG | config, ENVIRONMENT | environment
    found = _found(run, simple_run(tmp_path / "other", compute="fp32", config=settings, environment=place))
    assert {key for key in LIMITS if words in found[key].reason} == keys
    assert {found[key].verdict for key in keys} == {"not measured"}


def test_the_validation_delta_is_taken_at_equal_tokens(tmp_path: Path, baseline: Path) -> None:
    """The run went on to step 60; at step 40, between its evaluations at 30 and 50, it was at 3.5."""
    run = simple_run(tmp_path / "longer", evals=((30, 4.0), (50, 3.0), (60, 2.0)))
    assert _found(run, baseline)["validation_delta"].value == pytest.approx(3.5 / 3.0 - 1)
    late = simple_run(tmp_path / "late", evals=((50, 3.0),))
    assert "no evaluation within the range" in _found(late, baseline)["validation_delta"].reason


def test_utilisation_counts_the_models_flops(run: Path, tmp_path: Path) -> None:
    flops_a_token = 6 * 12_345_678 + 12 * 4 * 256 * 512
    expected = TOKENS_PER_STEP / 0.3 / 2 * flops_a_token / 989.4e12
    found = _found(run)["utilisation"]
    assert found.value == pytest.approx(expected) and found.verdict == "fail"
    assert _found(run, peak=2 * expected * 989.4e12)["utilisation"].value == pytest.approx(0.5)
    bare = simple_run(tmp_path / "bare", config={"model": {"name_or_path": "gpt2"}})
    found = _found(bare)["utilisation"]
    assert found.value == pytest.approx(TOKENS_PER_STEP / 0.5 / 2 * 6 * 12_345_678 / 989.4e12)
    assert "attention term is left out" in found.how


def test_each_session_counts_with_its_own_devices(tmp_path: Path) -> None:
    """A session on eight devices at 8000 tokens/s, then one on two at 2000: 1000 a device all along."""
    folder = tmp_path / "moved"
    for size, began in ((8, 0), (2, 8)):
        with session(folder, world_size=size, step=began, time=1.7e9 + 3600 * began, seconds=36.0) as written:
            written.steps(9 - began, tokens_per_second=1000.0 * size)
    RunDir(folder).write_inputs(CONFIG, {}, ENVIRONMENT)
    flops_a_token = 6 * 12_345_678 + 12 * 4 * 256 * 512
    share = pytest.approx(1000 * flops_a_token / 989.4e12)
    assert _found(folder)["utilisation"].value == share
    run = read_run(folder)
    assert [share == value / 100 for value in curves(run)["runs"][0]["curve"]["utilisation"]] == [True] * 9
    hours = (9 * 8 + 1 * 2) * 36 / 3600
    assert run.device_hours == pytest.approx(hours)
    rows = {row.key: row.values for row in measures([run], price=2.0)}
    assert rows["device_hours"] + rows["cost"] == pytest.approx((hours, 2 * hours))
    epoch = hours / (9 * TOKENS_PER_STEP) * 8e6
    assert f"{epoch:.3g} device hours for an epoch" in _found(folder)["epoch_cost"].shown


def test_utilisation_leaves_out_the_gradients_of_frozen_weights(tmp_path: Path) -> None:
    with session(tmp_path / "adapter", compute="bf16", parameters=12_345_678, trained_parameters=345_678) as written:
        written.steps(9, step_seconds=0.5, tokens_per_second=TOKENS_PER_STEP / 0.5)
        written.end("done")
    RunDir(tmp_path / "adapter").write_inputs(CONFIG, {}, ENVIRONMENT)
    found = _found(tmp_path / "adapter")["utilisation"]
    flops_a_token = 4 * 12_345_678 + 2 * 345_678 + 12 * 4 * 256 * 512
    assert found.value == pytest.approx(TOKENS_PER_STEP / 0.5 / 2 * flops_a_token / 989.4e12)
    assert "12,000,000 frozen parameters count 4" in found.how


def test_utilisation_counts_the_experts_that_a_token_uses(tmp_path: Path) -> None:
    fields = {"parameters": 12_345_678, "trained_parameters": 12_345_678}
    fields |= {"active_parameters": 2_345_678, "active_trained_parameters": 2_345_678}
    with session(tmp_path / "moe", compute="bf16", **fields) as written:
        written.steps(9, step_seconds=0.5, tokens_per_second=TOKENS_PER_STEP / 0.5)
        written.end("done")
    RunDir(tmp_path / "moe").write_inputs(CONFIG, {}, ENVIRONMENT)
    found = _found(tmp_path / "moe")["utilisation"]
    flops_a_token = 6 * 2_345_678 + 12 * 4 * 256 * 512
    assert found.value == pytest.approx(TOKENS_PER_STEP / 0.5 / 2 * flops_a_token / 989.4e12)
    assert "10,000,000 parameters of experts" in found.how and "frozen" not in found.how


def test_utilisation_is_not_guessed(tmp_path: Path) -> None:
    cpu = simple_run(tmp_path / "cpu", environment={"accelerator": {"device": "cpu"}})
    assert "--peak-tflops" in _found(cpu)["utilisation"].reason
    wide = simple_run(tmp_path / "wide", compute="fp32")
    assert "FP32" in _found(wide)["utilisation"].reason


@pytest.mark.parametrize(
    ("device", "tflops"),
    [
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.5),
        ("NVIDIA H100 NVL", 835.5),
        ("NVIDIA H200", 989.4),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("Tesla V100-SXM2-32GB", 125.0),
        ("Tesla T4", 65.0),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA T400", None),
        ("cpu", None),
    ],
)
def test_peaks_are_found_by_whole_words(device: str, tflops: float | None) -> None:
    assert peak_flops(device) == (None if tflops is None else tflops * 1e12)


def test_numerics_are_counted_and_judged(tmp_path: Path) -> None:
    with session(tmp_path, compute="fp16") as run:
        run.steps(94, loss_scale=1024.0)
        for _ in range(5):
            run.overflow()
        run.overflow(loss=math.nan)
        run.event("precision", flop_share={"fp16": 1.0})
        run.event("precision", flop_share={"fp16": 0.9, "fp32": 0.1})
        run.event("telemetry", **TELEMETRY, drift={"maximum": 1e-3, "rms": 1e-4})
    found = _found(tmp_path)
    values = {"nonfinite": 1, "overflow_rate": 0.05, "low_precision": pytest.approx(0.9), "drift": 1e-3}
    assert {key: found[key].value for key in values} == values and "step 100" in found["nonfinite"].reason
    assert [found[key].verdict for key in values] == ["fail", "pass", "fail", "fail"]
    limits = limits_from(["overflow_rate=0.04", "low_precision=0.9", "drift=0.01", "nonfinite=1"])
    found = _found(tmp_path, limits=limits)
    assert [found[key].verdict for key in values] == ["pass", "fail", "pass", "pass"]


def test_what_does_not_apply_is_not_measured(tmp_path: Path) -> None:
    found = _found(simple_run(tmp_path / "run", compute="fp32"))
    assert found["overflow_rate"].reason == "the loss is not scaled"
    assert "FP32" in found["low_precision"].reason and "masters themselves" in found["drift"].reason
    assert found["restore_success"].reason == "nothing had to be restored"
    assert found["nonfinite"].verdict == found["job_success"].verdict == "pass"
    manifest = tmp_path / "manifest"
    with session(manifest, compute="fp32", regions={"lm_head": "fp32", "mlp": "bf16"}) as run:
        run.steps(1)
        run.event("precision", flop_share={"bf16": 0.96, "fp32": 0.04})
    assert _found(manifest)["low_precision"].value == pytest.approx(0.96), "regions compute in BF16 under FP32 masters"


def test_gradient_norm_variance_is_that_of_the_second_half_of_applied_steps(tmp_path: Path, baseline: Path) -> None:
    with session(tmp_path / "run") as run:
        run.steps(30, grad_norm=1e6)
        for step in range(40):
            run.steps(1, grad_norm=1.0 + step % 2, applied=True)
            run.steps(1, grad_norm=50.0, applied=False)
            run.overflow()
        run.end("done")
    events = read_events(tmp_path / "run" / "events.jsonl")
    norms = [event["grad_norm"] for event in events if event.get("applied")][35:]
    base = [event["grad_norm"] for event in read_events(baseline / "events.jsonl") if event["event"] == "step"][30:]
    ratio = statistics.variance(norms) / statistics.mean(norms) ** 2
    expected = ratio / (statistics.variance(base) / statistics.mean(base) ** 2)
    found = _found(tmp_path / "run", baseline)["norm_variance"]
    assert found.value == pytest.approx(expected) and found.verdict == "fail"
    short = simple_run(tmp_path / "short", steps=30)
    assert "15 applied steps; 20 are the fewest" in _found(short, baseline)["norm_variance"].reason


@pytest.mark.parametrize(
    ("status", "code", "verdict"),
    [("done", 0, "pass"), ("preempted", 75, "pass"), ("aborted", 3, "fail"), ("crashed", 69, "fail")],
)
def test_a_job_succeeds_by_how_it_ended(tmp_path: Path, status: str, code: int, verdict: str) -> None:
    with session(tmp_path) as run:
        run.steps(1)
    with session(tmp_path) as run:
        run.end(status, code)
    found = _found(tmp_path)["job_success"]
    assert found.verdict == verdict and "1 of 1 earlier sessions crashed" in found.shown
    assert found.reason == ("why it ended" if verdict == "fail" else "")


def test_a_run_without_an_end_or_a_process_has_crashed_once_it_is_silent(tmp_path: Path) -> None:
    with session(tmp_path, time=1.7e9, seconds=1.0) as run:
        run.steps(5)
    found = _found(tmp_path, now=1.7e9 + 5 + 50)["job_success"]
    assert (found.verdict, found.reason) == ("not measured", "it has not ended: running")
    found = _found(tmp_path, now=1.7e9 + 5 + 3600)["job_success"]
    assert (found.verdict, found.shown) == ("fail", "killed") and "1h00m old" in found.reason


def test_restores_are_judged(tmp_path: Path) -> None:
    with session(tmp_path) as run:
        run.steps(2)
        run.save()
    for resumed in ("step-2", "step-2", "step-2", None):
        with session(tmp_path, step=2 if resumed else 0, resumed_from=resumed) as run:
            run.steps(1)
    found = _found(tmp_path)["restore_success"]
    assert (found.value, found.verdict, found.shown) == (0.75, "fail", "75% (3 of 4)")


def test_an_empty_session_has_no_measure_and_no_division_by_zero(tmp_path: Path, baseline: Path) -> None:
    with session(tmp_path / "run"):
        pass
    found = _found(tmp_path / "run", baseline, now=1.7e9)
    assert {finding.verdict for finding in found.values()} == {"not measured"}
    assert {found[key].reason for key in ("nonfinite", "epoch_time", "overflow_rate")} == {"no step was recorded"}
    held = _found(baseline, tmp_path / "run")
    relative = ("epoch_time", "peak_memory", "epoch_cost", "norm_variance")
    assert all(held[key].verdict == "not measured" for key in relative)


def test_a_baseline_that_is_not_fp32_or_has_not_ended_gets_a_caveat(tmp_path: Path, run: Path, baseline: Path) -> None:
    with session(tmp_path / "cut", compute="fp16") as cut:
        cut.steps(1)
    assert caveats(_context(run)) == caveats(_context(run, baseline)) == []
    assert caveats(_context(run, tmp_path / "cut")) == [
        "the baseline cut computes in fp16, not in FP32",
        "the baseline cut has not ended",
    ]


TASKS = [
    ("pretrain", {}, "nats per token", "pretrain", "sequences of 1024 tokens"),
    ("sft", {}, "nats per token", "sft", "sequences of 1024 tokens"),
    ("sft", {"data.packing": "none"}, "nats per token", "sft", "rows of at most 1024 tokens"),
    ("sft", {"sft.loss": "row"}, "nats per token, mean over rows", "sft, mean over rows", "sequences of 1024 tokens"),
    (
        "dpo",
        {"preference.sft_weight": 0.5},
        "",
        "dpo, sigmoid with beta 0.1, reference precomputed, 0.5 x cross-entropy of the chosen answer",
        "pairs of at most 1024 tokens a side",
    ),
    ("dpo", {"adapter.kind": "lora"}, "", "reference adapter off", "lora, rank 16, alpha 32"),
    (
        "distill",
        {"distill.teacher": "big", "distill.top_k": 8, "distill.ce_weight": 0.5},
        "",
        "distill, forward_kl at temperature 1.0 from big, its 8 likeliest tokens, 0.5 x cross-entropy of the labels",
        "sequences of 1024 tokens",
    ),
    ("classify", {"classify.kind": "regression"}, "mean squared error", "classify, regression", "rows of at most 1024"),
    ("classify", {"classify.kind": "token"}, "nats per label", "classify, token", "rows of at most 1024 tokens"),
    ("classify", {}, "nats per row", "classify, sequence", "rows of at most 1024 tokens"),
    ("mlm", {"mlm.whole_word": False}, "nats per token", "mlm, 15% of the tokens chosen", "sequences of 1024 tokens"),
    ("seq2seq", {"data.target_length": 64}, "nats per token", "seq2seq", "1024 tokens and 64 of the target"),
]


@pytest.mark.parametrize(("task", "given", "unit", "said", "batch"), TASKS)
def test_the_report_says_what_was_minimised(tmp_path, task, given, unit, said, batch) -> None:
    (tmp_path / "rows.jsonl").touch()
    data = f"{{source: jsonl, path: {tmp_path}/rows.jsonl, tokenizer: bytes}}"
    (tmp_path / "run.yaml").write_text(f"model: {{name_or_path: owner/base}}\ndata: {data}\n")
    overrides = [f"{key}={json.dumps(value)}" for key, value in {"task": task, **given}.items()]
    overrides += ["data.sequence_length=1024"]
    config = settle_task(load_config(tmp_path / "run.yaml", overrides, None))
    assert loss_unit(config) == unit
    folder = RunDir(tmp_path / "run")
    with session(folder.path, loss_unit=unit) as run:
        run.steps(2)
        run.event("eval", loss=900.5, perplexity=None)
    folder.write_inputs(to_dict(config), {}, {})
    page = report_of(folder)
    assert said in page and batch in page
    assert f"| training loss{f' ({unit})' if unit else ''} |" in page
    assert f"| 900.5000{f' {unit}' if unit else ''} at " in page
