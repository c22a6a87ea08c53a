"""A SIGKILL in the middle of a save: the next job goes on from a whole checkpoint, with the masters it should have."""

from __future__ import annotations

from tests.training import chaos
from tests.training.chaos import Kill


def test_a_kill_at_any_phase_of_a_save_loses_nothing_that_was_published(tmp_path):
    """22 s on two busy cores; `make chaos` kills at every phase on every rank, and at random."""
    chaos.preload()
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
