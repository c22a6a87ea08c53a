"""Sequences that ranks share: the steps of one rank on whole sequences, at every ZeRO stage."""

from pathlib import Path
from typing import Any

import pytest

from tests.support.jobs.process_group import ProcessGroup
from tests.support.marks import slow
from tests.support.models import plain_steps
from tests.support.models.small_run import manifest_of
from tests.training.engine import sequence_cases

CLOSE = {"fp32": 1e-5, "bf16": 6.5e-2}


@pytest.mark.parametrize(
    ("stage", "given"),
    [
        (2, {"apart": True, "heads": 1, "overrides": ["model.loss=chunked", "model.loss_chunk_tokens=5"]}),
        (3, {"overrides": ["model.activation_checkpointing=full", "optimizer.gradient_clipping=0.1"]}),
        *(slow(stage, {"apart": True}) for stage in (0, 1, 2, 3)),
        *(slow(stage, {"apart": False, "heads": 4}) for stage in (0, 1, 2, 3)),
        *(slow(stage, {"apart": True, "compute": "bf16"}) for stage in (1, 2, 3)),
        *(
            slow(2, {"apart": True, "overrides": [f"model.activation_checkpointing={kind}"]})
            for kind in ("selective", "attention", "ops")
        ),
        slow(1, {"overrides": ["model={activation_checkpointing: full, checkpointing_reentrant: true}"]}),
    ],
)
def test_it_trains_as_one_rank_does(pair: ProcessGroup, stage: int, given: dict[str, Any]) -> None:
    for found in pair.run(sequence_cases.against_one_rank, stage=stage, **given):
        close = CLOSE[given.get("compute", "fp32")]
        assert found["numbers"] < close
        assert found["masters"] < close
        assert found["norm"] > 0.2, "clipping would do nothing"


def test_a_value_that_is_not_finite_is_blamed_on_the_rank_where_it_began(pair: ProcessGroup) -> None:
    for found in pair.run(sequence_cases.blamed):
        assert found == [[(rank, module or "loss")] for rank, _, module in plain_steps.SPOILED]


@pytest.mark.parametrize(("stage", "ranks", "heads"), [(3, 2, 2), *(slow(*cell) for cell in ((2, 4, 1), (0, 4, 4)))])
def test_four_ranks_share_sequences_by_two_and_by_four(four: ProcessGroup, stage: int, ranks: int, heads: int) -> None:
    for found in four.run(sequence_cases.against_one_rank, stage=stage, apart=True, heads=heads, ranks=ranks):
        assert max(found["numbers"], found["masters"]) < CLOSE["fp32"]


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3])
def test_the_fp32_references_share_sequences_too(pair: ProcessGroup, stage: int) -> None:
    """The parity gate's, and below ZeRO-3 the telemetry probe's."""
    for found in pair.run(sequence_cases.references, stage=stage):
        assert found["loss"] < 1e-5
        assert found["gradients"] < 1e-5
        assert found["outputs"] < 1e-5
        assert stage == 3 or found["probe"] > 0.9999


@pytest.mark.slow
def test_an_adapter_trains_as_without_sharing(pair: ProcessGroup, tmp_path: Path) -> None:
    pair.run(sequence_cases.saved_model, folder=str(tmp_path))
    model = f"model={{name_or_path: {tmp_path}, architecture: null, config: {{}}}}"
    for found in pair.run(sequence_cases.against_no_sharing, overrides=[model, "adapter.kind=lora"]):
        assert max(found["numbers"], found["masters"]) < CLOSE["fp32"]


@pytest.mark.slow
def test_fp8_rounds_a_slice_as_it_rounds_the_whole(pair: ProcessGroup, tmp_path: Path) -> None:
    """Scales by row are of a token."""
    rules = [{"match": "*.mlp.*_proj", "compute": "fp8", "reason": "to be rounded"}]
    given = [*manifest_of(tmp_path, {"default": "fp32", "rules": rules}), "precision.compute=auto"]
    for found in pair.run(sequence_cases.against_no_sharing, overrides=given):
        assert max(found["numbers"], found["masters"]) < CLOSE["fp32"]


@pytest.mark.slow
def test_experts_are_balanced_over_all_slices(pair: ProcessGroup) -> None:
    """Loss, two norms and four metrics of the router."""
    sizes = "hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 4, "
    sizes += "num_key_value_heads: 2, num_local_experts: 4"
    model = f"model={{architecture: mixtral, config: {{{sizes}}}, balance_loss: 0.1, router_z_loss: 0.01}}"
    for found in pair.run(sequence_cases.against_no_sharing, overrides=[model], length=14):
        assert max(found["numbers"], found["masters"]) < CLOSE["fp32"]
        assert found["count"] == 7
