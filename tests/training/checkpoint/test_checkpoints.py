"""A checkpoint's settings after a load, and the runs that may resume from it."""

import copyreg
import pickle
import pickletools

import pytest
from deepspeed.runtime.zero.config import ZeroStageEnum

from tests.training.checkpoint import checkpoint_cases
from training.checkpoint.contents import attention_difference, identity_difference, layout_difference


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("stage", "compute"), [(3, "bf16"), (1, "fp16"), (2, "bf16")])
def test_the_clipping_of_the_config_holds_after_a_load(pair, tmp_path, stage, compute):
    """DeepSpeed takes the saved run's at ZeRO-1 and 2: gradients of norm 1 would not be clipped to 0.01."""
    for rows in pair.run(checkpoint_cases.clipping_after_load, stage=stage, compute=compute, folder=str(tmp_path)):
        for row in rows:
            assert row["applied"]
            assert row["grad_norm"] > 0.1
            assert max(row["update_error"].values()) < 1e-3


def test_another_attention_may_resume_and_is_named_where_it_is_known():
    saved, now = {"model.attention": "sdpa"}, {"model.attention": "eager"}
    assert identity_difference(saved, now) is None and layout_difference(saved, now) is None
    assert attention_difference(saved, now) == "model.attention sdpa -> eager, which rounds differently"
    assert attention_difference(saved, saved) is None
    assert attention_difference({}, now) is None  # a checkpoint of an earlier version


def test_another_number_of_ranks_to_a_sequence_may_resume_and_is_named():
    one, two = {"parallel.sequence": 1}, {"parallel.sequence": 2}
    assert identity_difference(one, two) is None
    assert layout_difference(one, two) == "parallel.sequence 1 -> 2"
    assert layout_difference({}, one) is None  # a checkpoint of an earlier version


def test_a_run_that_trained_on_all_of_its_text_is_told_how_to_resume():
    saved, now = {"data fingerprint": "ab12"}, {"data fingerprint": "ab12+tail"}
    assert "set data.hold_out=documents" in (identity_difference(saved, now) or "")
    assert "data.hold_out" not in (identity_difference(now, {"data fingerprint": "cd34+tail"}) or "")


def test_rows_that_were_grouped_across_epochs_are_not_resumed():
    now = {"grouping of rows by length": "within an epoch"}
    refused = identity_difference({}, now)  # a checkpoint of an earlier version
    assert refused is not None and refused.startswith("grouping of rows by length is across epochs there and within an")
    assert identity_difference(now, now) is None and identity_difference({}, {"task": "pretrain"}) is None


def test_a_zero_stage_is_saved_by_its_value():
    """Debian 12's Python 3.11.2 would save a call of getattr, and no checkpoint could be read again."""
    named = [argument for _, argument, _ in pickletools.genops(pickle.dumps(ZeroStageEnum.weights, 2))]
    assert not any("getattr" in str(argument) for argument in named)
    assert pickle.loads(pickle.dumps(ZeroStageEnum.weights)) is ZeroStageEnum.weights
    assert ZeroStageEnum in copyreg.dispatch_table  # the fix, on a Python that needs none
