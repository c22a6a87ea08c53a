"""A SIGKILL in the middle of a save: the next job resumes from a whole checkpoint, with the right masters.

`make chaos` kills at every phase, every rank, at random, and whole jobs; CHAOS_ROUNDS in the environment repeats the
random part, and each round draws other kills.
"""

import os
import random

import pytest

from config.cli import REPOSITORY
from tests.support.jobs import chaos
from tests.support.jobs.chaos import ON_EVERY_RANK, ON_MAIN, Kill
from tests.support.jobs.launches import command, finish, last_attempts, start

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
