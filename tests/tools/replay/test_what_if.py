"""A failed step under another precision, and steps of ranks that share matrices, made again to the bit."""

import json
import re
from pathlib import Path

import pytest

from config.cli import REPOSITORY
from config.command_line import read_command_line
from config.errors import UserError
from precision.guard import Judgement, Verdict
from tests.support.jobs.launches import command, events, finish, replay
from tests.support.marks import slow
from tests.support.runs.long_record import STEPS, peak_memory, write_long_record
from tests.tools.replay.test_bisect import bisected
from tools.replay.command import main
from tools.replay.recorded import read_recorded
from tools.replay.what_if import Tried, compared, numbers, under, verdict

MODULE = "model.layers.1.mlp.down_proj"
FP16 = ["precision.compute=fp16", "deepspeed.config=ds_configs/zero2_fp16.json", "evaluate.every_steps=0"]
SHORT = [*FP16, "generate.tokens=0", "telemetry.every_steps=0", "schedule.warmup_steps=0", "checkpoint.every_steps=1"]
GROWS = [
    "model.config.initializer_range=1.0",
    f"optimizer.groups=[{{match: {MODULE}.weight, learning_rate: 200.0, weight_decay: 0.0}}]",
    "schedule.name=constant",
    "precision.loss_scale.initial=64",
    "precision.loss_scale.hysteresis=1",
    "checkpoint.keep=9",
    "run.steps=4",
]
"""Overrides under which MODULE's outputs exceed 65504 from its second step on; FP32 and BF16 can hold them."""


@pytest.fixture(scope="module")
def overflowed(tmp_path_factory):
    """The folder of a run that ends for it."""
    folder = tmp_path_factory.mktemp("what_if")
    finish(command("python", folder, "large", *SHORT, *GROWS, "guard.reactions=[abort]"), exit_code=3)
    assert [event["applied"] for event in events(folder, "large", "step")] == [True, False]
    return folder


def manifest(folder: Path, wide: str) -> str:
    """Projections in FP16, those that `wide` matches and all else in FP32."""
    rules = [("*_proj", "fp16"), (wide, "fp32")]
    text = {"default": "fp32", "rules": [{"match": m, "compute": c, "reason": "a test"} for m, c in rules]}
    path = folder / f"{wide.rpartition('.')[2]}.json"
    path.write_text(json.dumps(text))
    return f"precision.manifest={path}"


def tried_under(folder: Path, name: str, step: int, *overrides: str, exit_code: int, ranks: int = 1) -> list[str]:
    """The lines that a what-if prints."""
    run = ["python", "-m", "tools.replay", str(folder / "runs" / name), "--step", str(step)]
    return finish([*run, "--what-if", *overrides], exit_code=exit_code, ranks=ranks).splitlines()


def test_the_wide_module_survives_as_a_run_resumed_under_that_manifest_does(overflowed):
    given = manifest(overflowed, "*.down_proj")
    before = sorted((overflowed / "runs" / "large").rglob("*"))
    lines = tried_under(overflowed, "large", 2, given, exit_code=0)
    assert sorted((overflowed / "runs" / "large").rglob("*")) == before
    assert "21 masters carried over" in lines[0] and "checkpoints/step-1" in lines[0]
    assert "survived: step 2 is applied" in lines[-1] and "recorded: ABORT (loss nan" in lines[-1]
    assert "applied after it: 2 of 2 steps" in lines[-1]
    resume = [f"run.resume={overflowed}/runs/large/checkpoints/step-1", "precision.compute=auto"]
    only = [text for text in SHORT if not text.startswith(("precision.compute", "deepspeed.config"))]
    job = command("python", overflowed, "resumed", *only, *GROWS, *resume, "precision.path=manifest", given)
    finish([text for text in job if text != "precision.compute=fp32"])
    truth = events(overflowed, "resumed", "step")
    assert [event["step"] for event in truth] == [2, 3, 4]
    recorded = events(overflowed, "large", "step")[1]
    expected = [f"step {event['step']}: {numbers(event)}, applied; not recorded" for event in truth[1:]]
    first = f"step 2: {numbers(truth[0])}, applied; recorded: {numbers(recorded)}, skipped"
    assert [line for line in lines if line.startswith("step ")] == [first, *expected]


def test_an_unrelated_manifest_does_not_and_the_module_is_named(overflowed):
    lines = tried_under(overflowed, "large", 2, manifest(overflowed, "*.q_proj"), exit_code=3)
    assert "not have survived: step 2 is still not finite (loss nan" in lines[-1]
    assert f"rank 0, {MODULE}: " in lines[-1] and "inf in its activation" in lines[-1]


@pytest.mark.slow
def test_a_lower_scale_helps_gradients_and_not_activations(overflowed):
    lines = tried_under(overflowed, "large", 2, "precision.loss_scale.initial=2", exit_code=3)
    assert f"rank 0, {MODULE}: " in lines[-1] and "at loss scale 2)" in lines[-1]
    lines = tried_under(overflowed, "large", 2, "precision.compute=bf16", exit_code=0)
    assert "precision.compute fp16 -> bf16" in lines[0]
    static = ["precision.loss_scale.policy=static", "precision.loss_scale.initial=16777216", "guard.reactions=[abort]"]
    finish(command("python", overflowed, "scaled", *SHORT, *static, "run.steps=3"), exit_code=3, ranks=2)
    scale = "precision.loss_scale.initial=256"
    lines = tried_under(overflowed, "scaled", 1, scale, exit_code=0)  # which starts both processes itself
    assert "applied after it: 2 of 2 steps" in lines[-1] and "at loss scale 256" in lines[-1]


def step(number, loss=2.0, *, applied=True, position=None, scale=1.0):
    at = number - 1 if position is None else position
    norm = 1.0 if applied else float("inf")
    fields = {"loss": loss, "grad_norm": norm, "loss_scale": scale, "applied": applied, "position": at}
    return {"event": "step", "step": number, **fields}


def test_telemetry_is_not_held_to_find_a_step(tmp_path):
    size = write_long_record(tmp_path / "events.jsonl")
    with peak_memory() as peak, pytest.raises(UserError, match=f"--step 999: .* end at step {STEPS}"):
        main.__wrapped__([str(tmp_path), "--step", "999"])
    assert peak[0] < size / 4


START = {"event": "run_start", "zero_stage": 2, "compute": "fp16", "world_size": 1}
INCIDENT = {"event": "incident", "step": 2, "verdict": "ROLLBACK"}


def test_the_record_of_an_attempt_ends_where_the_run_went_back():
    first, failed, again = step(1), step(2, applied=False), step(2, position=2)
    trace = [START, first, failed, INCIDENT, again, step(3, position=3), step(4, position=5)]
    found = read_recorded(trace, 2)
    assert found.steps == [first, failed] and found.incident is INCIDENT and found.after == []
    causes = [{"event": "nonfinite", "step": 2, "rank": rank} for rank in range(40)]
    found = read_recorded([*trace[:3], *causes, *trace[3:]], 2)
    assert found.incident is INCIDENT
    found = read_recorded([START, first, again, *trace[5:]], 2)
    assert found.incident is None
    assert [event["step"] for event in found.after] == [3], "step 4 left a batch out"


FINE = Judgement(Verdict.STEP)
ROUTINE = Judgement(Verdict.SKIP, "overflow", routine=True)
REFUSED = Judgement(Verdict.SKIP, "the step is not finite")


@pytest.mark.parametrize(
    ("judgements", "incident", "survives", "words"),
    [
        ([FINE, FINE, FINE], True, True, "step 2 is applied"),
        ([FINE, REFUSED, FINE], True, False, "step 2 is still not finite"),
        ([FINE, FINE, REFUSED], True, False, "step 3 is not finite"),
        ([ROUTINE, ROUTINE, FINE], True, True, "step 2 overflows, which the loss scale handles"),
        ([FINE, ROUTINE, FINE], False, False, "step 2 is still not finite"),
        ([FINE, FINE, ROUTINE], True, False, "step 3 is not finite"),
    ],
)
def test_a_run_survives_without_incident_and_with_its_last_step_applied(judgements, incident, survives, words):
    recorded = read_recorded([START, step(1), step(2, applied=False), *([INCIDENT] if incident else [])], 2)
    known = {1: recorded.steps[0], 2: recorded.steps[1]}
    tried = [
        Tried(step(number, applied=judgement is FINE), judgement, recorded=known.get(number))
        for number, judgement in enumerate(judgements, start=1)
    ]
    found, text = verdict(tried, recorded)
    assert found is survives and words in text


def test_a_planted_fault_is_named_as_what_no_precision_undoes():
    recorded = read_recorded([START, step(1), step(2, applied=False), INCIDENT], 2)
    tried = Tried(step(2, applied=False), REFUSED, (), [{"kind": "nan_activation"}], recorded.steps[1])
    assert "faults: of the config plants nan_activation there" in verdict([tried], recorded)[1]
    assert compared(tried).endswith("skipped (SKIP); recorded: loss 2, grad norm inf, skipped")


@pytest.mark.parametrize("text", ["optimizer.learning_rate=1", "faults=[]", "model.kernels=torch", "run.seed=1"])
def test_only_precision_may_change(text):
    resolved = read_command_line(["--config", str(REPOSITORY / "config/recipes/demo_fp16.yaml")], {})
    with pytest.raises(UserError, match=text.partition("=")[0]):
        under(resolved, ["precision.compute=bf16", text], {})
    with pytest.raises(UserError, match="is what the run had already"):
        under(resolved, ["precision.compute=fp16"], {})
    assert under(resolved, ["precision.compute=bf16"], {}).compute == "bf16"


def test_mistakes_are_one_line(overflowed, capsys, monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    run = str(overflowed / "runs" / "large")
    assert main([run, "--step", "2", "--steps", "4"]) == 2
    assert main([run, "--step", "2", "--what-if", "batch.global_size=4"]) == 2
    assert main([run, "--bisect", "--what-if", "precision.compute=bf16"]) == 2
    with pytest.raises(SystemExit, match="2"):
        main([run, "--step", "2", "--what-if", "precision.compute=fp17"])
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 4 and "--steps belongs to --what-if" in said[0] and "batch.global_size" in said[1]
    assert "--what-if tries one step" in said[2] and "precision.compute = 'fp17' is not one of" in said[3]


@pytest.mark.slow
def test_a_run_with_dropout_is_repeated_and_tried_with_the_values_it_dropped(tmp_path):
    """Replayed from a checkpoint and from the seed; a key of `precision:` that changes no number changes no step."""
    dropout = "model.config={n_embd: 32, n_layer: 2, n_head: 2, resid_pdrop: 0.1, attn_pdrop: 0.1, embd_pdrop: 0.1}"
    bf16 = ["precision.compute=bf16", "deepspeed.config=ds_configs/zero2_bf16.json", "evaluate.every_steps=3"]
    every = ["run.steps=8", "checkpoint.every_steps=4", "checkpoint.keep=9", "telemetry.every_steps=2"]
    finish(command("python", tmp_path, "drops", "model.architecture=gpt2", dropout, *bf16, *every), ranks=2)
    recorded = {event["step"]: numbers(event) for event in events(tmp_path, "drops", "step")}
    for step, source in ((7, "checkpoints/step-4"), (3, "the seed")):
        lines = replay(tmp_path, "drops", step, ranks=2).splitlines()
        assert source in lines[0] and lines[-1] == "reproduced"
        lines = tried_under(tmp_path, "drops", step, "precision.verify_every_steps=1", exit_code=0, ranks=2)
        same = [f"step {each}: {recorded[each]}, applied; recorded: {recorded[each]}, applied" for each in (step, 8)]
        assert set(same) <= set(lines)


SHARED = ("parallel.tensor=2", "batch.micro_size=4", "telemetry.every_steps=0", "generate.tokens=0")
FAULT = "faults=[{kind: nan_activation, step: 4, rank: 1, module: model.layers.1.mlp.up_proj}]"


@pytest.mark.parametrize("how", [("bf16", 2), slow(("fp32", 0)), slow(("fp16", 3))], ids=str)
def test_a_failed_step_is_reproduced_to_the_bit_with_its_rank_and_module(tmp_path, how):
    compute, stage = how
    given = [f"precision.compute={compute}", f"deepspeed.config=ds_configs/zero{stage}_{compute}.json"]
    job = command("python", tmp_path, "bad", *SHARED, *given, FAULT, "run.steps=4", "evaluate.every_steps=0")
    finish(job, ranks=2)
    cause = events(tmp_path, "bad", "nonfinite")[0]
    assert (cause["rank"], cause["module"]) == (1, "model.layers.1.mlp.up_proj")
    said = replay(tmp_path, "bad", 4, ranks=2)
    assert said.count("as recorded") == 2 and re.search(r"^step 4: loss nan, .*as recorded$", said, re.M), said
    assert "cause: rank 1, model.layers.1.mlp.up_proj" in said
    assert said.rstrip().endswith("\nreproduced"), said


@pytest.mark.slow
def test_a_sound_run_stays_with_its_fp32_twin_and_a_flipped_bit_of_one_slice_is_found(tmp_path):
    given = {"ranks": 2, "exit_code": 0}
    assert bisected(tmp_path, "sound", *SHARED, "run.steps=4", **given)[-1].startswith("the run matches its FP32 twin")
    flip = "faults=[{kind: flipped_bit, place: weight, bit: 14, step: 3, rank: 1, module: model.layers.1.mlp.up_proj}]"
    lines = bisected(tmp_path, "flipped", *SHARED, "run.steps=4", flip, "checkpoint.every_steps=0", ranks=2)
    assert "departs from its FP32 twin at step 3, in model.layers.1.mlp.up_proj" in lines[-1]


@pytest.mark.slow
def test_what_would_have_been_is_what_a_run_resumed_under_it_does(tmp_path):
    grows = [*GROWS, "schedule.warmup_steps=0", "checkpoint.every_steps=1", "run.steps=3"]
    job = command("python", tmp_path, "large", *SHARED, *FP16, *grows, "guard.reactions=[abort]")
    finish(job, exit_code=3, ranks=2)
    assert [event["applied"] for event in events(tmp_path, "large", "step")] == [True, False]
    other = ["precision.compute=fp32", "deepspeed.config=ds_configs/zero2_fp32.json"]
    lines = tried_under(tmp_path, "large", 2, other[0], exit_code=0, ranks=2)
    assert "survived: step 2 is applied" in lines[-1], lines
    resume = f"run.resume={tmp_path}/runs/large/checkpoints/step-1"
    finish(command("python", tmp_path, "resumed", *SHARED, *FP16[2:], *grows, *other, resume), ranks=2)
    truth = events(tmp_path, "resumed", "step")[0]
    assert any(line.startswith(f"step 2: {numbers(truth)}, applied") for line in lines)
