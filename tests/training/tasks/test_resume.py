"""A fine-tuning that breaks off in the middle ends as one that does not, bit for bit, with and without an adapter."""

import random
from pathlib import Path

import pytest

from tests.support.jobs.process_group import ProcessGroup
from tests.training.checkpoint import resume_cases as cases
from tests.training.checkpoint.resume_cases import FP16, OVERFLOW
from training.checkpoint.partitions import open_saved_model

NOISE = "sft={neftune_alpha: 5, loss: row}"
JOBS = {
    "packed, BF16, ZeRO-2": ["precision.compute=bf16", "deepspeed.stage=2"],
    "padded, FP16, ZeRO-1, an overflow": [*FP16, *OVERFLOW, "deepspeed.stage=1", "data.packing=none", NOISE],
    "DoRA, FP16, ZeRO-2, an overflow": [*FP16, *OVERFLOW, "deepspeed.stage=2", "adapter={kind: dora, r: 4}"],
    "LoRA, BF16, ZeRO-3": [
        "precision.compute=bf16",
        "deepspeed.stage=3",
        "adapter={kind: lora, r: 4, dropout: 0.1, modules_to_save: [lm_head]}",
        NOISE,
    ],
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("what", JOBS)
def test_a_job_that_breaks_off_ends_as_one_that_does_not(pair: ProcessGroup, folder: Path, what: str) -> None:
    """60 rows are less than 10 steps: the jobs go through them more than once, and break in the middle."""
    breaks = (random.Random(what).randrange(4, 9),)
    cases.ends_as_whole(pair, folder, what, cases.task_job(folder, *JOBS[what]), breaks=breaks)
    saved = open_saved_model(folder / "runs" / cases.name_of(what) / "checkpoints" / "step-10" / "deepspeed")
    own = [tensor for tensor in saved.tensors if "lora_" in tensor or "modules_to_save" in tensor]
    assert own == ([] if "RA" not in what else list(saved.tensors))  # nothing of a frozen base


@pytest.mark.one_in(2)
@pytest.mark.parametrize("stage", [2, 3])
def test_an_adapter_resumes_on_fewer_ranks(pair: ProcessGroup, solo: ProcessGroup, folder: Path, stage: int) -> None:
    overrides = cases.task_job(folder, "precision.compute=fp32")
    overrides += ["adapter={kind: lora, r: 4}", f"deepspeed.stage={stage}", "model.config={}"]
    two, one = f"two{stage}", f"fewer{stage}"
    [whole, _] = pair.run(cases.job, folder=str(folder), name=two, overrides=overrides, passes=None)
    pair.run(cases.job, folder=str(folder), name=one, overrides=overrides, passes=12)
    [fewer] = solo.run(cases.job, folder=str(folder), name=one, overrides=overrides, passes=None)
    assert whole["exit_code"] == fewer["exit_code"] == 0
    assert cases.sessions_resumed(str(folder), one) == 1
    records = zip(cases.last_by_step(str(folder), two), cases.last_by_step(str(folder), one), strict=True)
    for mine, theirs in records:
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert mine["tokens"] == theirs["tokens"]


def test_an_adapter_of_another_base_is_refused(pair: ProcessGroup, folder: Path) -> None:
    from tests.support.rows.chats import write_base

    overrides = cases.task_job(folder, *JOBS["packed, BF16, ZeRO-2"], "adapter={kind: lora, r: 4}")
    pair.run(cases.job, folder=str(folder), name="based", overrides=overrides, passes=12)
    write_base(folder / "other", seed=1)
    other = [item.replace(f"{folder}/base", f"{folder}/other") for item in overrides]
    with pytest.raises(AssertionError, match="the base model is sha256:.* there and sha256:.* in this run"):
        pair.run(cases.job, folder=str(folder), name="based", overrides=other, passes=1)
