"""Runs whose ranks share matrices: what is recorded of a step is made again to the bit, and its cause found again."""

import re

import pytest

from tests.support.jobs.launches import command, events, finish, replay
from tests.support.marks import slow
from tests.tools.replay.test_bisect import bisected
from tests.tools.replay.test_what_if import tried_under
from tools.replay.what_if import numbers

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
    fp16 = ["precision.compute=fp16", "deepspeed.config=ds_configs/zero2_fp16.json", "evaluate.every_steps=0"]
    grows = ["optimizer.groups=[{match: model.layers.1.mlp.down_proj.weight, learning_rate: 200.0, weight_decay: 0.0}]"]
    grows += ["model.config.initializer_range=1.0", "precision.loss_scale={initial: 64, hysteresis: 1}"]
    grows += ["schedule.name=constant", "schedule.warmup_steps=0", "checkpoint.every_steps=1", "run.steps=3"]
    job = command("python", tmp_path, "large", *SHARED, *fp16, *grows, "guard.reactions=[abort]")
    finish(job, exit_code=3, ranks=2)
    assert [event["applied"] for event in events(tmp_path, "large", "step")] == [True, False]
    other = ["precision.compute=fp32", "deepspeed.config=ds_configs/zero2_fp32.json"]
    lines = tried_under(tmp_path, "large", 2, other[0], exit_code=0, ranks=2)
    assert "survived: step 2 is applied" in lines[-1], lines
    resume = f"run.resume={tmp_path}/runs/large/checkpoints/step-1"
    finish(command("python", tmp_path, "resumed", *SHARED, *fp16[2:], *grows, *other, resume), ranks=2)
    truth = events(tmp_path, "resumed", "step")[0]
    assert any(line.startswith(f"step 2: {numbers(truth)}, applied") for line in lines)
