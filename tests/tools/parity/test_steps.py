"""Single steps against FP32, FP8's and shared matrices' too: what is healthy passes, every planted defect is found."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from config.cli import REPOSITORY
from config.optimizers import OPTIMIZERS
from config.schema import OptimizerSection, ParitySection
from lab.detection.plants.permanent import PLANTED
from precision.inner_dtypes import LOSS_SUM, RESIDUAL, ROTARY, SOFTMAX, over_ranks
from precision.inner_dtypes import NORM as NORMS
from tests.support.marks import slow
from tests.support.models.small_run import VOCABULARY
from tests.tools.parity import step_cases
from tests.tools.parity.test_gate import forked
from tests.training.engine.test_tensor_parallel import MANIFEST
from tools.parity import gate as parity
from tools.parity import steps as single_steps
from tools.parity.dropped import Rate, otherwise
from tools.parity.judge_steps import Check, Walk, judge_dtypes, judge_signatures, judge_steps
from tools.parity.plain import by_chance
from training.engine.optimizer import IMPLEMENTATIONS
from training.engine.optimizers.rule import UpdateInputs

BOUNDS = ParitySection()
CLIPPED = "optimizer.gradient_clipping=0.5"
NORM, LINEAR = "model.layers.1.input_layernorm", "model.layers.0.mlp.down_proj"


def manifest(name: str) -> list[str]:
    return ["precision.path=manifest", f"precision.manifest=config/manifests/{name}.json"]


def judged(steps: list[dict], bounds: ParitySection = BOUNDS) -> dict[str, Check]:
    """The checks of one walk by name."""
    numbered = [{"step": index, **step} for index, step in enumerate(steps, start=1)]
    return {check.name: check for check in judge_steps([Walk(0, True, numbered, numbered[0]["loss"])], bounds)}


def failed(checks: dict[str, Check]) -> set[str]:
    return {name for name, check in checks.items() if not check.passed}


def sound(steps: list[dict]) -> dict[str, Check]:
    """The checks of one walk by name, all of which pass."""
    checks = judged(steps)
    assert not failed(checks), {name: checks[name] for name in failed(checks)}
    return checks


@pytest.mark.one_in(2)
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_fp32_is_its_own_parity(pair, stage):
    for steps in pair.run(step_cases.measured_steps, stage=stage, compute="fp32", steps=3, overrides=[CLIPPED]):
        checks = sound(steps)
        assert checks["module_error"].measured < 1e-6
        assert checks["gradient_error"].measured < 1e-6
        assert checks["update_error"].measured < 1e-5


@pytest.mark.parametrize("decay", [0.0, 0.05])
def test_the_masters_roundings_explain_an_update_at_a_small_rate(decay):
    """Decay takes less from a weight than a rounding does, and torch rounds its factor and the product besides."""
    torch.manual_seed(0)
    start = torch.empty(4096).uniform_(1.0, 1.01)
    weight = torch.nn.Parameter(start.clone())
    weight.grad = torch.randn(4096)
    given = UpdateInputs(start, weight.grad, [torch.zeros(4096)] * 2, OptimizerSection(), decay, 1e-6, 1, False)
    torch.optim.AdamW([weight], lr=1e-6, betas=given.section.betas, eps=given.section.eps, weight_decay=decay).step()
    off = (
        weight.detach().double() - given.master - IMPLEMENTATIONS["adamw"].update(given)
    ).norm() / given.master.norm()
    assert off < single_steps.roundings_of_master(decay) and (off > single_steps.roundings_of_master(0.0)) == (
        decay > 0
    )


IN_BF16 = ("optimizer.name=muon", "optimizer.orthogonalization=bf16")


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    "settings", [IN_BF16, *((f"optimizer.name={name}",) for name in OPTIMIZERS if name != "adamw")]
)
def test_the_update_of_each_optimizer_is_its_own_rule(pair, settings):
    """Two of Muon's iterations in BF16 round differently, which is no error of the update."""
    overrides = [CLIPPED, *settings]
    for steps in pair.run(step_cases.measured_steps, stage=3, compute="bf16", steps=3, overrides=overrides):
        checks = sound(steps)
        assert checks["update_error"].measured < 1e-4


@pytest.mark.one_in(5)
@pytest.mark.parametrize(
    ("stage", "compute", "overrides"),
    [
        *((stage, compute, []) for stage in (1, 2, 3) for compute in ("bf16", "fp16")),
        (2, "fp32", manifest("bf16")),
        (3, "fp32", manifest("llama_mixed")),
        (2, "bf16", ["model.activation_checkpointing=full"]),
    ],
)
def test_half_precision_agrees_and_every_module_is_measured(pair, stage, compute, overrides):
    """Errors are those of the format: none is hidden, and none is larger than a few roundings make it."""
    overrides = [CLIPPED, "precision.loss_scale.initial=1024", "precision.loss_scale.window=2", *overrides]
    for steps in pair.run(step_cases.measured_steps, stage=stage, compute=compute, steps=3, overrides=overrides):
        checks = sound(steps)
        least = 1e-4 if compute == "fp16" else 1e-3
        assert least < checks["module_error"].measured < 10 * least
        assert least < checks["gradient_error"].measured
        names = set(steps[0]["order"])
        assert {"model.embed_tokens", NORM, LINEAR, "model.layers.1.self_attn", "model.norm", "lm_head"} <= names
        assert not steps[0]["signature"]["not_measured"]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("stage", "compute", "given"), [(2, "bf16", []), (3, "fp16", []), (1, "fp32", manifest("bf16"))]
)
def test_a_gradient_beyond_its_bound_is_compared_with_plain_torch_in_the_same_dtype(pair, stage, compute, given):
    """Under a bound that no 16-bit gradient keeps: what is healthy passes, and a defect is still named."""
    bounds = ParitySection(gradient_error=1e-6)
    defect = f"{{kind: lost_reduction, module: {LINEAR}}}"
    overrides = ["parity.gradient_error=1e-6", "precision.loss_scale.initial=1024", *given]
    for planted in ("", defect):
        of_case = {"stage": stage, "compute": compute, "steps": 2, "overrides": overrides, "defect": planted}
        for steps in pair.run(step_cases.measured_steps, **of_case):
            assert steps[0]["plain"].keys() == steps[0]["parameters"].keys()
            assert "planned" in steps[0] and not steps[0]["planned"]
            found = judged(steps, bounds)
            assert failed(found) & {"gradient_error", "weight_drift"} == ({"gradient_error"} if planted else set())
            if planted:
                assert found["gradient_error"].modules == (LINEAR,)


def test_plain_torch_loses_as_much_below_fp16s_normal_numbers_as_the_run_does(pair):
    """Plain torch differentiates the engine's loss, which two ranks make twice as large."""
    overrides = ["parity.gradient_error=1e-6", "precision.loss_scale.initial=16", "precision.loss_scale.window=1000"]
    for [step, *_] in pair.run(step_cases.measured_steps, stage=2, compute="fp16", steps=2, overrides=overrides):
        errors = [[found["relative_error"] for found in step[key].values()] for key in ("plain", "parameters")]
        assert errors[0] == pytest.approx(errors[1], rel=0.02)


@pytest.mark.parametrize(("stage", "compute"), [(2, "bf16"), (3, "fp16")])
def test_an_evaluation_in_another_mode_or_dtype_than_it_should_be_is_named(pair, stage, compute):
    dtype = {"bf16": "bfloat16", "fp16": "float16"}[compute]
    named = {"": {}, "mode": {"lm_head": "in training mode"}, "dtype": {"lm_head": f"in float32, in training {dtype}"}}
    for planted, expected in named.items():
        for found in pair.run(step_cases.evaluated, stage=stage, compute=compute, planted=planted):
            assert found == {"evaluation_error": 0.0, "evaluated_otherwise": expected}


def test_a_model_that_computes_otherwise_in_evaluations_is_named(pair):
    """Unless transformers' own code does."""
    for planted, wrong in (("scale", True), ("both", False)):
        for found in pair.run(step_cases.evaluated, stage=2, compute="bf16", planted=planted):
            assert (found["evaluation_error"] > 1e-4) == wrong and not found["evaluated_otherwise"], found


def test_dropout_at_another_rate_than_declared_is_named_with_its_rank(pair):
    for planted, named in {
        "": {},
        "rate": {"transformer.h.1.mlp.dropout on rank 1": "drops 0.11"},
        "attention": {"transformer.h.1.attn on rank 1": "drops nothing"},
        "own": {"transformer.h.1.mlp.dropout on rank 1": "drops nothing"},
    }.items():
        for found in pair.run(step_cases.dropped, stage=2, compute="bf16", planted=planted):
            assert found.keys() == named.keys() and all(found[name].startswith(how) for name, how in named.items())


@pytest.mark.parametrize(("values", "turned", "passes"), [(8, 1, True), (8, 4, False), (10_000, 1_100, False)])
def test_one_sign_of_a_few_is_no_share_of_the_gradient(values: int, turned: int, passes: bool) -> None:
    expected = torch.ones(values)
    found = expected.clone()
    found[:turned] = -0.01
    agreement = single_steps._agreement({"norm.weight": found}, {"norm.weight": expected})
    assert (agreement["norm.weight"]["sign_agreement"] >= ParitySection().sign_agreement) == passes


def test_the_share_that_is_dropped_is_measured():
    """A function asked for the declared rate may drop more; chance alone is no finding."""
    declared = {"drop": Rate(0.1, 0, 0), "attn": Rate(0.1, 0, 0)}
    sound = {"drop": Rate(0.1, 1080, 10_000), "attn": Rate(0.1, 0, 0)}
    assert otherwise(sound, declared) == {}
    assert otherwise(sound | {"drop": Rate(0.1, 1190, 10_000)}, declared).keys() == {"drop"}
    assert otherwise(sound | {"other": Rate(0.5, 5, 10)}, declared) == {"other": "drops 0.5 where nothing is dropped"}


def module_of(defect: str) -> str:
    """The module that has to be named; none where the defect is one of the whole step."""
    return NORM if NORM in defect else LINEAR if LINEAR in defect else ""


PLANTS = [(defect.format(norm=NORM, linear=LINEAR), caught_by) for defect, caught_by in PLANTED]
KINDS = [defect[7:].rstrip("}").partition(",")[0] for defect, _ in PLANTS]


PLACES = [(1, "bf16"), (2, "fp16"), (3, "bf16")]
"""Each defect is planted in all of them, in one of them by `make test`."""


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("defect", "check", "stage", "compute"),
    [
        pytest.param(*plant, *place, id=f"{kind}-{place[0]}-{place[1]}", marks=[pytest.mark.slow] * ((i - j) % 3 > 0))
        for i, (plant, kind) in enumerate(zip(PLANTS, KINDS, strict=True))
        for j, place in enumerate(PLACES)
    ],
)
def test_a_planted_defect_is_found_and_named(pair, stage, compute, defect, check):
    """A defect of a module is named, first and alone in its check; one of the whole step blames every module."""
    overrides = [CLIPPED, "precision.loss_scale.initial=1024"]
    given = {"stage": stage, "compute": compute, "steps": 3, "overrides": overrides, "defect": defect}
    for steps in pair.run(step_cases.measured_steps, **given):
        found = judged(steps)[check]
        assert not found.passed
        if module_of(defect):
            assert found.modules == (module_of(defect),)
        else:
            assert found.note.startswith("all ")


@pytest.mark.one_in(3)
@pytest.mark.parametrize("defect", [defect for defect, _ in PLANTS if module_of(defect)])
def test_a_planted_defect_is_found_on_the_manifest_path(pair, defect):
    """There the parameters are the masters: weights that do not follow show in the update."""
    given = {"stage": 2, "compute": "fp32", "steps": 3, "overrides": [*manifest("bf16"), CLIPPED], "defect": defect}
    for steps in pair.run(step_cases.measured_steps, **given):
        assert failed(judged(steps))


PATHS = [
    *((stage, compute, []) for stage in (1, 2, 3) for compute in ("bf16", "fp16")),
    (0, "fp32", []),
    (2, "fp32", manifest("bf16")),
    (3, "fp32", manifest("llama_mixed")),
    (2, "bf16", ["model.activation_checkpointing=full"]),
    (3, "bf16", ["model.activation_checkpointing=full", "model.checkpointing_reentrant=true"]),
    (2, "bf16", ["model.loss_chunk_tokens=8"]),
    (2, "bf16", ["model.attention=eager"]),
]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(("stage", "compute", "overrides"), PATHS)
def test_what_the_engine_computes_inside_its_modules_is_fp32(pair, stage, compute, overrides):
    for report in pair.run(step_cases.inner_dtypes, stage=stage, compute=compute, overrides=overrides):
        assert report["lower"] == report["unobserved"] == []
        assert set(report["computed"]) == {SOFTMAX, NORMS, LOSS_SUM, ROTARY, RESIDUAL}
        assert report["computed"][NORMS] == {"fp32": 5}
        assert report["computed"][LOSS_SUM] == report["computed"][ROTARY] == {"fp32": 1}


def test_a_norm_that_one_rank_alone_computes_in_16_bits_is_named(pair):
    reports = pair.run(step_cases.inner_dtypes, stage=2, compute="bf16", planted=NORM)
    assert [len(report["lower"]) for report in reports] == [0, 1]
    check = judge_dtypes([over_ranks(reports)], BOUNDS)
    assert (check.passed, check.modules, check.note) == (False, (NORM,), f"norm statistics in bf16: {NORM}")


GPT2 = (
    "model.architecture=gpt2",
    "model.config={n_embd: 32, n_layer: 2, n_head: 2, resid_pdrop: 0.2, attn_pdrop: 0.2, embd_pdrop: 0.2, "
    "initializer_range: 0.1}",
)
FP32_ATTENTION = ["precision.path=manifest", f"precision.manifest={REPOSITORY}/lab/detection/fp32_attention.json"]


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("stage", "compute", "overrides"),
    [
        (2, "bf16", []),
        pytest.param(3, "fp32", FP32_ATTENTION, id="3-manifest"),
        pytest.param(3, "fp16", [], marks=SLOW),
        pytest.param(2, "fp32", FP32_ATTENTION, id="2-manifest", marks=SLOW),
        pytest.param(0, "fp32", [], marks=SLOW),
        pytest.param(1, "bf16", [], marks=SLOW),
    ],
)
def test_a_model_with_dropout_is_sound_and_repeats_its_loss(pair, stage, compute, overrides):
    """Restored with the values that the run dropped, compared without any; and the keys' part of a bias is noise."""
    overrides = [*GPT2, "precision.loss_scale.initial=1024", *overrides]
    for found in pair.run(step_cases.with_dropout, stage=stage, compute=compute, overrides=overrides):
        assert found["repeated"] == found["run"] != found["other"]
        step = {"step": 1, "loss_with_dropout": found["repeated"], **found["step"]}
        assert abs(step["loss"] - step["reference_loss"]) < 0.003 < abs(step["loss"] - found["run"])
        for recorded, bad in ((found["run"], set()), (step["loss"], {"restored_share"})):
            assert (
                failed({check.name: check for check in judge_steps([Walk(0, True, [step], recorded)], BOUNDS)}) == bad
            )


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("stage", "compute", "overrides"),
    [*((stage, compute, []) for compute in ("bf16", "fp16") for stage in (2, 3, 1)), (2, "fp32", manifest("bf16"))],
)
def test_known_gradients_are_added_up_in_fp32_or_every_module_is_named(pair, stage, compute, overrides):
    overrides = ["precision.loss_scale.initial=1024", *overrides]
    of_case = {"stage": stage, "compute": compute, "overrides": overrides}
    for found in pair.run(step_cases.summed, **of_case):
        assert found and max(found.values()) < BOUNDS.accumulation_error / 10
    for found in pair.run(step_cases.summed, rounded=True, **of_case):
        assert min(found.values()) > 10 * BOUNDS.accumulation_error


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("stage", "compute", "overrides"),
    [
        *((stage, compute, []) for compute in ("bf16", "fp16") for stage in (2, 3, 1)),
        (0, "fp32", []),
        (2, "fp32", manifest("bf16")),
    ],
)
def test_every_label_counts_the_same_or_the_weighting_is_named(pair, stage, compute, overrides):
    """Whatever the precision: the passes compared are rounded alike."""
    of_case = {"stage": stage, "compute": compute, "overrides": ["precision.loss_scale.initial=1024", *overrides]}
    for found in pair.run(step_cases.weighted, **of_case):
        assert found["weighting_error"] and max(found["weighting_error"].values()) < BOUNDS.weighting_error / 10
        assert found["loss_error"] < BOUNDS.loss_error / 10
    for planted in ("micro-batches", "ranks"):
        for found in pair.run(step_cases.weighted, planted=planted, **of_case):
            assert min(found["weighting_error"].values()) > 10 * BOUNDS.weighting_error
            assert found["loss_error"] < BOUNDS.loss_error / 10
    for found in pair.run(step_cases.weighted, planted="reported", **of_case):
        assert max(found["weighting_error"].values()) < BOUNDS.weighting_error < 10 * found["loss_error"]


@pytest.mark.slow
def test_sums_and_weights_are_compared_once_the_loss_scale_has_come_down(pair):
    """Gradients that overflow have none to compare, and a check without any would pass."""
    for steps in pair.run(
        step_cases.walked, stage=2, compute="fp16", overrides=["precision.loss_scale.initial=8388608"]
    ):
        assert [step["applied"] for step in steps] == [False] * (len(steps) - 1) + [True] and len(steps) > 2
        assert not steps[0]["accumulation_error"] and "weighting_error" not in steps[0]
        assert all(steps[-1][key] for key in ("accumulation_error", "weighting_error")) and "loss_error" in steps[-1]


def test_the_second_step_of_a_point_is_compared_without_its_modules(pair):
    for first, second in pair.run(step_cases.walked, stage=2, compute="bf16", length=2):
        assert first["signature"]["parts"] and not second["signature"]["parts"]
        assert first["plain_error"].keys() == first["parameters"].keys() == second["parameters"].keys()
        assert first["update_error"].keys() == second["update_error"].keys() == first["parameters"].keys()


ROUTED = (
    "model={architecture: qwen3_moe, config: {hidden_size: 32, moe_intermediate_size: 24, num_hidden_layers: 2, "
    "num_attention_heads: 2, num_key_value_heads: 2, num_experts: 4, num_experts_per_tok: 2}, router_z_loss: 0.001, "
    "balance_loss: 0.01}",
)


@pytest.mark.parametrize(("stage", "compute"), [(2, "bf16"), *(slow(*case) for case in ((3, "fp16"), (1, "bf16")))])
def test_losses_of_routers_count_as_the_config_says_or_are_named(pair, stage, compute):
    """A doubled z-loss changes the routers' gradient by a hundredth."""
    of_case = {"stage": stage, "compute": compute, "overrides": ["precision.loss_scale.initial=1024", *ROUTED]}
    for found in pair.run(step_cases.weighted, **of_case):
        assert found["weighting_error"] and max(found["weighting_error"].values()) < BOUNDS.weighting_error / 10
        assert found["loss_error"] < BOUNDS.loss_error / 10
    for found in pair.run(step_cases.weighted, planted="z-loss", **of_case):
        errors = found["weighting_error"]
        assert min(value for name, value in errors.items() if ".gate." in name) > 10 * BOUNDS.weighting_error


@pytest.mark.parametrize(
    ("overrides", "compute"), [((), "bf16"), (("model.router_z_loss=0",), "fp32"), (("model.balance_loss=0",), "fp32")]
)
def test_a_wrong_definition_of_routers_losses_that_both_twins_share_is_named(pair, overrides, compute):
    given = {"stage": 2, "compute": compute, "overrides": [*ROUTED, *overrides]}
    assert max(pair.run(step_cases.router_losses, value=1.0, gradient=1.0, **given)) < 0.1
    for value, gradient in ((2.0, 2.0), (1.0, 0.5)):
        assert min(pair.run(step_cases.router_losses, value=value, gradient=gradient, **given)) > 100


def test_a_window_that_sequences_do_not_reach_is_said_to_be_unmeasured(pair):
    for length, expected in ((16, {"sliding_window": "16 is not shorter than the sequences (16)"}), (17, {})):
        assert single_steps.idle({"sliding_window": 16, "attention_chunk_size": None}, length) == expected
    yarn = {"full_attention": {"original_max_position_embeddings": 4096}}
    assert [*single_steps.idle({"rope_parameters": yarn}, 128)] == ["original_max_position_embeddings"]
    overrides = ["model.architecture=mistral", "model.config.sliding_window=4096"]
    for steps in pair.run(step_cases.measured_steps, stage=2, compute="bf16", steps=1, overrides=overrides):
        assert "not measured: sliding_window: 4096 is not shorter than" in sound(steps)["unexplained"].note


def test_weight_decay_on_what_should_have_none_is_named(pair):
    """The update is judged by the rule that the config states, not by what the engine's groups say."""
    for steps in pair.run(step_cases.decaying_norms, stage=2, compute="bf16", steps=2):
        checks = judged(steps)
        assert "update_error" in failed(checks)
        assert NORM in checks["update_error"].modules


@pytest.mark.one_in(6)
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("key", ["exp_avg_sq", "exp_avg"])
def test_a_moment_that_is_kept_in_bf16_is_found_by_its_rounding(pair, stage, key):
    """Rounding the second moment moves an update by less than the bound on its error."""
    plant = partial(step_cases.rounded_moment, key=key)
    for steps in pair.run(step_cases.measured_steps, stage=stage, compute="bf16", steps=2, plant=plant):
        checks = judged(steps)
        assert checks["update_rounding"].measured > 0.5
        assert checks["update_rounding"].note.startswith("all ")
        assert key == "exp_avg" or checks["update_error"].passed


@pytest.mark.parametrize("optimizer", ["adamw", "lion"])
def test_second_moments_below_the_smallest_normal_number_are_no_finding(pair, optimizer):
    """The embedding of a pretrained model has them: where a token's probability is 1e-15, its gradient's square is."""
    how = {"stage": 2, "compute": "bf16", "steps": 2, "overrides": [f"optimizer.name={optimizer}"]}
    for steps in pair.run(step_cases.measured_steps, plant=step_cases.damped_gradients, **how):
        assert judged(steps)["update_rounding"].measured == 0.0
        assert steps[0]["update_rounding"]


def test_sound_alternatives_are_measured_again_where_gradients_are_further_off(pair):
    """Weights are rounded by chance as well, and damped gradients are still out of bounds."""
    for plant, damped in ((None, False), (step_cases.damped_gradients, True)):
        for steps in pair.run(step_cases.measured_steps, stage=2, compute="bf16", steps=2, plant=plant):
            assert [bool(step["alternatives"]) for step in steps] == [True, damped]
            assert any("weights rounded by chance" in step["alternatives"] for step in steps) == damped
            assert ("gradient_excess" in failed(judged(steps))) == damped


@pytest.mark.slow
def test_a_kernel_without_fp32_is_compared_with_plain_attention_and_its_modules_are_measured(solo):
    [(attention, step)] = solo.run(step_cases.with_flex_attention)
    assert attention == "sdpa"
    sound([step])
    assert step["signature"]["not_measured"] == {}
    assert "model.layers.1.self_attn" in {row["module"] for row in step["signature"]["parts"]}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_rounded_by_chance_become_one_of_their_two_neighbours(dtype: torch.dtype) -> None:
    """Each is closer than one spacing, and on average none is moved."""
    values = torch.full((4096,), 1.25 + 0.25 * torch.finfo(dtype).eps)
    rounded = by_chance(values, dtype, torch.Generator().manual_seed(0)).double()
    assert set((rounded - 1.25).div(torch.finfo(dtype).eps).tolist()) == {0.0, 1.0}
    assert abs(float((rounded - values).mean())) < 0.1 * torch.finfo(dtype).eps


@pytest.mark.parametrize(
    ("defect", "words"),
    [
        ("{kind: fp16_norm}", "it needs a module"),
        ("{kind: stale_weight, module: model.layers.9}", "the model has no such module"),
    ],
)
def test_a_defect_of_no_module_is_refused(solo, defect, words):
    with pytest.raises(AssertionError, match=words):
        solo.run(step_cases.measured_steps, stage=0, compute="fp32", steps=1, defect=defect)


FP8 = [*manifest("fp8"), CLIPPED]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("stage", "overrides"),
    [
        (2, []),
        (3, ["precision.fp8.gradient=e5m2", "precision.fp8.scaling=block32"]),
        (0, ["precision.fp8.weight_gradient=fp8", "model.activation_checkpointing=full"]),
        (1, ["model.activation_checkpointing=full", "model.checkpointing_reentrant=true"]),
    ],
)
def test_a_sound_run_is_parity(pair, stage, overrides):
    """Its errors are those of four bits, which no bound of 16 bits allows; its products are those of the definition."""
    given = {"stage": stage, "compute": "fp32", "steps": 3, "overrides": [*FP8, *overrides]}
    for steps in pair.run(step_cases.measured_steps, **given):
        checks = sound(steps)
        assert max(step["own_error"][LINEAR] for step in steps) > 0.02
        assert checks["fp8_products"].measured < 0.6
        assert "what FP8's rounding alone makes, up to" in checks["module_error"].note
        assert checks["module_error"].measured < 0.02 and "alone makes" in checks["gradient_error"].note
        for step in steps:
            parts = [row["part"] for row in step["fp8_products"] if row["module"] == LINEAR]
            assert sorted(parts) == ["input gradient", "output", "weight gradient"]
            assert {name for name, error in step["planned_error"].items() if error > 0.01} >= {LINEAR}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("wrong", step_cases.WRONG)
def test_what_a_layer_does_otherwise_is_found_and_named(pair, wrong):
    given = {"stage": 2, "compute": "fp32", "steps": 1, "overrides": FP8}
    for steps in pair.run(step_cases.measured_steps, plant=partial(step_cases.wrong_layer, wrong=wrong), **given):
        check = judged(steps)["fp8_products"]
        assert (check.passed, check.modules) == (False, (step_cases.LAYER,))
        assert check.measured > 1.5


@pytest.mark.one_in(12)
@pytest.mark.parametrize("defect", [defect.format(norm="model.norm", linear=LINEAR) for defect, _ in PLANTED])
def test_a_planted_defect_is_found_beside_fp8(pair, defect):
    """The defects of the table, at bounds that FP8's own error has widened."""
    given = {"stage": 2, "compute": "fp32", "steps": 3, "overrides": FP8, "defect": defect}
    for steps in pair.run(step_cases.measured_steps, **given):
        checks = judged(steps)
        assert failed(checks)
        if module_of(defect):
            assert any(module_of(defect) in check.modules for check in checks.values())


SCALE = ["precision.loss_scale.initial=1024", "precision.loss_scale.window=2"]


@pytest.mark.one_in(8)
@pytest.mark.parametrize(
    ("stage", "compute", "overrides"),
    [
        *((stage, compute, []) for stage, compute in ((2, "bf16"), (3, "fp16"), (1, "bf16"), (3, "bf16"))),
        (2, "bf16", ["model.activation_checkpointing=full"]),
        (2, "bf16", ["model.loss=chunked", "model.loss_chunk_tokens=8"]),
        (0, "fp32", []),
        (3, "fp32", []),
    ],
)
def test_every_module_is_measured_and_none_is_blamed(pair, stage, compute, overrides):
    given = {"stage": stage, "compute": compute, "steps": 3, "overrides": [CLIPPED, *SCALE, *overrides]}
    for steps in pair.run(step_cases.of_shared_matrices, **given):
        sound(steps)
        assert steps[0]["accumulation_error"]
        names = set(steps[0]["order"])
        assert {"model.embed_tokens", NORM, LINEAR, "model.layers.1.self_attn", "model.norm"} <= names
        assert {f"model.layers.0.self_attn.{one}_proj" for one in "qkvo"} <= names
        chunked = {"lm_head"} if any("chunked" in text for text in overrides) else set()  # as on one rank
        assert steps[0]["signature"]["not_measured"].keys() == chunked
        parts = {(row["module"], row["part"]) for row in steps[0]["signature"]["parts"]}
        assert {("model.layers.0.mlp.up_proj", "output"), (LINEAR, "gradient of its input")} <= parts


@pytest.mark.parametrize("stage", [2, slow(3), slow(0)])
def test_slices_of_the_head_may_differ_by_a_row(pair, stage):
    compute = "bf16" if stage else "fp32"
    given = {"stage": stage, "compute": compute, "steps": 2, "overrides": [CLIPPED], "vocabulary": VOCABULARY - 1}
    for steps in pair.run(step_cases.of_shared_matrices, **given):
        sound(steps)
        assert steps[0]["signature"]["not_measured"] == {} and "lm_head" in steps[0]["order"]


@pytest.mark.one_in(4)
@pytest.mark.parametrize("kind", ["qwen3", "gpt_neox", "gemma3_text", "opt"])
def test_other_kinds_of_models_are_measured_as_well(pair, kind):
    """Norms of heads, fused queries, keys and values, biases."""
    given = {"stage": 2, "compute": "bf16", "steps": 2, "overrides": [CLIPPED], "kind": kind}
    for steps in pair.run(step_cases.of_shared_matrices, **given):
        sound(steps)


def under_a_manifest(folder: Path, stage: int, *overrides: str) -> dict[str, Any]:
    path = folder / "manifest.json"
    path.write_text(json.dumps(MANIFEST), encoding="utf-8")
    given = ["precision.path=manifest", f"precision.manifest={path}", "precision.compute=auto", *SCALE, *overrides]
    return {"stage": stage, "compute": "fp32", "steps": 3, "overrides": [CLIPPED, *given]}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("stage", [2, 1, 3])
def test_a_manifest_is_the_plan(pair, tmp_path, stage):
    for steps in pair.run(step_cases.of_shared_matrices, **under_a_manifest(tmp_path, stage)):
        sound(steps)
        assert steps[0]["signature"]["not_measured"] == {} and "model.layers.1.self_attn" in steps[0]["order"]


@pytest.mark.one_in(22)
@pytest.mark.parametrize(("stage", "compute"), [(2, "bf16"), (3, "fp16"), (2, "manifest")])
@pytest.mark.parametrize(("defect", "check"), PLANTS, ids=KINDS)
def test_a_planted_defect_of_shared_matrices_is_found_and_named(pair, tmp_path, stage, compute, defect, check):
    given = {"stage": stage, "compute": compute, "steps": 3, "overrides": [CLIPPED, SCALE[0]]}
    given = under_a_manifest(tmp_path, stage) if compute == "manifest" else given
    for steps in pair.run(step_cases.of_shared_matrices, **given, defect=defect):
        found = judged(steps)[check]
        assert not found.passed
        assert found.modules == (module_of(defect),) if module_of(defect) else found.note.startswith("all ")


@pytest.mark.one_in(4)
@pytest.mark.parametrize("forward", [True, False])
@pytest.mark.parametrize("module", ["model.layers.0.mlp.up_proj", "model.layers.1.self_attn.v_proj"])
def test_one_ranks_slice_that_is_wrong_is_named(pair, module, forward):
    plant = partial(step_cases.spoiled, module=module, rank=1, forward=forward)
    for steps in pair.run(step_cases.of_shared_matrices, stage=2, compute="bf16", steps=2, overrides=[], plant=plant):
        assert judge_signatures(steps, BOUNDS).modules == (module,)


@pytest.mark.slow
@pytest.mark.parametrize(("compute", "stage"), [("bf16", 2), ("fp16", 3), ("manifest", 2)])
def test_the_gate_says_of_two_ranks_what_it_says_of_one(tmp_path, compute, stage):
    """Twin and run share the matrices alike; both FP32 twins are the same training."""
    found = {}
    for ranks in (1, 2):
        given = [f"parallel.tensor={ranks}", "batch.micro_size=4"]
        if compute == "manifest":
            given += [f"deepspeed.stage={stage}", *under_a_manifest(tmp_path, stage)["overrides"]]
        else:
            given += [f"deepspeed.config=ds_configs/zero{stage}_{compute}.json", f"precision.compute={compute}"]
        with forked(tmp_path / str(ranks), *given, ranks=ranks) as chosen:
            found[ranks] = parity.gate(chosen)
    assert found[2]["verdict"] == found[1]["verdict"] == "parity"
    one, two = ({check["name"]: check for check in found[ranks]["checks"]} for ranks in (1, 2))
    assert one.keys() == two.keys()
    assert {name: check["passed"] for name, check in one.items()} == {
        name: check["passed"] for name, check in two.items()
    }
    twins = [found[ranks]["trajectories"]["fp32"][0]["losses"] for ranks in (1, 2)]
    assert twins[1] == pytest.approx(twins[0], rel=1e-5)
    assert two["module_error"]["measured"] == pytest.approx(one["module_error"]["measured"], rel=0.5)
    assert all(walk["recorded_loss"] == walk["steps"][0]["loss"] for walk in found[2]["walks"])
