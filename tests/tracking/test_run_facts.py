"""A run's facts, report and table say what its events say, also for a crashed or resumed run."""

import json
import math
import random
from pathlib import Path

import pytest

from tests.support.runs.compare_runs import TELEMETRY, TOKENS_PER_STEP, start_fields, step_fields, ticking_clock
from tests.support.runs.report_runs import SessionWriter, report_of, session
from tracking.compare.surviving import read_events
from tracking.jsonl import JsonlSink
from tracking.numbers import loss
from tracking.record import Record
from tracking.report.command import main
from tracking.report.page import results
from tracking.run_dir import RunDir
from tracking.run_facts import Collector, RunFacts, read_facts
from tracking.summary import read_run


def _events(folder: Path) -> Path:
    return folder / "events.jsonl"


def _plainly(path: Path) -> tuple[int, int, int]:
    """(attempts, overflows, non-finite steps) from all events at once: those of a step come before the next step."""
    groups: list[list[dict]] = []
    for event in read_events(path):
        if event["event"] == "step":
            groups.append([event])
        elif groups and event["step"] == groups[-1][0]["step"] and event["event"] != "run_start":
            groups[-1].append(event)
    overflows = nonfinite = 0
    for step, *others in groups:
        kinds = {event["event"] for event in others}
        handled = any(event["event"] == "scale" and event["reason"] in ("overflow", "hysteresis") for event in others)
        broken = not math.isfinite(step["loss"]) or not math.isfinite(step["grad_norm"]) or "nonfinite" in kinds
        if broken and handled and math.isfinite(step["loss"]):
            overflows += 1
        elif broken:
            nonfinite += 1
    return len(groups), overflows, nonfinite


def _at_random(run: SessionWriter, draw: random.Random) -> None:
    match draw.randrange(9):
        case 0:
            run.overflow(reason=draw.choice(["overflow", "hysteresis", None]))
            if draw.random() < 0.5:
                run.event("nonfinite", rank=0, module="m", tensor="gradient", kind="inf", count=1)
        case 1:
            run.overflow(loss=draw.choice([math.nan, math.inf, -math.inf]), reason=draw.choice(["overflow", None]))
        case 2:
            run.steps(1, loss_scale=2.0)
            run.scale("growth")
        case 3:
            run.steps(1)
            run.event("nonfinite", rank=1, module="m", tensor="parameter", kind="nan", count=1)
        case 4:
            run.evaluate(2.0)
            run.step = max(0, run.step - draw.choice([0, 0, 2, 5]))  # a rollback
        case _:
            run.steps(draw.randrange(1, 4))


@pytest.mark.parametrize("seed", range(8))
def test_steps_that_were_not_finite_are_counted_as_a_plain_reading_counts_them(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    for start in (0, draw.randrange(3, 20)):  # the second session repeats steps: abandoned attempts count too
        with session(tmp_path, step=start) as run:
            for _ in range(60):
                _at_random(run, draw)
    run = read_facts(_events(tmp_path), "run")
    overflows, nonfinite = sum(attempt.handled for attempt in run.broken), len(run.nonfinite)
    assert (run.counts["step"], overflows, nonfinite) == _plainly(_events(tmp_path))
    assert overflows > 0 and nonfinite > 0
    bounded = Collector(columns=False)
    for event in read_events(_events(tmp_path)):
        bounded.add(event)
    few = bounded.facts("run", "", None).rare_events
    for kind in ("eval", "scale"):
        survived = run.rare_events.get(kind, [])
        assert [event["step"] for event in survived] == sorted(event["step"] for event in survived)
        assert all(event in survived for event in few.get(kind, [])), "a discarded attempt left something behind"


def _restarted(folder: Path) -> RunFacts:
    """Four sessions: no checkpoint to go on from; restored; started anew by mistake; an older checkpoint taken."""
    with session(folder, time=1e9) as run:
        run.steps(2)
    with session(folder, time=2e9) as run:
        run.steps(4)
        run.save()
    with session(folder, time=3e9, step=4, resumed_from="step-4") as run:
        run.incident("ROLLBACK", rolled_back_to="step-4")
        run.incident("ROLLBACK")
        run.incident("ABORT", reason="the loss is nan; no checkpoint can be loaded: step-4 is damaged")
        run.incident("ABORT", reason="the loss is nan; no checkpoint can be loaded: there is none")
        run.end("preempted", 75)
    with session(folder, time=4e9) as run:
        run.incident("ABORT")
        run.incident("ABORT")
        run.end("aborted", 3)
    with session(folder, time=5e9, step=4, resumed_from="step-4") as run:
        run.event("note", text="passed over checkpoint step-9: rng-rank-1.pt is missing")
        run.event("note", text="a sink was lost")
    return read_facts(_events(folder), "run")


def test_sessions_and_restores(tmp_path: Path) -> None:
    run = _restarted(tmp_path)
    assert [item.restored for item in run.sessions] == [None, None, True, False, False]
    assert run.restores == (1 + 1, 2 + 3), "one rollback of two, and one of three sessions"
    assert [item.end and item.end["status"] for item in run.sessions] == [None, None, "preempted", "aborted", None]
    assert run.end is None and run.sessions[3].aborted == "the loss is nan"
    assert [item.began for item in run.sessions] == [1e9, 2e9, 3e9, 4e9, 5e9]
    assert [item.last for item in run.sessions] == [1e9 + 1, 2e9 + 2.5, 3e9 + 2.5, 4e9 + 1.5, 5e9]


def test_drift_is_the_largest_and_nan_stays(tmp_path: Path) -> None:
    with session(tmp_path) as run:
        for drift in (None, {"maximum": 0.0, "rms": 0.0}, {"maximum": 0.5, "rms": 0.1}, {"maximum": 0.25, "rms": 0.1}):
            run.event("telemetry", **TELEMETRY, drift=drift)
    assert read_facts(_events(tmp_path), "run").heat.drift == (3, 0.5)
    with session(tmp_path) as run:
        for drift in (math.nan, 0.75):
            run.event("telemetry", **TELEMETRY, drift={"maximum": drift, "rms": drift})
    assert math.isnan(read_facts(_events(tmp_path), "run").heat.drift[1])


def test_a_static_loss_scale_is_seen_without_scale_events(tmp_path: Path) -> None:
    with session(tmp_path / "static") as run:
        run.steps(3, loss_scale=128.0)
    with session(tmp_path / "none") as run:
        run.steps(3)
    assert read_facts(_events(tmp_path / "static"), "run").scaled
    assert not read_facts(_events(tmp_path / "none"), "run").scaled


_CONFIG = {
    "run": {"hypothesis": "FP16 with our scaler\nfollows FP32"},
    "model": {"architecture": "llama"},
    "data": {"source": "stdlib", "tokenizer": "bpe:4096", "sequence_length": 512},
    "batch": {"global_size": 8, "micro_size": 2},
    "precision": {"path": "cast"},
}
_ENVIRONMENT = {
    "hostname": "node7",
    "accelerator": {"device": "NVIDIA H100"},
    "versions": {"torch": "2.13.0", "wandb": None},
    "git": {"commit": "0123456789abcdef", "dirty": True},
    "ledger": [
        {"what": "masters", "dtype": "float32", "bytes": 50 * 2**20},
        {"what": "reductions", "dtype": "bfloat16", "bytes": None},
    ],
    "resume_command": "deepspeed train.py --config demo.yaml",
}


@pytest.fixture
def told_run(fp16_run: RunDir) -> RunDir:
    fp16_run.write_inputs(_CONFIG, {"gradient_accumulation_steps": 2}, _ENVIRONMENT)
    return fp16_run


def test_the_report_has_the_dtypes_seen_inside_the_modules_by_the_newest_observation(told_run: RunDir) -> None:
    low = {"what": "norm statistics", "computed": "bf16", "promised": "fp32", "modules": ["model.norm"]}
    blind = {"what": "softmax", "why": "a kernel of its own", "modules": ["model.layers.0.self_attn"]}
    record = Record([JsonlSink(told_run.events)])
    for step, count in ((61, 8), (62, 1)):
        inner = {"computed": {"norm statistics": {"fp32": count, "bf16": 1}}, "lower": [low], "unobserved": [blind]}
        record.event("precision", step=step, tokens=0, flop_share={"bf16": 1.0}, inner=inner)
    record.close()
    page = report_of(told_run, resume_command="train")
    section = page.partition("### Inside the modules")[2].partition("## Resume")[0]
    assert "Seen in step 62" in section
    assert "| norm statistics | fp32 (1); bf16 (1) |" in section
    assert "| softmax | not observable (model.layers.0.self_attn): a kernel of its own |" in section
    assert "- **norm statistics in bf16 where fp32 is promised: model.norm**" in section


def test_the_numbers_are_those_of_the_events(fp16_run: RunDir) -> None:
    run, losses = read_run(fp16_run.path), [step_fields(step)["loss"] for step in range(1, 61)]
    rows, best = dict(results(run)), losses.index(min(losses)) + 1
    assert (
        rows["training loss (nats)"]
        == f"{loss(losses[0])} -> {loss(losses[-1])} (best {loss(min(losses))} at step {best})"
    )
    assert rows["steps"] == "60 attempted, 58 applied, 2 skipped" and rows["tokens"] == f"{60 * TOKENS_PER_STEP:,}"
    assert rows["loss scale"] == "2^16 -> 2^15 (1 x growth, 2 x overflow)"
    assert float(rows["gradient norm"].partition("largest ")[2].partition(";")[0]) < 10, (
        "not that of an overflowed step"
    )
    assert run.wall_seconds == pytest.approx(0.5 * (len(fp16_run.events.read_text().splitlines()) - 1))
    assert (run.verdict.word, run.end["exit_code"], len(run.sessions)) == ("healthy", 0, 1)


def test_the_report_holds_the_page_a_reader_needs(told_run: RunDir) -> None:
    sample = "def f():\n```\n    return 1\n"
    text = report_of(told_run, sample=sample, resume_command="deepspeed train.py --config demo.yaml")
    for part in (
        *("# demo", "> Hypothesis: FP16 with our scaler follows FP32", "**healthy**", "llama, 12,345,678 parameters"),
        *("8 sequences of 512 tokens, micro-batch 2, accumulation 2", "fp16 compute, FP32 masters", "stage 2, 2 proc"),
        *("node7: 2 x NVIDIA H100", "torch 2.13.0", "0123456789ab with local changes"),
        *("60 attempted, 58 applied, 2 skipped", "2^16 -> 2^15 (1 x growth, 2 x overflow)", "245,760"),
        *("perplexity 28.98", "3,072 MiB", "| masters | float32 | 50 MiB |", "| reductions | bfloat16 |  |"),
        *("![", "plots/run.png", "step-60"),
        *("````text\ndef f():\n```\n    return 1\n````", "```bash\ndeepspeed train.py --config demo.yaml\n```"),
    ):
        assert part in text, part
    assert "wandb None" not in text and "None" not in text
    assert (told_run.plots / "run.png").stat().st_size > 30_000


def test_the_report_names_the_sources_of_a_mixture(told_run: RunDir) -> None:
    sources = [{"path": "a.jsonl", "name": "chats", "source": "jsonl"}, {"path": "b", "name": "facts", "source": "hub"}]
    given = {"task": "sft", "data": {"source": "stdlib", "sources": sources}}
    (told_run.path / "config.yaml").write_text(json.dumps(given))
    text = report_of(told_run, sample="", resume_command="x")
    assert "| task | sft |" in text and "| data | chats, jsonl, a.jsonl; facts, hub, b |" in text


def test_a_later_report_keeps_the_sample(told_run: RunDir) -> None:
    report_of(told_run, sample="def sampled(): ...", resume_command="x")
    assert main([str(told_run.path)]) == 0
    text = told_run.report.read_text()
    assert "def sampled(): ..." in text and _ENVIRONMENT["resume_command"] in text


def test_a_sample_has_the_step_of_the_session_that_wrote_it(run_dir: RunDir) -> None:
    for step, status in ((0, "done"), (8, "preempted")):
        with session(run_dir.path, step=step) as run:
            run.steps(8)
            run.end(status)
    assert "Sample after 8 steps" in report_of(run_dir, sample="def f(x):")


def test_samples_at_evaluations_are_shown_in_order(run_dir: RunDir) -> None:
    with session(run_dir.path) as run:
        for sample in ("def aaaa", "def f(x):"):
            run.steps(2)
            run.event("eval", loss=2.0, perplexity=7.4, sample=sample)
    text = report_of(run_dir, sample="def g(y):", resume_command="x")
    places = [
        text.index(part) for part in ("def g(y):", "Samples at evaluations", "At step 2:", "def aaaa", "def f(x):")
    ]
    assert places == sorted(places)


def test_a_crashed_and_resumed_run_is_summarised_as_one(run_dir: RunDir) -> None:
    """Killed within step 9, resumed from step 4; no config, no environment, the pause between does not count."""
    clock = ticking_clock(seconds=1.0)
    for start, stop, pause in ((0, 8, 0.0), (4, 12, 5000.0)):
        record = Record([JsonlSink(run_dir.events)], clock=lambda pause=pause: clock() + pause)
        record.note("at its start, as 0.2 recorded it")
        resumed = f"checkpoints/step-{start}" if start else None
        record.event("run_start", step=start, tokens=start * 10, **start_fields(resumed_from=resumed))
        record.event("note", step=start, tokens=start * 10, text="data: 4 rows")
        for step in range(start + 1, stop + 1):
            record.event("step", step=step, tokens=step * 10, **step_fields(step, loss=10.0 - step + pause / 1e6))
        with run_dir.events.open("a") as file:
            file.write('{"event":"step","st')
    run = read_run(run_dir.path)
    assert (len(run.sessions), len(run.columns), run.columns.tokens[-1]) == (2, 12, 120)
    assert run.wall_seconds == pytest.approx(8 + 8 + 2)
    assert run.columns.loss[-1] == pytest.approx(10.0 - 12 + 0.005)
    text = report_of(run_dir, resume_command="python train.py")
    assert (
        "**killed** since step 12: no process has the run folder" in text
        and "As of step 12, 2023-11-14 23:37 UTC." in text
        and "In 2 sessions." in text
        and "python train.py" in text
        and text.count("data: 4 rows") == 1
    )
