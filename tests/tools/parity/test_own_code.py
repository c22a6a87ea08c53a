"""Errors that 16 bits hide, or that have no direction, and gradients of experts that rounding chose near a tie."""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from modeling.objectives.label_prediction import LabelPrediction
from modeling.objectives.objective import Scored
from tests.modeling.test_quantised_base import eight_bits, four_bits
from tests.support.marks import slow
from tests.tools.parity.test_signature import (
    ATTENTION,
    LAYER,
    MLP,
    NORM,
    ROTARY,
    VOCABULARY,
    Chunked,
    Plant,
    cast,
    fused,
    measured,
    named,
    replaced,
    trained,
)
from tools.dequantise import dequantise
from tools.parity.plain import Apart
from tools.parity.rounding import findings, pooled
from tools.parity.routing import Choices, choosing, differ
from tools.parity.signature import Signatures

UP = f"{MLP}.up_proj"

CAP = 30.0
"""Cap on the final logits in Gemma 2's config."""


def turned(run: Any) -> None:
    """Queries and keys of one layer by the angles of a base that is 1% larger."""
    module, table = run.get_submodule(ATTENTION), run.get_submodule(ROTARY).inv_freq
    right, pairs = module.forward, len(table)

    def forward(*args: Any, position_embeddings: Any, **options: Any) -> Any:
        cos, _ = position_embeddings
        angles = torch.arange(cos.shape[1])[:, None] * (table * 1.01 ** -(torch.arange(pairs) / pairs))
        both = torch.cat((angles, angles), -1).expand(cos.shape)
        return right(*args, position_embeddings=(both.cos().to(cos.dtype), both.sin().to(cos.dtype)), **options)

    module.forward = forward


def _approximated(_: Any, given: torch.Tensor) -> torch.Tensor:
    """SiLU whose exponential is good to 12 bits, as a fast kernel's may be."""
    return (given.float() / (1 + (-given.float()).exp() * (1 + 2.0**-12))).to(given.dtype)


def _scaled_residual(module: Any, *args: Any, **options: Any) -> torch.Tensor:
    """Scales by 1 + 2^-14, a thirty-second of BF16's smallest step."""
    output = type(module).forward(module, *args, **options)
    return (output.float() * (1 + 2.0**-14)).to(output.dtype)


def laid_out(run: Any, *, turned_first: bool) -> None:
    """Attention whose norms get (batch, heads, tokens, width), not (batch, tokens, heads, width), as a kernel may."""
    module = run.get_submodule(ATTENTION)

    def forward(hidden_states: Any, position_embeddings: Any, attention_mask: Any = None, **_: Any) -> Any:
        shape = (*hidden_states.shape[:-1], -1, module.head_dim)
        projected = (project(hidden_states) for project in (module.q_proj, module.k_proj, module.v_proj))
        query, key, value = (states.view(shape).transpose(1, 2) for states in projected)
        if turned_first:
            query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        query, key = module.q_norm(query), module.k_norm(key)
        if not turned_first:
            query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        found, _ = ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, key, value, attention_mask, scaling=module.scaling)
        return module.o_proj(found.reshape(*hidden_states.shape[:-1], -1)), None

    module.forward = forward


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
@pytest.mark.parametrize(("turned_first", "found"), [(True, (ATTENTION,)), (False, ())])
def test_what_is_inside_in_another_layout_is_compared_as_a_whole(turned_first, found, compute) -> None:
    """The reference's code cannot take what the run's modules inside returned."""
    steps = measured("qwen3", compute, plant=partial(laid_out, turned_first=turned_first))
    assert named(steps) == found
    assert set(steps[0]["not_measured"]) == {ATTENTION}
    assert steps[0]["not_measured"][ATTENTION].startswith("backward: ")


@pytest.mark.parametrize(
    ("plant", "module"),
    [
        (turned, ATTENTION),
        (replaced(f"{MLP}.act_fn", _approximated), f"{MLP}.act_fn"),
        (replaced(LAYER, _scaled_residual), LAYER),
    ],
)
def test_an_error_below_the_roundings_of_16_bits_is_named_alone(plant: Plant, module: str) -> None:
    steps = measured(plant=plant)
    assert named(steps) == (module,)
    assert any("the run's own code" in item.why for item in findings(pooled(steps)))


class Uncapped(LabelPrediction):
    """The loss of logits that were not capped, as a kernel of head and loss in one that knows of no cap."""

    def score(self, forward: Any, inputs: dict[str, Any], labels: torch.Tensor) -> Scored:
        """Same signature as the parent."""

        def uncapped(**given: Any) -> Any:
            output = forward(**given)
            output.logits = CAP * (output.logits.float() / CAP).atanh()
            return output

        return super().score(uncapped, inputs, labels)


def looked_at(objective: Chunked, run: Any) -> None:
    """A chunked loss that knows what the model does to its logits."""
    objective.of(run)
    with torch.no_grad():
        objective.head.detect_logit_transform(lambda: run(torch.zeros(1, 2, dtype=torch.int64), use_cache=False))


@pytest.mark.parametrize(("chunked", "compute"), [(False, "bf16"), slow(False, "fp16"), (True, "bf16")])
def test_a_cap_that_the_loss_leaves_out_is_named(chunked: bool, compute: str) -> None:
    """It changes the small logits of a small model by less than 16 bits round them."""
    wrong, right = (Chunked(), Chunked()) if chunked else (Uncapped(), LabelPrediction())
    for objective, found in ((wrong, ("(loss)",)), (right, ())):
        plant: Plant | None = None
        if isinstance(objective, Chunked):
            plant = objective.of if objective is wrong else partial(looked_at, objective)
        steps = measured("gemma2", compute, attention="eager", objective=objective, plant=plant)
        assert named(steps) == found
        parts = pooled(steps)
        assert [part.module for part in parts if part.part == "output" and part.sums["own_xx"]][-1] == "(loss)"
        assert any("the run's own code" in item.why for item in findings(parts)) == bool(found)


@pytest.mark.parametrize("plant", [None, fused])
def test_the_code_of_a_sound_model_is_right_in_fp32(plant: Callable[[Any], None] | None) -> None:
    kept: list[Any] = []

    def planted(run: Any) -> None:
        kept.append(run)
        if plant is not None:
            plant(run)

    steps = measured(plant=planted)
    assert named(steps) == ()
    known = {(part.module, part.part) for part in pooled(steps) if part.sums["own_xx"]}
    assert {(ATTENTION, "into o_proj"), (NORM, "output"), (f"{MLP}.up_proj", "output"), (LAYER, "output")} <= known
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in kept[0].modules())


def test_a_run_in_fp32_is_its_own_code() -> None:
    assert not any(part.sums["own_xx"] for part in pooled(measured(compute="fp32")))


@pytest.mark.parametrize("made", [four_bits, eight_bits])
@pytest.mark.parametrize(("factor", "found"), [(1.0, ()), (1 + 2.0**-11, (UP,))])
def test_layers_of_codes_are_judged_in_the_runs_dtype_alone(made, factor, found) -> None:
    """The reference's weights are no codes that theirs could be replaced by. factor: on the run's scales."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    reference, run = (trained("llama", "sdpa", 1) for _ in range(2))
    layer = made(run.get_submodule(UP).weight.detach().clone())
    layer.bias = None
    for model in (reference, run):
        model.set_submodule(UP, layer)
    assert dequantise(reference) == [UP]
    for scale in layer.scales():
        scale *= factor
    for parameter in run.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.bfloat16()
    tokens = torch.randint(VOCABULARY, (4, 64), generator=torch.Generator().manual_seed(1))
    signatures = Signatures(reference, run, compute=torch.bfloat16)
    with torch.no_grad(), signatures.of_candidate():
        run(tokens, use_cache=False)
    step = signatures.measured()
    assert named([step]) == found
    assert (UP, "output") in {(part.module, part.part) for part in pooled([step])}


def gradient_of(model: torch.nn.Module, name: str, made: Choices, taken: Choices | None = None) -> torch.Tensor:
    tokens = torch.randint(VOCABULARY, (4, 64), generator=torch.Generator().manual_seed(1))
    with choosing(model, made, taken):
        model(tokens, labels=tokens, use_cache=False).loss.backward()
    gradient = model.get_parameter(name).grad
    assert gradient is not None
    model.zero_grad()
    return gradient.clone()


@pytest.mark.parametrize(
    ("architecture", "parameter"),
    [("mixtral", "model.layers.1.mlp.experts.down_proj"), ("opt", "model.decoder.layers.1.fc1.weight")],
)
def test_choices_near_a_tie_are_taken_over_and_wrong_ones_are_not(architecture: str, parameter: str) -> None:
    reference = trained(architecture, "eager", 1)
    run = copy.deepcopy(reference)
    cast(run)
    expected: Choices = {}
    chosen: Choices = {}
    taken: Choices = {}
    own, mine = gradient_of(reference, parameter, expected), gradient_of(run, parameter, chosen)
    assert differ(chosen, expected) == 1.0 and differ(chosen, chosen) == 0.0
    same = gradient_of(reference, parameter, taken, chosen)
    assert all(
        torch.equal(one.indices, other.indices)
        for name in chosen
        for one, other in zip(taken[name], chosen[name], strict=True)
    )
    assert Apart([(mine, same)]).error < 0.5 * Apart([(mine, own)]).error
    assert math.isnan(differ(chosen, {}))
    halves = {key: [c._replace(indices=c.indices[..., :1]) for c in each] for key, each in chosen.items()}
    assert math.isnan(differ(halves, expected)), "a rank has a slice"
    if architecture == "opt":
        return
    [name, *_] = chosen
    worst = [choice._replace(indices=choice.given.argsort()[:, :2]) for choice in chosen[name]]
    assert math.isnan(differ(chosen | {name: worst}, expected))
