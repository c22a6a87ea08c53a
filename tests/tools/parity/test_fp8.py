"""FP8 in the parity gate: a sound run is parity by bounds that are FP8's, and what is wrong inside a layer is found."""

import pytest

from lab.detection.plants.permanent import PLANTED
from tests.tools.parity import fp8_cases, step_cases
from tests.tools.parity.test_steps import CLIPPED, LINEAR, failed, judged, manifest, module_of

FP8 = [*manifest("fp8"), CLIPPED]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("stage", "overrides"),
    [
        (2, []),
        (3, ["precision.fp8.gradient=e5m2", "precision.fp8.scaling=block32"]),
        (0, ["precision.fp8.weight_gradient=fp8", "model.activation_checkpointing=full"]),
        (1, ["model.activation_checkpointing=full", "model.checkpointing_reentrant=true"]),
    ],
)
def test_a_sound_run_is_parity(pair, stage, overrides):
    """Its errors are those of four bits, which no bound of 16 bits allows; its products are those of the definition."""
    for steps in pair.run(fp8_cases.measured_steps, stage=stage, steps=3, overrides=[*FP8, *overrides]):
        checks = judged(steps)
        assert not failed(checks)
        assert max(step["own_error"][LINEAR] for step in steps) > 0.02
        assert checks["fp8_products"].measured < 0.6
        assert "what FP8's rounding alone makes, up to" in checks["module_error"].note
        assert checks["module_error"].measured < 0.02 and "alone makes" in checks["gradient_error"].note
        for step in steps:
            parts = [row["part"] for row in step["fp8_products"] if row["module"] == LINEAR]
            assert sorted(parts) == ["input gradient", "output", "weight gradient"]
            assert {name for name, error in step["planned_error"].items() if error > 0.01} >= {LINEAR}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("wrong", fp8_cases.WRONG)
def test_what_a_layer_does_otherwise_is_found_and_named(pair, wrong):
    for steps in pair.run(fp8_cases.measured_steps, stage=2, steps=1, wrong=wrong, overrides=FP8):
        check = judged(steps)["fp8_products"]
        assert (check.passed, check.modules) == (False, (fp8_cases.LAYER,))
        assert check.measured > 1.5


@pytest.mark.one_in(6)
@pytest.mark.parametrize("defect", [defect.format(norm="model.norm", linear=LINEAR) for defect, _ in PLANTED])
def test_a_planted_defect_is_found_beside_fp8(pair, defect):
    """The defects of the table, at bounds that FP8's own error has widened."""
    given = {"stage": 2, "compute": "fp32", "steps": 3, "overrides": FP8, "defect": defect}
    for steps in pair.run(step_cases.measured_steps, **given):
        checks = judged(steps)
        assert failed(checks)
        if module_of(defect):
            assert any(module_of(defect) in check.modules for check in checks.values())
