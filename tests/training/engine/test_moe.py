"""The balancing loss of experts is that of plain torch on the whole batch, however that is cut."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from config.schema import ModelSection
from modeling.router_balance import RouterBalance, untrained_balance
from tests.support.marks import slow
from tests.support.models import small_run
from tests.training.engine import moe_cases as cases
from tests.training.engine.engine_cases import one_step
from tests.training.engine.expert_cases import model_of
from tests.training.engine.test_engine import require_step

FIRST = "mixtral"


@pytest.fixture(scope="module", params=[FIRST, slow("qwen3_moe")])
def family(request):
    return request.param


@pytest.fixture(scope="module")
def expected(solo, family):
    return solo.run(cases.plain_step, family=family)[0]


CHUNKED = ("model.activation_checkpointing=full", "model.loss=chunked", "model.loss_chunk_tokens=16")


@pytest.mark.parametrize(
    ("ranks", "stage", "micro", "more"),
    [
        *(("pair", stage, micro, ()) for stage, micro in ((0, 4), (1, 2), (2, 1), (3, 4), (3, 2))),
        ("pair", 2, 2, CHUNKED),
        ("four", 2, 1, ()),
        ("solo", 2, 2, ()),
    ],
)
def test_a_step_does_not_depend_on_its_cut(request, family, expected, ranks, stage, micro, more):
    options = {"compute": "fp32", "mask": "uneven", "overrides": [model_of(family), *cases.ON, *more]}
    results = request.getfixturevalue(ranks).run(one_step, stage=stage, micro=micro, **options)
    require_step(results, expected)
    for metrics in (result["metrics"] for result in results):
        assert metrics["router/balance_loss"] == pytest.approx(expected["balance"], rel=1e-5)
        assert metrics["router/z_loss"] == pytest.approx(expected["z"], rel=1e-5)
        assert 1.0 <= metrics["router/busiest"] <= 4 / 2
        assert 0.0 < metrics["router/entropy"] <= 1.0


def test_the_reference_of_parity_has_it_too(pair, family, expected):
    for norm in pair.run(cases.reference_norm, family=family, micro=2):
        assert norm == pytest.approx(expected["grad_norm"], rel=1e-5)


def test_that_a_models_own_loss_is_not_trained_is_said(solo):
    [result] = solo.run(one_step, stage=1, compute="fp32", micro=8, mask="uneven", overrides=[model_of(FIRST)])
    assert [line for line in result["notes"] if "router_aux_loss_coef = 0.001" in line]
    assert result["metrics"] == {}


def jetmoe():
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_key_value_heads": 1, "kv_channels": 8}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model("jetmoe", vocab_size=16, num_hidden_layers=1, **shape))


def test_that_a_loss_under_another_name_is_not_trained_is_said():
    [note] = untrained_balance(jetmoe(), ModelSection(architecture="jetmoe"))
    assert "(aux_loss_coef = 0.01) is not trained" in note and "set model.balance_loss to train one" in note


def test_a_router_counts_once():
    """transformers lists the logits of JetMoe's attention twice."""
    model = jetmoe()
    router = RouterBalance(model, balance=1.0, z=0.0)
    router.watching(model)(input_ids=torch.arange(4)[None])
    assert len(router.routed) == sum("Gating" in type(module).__name__ for module in model.modules()) == 2


def test_a_model_without_routers_is_refused(solo):
    [said] = solo.run(small_run.refused, stage=1, compute="fp32", overrides=cases.ON)
    assert said.startswith("model.balance_loss = 0.5: not supported for model llama: no router")


@pytest.mark.parametrize(("stage", "compute"), [(3, "bf16"), slow(2, "fp16"), slow(1, "bf16")])
def test_routers_choose_in_fp32_of_16_bit_weights_and_inputs(pair, family, stage, compute):
    [plain, *_] = pair.run(cases.routed, family=family, stage=stage, compute=compute, routers="compute")
    for result in pair.run(cases.routed, family=family, stage=stage, compute=compute, routers="fp32"):
        assert result["moved"] == [True, True]
        assert len(result["errors"]) == 2 and max(result["errors"]) < 1e-6
        assert "2 routers compute in FP32 (precision.routers)" in result["notes"]
    assert min(plain["errors"]) > 1e-4 and not any("routers" in note for note in plain["notes"])
