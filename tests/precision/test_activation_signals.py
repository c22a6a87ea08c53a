"""Figures of attention against the probabilities that transformers' own eager attention returns in FP64."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from precision.activation_signals import OUTLIER, AttentionMeter, ChannelMeter, channel_figures

SMALL = {"vocab_size": 31, "num_hidden_layers": 2, "bos_token_id": None, "eos_token_id": None, "pad_token_id": 0}
LLAMA = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2}
SOFTCAP = 0.004
MODELS = {
    "llama": LLAMA,
    "gpt2": {"n_embd": 16, "n_head": 2, "n_layer": 2, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "gemma2": {**LLAMA, "head_dim": 8, "sliding_window": 5, "attn_logit_softcapping": SOFTCAP},
}


def _models(name: str, attention: str):
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **SMALL, **MODELS[name])
    models = [AutoModelForCausalLM.from_config(config, attn_implementation=kind) for kind in (attention, "eager")]
    models[1].load_state_dict(models[0].state_dict())
    return models[0], models[1].double()


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
    model, reference = _models(name, attention)
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
    model, _ = _models("gemma2", "eager")
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
