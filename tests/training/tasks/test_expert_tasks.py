"""Fine-tuning a mixture whose experts ranks share equals plain torch with all experts on the same rows."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.support.jobs.process_group import ProcessGroup
from tests.support.marks import slow
from tests.support.models.plain_steps import distance_of_updates, require_equal
from tests.support.rows.chats import write_folder
from tests.training.checkpoint import resume_cases
from tests.training.checkpoint.resume_cases import FP16, OVERFLOW
from tests.training.tasks import dpo_cases, sft_cases
from tests.training.tasks.test_dpo import STARTED
from tests.training.tasks.test_dpo import require_equal as require_equal_pairs
from training.checkpoint.partitions import open_saved_model

SHARED = "parallel.expert=2"
EPS = 1e-5
"""At 1e-8 AdamW makes whole steps of gradients that are nothing but rounding."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A mixture that chooses two of four experts, chats and pairs."""
    return write_folder(tmp_path_factory.mktemp("mixtures"), "mixtral", initializer_range=0.2)


def off(found: dict[str, Any], exact: dict[str, Any]) -> float:
    """The distance between updates of the experts' masters, in units of these updates."""
    experts = {name for name in found["after"] if ".experts." in name}
    assert len(experts) == 4
    return distance_of_updates(
        *({name: of[name] for name in experts} for of in (found["after"], exact["after"], found["before"]))
    )


@pytest.mark.parametrize(
    ("stage", "packing", "more"),
    [
        (1, "none", ()),
        (2, "best_fit", ("sft.loss=row",)),
        (3, "none", ("model.loss=chunked", "model.loss_chunk_tokens=7")),
        *(slow(stage, "best_fit", ()) for stage in (1, 2, 3)),
        slow(2, "none", ("model.activation_checkpointing=full", "batch.micro_size=1")),
        slow(3, "none", ("sft.loss=row", "batch.micro_size=4")),
    ],
)
def test_chats(pair: ProcessGroup, folder: Path, stage: int, packing: str, more: tuple[str, ...]) -> None:
    given = (SHARED, f"data.packing={packing}", f"optimizer.eps={EPS}", *more)
    found, other = pair.run(sft_cases.steps, folder=folder, stage=stage, overrides=given)
    exact = sft_cases.oracle(folder, found, by_row="sft.loss=row" in more, eps=EPS)
    require_equal(found, exact)
    assert off(found, exact) < 1e-5
    assert found["steps"] == other["steps"]


@pytest.mark.parametrize("stage", [*(slow(stage) for stage in (1, 2)), 3])
def test_pairs(pair: ProcessGroup, folder: Path, stage: int) -> None:
    given = (SHARED, f"optimizer.eps={EPS}")
    found, _ = pair.run(dpo_cases.steps, folder=folder, stage=stage, overrides=given)
    exact = dpo_cases.oracle(folder, found, eps=EPS)
    require_equal_pairs(found, exact)
    assert off(found, exact) < 1e-5
    assert found["steps"][0]["metrics"] | STARTED == found["steps"][0]["metrics"]


JOBS = {
    "packed, BF16, ZeRO-2": ["precision.compute=bf16", "deepspeed.stage=2"],
    "padded, FP16, ZeRO-3, an overflow": [*FP16, *OVERFLOW, "deepspeed.stage=3", "data.packing=none"],
    "padded, FP16, ZeRO-1, an overflow": [*FP16, *OVERFLOW, "deepspeed.stage=1", "data.packing=none"],
    "manifest, ZeRO-2": [
        "deepspeed.stage=2",
        "model.config={}",
        "precision={path: manifest, manifest: config/manifests/bf16.json, compute: auto}",
    ],
    "offloaded, BF16, ZeRO-2": ["precision.compute=bf16", "deepspeed={stage: 2, offload: cpu}"],
    "offloaded, FP16, ZeRO-3, an overflow": [*FP16, *OVERFLOW, "deepspeed={stage: 3, offload: cpu}"],
}


@pytest.mark.one_in(6)
@pytest.mark.parametrize("what", JOBS)
def test_a_job_that_breaks_off_ends_as_one_that_does_not(pair: ProcessGroup, folder: Path, what: str) -> None:
    overrides, name = resume_cases.task_job(folder, *JOBS[what], SHARED), resume_cases.name_of(what)
    resume_cases.ends_as_whole(pair, folder, what, overrides, breaks=(7,))
    saved = open_saved_model(folder / "runs" / name / "checkpoints" / "step-10" / "deepspeed")
    base = AutoModelForCausalLM.from_pretrained(folder / "base")
    assert {key: item.shape for key, item in saved.tensors.items()} == {
        key: item.shape for key, item in base.named_parameters()
    }
