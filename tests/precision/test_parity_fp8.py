"""Verdicts on steps with FP8 in the plan: beyond the error of its rounding, and by their layers' products."""

import math
from typing import Any

import pytest

from tests.tools.parity.test_judge_steps import BOUNDS, step
from tools.parity.judge_steps import FP8_MARGIN, Check, Walk, blamed, first_divergence, judge_steps

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
