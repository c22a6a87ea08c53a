"""Checkpoints: exact resume, and never a half-written one."""

from __future__ import annotations

import pytest
import torch

from tests.training import checkpoint_cases
from training.checkpoint import is_whole, newest


@pytest.mark.parametrize(
    ("stage", "compute"),
    [(0, "fp32"), (1, "bf16"), (2, "bf16"), (3, "bf16"), (1, "fp16"), (2, "fp16"), (3, "fp16")],
)
def test_a_resumed_run_is_bit_identical_to_an_unbroken_one(pair, tmp_path, stage, compute):
    """Losses, norms, scale, masters and moments; broken right after an overflow, with dropout."""
    arguments = {"stage": stage, "compute": compute}
    whole = pair.run(checkpoint_cases.trajectory, folder=str(tmp_path / "whole"), first=1, last=6, **arguments)
    folder = str(tmp_path / "broken")
    head = pair.run(checkpoint_cases.trajectory, folder=folder, first=1, last=3, **arguments)
    tail = pair.run(checkpoint_cases.trajectory, folder=folder, first=4, last=6, **arguments)
    for rank in range(2):
        assert [row[3] for row in whole[rank]["rows"]] == [True, False, True, True, True, True]
        assert head[rank]["rows"] + tail[rank]["rows"] == whole[rank]["rows"]
        assert tail[rank]["momentum"] == whole[rank]["momentum"]
        assert tail[rank]["scaler"] == whole[rank]["scaler"]
        assert tail[rank]["progress"] == whole[rank]["progress"]
        for name, master in whole[rank]["masters"].items():
            assert torch.equal(tail[rank]["masters"][name], master), name


@pytest.mark.parametrize(("stage", "compute"), [(1, "fp16"), (2, "bf16"), (3, "bf16")])
def test_the_clipping_of_the_config_holds_after_a_load(pair, tmp_path, stage, compute):
    """DeepSpeed takes the saved run's at ZeRO-1 and 2: gradients of norm 1 would not be clipped to 0.01."""
    for rows in pair.run(checkpoint_cases.clipping_after_load, stage=stage, compute=compute, folder=str(tmp_path)):
        for row in rows:
            assert row["applied"]
            assert row["grad_norm"] > 0.1
            assert max(row["update_error"].values()) < 1e-3


@pytest.fixture
def saved(pair, tmp_path):
    """A folder with checkpoints of steps 1 and 2."""
    for step in (1, 2):
        pair.run(checkpoint_cases.trajectory, folder=str(tmp_path), stage=1, compute="fp32", first=step, last=step)
    return tmp_path


def test_only_whole_checkpoints_are_chosen(saved):
    assert newest(saved).name == "step-2"
    shard = next((saved / "step-2" / "deepspeed").glob("*optim_states.pt"))
    content = shard.read_bytes()
    shard.write_bytes(content[:-1])
    assert not is_whole(saved / "step-2")
    assert newest(saved).name == "step-1"
    shard.unlink()
    assert newest(saved).name == "step-1"
    shard.write_bytes(content)
    assert newest(saved).name == "step-2"
    (saved / "LATEST").unlink()
    assert newest(saved).name == "step-2"
    (saved / "step-2" / "state.json").write_text("{")
    assert newest(saved).name == "step-1"


def test_what_resume_asks_for_is_what_is_loaded(pair, saved):
    leftover = saved / ".step-3.partial"
    leftover.mkdir()
    for resume, expected in [
        ("auto", "step-2"),
        ("never", None),
        (str(saved), "step-2"),
        (f"{saved}/step-1", "step-1"),
    ]:
        assert pair.run(checkpoint_cases.find, folder=str(saved), resume=resume) == [expected, expected]
    assert not leftover.exists()
    for answer in pair.run(checkpoint_cases.find, folder=str(saved), resume=f"{saved}/step-9"):
        assert answer.startswith(f"error: run.resume = {saved}/step-9: no whole checkpoint there; give ")


def test_the_newest_are_kept_and_the_rest_dropped(pair, saved):
    pair.run(checkpoint_cases.trajectory, folder=str(saved), stage=1, compute="fp32", first=3, last=3)
    assert sorted(path.name for path in saved.iterdir()) == ["LATEST", "step-2", "step-3"]


def test_a_checkpoint_of_another_run_is_refused_by_name(pair, saved):
    for message in pair.run(checkpoint_cases.load_with_identity, folder=str(saved), identity={"stage": 2}):
        assert message.startswith(f"{saved}/step-2: stage is 1 there and 2 in this run")
        assert "\n" not in message
