"""Packed documents through the engine: the loss and gradient of every document alone, at every ZeRO stage."""

import pytest

from tests.support.jobs.process_group import ProcessGroup
from tests.support.marks import slow
from tests.support.models import small_run
from tests.training.engine import document_cases


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("stage", "compute", "loss", "attention"),
    [
        (1, "fp32", "full", "sdpa"),
        (2, "fp32", "chunked", "sdpa"),
        (3, "fp32", "full", "sdpa"),
        (2, "bf16", "full", "sdpa"),
        (3, "bf16", "chunked", "sdpa"),
        (2, "bf16", "full", "flex_attention"),
        slow(3, "fp32", "chunked", "flex_attention"),
    ],
)
def test_packed_documents_train_as_each_one_alone(
    pair: ProcessGroup, stage: int, compute: str, loss: str, attention: str
) -> None:
    case = {"stage": stage, "compute": compute, "loss": loss, "attention": attention}
    for found in pair.run(document_cases.against_separate_documents, **case):
        close = 1e-5 if compute == "fp32" else 2e-2
        assert found["loss"] == pytest.approx(found["alone"], rel=close)
        assert found["evaluated"] == pytest.approx(found["alone"], rel=close)
        assert found["norm"] == pytest.approx(found["norm_alone"], rel=close)


def test_an_architecture_that_attends_across_documents_is_refused_before_training(pair: ProcessGroup) -> None:
    opt = "{hidden_size: 32, ffn_dim: 48, word_embed_proj_dim: 32, num_hidden_layers: 2, num_attention_heads: 2}"
    given = ["data.document_masking=true", "model.architecture=opt", f"model.config={opt}"]
    for said in pair.run(small_run.refused, stage=3, compute="bf16", overrides=given):
        assert said.startswith("data.document_masking = true: opt does not keep packed documents apart")
