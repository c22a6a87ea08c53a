"""Measurements in, manifest out: every rule of the decision, and that the manifest means what was decided."""

import json
import math
import random

import pytest
import torch

from precision.manifest import assign, load_manifest
from tools.analyze.proposal import (
    Choice,
    Limits,
    Unit,
    choose_scale,
    flushed_share,
    fp16_obstacle,
    largest_scale,
    propose,
    propose_fp8,
    rules_for,
)
from tools.analyze.ranges import Ranges, Spread

GOOD = {"bf16": 8e-3, "fp16": 1e-3}


def spread(low: int, high: int, each: int = 100) -> Spread:
    """`each` values at every power of two from 2^low to 2^high, the largest being 2^high."""
    return Spread(low, (each,) * (high - low + 1), 0, 0, 2.0**high)


def region(activations=(-8, 3), gradients=(-20, -8), weights=(-9, -2)) -> dict[str, Spread]:
    kinds = {"activations": activations, "gradients": gradients, "weights": weights, "weight_gradients": gradients}
    return {kind: spread(*extent) for kind, extent in kinds.items() if extent}


def decide(units: list[Unit], spreads: dict, **more):
    return propose(units, spreads, other_flops=more.pop("other_flops", 0), limits=more.pop("limits", Limits()), **more)


def model_of(names: list[str]) -> torch.nn.Module:
    """Modules that do nothing but have these regions."""
    root = torch.nn.Module()
    for name in names:
        *parents, last = name.split(".")
        at = root
        for parent in parents:
            if not hasattr(at, parent):
                at.add_module(parent, torch.nn.Module())
            at = getattr(at, parent)
        at.add_module(last, torch.nn.Linear(2, 2))
    return root


def test_fp16_where_it_fits_and_pays():
    units = [Unit(("a",), 50, GOOD), Unit(("b",), 50, {"bf16": 8e-3, "fp16": 7e-3})]
    found = decide(units, {"a": region(), "b": region()}, promote=False)
    assert found.choices["a"].compute == "fp16" and "fits FP16" in found.choices["a"].reason
    assert found.choices["b"].compute == "bf16" and "do not help" in found.choices["b"].reason
    assert found.low_precision_share == 1.0


@pytest.mark.parametrize(
    ("changed", "obstacle"),
    [
        ({"activations": (-8, 13)}, "activations to 8.19e+03 leave no 16x headroom"),
        ({"weights": (-9, 13)}, "weights to 8.19e+03 leave no 16x headroom"),
        ({"activations": (-40, 3)}, "FP16 would round 34.1% of its activations to zero"),
    ],
)
def test_bf16_where_the_range_does_not_fit(changed, obstacle):
    units = [Unit(("a",), 50, GOOD), Unit(("b",), 50, GOOD)]
    found = decide(units, {"a": region(), "b": region(**changed)})
    assert found.choices["a"].compute == "fp16"
    assert found.choices["b"].compute == "bf16" and obstacle in found.choices["b"].reason


def test_values_that_are_not_finite_never_fit():
    numbers = region()
    numbers["activations"] = Spread(0, (5,), 0, 1, 1.0)
    assert fp16_obstacle(numbers, 1.0, Limits())[1]


def test_the_ambient_dtype_is_bf16_as_soon_as_something_overflows_fp16():
    units = [Unit(("a",), 90, GOOD), Unit(("b",), 10, GOOD)]
    fits, flushes, overflows = region(), region(activations=(-40, 3)), region(activations=(-8, 14))
    assert decide(units, {"a": fits, "b": fits}).manifest["default"] == "fp16"
    assert decide(units, {"a": fits, "b": flushes}).manifest["default"] == "fp16"
    assert decide(units, {"a": fits, "b": overflows}).manifest["default"] == "bf16"
    assert decide(units, {"a": fits, "b": fits}, ambient="fp32").manifest["default"] == "fp32"
    everything = decide(units, {"a": overflows, "b": overflows})
    assert everything.manifest["default"] == "bf16" and everything.loss_scale is None


def test_the_loss_scale_lets_most_flops_fit():
    limits = Limits()
    wide = [Unit(("a",), 90, GOOD), Unit(("b",), 10, GOOD)]
    spreads = {"a": region(gradients=(-30, -20)), "b": region(gradients=(-10, 6))}
    scale = choose_scale(wide, spreads, limits)
    # b has no headroom above 2^5: 2^(6 + 5 + 4) is under 65504. a flushes below it: 2^(-30 + 5) is the first to stay.
    assert scale == 2.0**5
    spreads["b"] = region(gradients=(-10, 8))  # now no scale suits both, and a has the FLOPs
    assert choose_scale(wide, spreads, limits) == 2.0**31
    found = decide(wide, spreads, promote=False)
    assert found.choices["b"].compute == "bf16" and found.loss_scale == 2.0**31
    assert largest_scale(spreads, limits) == 2.0**3
    assert largest_scale({"a": {}}, limits) == 1.0


def test_flushing_is_what_fp16_does():
    values = torch.randn(20000, generator=torch.Generator().manual_seed(0)) * 2.0**-22
    ranges = Ranges(["it"], values.device)
    ranges.add("it", "gradients", values)
    for scale in (1.0, 4.0, 1024.0):
        lost = float(((values * scale).half() == 0).double().mean())
        assert flushed_share(ranges.spreads()["it"]["gradients"], scale) == pytest.approx(lost, abs=1e-9)


def test_sensitive_regions_go_to_fp32_while_the_floor_holds():
    names = ["cheap", "dear", *(f"r{index}" for index in range(8))]
    flops = {"cheap": 4, "dear": 8, **dict.fromkeys(names[2:], 11)}
    errors = {"cheap": 3e-3, "dear": 3e-3, **dict.fromkeys(names[2:], 5e-4)}
    units = [Unit((name,), flops[name], {"bf16": 8 * errors[name], "fp16": errors[name]}) for name in names]
    spreads = {name: region() for name in names}
    found = decide(units, spreads, limits=Limits(floor=0.9))
    assert [name for name in names if found.choices[name].compute == "fp32"] == ["cheap"]
    assert found.choices["cheap"].reason.startswith("sensitive: 45% of the squared gradient error at 4.0% of the FLOPs")
    assert found.low_precision_share == pytest.approx(0.96)
    both = decide(units, spreads, limits=Limits(floor=0.85))
    assert [name for name in names if both.choices[name].compute == "fp32"] == ["cheap", "dear"]
    nobody = decide(units, spreads, promote=False)
    assert {choice.compute for choice in nobody.choices.values()} == {"fp16"}


def test_what_casts_by_itself_is_not_promised_another_dtype():
    """It takes nothing from the floor: the cheap one is promoted although a third of the FLOPs are in FP32 anyway."""
    flops = {"attention": 50, "half": 20, "cheap": 4, "rest": 76}
    errors = {"attention": 9e-3, "half": 5e-4, "cheap": 3e-3, "rest": 5e-4}
    units = [Unit((name,), flops[name], {"bf16": 8 * errors[name], "fp16": errors[name]}) for name in flops]
    casts = {"attention": {"bf16": "fp32", "fp16": "fp32"}, "half": {"fp16": "bf16 and fp32"}}
    found = decide(units, {name: region() for name in flops}, casts=casts)
    assert [found.choices[name].compute for name in flops] == ["fp32", "bf16", "fp32", "fp16"]
    assert found.choices["attention"].reason.startswith("given FP16 it computed in FP32: its module or kernel casts")
    assert found.choices["half"].reason.startswith("given FP16 it computed in BF16 and FP32: its module or kernel")
    assert found.low_precision_share == pytest.approx(96 / 150)
    assert decide(units[:1], {"attention": region()}, casts=casts).low_precision_share == 0.0


def test_a_large_region_with_its_share_of_the_error_is_not_promoted():
    units = [Unit(("head",), 60, {"bf16": 8e-3, "fp16": 1e-3}), Unit(("rest",), 40, {"bf16": 6e-3, "fp16": 8e-4})]
    found = decide(units, {"head": region(), "rest": region()}, limits=Limits(floor=0.0))
    assert {choice.compute for choice in found.choices.values()} == {"fp16"}


def test_flops_outside_of_all_regions_are_not_in_16_bits():
    assert decide([Unit(("a",), 75, GOOD)], {"a": region()}, other_flops=25).low_precision_share == 0.75


def fp8_unit(*names: str, flops: int = 10, fp8: float = 0.03) -> Unit:
    return Unit(names, flops, {"bf16": fp8 / 16, "fp16": fp8 / 128, "fp8": fp8})


def test_fp8_goes_where_it_costs_least_error_per_flop_until_the_limit():
    units = [
        fp8_unit("layers.0.up", "layers.1.up", flops=40, fp8=0.03),
        fp8_unit("layers.0.v", flops=10, fp8=0.05),
        fp8_unit("layers.1.v", flops=10, fp8=0.01),
        Unit(("layers.1.o",), 10, {"bf16": 1e-3, "fp16": 1e-4, "fp8": math.inf}),
        Unit(("head",), 30, {"bf16": 2e-3, "fp16": 2e-4}),
    ]
    found = propose_fp8(units, other_flops=0, largest_error=0.04)
    chosen = {name: choice.compute for name, choice in found.choices.items()}
    assert chosen == {
        **dict.fromkeys(("layers.0.up", "layers.1.up", "layers.1.v"), "fp8"),
        **dict.fromkeys(("layers.0.v", "layers.1.o", "head"), "bf16"),
    }
    assert found.fp8_share == 0.5 and found.low_precision_share == 1.0 and found.loss_scale is None
    words = {name: choice.reason for name, choice in found.choices.items()}
    assert words["layers.1.v"].startswith("tolerates FP8: 2.9% of FP8's squared gradient error at 10.0% of the FLOPs")
    assert words["layers.0.v"].startswith("too sensitive for FP8: 71.4%")
    assert words["layers.1.o"].startswith("not finite in FP8") and words["head"].startswith("FP8 is for linear layers")
    held = propose_fp8(units, other_flops=0, largest_error=0.04, casts={"head": {"bf16": "fp32"}})
    assert held.choices["head"].compute == "fp32" and held.low_precision_share == 0.7
    assert found.manifest["default"] == "bf16"


def test_no_limit_takes_all_and_a_small_one_none():
    units = [fp8_unit("a"), fp8_unit("b"), Unit(("head",), 5, {"bf16": 2e-3, "fp16": 2e-4})]
    assert propose_fp8(units, other_flops=5, largest_error=math.inf).fp8_share == pytest.approx(20 / 30)
    nothing = propose_fp8(units, other_flops=5, largest_error=0.01)
    assert nothing.fp8_share == 0 and {choice.compute for choice in nothing.choices.values()} == {"bf16"}


def test_an_fp16_error_that_is_not_finite_is_an_obstacle():
    found = decide([Unit(("a",), 1, {"bf16": 8e-3, "fp16": math.inf})], {"a": region()})
    assert found.choices["a"].compute == "bf16"


def test_rules_are_one_a_pattern_with_exceptions_below():
    names = [f"layers.{layer}.{part}" for layer in range(3) for part in ("up", "down")] + ["head"]
    choices = {name: Choice("fp16", f"fine {name}", 0.1, 1e-3) for name in names}
    choices["layers.1.down"] = Choice("bf16", "its range", 0.1, 1e-3)
    choices["layers.2.up"] = Choice("fp16", "it matters", 0.2, 2e-3)
    choices["head"] = Choice("fp32", "sensitive", 0.1, 0.0)
    rules = rules_for(choices)
    assert [(rule["match"], rule["compute"]) for rule in rules] == [
        ("layers.*.up", "fp16"),
        ("layers.*.down", "fp16"),
        ("head", "fp32"),
        ("layers.1.down", "bf16"),
    ]
    assert rules[0]["reason"] == "layers.2.up, the most sensitive of 3: it matters"
    assert rules[3]["reason"] == "its range"


@pytest.mark.parametrize("seed", range(40))
def test_the_manifest_means_what_was_chosen(seed, tmp_path):
    """Whatever the names and choices: it loads, no rule is idle, and every region gets its dtype."""
    draw = random.Random(seed)
    names = [
        f"layers.{layer}.{part}"
        for layer in range(draw.randint(1, 4))
        for part in ("attn", "attn.proj", "proj", "experts.0.proj", "experts.1.proj", "odd[x]", "odd*")
        if draw.random() < 0.8
    ] + ["head", "proj", "12"]
    dtypes = draw.choice([("fp16", "bf16", "fp32"), ("fp16", "bf16"), ("fp16",), ("fp8", "bf16")])
    choices = {name: Choice(draw.choice(dtypes), name, 0.0, 0.0) for name in names}
    tree = {"default": draw.choice(("fp16", "bf16", "fp32")), "rules": rules_for(choices)}
    model = model_of(names)
    linear = {name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)}
    (tmp_path / "manifest.json").write_text(json.dumps(tree))
    assigned = assign(load_manifest(tmp_path / "manifest.json"), model)
    assert {name: assigned[name].compute for name in linear} == {name: choices[name].compute for name in linear}
