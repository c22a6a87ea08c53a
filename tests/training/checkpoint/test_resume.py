"""Jobs that break off at random or in the middle of a save end as one does that nothing disturbed."""

import json
import os
import random

import pytest

from config.cli import REPOSITORY
from data.text.prepare import prepare
from tests.support.jobs import chaos
from tests.support.jobs.chaos import ON_EVERY_RANK, ON_MAIN, Kill
from tests.support.jobs.launches import command, finish, last_attempts, start
from tests.training.checkpoint import resume_cases as cases

FP16_MANIFEST = {
    "default": "fp16",
    "rules": [{"match": "*.self_attn", "compute": "fp32", "reason": "torch's attention with dropout, on a CPU"}],
}
HIT = "model.layers.0.mlp.up_proj"
SCALE = ["precision.loss_scale.initial=256", "precision.loss_scale.window=3", "precision.loss_scale.hysteresis=2"]
OVERFLOWS = ["faults=[{kind: inf_gradient, step: 3, rank: 1}, {kind: inf_gradient, step: 6}]"]

JOBS = {
    "FP16, ZeRO-2, overflows": [
        *("deepspeed.config=ds_configs/zero2_fp16.json", "precision.compute=fp16"),
        *SCALE,
        *OVERFLOWS,
    ],
    "FP32, ZeRO-1, LAMB": [
        "deepspeed.config=ds_configs/zero1_fp32.json",
        "precision.compute=fp32",
        "optimizer.name=lamb",
    ],
    "BF16, ZeRO-3, a cut learning rate": [
        *("deepspeed.config=ds_configs/zero3_bf16.json", "precision.compute=bf16"),
        *("faults=[{kind: nan_gradient, step: 4}]", "guard.reactions=[cut_lr, abort]", "guard.cut_lr_steps=4"),
    ],
    "FP32, ZeRO-3, Muon": [
        *("deepspeed.config=ds_configs/zero3_fp32.json", "precision.compute=fp32", "optimizer.name=muon"),
        "optimizer.groups=[{match: model.layers.1.*, learning_rate: 1e-3}]",
    ],
    "FP16 manifest, ZeRO-2, a promotion": [
        *("deepspeed.config=ds_configs/zero2_fp32.json", "precision.path=manifest", "precision.compute=fp32"),
        "precision.manifest={folder}/fp16.json",
        *SCALE,
        f"faults=[{{kind: inf_gradient, step: 3, module: {HIT}}}, {{kind: inf_gradient, step: 4, module: {HIT}}}]",
        *("guard.reactions=[skip, promote, abort]", "guard.max_consecutive_skips=2", "guard.promote_to=bf16"),
    ],
    "BF16, ZeRO-2, offloaded": ["deepspeed.config=ds_configs/zero2_bf16_offload.json", "precision.compute=bf16"],
}

UNHEALTHY = {
    "FP16, ZeRO-2, overflows": [3, 6],
    "BF16, ZeRO-3, a cut learning rate": [4],
    "FP16 manifest, ZeRO-2, a promotion": [3, 4],
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A text of little more than five global batches, so that jobs go through it twice, and a manifest."""
    folder = tmp_path_factory.mktemp("resume")
    (folder / "text").mkdir()
    letters = random.Random(0)
    for index in range(11):
        (folder / "text" / f"{index}.txt").write_text("".join(letters.choices("abcdefgh ", k=130)))
    (folder / "fp16.json").write_text(json.dumps(FP16_MANIFEST))
    prepare(cases.resolve(str(folder), "prepared", JOBS["FP32, ZeRO-1, LAMB"]).config.data, progress=False)
    return folder


@pytest.mark.one_in(4)
@pytest.mark.parametrize("what", JOBS)
def test_a_job_that_breaks_off_ends_as_one_that_does_not(pair, folder, what):
    """Two breaks in the middle of an accumulation or between two; losses, scale, masters, moments, guard, dice."""
    overrides = [item.replace("{folder}", str(folder)) for item in JOBS[what]]
    draw = random.Random(what)
    breaks = (draw.randrange(4, 9), draw.randrange(4, 9))  # four passes to a checkpoint
    skipped = UNHEALTHY.get(what, [])
    whole, record = cases.ends_as_whole(pair, folder, what, overrides, breaks=breaks, skipped=skipped)
    assert len(record) == cases.STEPS
    assert (record[4]["lr"] < 0.6 * record[2]["lr"]) == ("cut" in what)
    promoted = [name for _, modules in whole[0]["promotions"]["by_step"] for name in modules]
    assert promoted == ([HIT] if "promotion" in what else [])


def test_a_run_that_is_only_timed_leaves_out_the_last_save(pair, folder):
    """A periodic save that falls on the last step as well; what was saved before stays."""
    overrides = [*JOBS["BF16, ZeRO-2, offloaded"], "checkpoint.at_end=false", "checkpoint.every_steps=5"]
    ends = pair.run(cases.job, folder=str(folder), name="timed", overrides=overrides, passes=None)
    assert [(end["exit_code"], end["progress"].step) for end in ends] == [(0, cases.STEPS)] * 2
    assert [path.name for path in (folder / "runs/timed/checkpoints").glob("step-*")] == ["step-5"]


ROUNDS = int(os.environ.get("CHAOS_ROUNDS", "1"))


def test_a_kill_at_any_phase_of_a_save_loses_nothing_that_was_published(tmp_path):
    """22 s on two busy cores."""
    kills = [
        Kill("write", rank=1, count=20),
        Kill("written", rank=0),
        Kill("sealed"),
        Kill("replacing"),
        Kill("latest"),
        Kill("dropping", alone=False),
        Kill("named"),
    ]
    survived = chaos.kill_again_and_again(tmp_path, kills, stage=2, compute="bf16")
    assert sum(survived.values()) == len(kills)


@pytest.mark.chaos
@pytest.mark.parametrize(("stage", "compute"), [(1, "fp16"), (2, "bf16"), (3, "bf16"), (3, "fp32")])
def test_a_kill_at_every_phase_on_every_rank(tmp_path, stage, compute):
    draw = random.Random(stage)
    kills = [Kill(phase, rank=rank, alone=draw.random() < 0.5) for phase in ON_EVERY_RANK for rank in (0, 1)]
    kills += [Kill(phase, alone=draw.random() < 0.5) for phase in ON_MAIN]
    kills += [Kill("write", rank=draw.randrange(2), count=draw.randrange(2, 40)) for _ in range(6)]
    kills += [Kill("flush", rank=draw.randrange(2), count=2) for _ in range(2)]
    draw.shuffle(kills)
    survived = chaos.kill_again_and_again(tmp_path, kills, stage=stage, compute=compute)
    print(f"\nZeRO-{stage} {compute}: {sum(survived.values())} kills survived of {len(kills)} tried: {survived}")


@pytest.mark.chaos
@pytest.mark.parametrize("round_", range(ROUNDS))
def test_kills_at_random_times(tmp_path, round_):
    kills = chaos.random_kills(24, seed=round_, within=0.25)
    survived = chaos.kill_again_and_again(tmp_path, kills, stage=2, compute="bf16")
    print(f"\nat random: {sum(survived.values())} kills survived of {len(kills)} tried")


@pytest.mark.chaos
def test_whole_jobs_killed_at_one_phase_after_another_end_as_one_that_was_not(tmp_path):
    """torchrun and train.py as users start them."""
    finish(command("torchrun", tmp_path, "undisturbed"))
    # The last three leave the saves of steps 2, 4 and 6 behind: after them there is nothing left to kill.
    kills = [("written", 1), ("sealed", 0), ("write", 0), ("renamed", 0), ("done", 0), ("dropping", 0)]
    strikes = 0
    for phase, rank in kills:
        given = command("torchrun", tmp_path, "disturbed", "run.steps=6")
        at = given.index(str(REPOSITORY / "train.py"))
        killed = [*given[:at], "-m", "tests.support.jobs.chaos_train", f"{phase}:{rank}:1:2", *given[at + 1 :]]
        job = start(killed)
        output, _ = job.communicate(timeout=240)
        assert job.returncode != 0, output
        strikes += "Signal 9" in output or "SIGKILL" in output
    finish(command("torchrun", tmp_path, "disturbed"))
    assert strikes == len(kills)
    assert last_attempts(tmp_path, "disturbed") == last_attempts(tmp_path, "undisturbed")
    print(f"\nwhole jobs: {strikes} kills survived of {len(kills)} tried")
