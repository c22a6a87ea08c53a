"""Exponent histograms of every region: complete, exact, booked where they belong. Under 10 seconds."""

import math
from collections import Counter

import pytest
import torch

from modeling.activation_checkpointing import apply_activation_checkpointing
from precision.manifest import find_regions
from tests.support.models.small_models import small_model
from tools.analyze.ranges import NOTHING, OperandMeter, Ranges, Spread, gradients_counted, merged

SHAPE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}


def llama(checkpointing: str = "none", attention: str = "sdpa") -> torch.nn.Module:
    model = small_model("llama", attention, vocab_size=40, tie_word_embeddings=True, **SHAPE)
    if checkpointing != "none":
        apply_activation_checkpointing(model, "full", reentrant=checkpointing == "reentrant")
    return model.train()


def tokens(seed: int = 1) -> torch.Tensor:
    return torch.randint(40, (3, 12), generator=torch.Generator().manual_seed(seed))


def spread_of(values: torch.Tensor) -> Spread:
    ranges = Ranges(["it"], torch.device("cpu"))
    ranges.add("it", "weights", values)
    return ranges.spreads()["it"].get("weights", NOTHING)


def test_merging_is_counting_all_values_at_once():
    first, second = torch.randn(100) * 1e-8, torch.randn(50) * 1e5
    assert merged([spread_of(first), spread_of(second)]) == spread_of(torch.cat([first, second]))
    assert merged([NOTHING, spread_of(first)]) == spread_of(first)
    assert merged([]) == NOTHING and NOTHING.values == 0


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_operands_are_booked_under_their_region(attention):
    model, ids = llama(attention=attention), tokens()
    kinds = find_regions(model)
    ranges = Ranges(kinds, torch.device("cpu"))
    inputs: dict[str, list[torch.Tensor]] = {}
    outputs: dict[str, torch.Tensor] = {}
    modules = dict(model.named_modules())
    for name in ("model.layers.1.mlp.down_proj", "model.layers.0.self_attn.q_proj", "lm_head"):

        def keep(module, args, output, name=name):
            inputs[name], outputs[name] = list(args), output

        modules[name].register_forward_hook(keep)
    with torch.no_grad(), OperandMeter(model, kinds, ranges) as meter:
        model(input_ids=ids, use_cache=False)
    found = ranges.spreads()
    for name, output in outputs.items():
        expected = merged([spread_of(inputs[name][0]), spread_of(output)])
        assert found[name]["activations"] == expected, name
        assert found[name]["weights"] == spread_of(modules[name].weight), name
    assert found["model.norm"]["weights"].counts and found["model.norm"]["activations"].values == 2 * 3 * 12 * 16
    # Queries, keys, values and the product: each (batch, sequence, hidden); eager attention adds scores and shares.
    core = found["model.layers.0.self_attn"]["activations"]
    assert core.values + core.zeros >= 4 * 3 * 12 * 16
    assert "weights" not in found["model.layers.0.self_attn"]
    assert meter.region_flops["lm_head"] == 2 * 3 * 12 * 16 * 40
    assert meter.region_flops["model.layers.0.mlp.up_proj"] == 2 * 3 * 12 * 16 * 24
    assert sum(meter.region_flops.values()) == sum(meter.flops.values())


@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "non-reentrant"])
def test_gradients_are_seen_once_and_whole(checkpointing):
    model, ids = llama(checkpointing), tokens(2)
    kinds = find_regions(model)
    ranges = Ranges(kinds, torch.device("cpu"))
    with gradients_counted(model, kinds, ranges):
        logits = model(input_ids=ids, use_cache=False).logits
        logits.retain_grad()
        logits.square().mean().backward()
    found = ranges.spreads()
    for name, module in model.named_modules():
        if name in kinds and kinds[name] != "attention":
            assert found[name]["weight_gradients"] == spread_of(module.weight.grad), name
    # Of lm_head: its output's gradient and its input's.
    assert found["lm_head"]["gradients"].maximum >= float(logits.grad.abs().max())
    seen = found["lm_head"]["gradients"]
    assert seen.values + seen.zeros == logits.numel() + 3 * 12 * 16
    inside = found["model.layers.1.self_attn"]["gradients"]  # its own input and output, and those of four projections
    assert inside.values + inside.zeros == (2 + 4 * 2) * 3 * 12 * 16
    for name in ("q_proj", "v_proj", "o_proj"):
        own = found[f"model.layers.1.self_attn.{name}"]["gradients"]
        assert own.values + own.zeros == 2 * 3 * 12 * 16
        assert own.maximum <= inside.maximum


def test_nothing_stays_behind():
    model, ids = llama(), tokens()
    kinds = find_regions(model)
    ranges = Ranges(kinds, torch.device("cpu"))
    with torch.no_grad(), OperandMeter(model, kinds, ranges):
        model(input_ids=ids)
    with gradients_counted(model, kinds, ranges):
        model(input_ids=ids).logits.sum().backward()
    before = ranges.counts.clone()
    model(input_ids=ids).logits.sum().backward()
    assert torch.equal(ranges.counts, before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any(parameter._backward_hooks for parameter in model.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_a_spread_counts_exponents_as_log2_does(dtype, monkeypatch):
    monkeypatch.setattr("tools.analyze.ranges._PIECE", 70)  # several pieces
    info = torch.finfo(dtype)
    values = torch.exp2(torch.linspace(-20, 12, 500, dtype=torch.float64)) * torch.tensor([1.0, -1.0]).repeat(250)
    values = torch.cat([values.to(dtype), torch.tensor([0.0, 1.0, -2.0, math.inf, math.nan]).to(dtype)])
    ends = [info.max, info.smallest_normal, info.smallest_normal * info.eps, info.smallest_normal * info.eps * 3]
    values = torch.cat([values, torch.tensor(ends, dtype=torch.float64).to(dtype)])
    expected = Counter(math.frexp(x)[1] - 1 for x in values.double().tolist() if x and math.isfinite(x))
    found = spread_of(values)
    assert {found.lowest + i: count for i, count in enumerate(found.counts) if count} == expected
    assert (found.zeros, found.nonfinite, found.maximum) == (1, 2, info.max)
    assert found.counts[0] and found.counts[-1]
