"""FP8: rounding bit by bit against the formats in fractions, matmuls against torch's, whole models, and verdicts."""

import json
import math
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from config.errors import UserError
from config.schema import Fp8Section
from precision import fp8_reference
from precision.fp8 import FORMATS, FlushMeter, kernel_problem, linear_fp8, no_kernel, rounded, scale_of
from precision.manifest import Manifest, Rule, load_manifest
from precision.regions import Regions
from tests.precision.test_regions import build, gradients, in_regions, oracle_of, verified
from tests.support.models.small_models import distance
from tests.tools.parity.test_judge_steps import BOUNDS, step
from tools.parity import fp8_linear
from tools.parity.judge_steps import FP8_MARGIN, Check, Walk, blamed, first_divergence, judge_steps

MODEL = {"e4m3": (3, -6, Fraction(448)), "e5m2": (2, -14, Fraction(57344))}
"""Stored bits of the mantissa, exponent of the smallest normal number, largest number (Micikevicius et al. 2022)."""
LINEAR = Rule("fp8", "test", "*.layers.*", "Linear")
E4M3, E5M2 = FORMATS["e4m3"], FORMATS["e5m2"]


def nearest(value: Fraction, kind: str) -> Fraction:
    """The number of the format that is nearest, of two the one with an even mantissa."""
    bits, smallest, largest = MODEL[kind]
    if not value:
        return value
    exponent = max(math.floor(math.log2(abs(value))), smallest)
    if Fraction(2) ** exponent > abs(value) and exponent > smallest:  # log2 was rounded up
        exponent -= 1
    step = Fraction(2) ** (exponent - bits)
    found = round(value / step) * step  # to even
    assert abs(found) <= largest
    return found


def power(largest: Fraction, kind: str) -> Fraction:
    """The smallest power of two by which the largest value fits, searched for one by one."""
    found = Fraction(2) ** -126
    while largest / found > MODEL[kind][2]:
        found *= 2
    return found


def in_fractions(row: torch.Tensor, kind: str) -> list[float]:
    values = [Fraction(value) for value in row.double().tolist()]
    scale = power(max(map(abs, values)), kind)
    return [float(nearest(value / scale, kind) * scale) for value in values]


@pytest.mark.parametrize("kind", MODEL)
def test_values_are_rounded_as_the_format_says(kind: str) -> None:
    """Random rows of every size, ties, subnormals and zeros included."""
    dtype, generator = FORMATS[kind], torch.Generator().manual_seed(3)
    sizes = torch.tensor([1.0, 1e-3, 1e4, 1e-30, 1e30, 2.0**-120]).unsqueeze(1)
    rows = torch.randn(6, 200, generator=generator) * sizes * torch.logspace(-6, 0, 200)
    ties = torch.arange(-448, 448, 2.0**-4).split(400)
    for row in [*rows, *ties, torch.zeros(3), torch.tensor([448.0, 449.0, -17.0, 0.0])]:
        assert rounded(row, -1, dtype, "row").double().tolist() == in_fractions(row, kind)
        assert fp8_reference.rounded(row, kind, "row").tolist() == in_fractions(row, kind)


@pytest.mark.parametrize("kind", MODEL)
@pytest.mark.parametrize("scaling", ["row", "block32", "tensor"])
def test_the_reference_rounds_the_same_numbers(kind: Any, scaling: str) -> None:
    """Written out in FP64 without an FP8 dtype: what the parity gate compares runs with."""
    generator = torch.Generator().manual_seed(5)
    values = torch.randn(64, 100, generator=generator) * torch.logspace(-40, 30, 64).unsqueeze(1)
    values = torch.cat([values, torch.zeros(1, 100), values * torch.logspace(-9, 0, 100)])
    values[7, 3], values[8, 40] = math.inf, math.nan
    if scaling == "tensor":
        values = values[10:40].clone()
    expected = rounded(values, -1, FORMATS[kind], scaling).double()
    found = fp8_reference.rounded(values, kind, scaling)
    assert torch.equal(found.isnan(), expected.isnan())
    assert torch.equal(found.nan_to_num(), expected.nan_to_num())


@pytest.mark.parametrize("ambient", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("weight_gradient", ["ambient", "fp8"])
def test_the_reference_multiplies_the_same_operands(ambient: torch.dtype, weight_gradient: Any) -> None:
    """Forward and backward pass within what sums and the ambient dtype round, far below a roundoff of FP8."""
    generator = torch.Generator().manual_seed(6)
    section = Fp8Section(weight_gradient=weight_gradient, gradient="e5m2")
    given = [torch.randn(shape, generator=generator) for shape in ((3, 9, 48), (20, 48), (20,), (3, 9, 20))]
    results = []
    for function in (linear_fp8, fp8_linear.linear):
        leaves = [value.clone().requires_grad_() for value in given[:3]]
        output = function(*leaves, ambient=ambient, section=section)
        output.backward(given[3].to(ambient))
        results.append([output, *(leaf.grad for leaf in leaves)])
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == theirs.dtype
        error = float((ours - theirs).double().norm() / theirs.double().norm())
        assert error < (1e-6 if ambient == torch.float32 else 2.0**-8)


def test_a_scale_is_written_as_its_bits() -> None:
    """CUDA does not promise that pow(2, n), of which torch.ldexp is a product, is exact."""

    class Called(TorchDispatchMode):
        names: set[str] = set()

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.names.add(function.__name__.partition(".")[0])
            return function(*args, **(kwargs or {}))

    with Called() as called:
        scales = scale_of(torch.tensor([2.0**exponent for exponent in range(-126, 128)]), E4M3)
    assert "frexp" in called.names and not called.names & {"pow", "ldexp", "exp2"}
    assert scales.tolist() == [2.0 ** max(exponent - 8, -126) for exponent in range(-126, 128)]


@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("scaling", ["row", "block32", "tensor"])
def test_a_value_that_is_not_finite_is_not_hidden(scaling: Any, special: float) -> None:
    """The bare cast makes 448 of inf. Only the rows that are hit are lost, unless the scale is that of all."""
    inputs, weight = torch.randn(4, 64), torch.randn(8, 64)
    inputs[2, 5] = special
    output = linear_fp8(inputs, weight, None, ambient=torch.float32, section=Fp8Section(scaling=scaling))
    lost = output.isnan().all(dim=1)
    assert lost.tolist() == ([True] * 4 if scaling == "tensor" else [False, False, True, False])
    assert output[~lost].isfinite().all()


@pytest.mark.parametrize("scaling", ["row", "block32", "tensor"])
def test_no_tokens_give_no_output_and_zeros_as_gradients(scaling: Any) -> None:
    inputs, weight = torch.zeros(0, 64, requires_grad=True), torch.randn(8, 64, requires_grad=True)
    output = linear_fp8(inputs, weight, None, ambient=torch.bfloat16, section=Fp8Section(scaling=scaling))
    output.sum().backward()
    assert output.shape == (0, 8) and output.dtype == torch.bfloat16
    assert weight.grad is not None and not weight.grad.any()


def manifest(default: Any = "bf16", *rules: Rule) -> Manifest:
    return Manifest(default, rules or (LINEAR,), Path("m.json"))


@pytest.mark.parametrize("default", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("family", ["llama", "qwen3", "stablelm"])
def test_a_model_computes_in_it_and_is_as_near_as_its_bits(family: str, default: Any) -> None:
    """The observed dtypes are the manifest's, the gradient is off by some roundings with four bits and no more."""
    model = build(family)
    oracle_loss, oracle = oracle_of(model)
    with in_regions(model, manifest(default)) as regions:
        loss, found, seen = verified(model, regions)
        assert "fp8" in regions.dtypes.values()
    share = seen.flop_share()
    assert share["fp8"] > 0.3
    # transformers before 5.20 or so multiplies positions and frequencies as matrices, in FP32
    tables = share.pop("fp32", 0.0) if default != "fp32" else 0.0
    assert tables < 1e-3
    assert set(share) == {"fp8", default}
    assert float(loss) == pytest.approx(float(oracle_loss), rel=0.05)
    assert 1e-3 < distance(found, oracle) < 5 * 2.0**-4


def test_a_module_can_leave_it_and_return_between_steps() -> None:
    model = build("llama")
    with in_regions(model, manifest()) as regions:
        _, before = gradients(model)
        name = "model.layers.0.mlp.down_proj"
        regions.set(name, "bf16")
        assert regions.state_dict() == {name: "bf16"}
        _, promoted, _ = verified(model, regions)
        regions.set(name, "fp8")
        _, after = gradients(model)
    assert not torch.equal(before[f"{name}.weight"], promoted[f"{name}.weight"])
    assert all(torch.equal(before[key], value) for key, value in after.items())


REFUSED = {
    "default": ("fp8", {"match": "lm_head"}, "default = fp8"),
    "attention": ("bf16", {"match": "*self_attn*"}, "self_attn, a"),
    "head": ("bf16", {"module_class": "Linear"}, "lm_head, a Linear"),
    "norm": ("bf16", {"module_class": "*RMSNorm"}, "a LlamaRMSNorm"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_fp8_is_refused_by_name(case: str, tmp_path: Path) -> None:
    default, rule, expected = REFUSED[case]
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps({"default": default, "rules": [{**rule, "compute": "fp8", "reason": "x"}]}))
    with pytest.raises(UserError, match=expected):
        Regions(build("llama", tied=False), load_manifest(path))


CPU = torch.device("cpu")


def test_each_reason_against_the_kernel_is_said() -> None:
    asked, auto = Fp8Section(kernel="scaled_mm"), Fp8Section()
    assert no_kernel((33, 40), CPU, torch.bfloat16, asked) == ""
    assert "is no faster" in no_kernel((32, 32), CPU, torch.bfloat16, auto)
    assert "BF16 or FP32" in no_kernel((32, 32), CPU, torch.float16, asked)
    assert "by block" in no_kernel((32, 32), CPU, torch.bfloat16, Fp8Section(kernel="scaled_mm", scaling="block32"))
    assert "emulate" in no_kernel((32, 32), CPU, torch.bfloat16, Fp8Section(kernel="emulate"))
    assert "9.0" in no_kernel((32, 32), torch.device("meta"), torch.bfloat16, auto)


def can_scaled_mm() -> None:
    problem = kernel_problem((48, 32), CPU, torch.bfloat16, Fp8Section(kernel="scaled_mm"))
    if problem is not None:
        pytest.skip(f"torch {torch.__version__} on this CPU: {problem}")


@pytest.mark.one_in(4)
@pytest.mark.parametrize("scaling", ["row", "tensor"])
@pytest.mark.parametrize("weight_gradient", ["ambient", "fp8"])
@pytest.mark.parametrize("default", ["bf16", "fp32"])
def test_the_kernel_computes_what_the_emulation_does(scaling: Any, weight_gradient: Any, default: Any) -> None:
    """A whole model forward and backward by torch's own scaled matmul, which on a GPU is the FP8 units', observed."""
    can_scaled_mm()
    results = []
    for kernel in ("scaled_mm", "emulate"):
        model = build("llama")
        section = Fp8Section(kernel=kernel, scaling=scaling, weight_gradient=weight_gradient, gradient="e5m2")
        regions, meter = Regions(model, manifest(default), section), FlushMeter(["a"], CPU)
        regions.fp8_count = lambda name, meter=meter: meter.of("a")
        loss, found, seen = verified(model, regions)
        regions.close()
        results.append((loss, found, meter.counts, seen.flop_share()))
    (loss, found, counts, share), (other_loss, other, other_counts, other_share) = results
    assert float(loss) == pytest.approx(float(other_loss), rel=1e-3) and share == other_share
    torch.testing.assert_close(counts, other_counts, rtol=0.01, atol=2.0)
    assert distance(found, other) < 0.01  # of which FP8's own error is ten times


WRONG_KERNELS: dict[str, Any] = {
    "rounds its sums to bf16": lambda own, a, b, **given: own(a, b, **given).bfloat16().to(given["out_dtype"]),
    "forgets a scale": lambda own, a, b, **given: own(a, b, **given | {"scale_a": torch.ones_like(given["scale_a"])}),
    "leaves out a term": lambda own, a, b, **given: own(a[:, :-16].contiguous(), b[:-16], **given),
    "raises": lambda own, a, b, **given: own(a, b, **given | {"out_dtype": torch.int8}),
}


@pytest.mark.parametrize("wrong", WRONG_KERNELS)
def test_a_kernel_that_computes_something_else_is_not_used(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    can_scaled_mm()
    section, ambient = Fp8Section(kernel="scaled_mm", weight_gradient="fp8"), torch.float32
    assert kernel_problem((48, 32), CPU, ambient, section) is None
    own, kernel = torch._scaled_mm, WRONG_KERNELS[wrong]
    monkeypatch.setattr(torch, "_scaled_mm", lambda a, b, **given: kernel(own, a, b, **given))
    problem = kernel_problem((48, 32), CPU, ambient, section)
    assert problem is not None and ("fails" in problem) == (wrong == "raises")


def test_a_weight_rounded_twice_would_be_another_one() -> None:
    """Why W is taken from its master: 3.1% of normal numbers differ when they pass through BF16 first."""
    weight = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))
    twice = rounded(weight.bfloat16(), -1, E4M3, "row")
    share = float((rounded(weight, -1, E4M3, "row") != twice).float().mean())
    assert 0.028 < share < 0.034


def test_the_share_of_each_operand_that_becomes_zero_is_counted() -> None:
    """Beside a 1, E4M3 has nothing between zero and 2^-17, and 2^-18 is a tie that goes to zero: zeros do not count."""
    inputs = torch.tensor([[1.0, 2.0**-17, 2.0**-18, 0.0], [2.0**-18, 2.0**-18, 2.0**-17, 2.0**-16]])
    weight = torch.full((2, 4), 0.5)
    meter = FlushMeter(["a", "b"], inputs.device)
    given, trained = inputs.clone().requires_grad_(), weight.clone().requires_grad_()
    output = linear_fp8(given, trained, None, ambient=torch.float32, section=Fp8Section(), count=meter.of("b"))
    output.backward(torch.tensor([[1.0, 1e-9], [1.0, 1.0]]))
    nothing = {"input": 0.0, "weight": 0.0, "gradient": 0.0}
    assert meter.shares(meter.counts) == {"a": nothing, "b": {"input": 1 / 7, "weight": 0.0, "gradient": 1 / 4}}


AGREEMENT = {"relative_error": 0.2, "cosine": 0.98, "sign_agreement": 0.94}
"""The agreement of FP32's gradients with those in FP8 alone: already beyond three of the bounds."""


def product(off: float = 0.3, module: str = "a", part: str = "output") -> dict[str, Any]:
    return {"module": module, "part": part, "off": off, "allowed": 1.0}


def fp8_step(**changes: Any) -> dict[str, Any]:
    """A sound step in which module a computes in FP8."""
    fields: dict[str, Any] = {"own_error": {"a": 0.05, "b": 0.002}, "planned_error": {"a": 0.04}}
    fields |= {name: dict.fromkeys(("a.weight", "b.weight"), AGREEMENT) for name in ("parameters", "planned")}
    return step(**fields | {"fp8_products": [product(), product(module="b")]} | changes)


def checks(found: dict[str, Any]) -> dict[str, Check]:
    return {check.name: check for check in judge_steps([Walk(0, True, [found], found["loss"])], BOUNDS)}


def failed(found: dict[str, Any]) -> set[str]:
    return {name for name, check in checks(found).items() if not check.passed}


def test_fp8s_own_error_is_no_failure() -> None:
    found = checks(fp8_step())
    assert all(check.passed for check in found.values())
    assert found["module_error"].measured == 0.002 and found["gradient_error"].measured == 0.0
    assert found["module_error"].note == "beyond 1.5 times what FP8's rounding alone makes, up to 4.00e-02"
    assert first_divergence([Walk(0, True, [fp8_step()])], BOUNDS) is None


def test_without_it_in_the_plan_the_same_step_is_beyond_the_bounds() -> None:
    bare = {key: value for key, value in fp8_step().items() if not key.startswith(("planned", "fp8"))}
    assert failed(bare) == {"module_error", "gradient_error", "gradient_cosine"}
    assert "fp8_products" not in checks(bare)


@pytest.mark.parametrize(
    ("what", "value", "check"),
    [
        ("relative_error", FP8_MARGIN * 0.2 + 0.16, "gradient_error"),
        ("cosine", 1 - FP8_MARGIN**2 * 0.02 - 0.011, "gradient_cosine"),
        ("sign_agreement", 1 - FP8_MARGIN * 0.06 - 0.11, "sign_agreement"),
    ],
)
def test_what_is_beyond_fp8s_own_error_has_the_bounds_of_16_bits(what: str, value: float, check: str) -> None:
    wrong = {"a.weight": AGREEMENT, "b.weight": AGREEMENT | {what: value}}
    assert failed(fp8_step(parameters=wrong)) == {check}
    assert checks(fp8_step(parameters=wrong))[check].modules == ("b",)


def test_a_module_without_fp8_has_the_bound_of_16_bits() -> None:
    found = fp8_step(own_error={"a": 0.05, "b": 0.03})
    assert failed(found) == {"module_error"} and checks(found)["module_error"].modules == ("b",)


@pytest.mark.parametrize("off", [1.1, math.nan, math.inf])
def test_a_product_that_is_not_fp8s_is_named(off: float) -> None:
    found = fp8_step(fp8_products=[product(), product(off, "b", "weight gradient")])
    assert failed(found) == {"fp8_products"}
    assert blamed(list(checks(found).values())) == ("b",)
