"""The parity gate as a user runs it: real jobs, a report, an exit code; and whether the oracle fits into memory."""

import dataclasses
import json
import os
import re
import shutil
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from config.cli import REPOSITORY
from config.errors import UserError
from config.schema import LossScaleSection
from lab.detection.planted import MODULE
from launch.job import launch
from precision.loss_scale import DeepSpeedPolicy, make_policy
from tests.support.jobs import launches
from tests.support.jobs.forked_launcher import forked_launcher
from tests.support.rows.jsonl import change_jsonl, write_jsonl
from tests.support.runs.compare_runs import SCALE, TOKENS_PER_STEP, step_fields
from tools.parity import gate as parity
from tools.parity import jobs as parity_jobs
from tools.parity.gate import main
from tools.parity.jobs import Plan, plan
from tools.parity.judge_runs import Settling
from tools.parity.oracle.rules import loss_scale
from tools.parity.room import _estimate, estimates
from tracking.compare.surviving import read_events
from tracking.jsonl import JsonlSink
from tracking.record import Record
from tracking.run_dir import RunDir
from training.corruption.rates import schedule

DEMO = str(REPOSITORY / "config/recipes/demo.yaml")
NORM = "model.layers.1.post_attention_layernorm"
SMALL = [
    *launches.SMALL,
    *("batch.micro_size=2", "evaluate.every_steps=0", "evaluate.batches=4", "parity.points=2"),
    "parity.price_per_device_hour=3",
]


def given(folder, *overrides):
    """The overrides of a small gate on a run that saves into a store and is tracked."""
    store = [f"checkpoint.dir=file://{folder}/store", "checkpoint.storage_options={auto_mkdir: true}"]
    return [*SMALL, f"data.cache_dir={folder.parent}/cache", *store, "tracking.sinks=[csv]", *overrides]


@contextmanager
def forked(folder, *overrides, steps=12, ranks=2, through=()):
    """The jobs of a small gate, whose ranks are forked. through: what their programs are started by."""
    with forked_launcher(ranks) as launcher:
        jobs = {"folder": folder, "steps": steps, "processes": ranks, "launcher": [*launcher, *through]}
        yield parity.plan(DEMO, given(folder, *overrides), **jobs)


@pytest.fixture(scope="module")
def judged(folder):
    """A gate that passes, and its FP32 runs."""
    with forked(folder / "good", "parity.oracle_steps=3") as chosen:
        references = parity.train_references(chosen)
        return parity.gate(chosen, references=references), references


def test_bf16_passes_and_the_report_says_under_which_conditions(folder, judged):
    found, _ = judged
    assert found == json.loads((folder / "good/parity.json").read_text())
    assert found["verdict"] == "parity"
    assert not found["failed"]
    assert not (folder / "good/store").exists(), "the store is that of the user's own run"
    assert not list(folder.rglob("metrics.csv")), "so are the trackers"
    checks = {check["name"]: check for check in found["checks"]}
    assert checks.keys() >= {"validation_delta", "nonfinite_events", "restored_share", "module_error"}
    assert checks.keys() >= {"gradient_cosine", "update_error"}
    assert all(len(walk["steps"]) == 2 and walk["recorded_loss"] == walk["steps"][0]["loss"] for walk in found["walks"])
    runs = found["trajectories"]
    assert runs["candidate"][0]["steps"] == runs["fp32"][0]["steps"] == list(range(1, 13))
    assert 0 < abs(runs["candidate"][0]["losses"][-1] - runs["fp32"][0]["losses"][-1]) < 0.02
    for quantity in ("step_seconds", "memory_bytes", "tokens_per_second", "cost_per_million_tokens"):
        assert found["bought"][quantity]["ratio"] > 0
    assert (checks["lower_dtypes"]["measured"], checks["lower_dtypes"]["note"]) == (0, "")
    conditions = found["conditions"]
    assert conditions["steps"] == 12
    assert conditions["data"]
    assert conditions["environment"]["versions"]["deepspeed"]
    page = (folder / "good/parity.md").read_text()
    assert page.startswith("# Parity of bf16 with FP32: parity\n")
    assert "bf16 against FP32 over 12 steps, and in single steps at " in page and "checks hold." in page
    for name in ("trajectories.png", "steps.png"):
        assert name in page
        assert (folder / "good" / name).stat().st_size > 10_000


def test_the_run_compares_each_step_and_its_twin_one_in_eight(folder, judged):
    runs = RunDir(folder / "good/runs/candidate-seed-0"), judged[1].twins[0].folder
    half, twin = (
        {event["step"] for event in read_events(run.events) if "gradients" in event.get("checks", ())} for run in runs
    )
    assert 8 in twin and len(twin) < len(half) == 12


def test_a_finished_run_is_kept_for_the_same_command_and_code(judged, monkeypatch):
    """Judging may have been cut off; what was trained by other code or otherwise is made anew."""
    run, clean = judged[1].twins[0], {"commit": "1", "dirty": False}
    folder = run.folder.path.parents[1]
    log = folder / "logs" / f"{run.folder.name}.log"
    command = log.read_text().splitlines()[0].removeprefix("$ ").split(" ")
    recorded = run.folder.environment.read_text()
    chosen, other = (
        parity.plan(DEMO, given(folder, f"parity.oracle_steps={count}"), folder=folder, steps=12, processes=2)
        for count in (3, 2)
    )

    def is_kept(command, chosen=chosen):
        return parity_jobs._is_kept(chosen, run.folder, command)

    try:
        run.folder.environment.write_text(json.dumps({**json.loads(recorded), "git": clean}))
        for git, kept in ((clean, True), ({**clean, "commit": "2"}, False), ({**clean, "dirty": True}, False)):
            monkeypatch.setattr(parity_jobs, "git_state", lambda git=git: git)
            assert is_kept(command) == kept
        monkeypatch.setattr(parity_jobs, "git_state", lambda: clean)
        assert not is_kept([*command, "optimizer.learning_rate=1"])
        assert not is_kept(command, other), "of another config under the same command"
    finally:
        run.folder.environment.write_text(recorded)


def test_a_file_that_changed_under_the_same_command_is_noticed(tmp_path, monkeypatch):
    """The verdict on it would be that of the file before it."""
    monkeypatch.chdir(tmp_path)
    config, manifest, document = (tmp_path / name for name in ("job.yaml", "manifest.json", "zero.json"))
    seen = []
    for seed, regions, printing in ((0, "bf16", 1), (7, "bf16", 1), (7, "llama_mixed", 1), (7, "llama_mixed", 2)):
        config.write_text(Path(DEMO).read_text().replace("seed: 0", f"seed: {seed}", 1))
        manifest.write_text((REPOSITORY / f"config/manifests/{regions}.json").read_text())
        content = json.loads((REPOSITORY / "ds_configs/zero2_fp32.json").read_text())
        document.write_text(json.dumps({**content, "steps_per_print": 100 * printing}))
        given = ["precision.compute=auto", "precision.manifest=manifest.json", f"deepspeed.config={document}"]
        seen += [parity.plan("job.yaml", given, folder=tmp_path, processes=1).inputs for _ in range(2)]
    assert [seen.index(each) for each in seen] == [0, 0, 2, 2, 4, 4, 6, 6]


def copied(run, folder):
    """A copy of a run, to be changed."""
    return dataclasses.replace(run, folder=RunDir(shutil.copytree(run.folder.path, folder / "run")))


def test_what_both_runs_share_is_judged_outside_of_the_engine(folder, judged, tmp_path):
    """The twin's steps recomputed, as they were recorded and with one loss that is off by what BF16 would hide."""
    found, references = judged
    [check] = [check for check in found["checks"] if check["name"] == "oracle"]
    assert check["passed"] and 0 < check["measured"] < 0.5 and "bound" in check["where"]
    point = found["walks"][1]["point"]
    assert f"recomputed from its masters: step {point + 1}" in check["note"]
    assert "masters at the start: checksum" in check["note"]
    assert "times the run's own" in check["note"]
    for name in ("fp32_evaluation", "evaluation"):
        [judged_evaluation] = [check for check in found["checks"] if check["name"] == name]
        assert judged_evaluation["passed"] and 0 < judged_evaluation["measured"] < 0.5
    assert f"evaluation compared: step {point}; evaluation compared: step 12" in judged_evaluation["note"]
    assert "recomputed outside of the engine" in (folder / "good/parity.md").read_text()

    def off_at_step_2(event):
        if event["event"] == "step" and event["step"] == 2:
            event["loss"] *= 1 + 1e-4

    twin = copied(references.twins[0], tmp_path)
    change_jsonl(twin.folder.events, off_at_step_2)
    check, of_evaluations = parity.outside(twin, lambda line: None, "fp32_evaluation", steps=3)
    assert not check.passed and check.measured > 10 and check.where.startswith("loss 1.0")
    assert of_evaluations.passed


def test_what_the_oracle_does_not_know_is_said_and_what_it_cannot_read_fails(tmp_path, judged):
    twin = copied(judged[1].twins[0], tmp_path)
    folder, text = twin.folder, twin.folder.config.read_text()
    folder.config.write_text(text.replace("balance_loss: 0.0\n", "balance_loss: 0.1\n"))
    check, of_evaluations = parity.outside(twin, lambda line: None, "fp32_evaluation", steps=3)
    assert check.passed and "model.balance_loss = 0.1: the oracle does not compute it" in check.note
    assert check.where.startswith("loss ") and "step 1" in check.where
    assert of_evaluations.passed and of_evaluations.measured > 0
    folder.config.write_text(text + "\nparallel: {sequence: 2}\n")
    [check] = parity.outside(twin, lambda line: None, "fp32_evaluation", steps=3)
    assert not check.passed and "parallel" in check.note
    folder.config.write_text(text)
    events = [json.loads(line) for line in folder.events.read_text().splitlines()]
    kept = [event for event in events if event["event"] != "run_start"]  # as nothing that ran would leave it
    write_jsonl(folder.events, kept)
    [check] = parity.outside(twin, lambda line: None, "fp32_evaluation", steps=3)
    assert (check.name, check.passed, check.note) == ("oracle", False, "StopIteration")


def test_a_sabotaged_norm_fails_by_name(folder, judged):
    """The same job with a norm that squares in FP16, on one process, compared with the same FP32 runs."""
    defect = f"{{kind: fp16_norm, module: {NORM}, factor: 30000}}"
    with forked(folder / "bad", ranks=1, through=["-m", MODULE, defect]) as chosen:
        found = parity.gate(chosen, references=judged[1])
    assert found["verdict"] == "no parity"
    assert "module_error" in found["failed"]
    assert found["first_parting"]["module"] == NORM
    dtypes = {check["name"]: check for check in found["checks"]}["lower_dtypes"]
    assert (dtypes["passed"], dtypes["modules"]) == (False, [NORM])
    assert dtypes["note"] == f"norm statistics in fp16: {NORM}"
    assert NORM in (folder / "bad/parity.md").read_text().split("## Checks")[0]


@pytest.mark.slow
@pytest.mark.parametrize(("window", "failed"), [(1000, set()), (2, {"skipped_share"})])
def test_a_scale_that_settles_is_told_from_one_that_keeps_skipping(tmp_path, window, failed):
    """A loss scale from 2^24, in 24 steps: the first run skips some at the start, the second every third step later."""
    scale = f"precision.loss_scale={{initial: 16777216, window: {window}, hysteresis: 1}}"
    with forked(tmp_path / "fp16", "precision.compute=fp16", "parity.points=1", scale, steps=24) as chosen:
        found = parity.gate(chosen)
    assert set(found["failed"]) >= failed and bool(found["failed"]) is bool(failed), found["failed"]
    checks = {check["name"]: check for check in found["checks"]}
    assert checks["skipped_share"]["passed"] is not bool(failed)
    (twin,) = (tmp_path / "fp16/runs").glob("fp32-without-*-seed-0")
    lost = [event["step"] for event in launches.events(tmp_path / "fp16", twin.name, "fault")]
    steps = launches.events(tmp_path / "fp16", "candidate-seed-0", "step")
    assert lost and lost == [event["step"] for event in steps if not event["applied"]]
    assert "with the updates that the loss scale lost" in checks["validation_delta"]["note"]
    assert abs(checks["validation_delta"]["measured"]) < 2e-3


def test_the_skips_of_a_settling_loss_scale_are_read_from_the_events(tmp_path):
    changes = [(65536, 65536, "hysteresis"), (65536, 32768, "overflow")]
    record = Record([JsonlSink(tmp_path / "events.jsonl")])
    for step in range(1, 7):
        where = {"step": step, "tokens": step * TOKENS_PER_STEP}
        record.event("step", **where, **step_fields(step, applied=step > 2))
        if step <= 2:
            old, new, reason = changes[step - 1]
            record.scale(**where, previous=old, new=new, reason=reason, **SCALE)
    record.close()
    found = parity_jobs.trajectory(parity_jobs.Run(RunDir(tmp_path), True, "", None))
    assert (found.skipped, found.settling, found.lost) == (2, Settling([1, 2], 65536, 32768), [1, 2])


def test_what_a_restored_run_has_to_repeat_is_read_from_the_events_without_incidents(tmp_path):
    recorded = {"lr": 0.1, "position": 4, "sample_ids_sha256": "a"}
    rows = [{"event": "step", "step": 5, "loss": 2.0, **recorded}, {"event": "incident", "step": 9}]
    point = {"point": 4, "restored": True, "steps": [{"step": 5}]}
    for count, expected in ((1, recorded), (2, {})):
        write_jsonl(tmp_path / "events.jsonl", rows[:count])
        [walk] = parity_jobs.walks_of([point], parity_jobs.Run(RunDir(tmp_path), True, "", None))
        assert (walk.recorded_loss, walk.recorded) == (2.0, expected)


def test_the_warm_up_shrinks_with_the_steps_and_points_fit(folder):
    chosen = parity.plan(DEMO, [], folder=folder, steps=45, processes=2)
    assert chosen.resolved.config.schedule.warmup_steps == 4
    draws = {
        tuple(parity.plan(DEMO, [f"parity.draw={draw}"], folder=folder, steps=45, processes=2).points)
        for draw in range(8)
    }
    assert len(draws) > 4 and tuple(chosen.points) in draws
    assert all(first == 0 and 14 <= second < 29 <= third < 44 for first, second, third in draws)
    for steps, count in ((10, 4), (2, 3), (1, 3)):
        given = [f"parity.points={count}"]
        points = parity.plan(DEMO, given, folder=folder, steps=steps, processes=2).points
        assert points == sorted(set(points)) and points[0] == 0 and points[-1] < steps


def test_rates_and_scales_that_no_rule_gives_are_named(tmp_path):
    """A learning rate one step late, a scale that grows one step early; up to an incident, which changes both."""
    given = ["precision.compute=fp16", "precision.loss_scale={initial: 1024, window: 4}", "schedule.warmup_steps=2"]
    config = parity.plan(DEMO, given, folder=tmp_path, steps=12, processes=2).resolved.config
    rate = schedule(config.schedule, peak=config.optimizer.learning_rate, total=12)
    scale = loss_scale(config.precision.loss_scale)
    by_rule = [{"step": n + 1, "lr": rate(n), "loss_scale": scale(False)} for n in range(12)]
    steps = [{"event": "step", "applied": True, **row} for row in by_rule]
    start = {"event": "run_start", "step": 0, "compute": "fp16", "regions": None}
    grown = next(row["step"] for row in by_rule if row["loss_scale"] == 2048)

    def measured(*events, **wrong):
        rows = [start, *({**step, **wrong.get(f"at_{step['step']}", {})} for step in steps), *events]
        return parity.by_rule(write_jsonl(tmp_path / "events.jsonl", rows), config)

    assert measured().passed
    late = measured(at_7={"lr": steps[5]["lr"]})
    assert (late.passed, late.where) == (False, "learning rate at step 7")
    early = measured(**{f"at_{grown - 1}": {"loss_scale": 2048.0}})
    assert early.where == f"loss scale at step {grown - 1}"
    assert measured({"event": "incident", "step": 7}, at_7={"lr": steps[5]["lr"]}).passed
    adaptive = dataclasses.replace(config.precision, loss_scale=LossScaleSection(policy="adaptive"))
    config = dataclasses.replace(config, precision=adaptive)
    assert (measured().passed, measured().note) == (True, "loss scale not judged: policy adaptive")


@pytest.mark.parametrize("section", [LossScaleSection(), LossScaleSection(policy="static", initial=7.0)])
def test_a_rule_that_no_run_is_long_enough_to_show_is_replayed(section, monkeypatch):
    assert parity.unlike_rule(section) == (0.0, "")
    shorter = lambda given: make_policy(dataclasses.replace(given, window=999))  # noqa: E731
    plants = ((parity, "make_policy", shorter), (DeepSpeedPolicy, "_FACTOR", 4.0))
    for plant in plants if section.policy == "deepspeed" else ():
        with monkeypatch.context() as planted:
            planted.setattr(*plant)
            off, where = parity.unlike_rule(section)
        assert off >= 0.5 and where.endswith("of a drawn pattern")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config", DEMO, "parity.validation_delta=0"], "parity.validation_delta"),
        (["--config", DEMO, "--steps", "0"], "--steps: 0 is not"),
        (["--config", DEMO, "parity.point=3"], "did you mean"),
        (["--config", DEMO, "--processes", "3"], "batch.global_size"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["--config", DEMO, "--effect", "0.5%"], "no report of the gate"),
        (["--config", DEMO, "--effect", "0"], "--effect: 0 is not between"),
        (["--config", DEMO, "--effect", "1%", "--power", "high"], "--power: high is not between"),
    ],
)
def test_bad_input_is_one_line_and_starts_nothing(tmp_path, refusal, arguments, words):
    assert words in refusal(parity.main, [*arguments, "--report", str(tmp_path / "report")])
    assert not (tmp_path / "report").exists()


def test_how_many_pairs_find_a_shift_is_planned_from_a_report(tmp_path, capsys):
    known = {"scatter": 0.004, "controls": 2, "degrees": 3}
    (tmp_path / "parity.json").write_text(json.dumps({"confidence": known}))
    plan = ["--config", DEMO, "--report", str(tmp_path), "--effect"]
    assert parity.main([*plan, "0.5%", "--power", "0.8"]) == parity.main([*plan, "0.01%"]) == 0
    said = capsys.readouterr().out
    assert "0.500% is found with probability 0.8 by parity.seeds=7 parity.controls=2" in said
    assert "0.010% is found with probability 0.9 by no number of pairs up to 10,000" in said


def test_a_twin_that_does_not_run_is_reported_with_its_error_line(tmp_path):
    (tmp_path / "rows.jsonl").write_text("no JSON\n")
    rows = ("data.source=jsonl", f"data.path={tmp_path}/rows.jsonl")
    said = r"FP32 twin failed: error: .*rows.jsonl.*; see"
    with forked(tmp_path / "report", *rows, ranks=1) as chosen, pytest.raises(UserError, match=said):
        parity_jobs.train_twin(chosen, 0)


def test_a_model_that_fp16_cannot_hold_is_refused_with_its_module_before_its_twin_trains(tmp_path):
    config = "{hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 2, %s}"
    huge = ["model.architecture=granite", f"model.config={config % 'residual_multiplier: 1.0e+9'}"]
    huge += ["precision.compute=fp16", "parity.whole_steps=0"]
    said = "took no step: .*an activation of model.layers.0.* exceeds FP16's 65,504.*use precision.compute=bf16"
    with forked(tmp_path / "report", *huge, ranks=1) as chosen, pytest.raises(UserError, match=said):
        parity.gate(chosen)
    assert [path.name for path in (tmp_path / "report/runs").iterdir()] == ["candidate-seed-0"]


def test_a_launcher_that_does_not_exist_is_told(tmp_path):
    with pytest.raises(UserError, match="there is no program nolauncher"):
        launch(["-m", "this"], processes=2, log=tmp_path / "log", launcher=["nolauncher"])


HUGE = "model.config={hidden_size: 65536, intermediate_size: 65536, num_hidden_layers: 2, num_attention_heads: 64}"
"""A model of 50 billion parameters, more than any machine holds in FP32 beside an engine."""


def of(folder: Path, *overrides: str) -> Plan:
    return plan(DEMO, ["data.tokenizer=bytes", *overrides], folder=folder, steps=20, processes=2)


def test_what_cannot_fit_is_one_line_and_trains_nothing(tmp_path: Path, refusal: Any) -> None:
    line = refusal(main, ["--config", DEMO, "--report", str(tmp_path / "out"), "data.tokenizer=bytes", HUGE])
    assert "the FP32 twin would take at least" in line and "give the model fewer layers" in line
    assert not (tmp_path / "out").exists()


def test_jobs_of_a_launcher_are_on_machines_that_are_not_asked(tmp_path: Path) -> None:
    assert list(estimates(dataclasses.replace(of(tmp_path, HUGE), launcher=("somewhere",)))) == []


def test_what_is_needed_is_said_and_what_does_not_fit_now_is_a_warning(tmp_path: Path) -> None:
    said = [line.split(" will take about ")[0] for line in estimates(of(tmp_path))]
    assert [line.removeprefix("warning: ") for line in said] == ["the FP32 twin", "single steps", "the oracle"]
    given = ("the oracle", 4e9, 6e9)
    line = "the oracle will take about 6.0 GB, and 7.0 are free on this machine"
    assert _estimate(*given, 7e9, 8e9, "this machine", "wait") == line
    line = f"warning: {line.replace('7.0', '5.0')}; wait"
    assert _estimate(*given, 5e9, 8e9, "this machine", "wait") == line
    with pytest.raises(UserError, match=r"at least 4\.0 GB, and this machine has 3\.0; wait"):
        _estimate(*given, 2e9, 3e9, "this machine", "wait")


BILLION = str(REPOSITORY / "config/recipes/benchmark_1b.yaml")


def with_cards(folder: Path, monkeypatch: pytest.MonkeyPatch, visible: str, *mebibytes: int | str) -> None:
    """A machine with GPUs of these sizes as nvidia-smi lists them, some of them visible."""
    sizes = " ".join(f"{index}) echo card, 575, {size}, 0, 34, 0, Not Active;;" for index, size in enumerate(mebibytes))
    program = folder / "nvidia-smi"
    listed = f"${{asked:-{' '.join(map(str, range(len(mebibytes))))}}}"
    asked = "asked=$(echo $* | sed -n 's/.*--id=//p' | tr , ' ')"
    program.write_text(f"#!/bin/sh\n{asked}\nfor id in {listed}; do case $id in {sizes} esac; done\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)


def test_a_micro_batch_that_fits_in_16_bits_alone_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_cards(tmp_path, monkeypatch, "0,1", 81559, 81559)
    given = ["batch.micro_size=16", "batch.global_size=32", "data.sequence_length=2048"]
    said = list(estimates(plan(BILLION, given, folder=tmp_path, steps=20)))
    twin, steps, _ = said
    assert re.match(r"warning: the FP32 twin will take about 1\d\d\.\d GB, and 85\.5 are free on a GPU; set a sm", twin)
    assert re.match(
        r"warning: single steps will take about 1\d\d\.\d GB, .* a smaller batch\.micro_size, or give", steps
    )


def test_other_cards_of_a_machine_are_not_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["batch.micro_size=1", "batch.global_size=4", "data.sequence_length=256"]
    with_cards(tmp_path, monkeypatch, "1", 8192, 49140)
    twin, steps, _ = estimates(plan(BILLION, given, folder=tmp_path, steps=20))
    assert twin.startswith("the FP32 twin will") and steps.startswith("single steps will") and "51.5 are free" in twin
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(UserError, match=r"at least \d+\.\d GB, and a GPU has 8\.6; give the model fewer layers"):
        list(estimates(plan(BILLION, given, folder=tmp_path, steps=20)))


def test_cards_without_a_figure_of_their_memory_are_not_estimated(tmp_path: Path, monkeypatch) -> None:
    """Where CPU and GPU share their memory, nvidia-smi prints "[N/A]"."""
    with_cards(tmp_path, monkeypatch, "0", "[N/A]")
    assert list(estimates(of(tmp_path))) == ["memory was not estimated: nvidia-smi reports none for a GPU"]
