"""Attribution and the manifest path on two real processes, at every ZeRO stage."""

import math

import pytest

from tests.training import reaction_cases
from tests.training.engine import engine_cases
from tests.training.reaction_cases import HIT

SHARDED = [(stage, compute) for stage in (1, 2, 3) for compute in ("fp32", "bf16", "fp16")]


@pytest.mark.one_in(8)
@pytest.mark.parametrize(("stage", "compute"), [(0, "fp32"), *SHARDED])
@pytest.mark.parametrize("kind", ["nan_activation", "inf_gradient", "nan_loss"])
def test_the_cause_is_named_by_rank_module_and_tensor_and_the_run_goes_on(pair, stage, compute, kind):
    rank = stage % 2
    arguments = {"stage": stage, "compute": compute, "kind": kind, "rank": rank}
    expected = {
        "nan_activation": (rank, HIT, "activation", "nan", 1),
        "inf_gradient": (rank, f"{HIT}.weight", "gradient", "inf", 1),
        "nan_loss": (rank, "loss", "loss", "nan", 1),
    }[kind]
    clean = pair.once(reaction_cases.clean_losses, stage=stage, compute=compute)
    for index, result in enumerate(pair.run(reaction_cases.attributed, checkpointing="none", **arguments)):
        assert result["found"][0] == expected
        assert {found[0] for found in result["found"]} == {rank}
        assert not result["changed"]
        assert result["losses"][0] == clean[index][0]
        # The random numbers of the second run are given back: the next step draws what it would have drawn.
        if compute != "fp16":
            assert result["losses"][2] == clean[index][2]
        if compute == "fp16":
            assert result["scale"] == 256.0 or result["scale"] == 128.0


@pytest.mark.one_in(3)
@pytest.mark.parametrize("checkpointing", ["reentrant", "hooks"])
@pytest.mark.parametrize("stage", [2, 3])
def test_the_cause_is_found_behind_recomputed_activations(pair, stage, checkpointing):
    arguments = {"stage": stage, "compute": "bf16", "kind": "nan_activation", "rank": 1}
    for result in pair.run(reaction_cases.attributed, checkpointing=checkpointing, **arguments):
        assert result["found"][0] == (1, HIT, "activation", "nan", 1)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("stage", "compute"), [(0, "fp32"), (1, "bf16"), (2, "fp16"), (3, "bf16"), (3, "fp32")])
def test_a_weight_that_was_bad_before_the_step_is_named(pair, stage, compute):
    for found in pair.run(reaction_cases.poisoned_parameter, stage=stage, compute=compute):
        named = [entry for entry in found if entry[2] == "parameter"]
        ranks = [1] if stage == 3 else [0, 1]
        assert named == [(rank, f"{HIT}.weight", "parameter", "nan", 1) for rank in ranks]
        assert found[0] == named[0]


MIXED = {
    "default": "bf16",
    "rules": [
        {"match": "*.q_proj", "compute": "fp16", "reason": "mantissa"},
        {"match": "*.gate_proj", "compute": "fp32", "reason": "an island"},
    ],
}
FP16 = {
    "default": "fp16",
    "rules": [
        {"match": "*.mlp.*", "compute": "bf16", "reason": "range"},
        {"match": "lm_head", "compute": "fp32", "reason": "logits"},
    ],
}


@pytest.mark.one_in(5)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("manifest", [MIXED, FP16], ids=["bf16 ambient", "fp16 ambient"])
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_mixed_manifest_follows_fp32(pair, tmp_path, stage, manifest, checkpointing):
    overrides = ["precision.loss_scale.initial=256", "precision.loss_scale.window=2"]
    expected = pair.once(engine_cases.norms_over_steps, stage=2, compute="fp32", steps=6, overrides=[])[0]
    overrides.append(f"model.activation_checkpointing={checkpointing}")
    arguments = {"stage": stage, "folder": str(tmp_path), "manifest": manifest, "overrides": overrides}
    for result in pair.run(reaction_cases.manifest_steps, **arguments):
        for (loss, norm, _, applied), reference in zip(result["rows"], expected, strict=True):
            assert applied
            assert loss == pytest.approx(reference["loss"], rel=2e-2)
            assert norm == pytest.approx(reference["grad_norm"], rel=3e-2)
        assert result["rows"][-1][2] > 256.0  # the scale grew
        assert set(result["share"]) == {"fp32", "bf16", "fp16"}
        assert math.isclose(sum(result["share"].values()), 1.0)
        assert result["computed"] == ({"bf16"}, {"fp32"})
        assert result["masters"] == {"torch.float32"}


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_that_disagree_stop_the_run_and_are_named(pair, stage):
    for message in pair.run(reaction_cases.disagreement, stage=stage, what="scale"):
        assert message == "the loss scale differs between ranks: rank 0 has 256.0, rank 1 has 128.0"
    for message in pair.run(reaction_cases.disagreement, stage=stage, what="count"):
        assert message == "the count of applied steps differs between ranks: rank 0 has 7.0, rank 1 has 8.0"
    for message in pair.run(reaction_cases.disagreement, stage=stage, what="nothing"):
        assert message == ""
