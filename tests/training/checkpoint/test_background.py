"""Saves that are written while training continues: they hold the state at the call, and retention deletes the rest."""

import io
import math

import pytest
import torch

from tests.training.checkpoint import background_cases
from training.checkpoint.retention import Retention, is_read_locked, read_lock
from training.checkpoint.writer import host_copy

MANIFEST = ["precision.path=manifest", "precision.manifest=config/manifests/bf16.json"]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("stage", "compute", "variant", "overrides"),
    [
        (0, "fp32", "", []),
        (1, "fp16", "", []),
        (2, "bf16", "", []),
        (2, "bf16", "_offload", []),
        (3, "bf16", "", []),
        (3, "fp16", "", []),
        (2, "fp32", "", MANIFEST),
    ],
)
def test_the_checkpoint_holds_the_step_it_was_taken_at(pair, tmp_path, stage, compute, variant, overrides):
    """Two steps are made before the first byte is written; going back gives the masters and moments of the call."""
    for result in pair.run(
        background_cases.train_while_it_is_written,
        folder=str(tmp_path),
        stage=stage,
        compute=compute,
        variant=variant,
        overrides=["precision.loss_scale.initial=256", *overrides],
    ):
        assert not result["published before a byte was written"]
        assert result["steps"] == [2] and result["state"] == {"guard": 1}
        assert result["back"] == result["then"] != result["later"]
        assert result["forth"] == result["later"]


def test_a_save_that_comes_before_the_last_one_has_ended_waits_for_it(pair, tmp_path):
    for result in pair.run(background_cases.save_into_a_save, folder=str(tmp_path), background=True):
        assert result["there"] == [False, True]
        assert result["stalls"][0] > 0.3


def test_where_nothing_is_copied_the_call_returns_with_the_checkpoint_on_disk(pair, tmp_path):
    for result in pair.run(background_cases.save_into_a_save, folder=str(tmp_path), background=False):
        assert result["there"] == [True, True]
        assert result["stalls"][0] > 0.4


def test_a_copy_shares_what_was_shared_and_nothing_with_what_it_is_of():
    whole = torch.arange(12.0)
    state = {"a": whole[2:6].view(2, 2), "b": [whole, (whole[::3],)], "c": torch.zeros(0), "d": "text", "e": None}
    before = io.BytesIO()
    torch.save(state, before)
    copied = host_copy(state)
    whole.zero_()
    after = io.BytesIO()
    torch.save(copied, after)
    assert after.getvalue() == before.getvalue()
    copied["b"][0][2] = 77.0
    assert copied["a"][0, 0] == 77.0 and whole[2] == 0.0


def test_what_stays(solo, tmp_path):
    """The newest two, each fifth step, the best two; a loss that is nan or was not measured is never among the best."""
    losses = [5.0, 1.5, math.nan, None, 3.0, 1.0, 2.0, 4.0, None, 9.0, 8.0, 7.0]
    keep = Retention(2, every=5, best=2)
    stays = solo.run(
        background_cases.losses_and_what_stays, folder=str(tmp_path), losses=dict(enumerate(losses, 1)), keep=keep
    )[0]
    assert sorted(stays, key=lambda name: int(name[5:])) == [
        "step-2",
        "step-5",
        "step-6",
        "step-10",
        "step-11",
        "step-12",
    ]


def test_what_is_being_read_stays(solo, tmp_path):
    def save(*steps):
        arguments = {"folder": str(tmp_path), "losses": dict.fromkeys(steps), "keep": Retention(1)}
        return solo.run(background_cases.losses_and_what_stays, **arguments)[0]

    assert save(1, 2) == ["step-2"]
    with read_lock(tmp_path / "step-2"):
        assert is_read_locked(tmp_path / "step-2")
        assert save(3, 4) == ["step-2", "step-4"]
    assert not is_read_locked(tmp_path / "step-2")
    assert save(5) == ["step-5"]
