"""The balancing loss of experts is that of plain torch on the whole batch, however that is cut."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from config.schema import ModelSection
from modeling.router_balance import RouterBalance, untrained_balance
from tests.support.marks import slow
from tests.training.engine import moe_cases as cases
from tests.training.engine.test_engine import difference

FIRST = "mixtral"


@pytest.fixture(scope="module", params=[FIRST, slow("qwen3_moe")])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def expected(solo, family):
    return solo.run(cases.plain_step, family=family)[0]


def same(result, expected):
    assert result["loss"] == pytest.approx(expected["loss"], abs=1e-5)
    assert result["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    assert difference(result["after"], expected["after"]) < 1e-5
    assert result["metrics"]["router/balance_loss"] == pytest.approx(expected["balance"], rel=1e-5)
    assert result["metrics"]["router/z_loss"] == pytest.approx(expected["z"], rel=1e-5)


@pytest.mark.parametrize(("stage", "micro"), [(0, 4), (1, 2), (2, 1), (3, 4), (3, 2)])
def test_a_step_does_not_depend_on_its_cut(pair, family, expected, stage, micro):
    for result in pair.run(cases.one_step, family=family, stage=stage, micro=micro):
        same(result, expected)


def test_four_ranks_balance_over_all_their_sequences(four, family, expected):
    for result in four.run(cases.one_step, family=family, stage=2, micro=1):
        same(result, expected)


def test_one_rank_in_micro_batches_is_the_same(solo, family, expected):
    [result] = solo.run(cases.one_step, family=family, stage=2, micro=2)
    same(result, expected)
    assert 1.0 <= result["metrics"]["router/busiest"] <= 4 / 2
    assert 0.0 < result["metrics"]["router/entropy"] <= 1.0


def test_recomputed_activations_and_a_chunked_loss_are_the_same(pair, family, expected):
    more = ("model.activation_checkpointing=full", "model.loss=chunked", "model.loss_chunk_tokens=16")
    for result in pair.run(cases.one_step, family=family, stage=2, micro=2, overrides=(*cases.ON, *more)):
        same(result, expected)


def test_the_reference_of_parity_has_it_too(pair, family, expected):
    for norm in pair.run(cases.reference_norm, family=family, micro=2):
        assert norm == pytest.approx(expected["grad_norm"], rel=1e-5)


def test_that_a_models_own_loss_is_not_trained_is_said(solo):
    [result] = solo.run(cases.one_step, family=FIRST, stage=1, micro=8, overrides=())
    assert [line for line in result["notes"] if "router_aux_loss_coef = 0.001" in line]
    assert result["metrics"] == {}


def test_that_a_loss_under_another_name_is_not_trained_is_said():
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_key_value_heads": 1, "kv_channels": 8}
    config = AutoConfig.for_model("jetmoe", vocab_size=16, num_hidden_layers=1, **shape)
    model = AutoModelForCausalLM.from_config(config)
    [note] = untrained_balance(model, ModelSection(architecture="jetmoe"))
    assert "(aux_loss_coef = 0.01) is not trained" in note and "set model.balance_loss to train one" in note


def test_a_router_counts_once():
    """transformers lists the logits of JetMoe's attention twice."""
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_key_value_heads": 1, "kv_channels": 8}
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("jetmoe", vocab_size=16, num_hidden_layers=1, **shape)
    )
    router = RouterBalance(model, balance=1.0, z=0.0)
    router.watching(model)(input_ids=torch.arange(4)[None])
    assert len(router.routed) == sum("Gating" in type(module).__name__ for module in model.modules()) == 2


def test_a_model_without_routers_is_refused(solo):
    message = solo.run(cases.refused)[0]
    assert message.startswith("model.balance_loss = 0.5: not supported for model llama: no router")


@pytest.mark.parametrize(("stage", "compute"), [(3, "bf16"), slow(2, "fp16"), slow(1, "bf16")])
def test_routers_choose_in_fp32_of_16_bit_weights_and_inputs(pair, family, stage, compute):
    [plain, *_] = pair.run(cases.routed, family=family, stage=stage, compute=compute, routers="compute")
    for result in pair.run(cases.routed, family=family, stage=stage, compute=compute, routers="fp32"):
        assert result["moved"] == [True, True]
        assert len(result["errors"]) == 2 and max(result["errors"]) < 1e-6
        assert "2 routers compute in FP32 (precision.routers)" in result["notes"]
    assert min(plain["errors"]) > 1e-4 and not any("routers" in note for note in plain["notes"])
