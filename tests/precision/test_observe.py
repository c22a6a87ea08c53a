"""Observed matmuls and figures of attention against torch's own counts, counts by hand, and FP64."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from modeling.activation_checkpointing import apply_activation_checkpointing
from precision.activation_signals import OUTLIER, AttentionMeter, ChannelMeter, channel_figures
from precision.observe import ROOT, Observation, PrecisionMismatch, _attention_flops, verify
from tests.support.models.flex_on_cpu import flex_on_cpu
from tests.support.models.small_models import small_model

IDS = torch.arange(2 * 12).reshape(2, 12)


def test_flops_are_those_of_torch() -> None:
    model = small_model("llama", "eager")
    with FlopCounterMode(display=False) as counter:
        model(IDS)
    with Observation(model) as seen:
        model(IDS)
    assert seen.flops == {"fp32": counter.get_total_flops()}
    assert seen.flop_share() == {"fp32": 1.0}


def test_the_backward_pass_is_not_counted() -> None:
    model = small_model("llama", "sdpa")
    with Observation(model) as forward:
        loss = model(IDS).logits.float().logsumexp(-1).sum()
    with Observation(model) as seen:
        model(IDS).logits.float().logsumexp(-1).sum().backward()
    assert seen.flops == forward.flops and seen.computed == forward.computed
    with Observation(model) as backward:
        loss.backward()
    assert backward.flops == {} and backward.computed == {} and backward.flop_share() == {}


def gradients(model: PreTrainedModel, dtype: torch.dtype) -> list[torch.Tensor]:
    """The loss, and the gradient of every parameter."""
    model.zero_grad()
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        loss = model(IDS).logits.float().logsumexp(-1).sum()
    loss.backward()
    return [loss.detach(), *(item.grad.clone() for item in model.parameters())]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_observing_changes_no_bit(dtype: torch.dtype) -> None:
    model = small_model("llama", "sdpa")
    plain = gradients(model, dtype)
    with Observation(model):
        observed = gradients(model, dtype)
    assert all(map(torch.equal, plain, observed))


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("mode", "first"),
    [("full", "not observed"), ("none", "observed"), *(("ops", first) for first in ("observed", "not observed"))],
)
def test_flex_attention_is_compiled_and_seen_all_the_same(mode: Any, first: str) -> None:
    """torch enters no compiled graph while operators are watched, and FlexAttention is one. The first pass compiles."""
    torch.compiler.reset()
    model, same = small_model("llama", "flex_attention"), small_model("llama", "sdpa")
    same.load_state_dict(model.state_dict())
    for each in (model, same):
        apply_activation_checkpointing(each.train(), mode, reentrant=False)
    with Observation(same) as expected:
        fused = gradients(same, torch.float32)
    with flex_on_cpu():
        plain = gradients(model, torch.float32) if first != "observed" else []
        with Observation(model) as seen:
            observed = gradients(model, torch.float32)
        plain = plain or gradients(model, torch.float32)
    assert all(map(torch.equal, plain, observed))
    assert seen.computed == expected.computed
    assert seen.flops == expected.flops or mode == "ops"  # which keeps what a fused kernel gives, and no graph's
    for found, wanted in zip(observed, fused, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_operators_that_come_whole_under_inference_mode() -> None:
    model = small_model("llama", "sdpa")
    with Observation(model) as expected, torch.no_grad():
        model(IDS)
    with Observation(model) as seen, torch.inference_mode():
        model(IDS)
    assert seen.flops == expected.flops and seen.computed == expected.computed


class Own(torch.nn.Module):
    def __init__(self, call: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(x)


@pytest.mark.parametrize(
    ("call", "flops"),
    [
        (lambda x: x @ x.mT, 2 * 4 * 6 * 6 * 8),
        (lambda x: x[0] @ x[0].mT, 2 * 6 * 6 * 8),
        (lambda x: torch.baddbmm(torch.zeros(6, dtype=x.dtype), x, x.mT), 2 * 4 * 6 * 6 * 8),
        (lambda x: x[0] @ x[0, 0], 2 * 6 * 8),
        (lambda x: torch.addmv(x[0, :, 0], x[0], x[0, 0]), 2 * 6 * 8),
        (lambda x: x[0, 0] @ x[0, 0], 2 * 8),
        (lambda x: torch.einsum("bij,bkj->bik", x, x), 2 * 4 * 6 * 6 * 8),
        (lambda x: functional.conv1d(x, torch.ones(5, 6, 3, dtype=x.dtype)), 2 * 4 * 5 * 6 * 6 * 3),
        (lambda x: functional.scaled_dot_product_attention(x[None], x[None], x[None]), 2 * 2 * 4 * 6 * 6 * 8),
        (lambda x: x * x, 0),
    ],
)
@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp64"])
def test_each_operator_by_hand(call: Callable[[torch.Tensor], torch.Tensor], flops: int, dtype: str) -> None:
    kinds = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
    model = torch.nn.Sequential(Own(call))
    with Observation(model) as seen:
        model(torch.randn(4, 6, 8, dtype=kinds[dtype], requires_grad=True))
    assert seen.flops == ({dtype: flops} if flops else {})
    assert seen.computed == ({"0": {dtype}} if flops else {})


def test_flash_attn_has_heads_after_tokens() -> None:
    """Two sequences of 6 tokens, 4 heads of 8 channels, two of them of keys; its operators need a GPU."""
    query, key = torch.zeros(2, 6, 4, 8), torch.zeros(2, 6, 2, 8)
    ends = torch.tensor([0, 6, 12])
    flat = (query.flatten(0, 1), key.flatten(0, 1), key.flatten(0, 1), ends, ends, 6, 6)
    assert _attention_flops("flash_attn::_flash_attn_forward", query, key, key) == 2 * 2 * 2 * 4 * 6 * 6 * 8
    assert _attention_flops("flash_attn::_flash_attn_varlen_forward", *flat) == 2 * 2 * 2 * 4 * 6 * 6 * 8


def test_the_innermost_running_module_owns_the_matmul() -> None:
    class Outer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                x = self.inner(x)
            return x.double() @ x.double()

    model = Outer()
    with Observation(model) as seen:
        model(torch.randn(4, 4))
    assert seen.computed == {"inner": {"bf16"}, ROOT: {"fp64"}}
    assert seen.flop_share() == {"bf16": 0.5, "fp64": 0.5}


def fail(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("on purpose")


def test_a_failed_forward_inside_does_not_confuse_what_follows() -> None:
    """Checkpointing ends recomputations by an exception out of a forward."""
    model = torch.nn.ModuleDict({"bad": Own(fail), "good": torch.nn.Linear(2, 2)})
    with Observation(model) as seen:
        with pytest.raises(RuntimeError, match="on purpose"):
            model["bad"](torch.ones(2, 2))
        torch.ones(2, 2) @ torch.ones(2, 2)
        model["good"](torch.ones(2, 2))
    assert seen.computed == {"good": {"fp32"}}
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
    assert torch.utils._python_dispatch._get_current_dispatch_mode() is None


def observe_linear(cast: torch.dtype | None) -> Observation:
    """A two-layer model in FP32 whose second layer is secretly cast."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    secret = model[1]
    original = secret.forward
    if cast is not None:

        def forward(x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", cast):
                return original(x).float()

        secret.forward = forward
    with Observation(model) as seen:
        model(torch.randn(2, 4))
    return seen


def test_a_secret_cast_is_caught() -> None:
    promised = {"0": "fp32", "1": "fp32", "2": "fp32"}
    verify(observe_linear(None), promised)
    with pytest.raises(PrecisionMismatch, match="^1: fp32 was promised, but it computed in bf16;"):
        verify(observe_linear(torch.bfloat16), promised)
    with pytest.raises(PrecisionMismatch, match=r"^0: fp16 was promised.*\(and 1 more\)"):
        verify(observe_linear(None), {"0": "fp16", "1": "fp32", "2": "bf16"})


def test_a_region_that_never_computed_is_an_error() -> None:
    seen = observe_linear(None)
    with pytest.raises(PrecisionMismatch, match="^absent: bf16 was promised, but no computation of it"):
        verify(seen, {"absent": "bf16"})
    verify(seen, {"absent": "bf16"}, may_idle={"absent"})
    with pytest.raises(PrecisionMismatch, match="^0: bf16"):
        verify(seen, {"0": "bf16"}, may_idle={"0"})


def test_a_norm_that_casts_by_itself_is_caught() -> None:
    """transformers' RMSNorm widens to FP32 whatever it is given."""
    model = small_model("llama", "eager")
    with Observation(model) as seen:
        model(IDS)
    assert seen.computed["model.norm"] == {"fp32"}
    with pytest.raises(PrecisionMismatch, match="^model.norm: bf16 was promised, but it computed in fp32"):
        verify(seen, {"model.norm": "bf16"}, may_idle={"model.norm"})


SOFTCAP = 0.004
CONFIGS = {"gemma2": {"head_dim": 8, "sliding_window": 5, "attn_logit_softcapping": SOFTCAP}}


def _inputs(kind: str) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 31, (2, 50 if kind == "long" else 12), generator=torch.Generator().manual_seed(1))
    if kind == "packed":
        return {"input_ids": ids, "position_ids": torch.cat([torch.arange(5), torch.arange(7)]).repeat(2, 1)}
    if kind == "padded":
        mask = torch.ones_like(ids)
        mask[1, 8:] = 0
        return {"input_ids": ids, "attention_mask": mask}
    return {"input_ids": ids}


@pytest.mark.parametrize(
    ("name", "attention", "kind"),
    [
        ("llama", "sdpa", "long"),
        ("llama", "sdpa", "packed"),
        ("llama", "sdpa", "padded"),
        ("gpt2", "sdpa", "packed"),
        ("gemma2", "eager", "long"),
    ],
)
def test_entropy_is_that_of_the_probabilities(name, attention, kind):
    model, reference = (small_model(name, kind, **CONFIGS.get(name, {})) for kind in (attention, "eager"))
    reference.double()
    inputs = _inputs(kind)
    with torch.no_grad(), AttentionMeter(model) as meter:
        model(**inputs, use_cache=False)
    assert "get_interface" not in vars(ALL_ATTENTION_FUNCTIONS)
    with torch.no_grad():
        layers = reference(**inputs, use_cache=False, output_attentions=True).attentions
    assert len(meter.entropies) == len(layers) == 2
    for (module, sums), whole in zip(meter.entropies.items(), layers, strict=True):
        shown = whole.flip(2)[:, :, :: 4 if kind == "long" else 1]  # of 50 queries at most 16 are looked at
        seen = (shown > 0).sum(-1)
        entropy = -torch.special.xlogy(shown, shown).sum(-1) / seen.clamp(min=2).log()
        counted = seen > 1
        expected = torch.stack([torch.where(counted, entropy, 0.0).sum((0, 2)), counted.sum((0, 2)).double()])
        torch.testing.assert_close(sums, expected, rtol=1e-5, atol=1e-5, msg=module)


def test_a_soft_cap_bounds_the_logit():
    model = small_model("gemma2", "eager", **CONFIGS["gemma2"])
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(1e4)
        with AttentionMeter(model) as meter:
            model(**_inputs("plain"), use_cache=False)
    assert all(float(value) == pytest.approx(SOFTCAP) for value in meter.largest.values())


def test_one_loud_channel_is_an_outlier_and_one_loud_token_is_not():
    values = torch.randn(2, 64, 32, generator=torch.Generator().manual_seed(0))
    values[0, 0] *= 1e4
    module = torch.nn.Identity()
    for loud, expected in ((1.0, 0), (100.0, 1)):
        values[..., 7] *= loud
        with ChannelMeter({"it": module}) as meter:
            module(values[:1])
            module(values[1:])
        wide = values.double().flatten(0, 1)
        norms = (wide / wide.square().mean(1, keepdim=True).sqrt()).square().mean(0).sqrt()
        kurtosis, outliers = channel_figures(meter.squares["it"])
        assert kurtosis == pytest.approx(float(norms.pow(4).mean() / norms.pow(2).mean() ** 2), rel=1e-5)
        assert outliers == expected == int((norms > OUTLIER * norms.median()).sum())
        assert (kurtosis > 16) == bool(expected)


KERNELS = {
    "causal": {},
    "both ways": {"is_causal": False},
    "window": {"sliding_window": 3},
    "window both ways": {"sliding_window": 3, "is_causal": False},
    "packed": {"position_ids": torch.cat([torch.arange(5), torch.arange(7)]).repeat(2, 1)},
    "padded": {"mask": torch.arange(12).repeat(2, 1) < torch.tensor([[12], [9]])},
}


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_without_a_mask_sees_what_one_with_the_mask_written_out_sees(kernel):
    def sees(batch: int, query: int, key: int) -> bool:
        match kernel:
            case "both ways":
                return True
            case "window":
                return query - 2 <= key <= query
            case "window both ways":
                return query - 2 <= key <= query + 2
            case "packed":
                return key <= query and (key < 5) == (query < 5)
            case "padded":
                return key <= query and (batch == 0 or key < 9)
            case _:
                return key <= query

    mask = torch.tensor([[[[sees(b, q, k) for k in range(12)] for q in range(12)]] for b in range(2)])
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(2, heads, 12, 8, generator=generator) for heads in (4, 2))
    module = torch.nn.Module()
    found = []
    for given, options in ((mask, {}), (KERNELS[kernel].get("mask"), KERNELS[kernel])):
        with AttentionMeter(torch.nn.ModuleDict({"it": module})) as meter:
            attention = ALL_ATTENTION_FUNCTIONS.get_interface("eager", lambda *_, **__: None)
            attention(module, query, key, key, given, **{k: v for k, v in options.items() if k != "mask"})
        found.append((meter.largest["it"], meter.entropies["it"]))
    torch.testing.assert_close(found[0], found[1])
