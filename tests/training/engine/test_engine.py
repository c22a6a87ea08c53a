"""The engine against plain torch at every stage and precision, on packed documents; no bad gradient is applied."""

import pytest
import torch
from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

from tests.support.jobs.process_group import ProcessGroup
from tests.support.marks import slow
from tests.support.models import small_run
from tests.training.engine import engine_cases

STAGES = [0, 1, 2, 3]
SHARDED = [(stage, compute) for stage in (1, 2, 3) for compute in ("fp32", "bf16", "fp16")]


def difference(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> float:
    """Largest absolute difference over all tensors."""
    assert left.keys() == right.keys()
    return max(float((left[name] - right[name]).abs().max()) for name in left)


@pytest.fixture(scope="module")
def references(solo):
    """Plain torch FP32 steps by mask."""
    return {mask: solo.run(engine_cases.reference_step, mask=mask)[0] for mask in ("uneven", "sequences")}


def require_step(results, expected):
    """Every rank has applied the step of plain torch."""
    for result in results:
        assert result["applied"]
        assert result["loss"] == pytest.approx(expected["loss"], abs=1e-5)
        assert result["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
        assert difference(result["after"], expected["after"]) < 1e-5


@pytest.mark.one_in(3)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("mask", ["uneven", "sequences"])
def test_loss_norm_and_masters_do_not_depend_on_the_layout(pair, solo, references, stage, mask):
    """(micro 8, accumulation 1) and (micro 2, accumulation 4 or 2), one rank or two: the step of plain torch."""
    expected = references[mask]
    for group, micro in ((solo, 8), (solo, 2), (pair, 4), (pair, 2)):
        results = group.run(engine_cases.one_step, stage=stage, compute="fp32", micro=micro, mask=mask)
        require_step(results, expected)
        assert results[0]["clip"] == pytest.approx(min(1.0, 1.0 / expected["grad_norm"]), rel=1e-4)


def test_ranks_whose_tokens_choose_different_experts_reduce_the_same_gradients(pair, tmp_path):
    torch.manual_seed(0)
    sizes = {"vocab_size": small_run.VOCABULARY, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_heads": 4, "num_experts": 4}
    layers = dict.fromkeys(("num_layers", "num_decoder_layers"), 2)
    layers |= {f"num_sparse_{side}_layers": 1 for side in ("encoder", "decoder")}
    sizes |= {"dropout_rate": 0.0, "router_jitter_noise": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0}
    config = SwitchTransformersConfig(**sizes, **layers)
    SwitchTransformersForConditionalGeneration(config).save_pretrained(tmp_path)
    expected = pair.run(engine_cases.of_idle_experts, stage=0, folder=str(tmp_path))
    assert expected[0][0] != expected[1][0]
    for stage in (1, 2, 3):
        for _, gradients in pair.run(engine_cases.of_idle_experts, stage=stage, folder=str(tmp_path)):
            assert difference(gradients, expected[0][1]) < 1e-6


@pytest.mark.parametrize(("stage", "ranks"), [(1, 2), (2, 2), (3, 1)])
def test_layers_that_each_rank_drops_for_itself_are_refused(solo, pair, stage, ranks):
    overrides = ["model.architecture=opt", "model.config={hidden_size: 32, num_attention_heads: 2, layerdrop: 0.1}"]
    for found in (solo if ranks == 1 else pair).run(
        small_run.refused, stage=stage, compute="fp32", overrides=overrides
    ):
        assert "model.config.layerdrop = 0.1" in found and "set model.config.layerdrop=0.0" in found


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("micro", [2, 4])
def test_offload_changes_nothing(pair, references, stage, micro):
    options = {"compute": "fp32", "micro": micro, "mask": "uneven", "variant": "_offload"}
    require_step(pair.run(engine_cases.one_step, stage=stage, **options), references["uneven"])


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("stage", "compute", "variant"),
    [(0, "fp32", ""), *((stage, compute, "") for stage, compute in SHARDED), (2, "bf16", "_offload")],
)
def test_one_rank_reduces_no_gradient_and_trains_to_the_same_bits(solo, stage, compute, variant):
    options = {"stage": stage, "compute": compute, "variant": variant}
    (expected, reductions, _), (found, large, every) = (
        solo.run(engine_cases.masters_on_one_rank, reduces=reduces, **options)[0] for reduces in (True, False)
    )
    assert reductions > large == 0
    # the sum of label tokens; DeepSpeed would clip by a norm that it measures again and averages over ranks
    assert stage or every == 2
    assert difference(found, expected) == 0


@pytest.mark.parametrize("stage", STAGES)
def test_a_batch_without_labels_neither_hangs_nor_makes_nan(pair, stage):
    for result in pair.run(engine_cases.one_step, stage=stage, compute="fp32", micro=2, mask="all"):
        assert result["loss"] == 0.0
        assert result["grad_norm"] == 0.0
        assert all(torch.isfinite(value).all() for value in result["after"].values())


def test_zero_3_builds_the_model_partitioned(pair):
    for result in pair.run(engine_cases.partitioned_build):
        assert result["held"] <= result["whole"] // 2 + 64
        assert result["resident"] == 0


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("stage", "compute"), SHARDED)
def test_half_precision_follows_fp32(pair, stage, compute):
    """Norm and loss stay near FP32's over steps in which the FP16 scale grows; unclipped, so that scaling shows."""
    options = {"steps": 6, "overrides": ["optimizer.gradient_clipping=0", "precision.loss_scale.window=2"]}
    options["overrides"].append("precision.loss_scale.initial=256")
    expected = pair.once(engine_cases.steps_of, stage=2, compute="fp32", **options)[0]
    for rows in pair.run(engine_cases.steps_of, stage=stage, compute=compute, **options):
        if compute == "fp16":
            assert [row["change"] for row in rows].count("growth") >= 2
        for row, reference in zip(rows, expected, strict=True):
            assert row["applied"]
            assert row["loss"] == pytest.approx(reference["loss"], rel=2e-2)
            assert row["grad_norm"] == pytest.approx(reference["grad_norm"], rel=3e-2)
            assert row["momentum"] == pytest.approx(reference["momentum"], rel=3e-2)


@pytest.mark.parametrize(
    ("stage", "compute"), [(2, "bf16"), *(slow(stage, compute) for stage in (1, 3) for compute in ("bf16", "fp16"))]
)
def test_offloaded_gradients_of_a_skipped_step_are_forgotten(pair, stage, compute):
    """DeepSpeed would add those of the next step to them: twice the norm here."""
    for first, second in pair.run(engine_cases.norms_of_skipped, stage=stage, compute=compute):
        assert first == second > 0


@pytest.mark.one_in(3)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("mode", ["full", "selective"])
@pytest.mark.parametrize("reentrant", ["true", "false"])
def test_recomputed_activations_change_nothing(pair, references, stage, mode, reentrant):
    overrides = [f"model.activation_checkpointing={mode}", f"model.checkpointing_reentrant={reentrant}"]
    options = {"compute": "fp32", "micro": 2, "mask": "uneven", "overrides": overrides}
    require_step(pair.run(engine_cases.one_step, stage=stage, **options), references["uneven"])


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("stage", "compute"), [(0, "fp32"), *SHARDED])
def test_the_ledger_is_what_the_config_promises(pair, stage, compute):
    name = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}[compute]
    for reduce, promise in (("fp32", "compute"), ("compute", "fp32")):
        arguments = {"stage": stage, "compute": compute, "reduce": reduce, "promise": promise}
        for rows, error in pair.run(engine_cases.ledger, **arguments):
            assert rows["parameters"] == rows["gradients of a micro-batch"] == name
            assert rows["masters"] == rows["moments"] == rows["gradients accumulated"] == "float32"
            assert rows["sums within a product"] == "float32"
            assert rows["gradients reduced"] == ("float32" if reduce == "fp32" else name)
            assert ("gradients are reduced" in error) is (compute != "fp32")


def test_a_product_that_may_be_summed_in_16_bits_stops_the_run(solo):
    assert solo.once(engine_cases.sums_in_16_bits)[0].startswith("torch lets cuBLAS add parts of a product in 16 bits")


@pytest.mark.parametrize(("compute", "steps", "bound"), [("bf16", 2, 1e-6), ("fp32", 10, 1e-5)])
def test_zero_1_and_2_part_by_the_order_of_sums_alone(pair, compute, steps, bound):
    """Each parameter, relative to how far it moved. In BF16 a last bit then decides how a weight is rounded."""
    options = {"compute": compute, "steps": steps, "micro": 2, "lr": 0.01}
    first, second = (pair.run(engine_cases.steps_of, stage=stage, **options)[0] for stage in (1, 2))
    start, one, two = second[0]["before"], first[-1]["after"], second[-1]["after"]
    off = {name: float((one[name] - two[name]).norm() / (two[name] - start[name]).norm()) for name in start}
    assert 0 < max(off.values()) < bound, off


def test_without_another_order_of_sums_stages_are_equal_bit_for_bit(pair):
    """One micro-batch, whose gradients two ranks add up in one way; and no norm in the update."""
    options = {"compute": "bf16", "steps": 4, "lr": 0.01, "overrides": ["optimizer.gradient_clipping=0"]}
    first, *others = (pair.run(engine_cases.steps_of, stage=stage, **options)[0] for stage in (1, 2, 3))
    assert difference(first[0]["before"], first[-1]["after"]) > 0.0
    for other in others:
        for mine, theirs in zip(first, other, strict=True):
            assert difference(mine["before"], theirs["before"]) == difference(mine["after"], theirs["after"]) == 0.0


@pytest.mark.parametrize("stage", [2, 3])
def test_a_master_that_is_not_fp32_stops_the_run(pair, stage):
    for error in pair.run(engine_cases.broken_master, stage=stage):
        assert error == "masters are in bfloat16, the config promises float32"


@pytest.mark.parametrize("stage", [2, 3])
def test_a_buffer_that_is_not_in_the_dtype_of_the_models_code_stops_the_run(pair, stage):
    """Gemma's constructor makes one, at ZeRO-3 inside `deepspeed.zero.Init`."""
    for rows, error in pair.run(engine_cases.rounded_buffer, stage=stage):
        assert rows["buffers"] == "float32"
        assert "softmax and loss" not in rows
        assert error == "buffer model.rotary_emb.inv_freq is in bfloat16, the model's own code has it in float32"


@pytest.mark.parametrize(("ranks", "compute"), [("pair", "bf16"), slow("four", "fp32"), slow("four", "fp16")])
def test_a_second_copy_of_the_weights_in_each_node_changes_no_bit(request, tmp_path, ranks, compute):
    """zero_hpz_partition_size: the copies are gathered from while they are new, and made again after a rollback."""
    group = request.getfixturevalue(ranks)
    runs = [
        group.run(engine_cases.stepped_back, folder=str(tmp_path), compute=compute, secondary=secondary)
        for secondary in (1, 2)
    ]
    for without, with_copies in zip(*runs, strict=True):
        assert without["copies"] == [set()] * 5
        assert with_copies["copies"] == [{True}] * 5
        assert with_copies["losses"] == without["losses"]
        assert without["losses"][1:3] == without["losses"][3:]
        assert difference(with_copies["masters"], without["masters"]) == 0.0


def test_a_module_may_begin_to_read_parameters_of_another_one(pair, tmp_path):
    """ZeRO-3 gathers parameters ahead in an order that it has recorded before."""
    plain, sharded = (pair.run(engine_cases.of_mixers, stage=stage, folder=str(tmp_path)) for stage in (0, 3))
    assert sharded[0] == pytest.approx(plain[0], abs=1e-5)


SPLIT = ("precision.masters=split",)


@pytest.mark.parametrize(
    ("ranks", "layout", "stage", "compute", "overrides"),
    [
        ("pair", "tensor", 2, "fp32", ()),
        ("pair", "expert", 3, "bf16", ()),
        *(
            slow("pair", "tensor", *cell, ())
            for cell in ((0, "fp32"), (1, "bf16"), (1, "fp16"), (3, "bf16"), (3, "fp16"))
        ),
        *(slow("pair", "expert", *cell, ()) for cell in ((1, "bf16"), (2, "fp32"), (2, "fp16"))),
        *(slow("pair", "sequence", *cell, ()) for cell in ((1, "bf16"), (2, "fp32"), (3, "bf16"))),
        *(slow("pair", "hpz", 3, compute, ()) for compute in ("fp32", "bf16", "fp16")),
        *(slow("pair", "offload", *cell, ()) for cell in ((1, "fp32"), (2, "bf16"), (3, "bf16"), (3, "fp16"))),
        *(slow("pair", "data", stage, "bf16", SPLIT) for stage in (1, 2, 3)),
        *(slow("pair", "data", *cell, ()) for cell in ((0, "fp32"), (1, "bf16"), (2, "fp16"), (3, "fp32"))),
        *(slow("four", "tensor", *cell, ()) for cell in ((2, "bf16"), (3, "fp32"))),
    ],
)
def test_it_is_never_applied(request, tmp_path, ranks, layout, stage, compute, overrides):
    given = {"layout": layout, "stage": stage, "compute": compute, "overrides": overrides, "folder": str(tmp_path)}
    for found in request.getfixturevalue(ranks).run(engine_cases.spoiled, **given):
        assert found["wrong"] == []
        assert found["sound"], "the step after them"
        assert found["cases"] >= 3


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
def test_packed_documents_train_as_each_one_alone(pair, stage, compute, loss, attention) -> None:
    case = {"stage": stage, "compute": compute, "loss": loss, "attention": attention}
    for found in pair.run(engine_cases.against_separate_documents, **case):
        close = 1e-5 if compute == "fp32" else 2e-2
        assert found["loss"] == pytest.approx(found["alone"], rel=close)
        assert found["evaluated"] == pytest.approx(found["alone"], rel=close)
        assert found["norm"] == pytest.approx(found["norm_alone"], rel=close)


def test_an_architecture_that_attends_across_documents_is_refused_before_training(pair: ProcessGroup) -> None:
    opt = "{hidden_size: 32, ffn_dim: 48, word_embed_proj_dim: 32, num_hidden_layers: 2, num_attention_heads: 2}"
    given = ["data.document_masking=true", "model.architecture=opt", f"model.config={opt}"]
    for said in pair.run(small_run.refused, stage=3, compute="bf16", overrides=given):
        assert said.startswith("data.packing or data.document_masking: opt does not keep packed documents apart")
