"""Regions against plain torch: FP32 bit for bit, plain autocast, and an FP64 oracle for every mixture."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from config.errors import UserError
from modeling.activation_checkpointing import apply_activation_checkpointing
from precision import fp8
from precision.dtypes import DTYPES
from precision.manifest import Manifest, Rule
from precision.observe import ROOT, Observation, verify
from precision.regions import Regions
from precision.shared_inputs import SharedInputs
from tests.support.models.small_models import VOCABULARY, distance, small_model
from tests.support.refusals import refused

SCALE = 1024.0
"""Loss scale of these tests, a power of two: without one, FP16 gradients underflow."""
TOLERANCE = {"fp32": 40 * 2.0**-24, "fp16": 5 * 2.0**-11, "bf16": 5 * 2.0**-8}
"""Largest ||gradient - oracle|| / ||oracle|| over all parameters, by the coarsest dtype in use, in unit roundoffs: the
errors of some ten roundings in a row add up, in 16 bits to about twice the roundoff; FP32 also sums in FP32."""


def manifest(default: str, *rules: tuple[str, str]) -> Manifest:
    return Manifest(default, tuple(Rule(compute, "test", match) for match, compute in rules), Path("m.json"))


def build(family: str, attention: str = "sdpa", *, tied: bool = True, **config: Any) -> PreTrainedModel:
    """A model with weights large enough for each dtype's rounding to be seen."""
    return small_model(family, attention, tie_word_embeddings=tied, initializer_range=0.1, **config)


@contextmanager
def in_regions(model: torch.nn.Module, given: Manifest) -> Iterator[Regions]:
    regions = Regions(model, given)
    try:
        yield regions
    finally:
        regions.close()


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (2, 13), generator=torch.Generator().manual_seed(1))


def loss_of(model: PreTrainedModel) -> torch.Tensor:
    logits = model(tokens()[:, :-1], use_cache=False).logits
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return functional.cross_entropy(logits.flatten(0, 1), tokens()[:, 1:].flatten())


def gradients(model: PreTrainedModel) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and unscaled gradients of one step under loss scale SCALE."""
    model.zero_grad(set_to_none=True)
    loss = loss_of(model)
    (loss * SCALE).backward()
    return loss.detach(), {name: item.grad / SCALE for name, item in model.named_parameters()}


def verified(model: PreTrainedModel, regions: Regions) -> tuple[torch.Tensor, dict[str, torch.Tensor], Observation]:
    """Loss and gradients of a step in which each region computes as promised, and what was seen of it."""
    with Observation(model) as seen:
        loss, found = gradients(model)
    verify(seen, regions.dtypes, may_idle=regions.may_idle)
    return loss, found, seen


def oracle_of(model: PreTrainedModel) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return gradients(copy.deepcopy(model).double())


ALL = [("llama", "sdpa"), ("llama", "eager"), ("gpt2", "sdpa"), ("gpt2", "eager")]


@pytest.mark.parametrize(("family", "attention"), ALL)
def test_fp32_is_plain_fp32_bit_for_bit(family: str, attention: str) -> None:
    model = build(family, attention)
    plain_loss, plain = gradients(model)
    with in_regions(model, manifest("fp32")):
        loss, found = gradients(model)
    assert torch.equal(loss, plain_loss)
    assert all(torch.equal(found[name], value) for name, value in plain.items())


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
@pytest.mark.parametrize(("family", "attention"), ALL)
def test_one_dtype_agrees_with_torch_autocast(family: str, attention: str, compute: str) -> None:
    """Closer to plain autocast than either is to the truth; the residual stream is FP32 in both."""
    model = build(family, attention, tied=False)
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=DTYPES[compute]):
        plain_loss = loss_of(model)
    (plain_loss * SCALE).backward()
    plain = {name: item.grad.double() / SCALE for name, item in model.named_parameters()}
    with in_regions(model, manifest(compute)):
        loss, found = gradients(model)
    assert float(loss) == pytest.approx(float(plain_loss.detach()), rel=1e-6)
    assert distance(found, plain) < 1e-6


MIXTURES = {
    "bf16 with fp16": ("bf16", (("*.q_proj", "fp16"), ("*.c_attn", "fp16"), ("*.mlp.c_fc", "fp16"))),
    "bf16 with fp32": ("bf16", (("*.down_proj", "fp32"), ("*.mlp.c_proj", "fp32"), ("lm_head", "fp32"))),
    "bf16 with fp16 attention": ("bf16", (("*.self_attn", "fp16"), ("*.attn", "fp16"))),
    "bf16 with fp32 attention": ("bf16", (("*attn", "fp32"), ("*.v_proj", "fp16"), ("*.attn.c_proj", "fp16"))),
    "fp16 with bf16": ("fp16", (("*.k_proj", "bf16"), ("*.attn", "bf16"), ("*.self_attn", "bf16"))),
    "fp16 with fp32": ("fp16", (("*_proj", "fp32"), ("*.mlp.*", "fp32"))),
    "fp16 with both": ("fp16", (("*.layers.0.*", "fp32"), ("*.h.0.*", "fp32"), ("lm_head", "bf16"))),
    "fp32 with both": ("fp32", (("*.layers.1.*", "bf16"), ("*.h.1.*", "bf16"), ("lm_head", "fp16"))),
}


def mixture(name: str, model: torch.nn.Module) -> Manifest:
    """The rules of a mixture that match something in this family."""
    default, rules = MIXTURES[name]
    kept: list[tuple[str, str]] = []
    for candidate in rules:
        try:
            Regions(model, manifest(default, candidate)).close()
        except UserError:
            continue
        kept.append(candidate)
    assert kept
    return manifest(default, *kept)


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize(("family", "attention"), ALL)
def test_mixtures_are_near_fp64(family: str, attention: str, name: str) -> None:
    model = build(family, attention)
    oracle_loss, oracle = oracle_of(model)
    with in_regions(model, mixture(name, model)) as regions:
        loss, found, _ = verified(model, regions)
        computes = {*regions.dtypes.values()}
    assert len(computes) > 1
    tolerance = TOLERANCE["bf16" if "bf16" in computes else "fp16"]
    assert {item.dtype for item in found.values()} == {torch.float32}
    assert float(loss) == pytest.approx(float(oracle_loss), rel=tolerance)
    assert distance(found, oracle) < tolerance


def test_fused_experts_compute_where_autocast_does_not_reach() -> None:
    model = build("mixtral", tied=False, intermediate_size=48)
    _, oracle = gradients(model)  # in FP32: grouped matmuls have no FP64 kernel
    with in_regions(model, manifest("fp32", ("*.experts", "fp16"))) as regions:
        _, found, seen = verified(model, regions)
        assert seen.computed["model.layers.0.mlp.experts"] == {"fp16"}
    with in_regions(model, manifest("bf16")) as regions:
        assert {regions.dtypes[f"model.layers.{layer}.mlp.gate"] for layer in (0, 1)} == {"fp32"}
        with Observation(model) as seen:
            gradients(model)
        assert seen.computed["model.layers.0.mlp.gate"] == {"fp32"}
    with in_regions(model, manifest("fp32", ("*.gate", "bf16"))) as regions:
        assert regions.dtypes["model.layers.0.mlp.gate"] == "bf16"
    assert {item.dtype for item in found.values()} == {torch.float32}
    assert 1e-5 < distance(found, oracle) < TOLERANCE["fp16"]
    with in_regions(model, manifest("bf16", ("*.experts", "fp16"))) as regions:
        verified(model, regions)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("name", ["bf16 with fp16", "bf16 with fp32 attention", "fp16 with both"])
def test_checkpointing_recomputes_in_the_same_dtype(name: str, reentrant: bool) -> None:
    model = build("llama")
    model.train()
    with in_regions(model, mixture(name, model)) as regions:
        loss, without = gradients(model)
        apply_activation_checkpointing(model, "full", reentrant=reentrant)
        model.enable_input_require_grads()
        with Observation(model) as forward_only:
            loss_of(model)
        checkpointed_loss, found, seen = verified(model, regions)
    assert sum(seen.flops.values()) > 1.5 * sum(forward_only.flops.values()), "nothing was recomputed"
    assert torch.equal(checkpointed_loss, loss)
    assert all(torch.equal(found[name], value) for name, value in without.items())


def test_what_flows_between_modules() -> None:
    model = build("llama")
    outputs: dict[str, torch.dtype] = {}

    def note(name: str, module: torch.nn.Module, args: object, output: object) -> None:
        outputs[name] = (output[0] if isinstance(output, tuple) else output).dtype

    layer = "model.layers.0"
    watched = [f"{layer}.self_attn.{part}" for part in ("q_proj", "v_proj")]
    watched += [layer, f"{layer}.self_attn", f"{layer}.input_layernorm", f"{layer}.mlp.down_proj", "lm_head"]
    hooks = [model.get_submodule(name).register_forward_hook(partial(note, name)) for name in watched]
    rules = (("*.q_proj", "fp32"), ("*.self_attn", "fp16"), ("*.down_proj", "fp32"), ("lm_head", "fp32"))
    with in_regions(model, manifest("bf16", *rules)):
        loss_of(model)
    for hook in hooks:
        hook.remove()
    assert outputs[f"{layer}.self_attn.q_proj"] == torch.float16, "its attention's dtype"
    assert outputs[f"{layer}.self_attn.v_proj"] == torch.float16
    assert outputs[f"{layer}.self_attn"] == torch.bfloat16, "the ambient dtype"
    assert outputs[f"{layer}.mlp.down_proj"] == torch.bfloat16
    assert outputs[f"{layer}.input_layernorm"] == torch.float32, "what it was given"
    assert outputs[layer] == torch.float32, "the residual stream"
    assert outputs["lm_head"] == torch.float32, "its own dtype, for the loss"


def test_a_tied_weight_is_cast_for_each_region() -> None:
    """Autocast's cache is keyed by the weight alone and would serve the first region's copy to the second."""
    model = torch.nn.Sequential(torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8, bias=False))
    model[1].weight = model[0].weight
    with in_regions(model, manifest("bf16", ("1", "fp16"))) as regions, Observation(model) as seen:
        output = model(torch.randn(3, 8))
        verify(seen, regions.dtypes)
    output.float().sum().backward()
    assert model[0].weight.grad.dtype == torch.float32


def test_a_bias_is_rounded_at_zero_3_as_at_other_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's linear layer adds it in place, where autocast does not reach."""
    model = build("llama", attention_bias=True)
    layer = model.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        layer.weight.fill_(1.0 / layer.in_features)
        layer.bias.fill_(2.0**-8 * (1 + 2.0**-9))  # in BF16 2^-8, half of a spacing above 1
    with in_regions(model, manifest("bf16")):
        monkeypatch.setattr(functional, "linear", zero3_linear_wrap)
        output = layer(torch.ones(2, 3, layer.in_features))
        output.sum().backward()
    assert set(output.flatten().tolist()) == {1.0} and layer.bias.grad.tolist() == [6.0] * layer.out_features


def test_what_is_outside_every_region_runs_in_the_default() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.nn.Linear(8, 8)

        def score(self, x: torch.Tensor) -> torch.Tensor:
            return x @ x.mT

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.score(self.first(x).float())

    model = Model()
    with in_regions(model, manifest("bf16", ("first", "fp16"))) as regions:
        with Observation(model) as seen:
            assert model(torch.randn(4, 8)).dtype == torch.bfloat16
        assert seen.computed == {"first": {"fp16"}, ROOT: {"bf16"}}
        with regions.ambient():
            assert model.score(torch.randn(4, 8)).dtype == torch.bfloat16
        assert not torch.is_autocast_enabled("cpu")


def test_fp16_and_bf16_never_meet() -> None:
    """`cat` and `add` of the two raise under autocast, between regions as inside one."""

    class LatentAttention(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down, self.rope = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            joined = torch.cat([self.down(hidden), self.rope(hidden), hidden], dim=-1)
            return joined @ joined.mT

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.attend, self.last = torch.nn.Linear(8, 8), LatentAttention(), torch.nn.Linear(8, 8)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            hidden = self.first(hidden)
            return torch.cat([self.last(hidden), hidden, self.attend(hidden)], dim=-1)

    model = Model()
    rules = (("last", "fp16"), ("attend", "fp16"), ("attend.rope", "bf16"))
    with in_regions(model, manifest("bf16", *rules)) as regions, Observation(model) as seen:
        assert model(torch.randn(2, 4, 8)).dtype == torch.bfloat16
    verify(seen, regions.dtypes)


def test_a_change_between_two_steps_takes_effect_and_is_kept() -> None:
    model = build("llama")
    name = "model.layers.0.self_attn.q_proj"
    given = manifest("bf16", (name, "fp16"))
    with in_regions(model, given) as regions:
        assert regions.uses("fp16") and regions.state_dict() == {}
        regions.set(name, "fp32")
        assert verified(model, regions)[2].computed[name] == {"fp32"}
        assert not regions.uses("fp16") and regions.uses("bf16")
        state = regions.state_dict()
    assert state == {name: "fp32"}
    with in_regions(model, given) as resumed:
        resumed.set("lm_head", "fp32")  # which is not in the checkpoint
        resumed.load_state_dict(state)
        assert resumed.dtypes[name] == "fp32" and resumed.dtypes["lm_head"] == "bf16"
        assert resumed.state_dict() == state


def test_a_wrong_change_is_told() -> None:
    model = build("llama")
    with in_regions(model, manifest("bf16")) as regions:
        with pytest.raises(UserError, match="q_pro: no region.*did you mean model.layers.0.self_attn.q_proj"):
            regions.set("model.layers.0.self_attn.q_pro", "fp32")
        assert "lm_head: fp4 is not one of" in refused(regions.set, "lm_head", "fp4")
        assert "lm_head: fp8 is for linear layers" in refused(regions.set, "lm_head", "fp8")
        assert "gone: no region" in refused(regions.load_state_dict, {"lm_head": "fp32", "gone": "fp32"})
        assert regions.dtypes["lm_head"] == "bf16", "a refused state changes nothing"


def test_close_gives_the_model_back() -> None:
    model = build("llama")
    _, plain = gradients(model)
    own = model.lm_head.forward
    model.lm_head.forward = own  # an instance attribute, as kernels from the hub leave one
    Regions(model, manifest("bf16")).close()
    assert model.lm_head.__dict__["forward"] == own
    del model.lm_head.forward
    assert not [name for name, module in model.named_modules() if "forward" in module.__dict__]
    assert all(torch.equal(value, plain[name]) for name, value in gradients(model)[1].items())


@pytest.mark.parametrize("kind", [torch.nn.LayerNorm, torch.nn.RMSNorm])
def test_norms_in_fp32_survive_what_16_bits_do_not(kind: type) -> None:
    """Squares of 3000 pass FP16's 65504; the norm of an FP16 activation still agrees with FP64."""
    model = torch.nn.Sequential(kind(64))
    inputs = (torch.randn(5, 64) * 3000).half()
    with in_regions(model, manifest("fp16")):
        output = model(inputs)
    assert output.dtype == torch.float16
    torch.testing.assert_close(output.double(), copy.deepcopy(model).double()(inputs.double()), rtol=1e-3, atol=1e-3)


def test_a_rule_lowers_a_norm_and_the_parameters_stay() -> None:
    model = torch.nn.Sequential(torch.nn.LayerNorm(64))
    given = Manifest("fp32", (Rule("bf16", "test", None, "LayerNorm"),), Path("m.json"))
    inputs = torch.randn(5, 64)
    with in_regions(model, given) as regions:
        with Observation(model) as seen:
            output = model(inputs)
        verify(seen, regions.dtypes)
        output.sum().backward()
        with pytest.raises(RuntimeError):
            model(torch.randn(5, 63))
    assert seen.computed == {"0": {"bf16"}} and output.dtype == torch.float32
    error = (output - copy.deepcopy(model)(inputs)).abs().max()
    assert 1e-4 < error < 5e-2, "computed in BF16, not in FP32"
    assert model[0].weight.grad.dtype == torch.float32
    assert "weight" not in model[0].__dict__ and isinstance(model[0].weight, torch.nn.Parameter)


@pytest.mark.parametrize("compute", ["bf16", "fp16", "fp8"])
@pytest.mark.parametrize("recompute", ["none", "full", "ops"])
def test_layers_with_one_input_cast_and_round_it_once(compute, recompute, monkeypatch) -> None:
    """With the same bits, and nothing is kept between passes once the first has shown which layers these are."""

    class Casts(TorchDispatchMode):
        """Counts casts of activations, which have as many rows as there are tokens."""

        count = 0

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.ops.aten._to_copy.default and args[0].dtype == torch.float32 and args[0].ndim == 3:
                self.count += 1
            return function(*args, **(kwargs or {}))

    rounded: list[int] = []
    own = fp8._narrow
    monkeypatch.setattr(fp8, "_narrow", lambda *given: rounded.append(1) or own(*given))
    model = build("llama")
    apply_activation_checkpointing(model, recompute, reentrant=False)
    default = "bf16" if compute == "fp8" else compute
    with in_regions(model, manifest(default, ("*_proj", compute))) as regions:
        found = []
        for shares in (True, True, False):
            rounded.clear()
            if not shares:
                monkeypatch.setattr(SharedInputs, "at", lambda *given: None)
            with Casts() as casts:
                found.append((*gradients(model), casts.count, len(rounded)))
            assert len(found) == 1 or regions._shared._kept == {}
    (loss, expected, *alone), passes = found.pop(), 1 if recompute == "none" else 2
    fewer = passes * 3 * len(model.model.layers)  # those of keys, values and the MLP's second layer
    for of_pass, each, *counts in found:
        assert counts == [alone[0] - fewer, alone[1] - (fewer if compute == "fp8" else 0)]
        assert torch.equal(of_pass, loss)
        assert all(torch.equal(each[name], value) for name, value in expected.items())
