"""Telemetry on two real processes: the right numbers, and no trace in the training."""

import pytest

from tests.training import telemetry_cases

ALL = [(0, "fp32"), *[(stage, compute) for stage in (1, 2, 3) for compute in ("fp32", "bf16", "fp16")]]


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("stage", "compute"), ALL)
def test_what_is_measured_is_right_and_changes_nothing(pair, stage, compute):
    probe = (stage, compute) != (0, "fp32") and stage != 3
    for result in pair.run(telemetry_cases.measured, stage=stage, compute=compute, probe=probe):
        assert result["unchanged"]
        found = result["telemetry"]
        tolerance = {"fp32": 1e-5, "fp16": 5e-3, "bf16": 4e-2}[compute]
        assert found["gradients"].keys() == result["reference"].keys()
        for module, norm in result["reference"].items():
            assert found["gradients"][module]["norm"] == pytest.approx(norm, rel=tolerance), module
        for module, reference in result["oracle"].items():
            own = found["gradients"][module]
            assert own["norm"] == pytest.approx(reference["norm"], rel=1e-5), module
            assert own["maximum"] == pytest.approx(reference["maximum"], rel=1e-5), module
            assert own["below_normal"] == pytest.approx(reference["below_normal"], abs=1e-5), module
            assert own["flushed"] == pytest.approx(reference["flushed"], abs=1e-5), module
        for module, ratio in result["update_ratios"].items():
            assert found["update_ratios"][module] == pytest.approx(ratio, rel=1e-4), module
        assert found["activation_max"]["lm_head"] > 0
        counts, lowest = found["gradient_exponents"]["counts"], found["gradient_exponents"]["lowest"]
        assert counts[0] > 0 and counts[-1] > 0 and -60 < lowest < 0 and sum(counts) > 5000
        assert found["update_ratio"] == pytest.approx(result["update_ratio"], rel=1e-5)
        if compute == "fp32":
            assert found["drift"] is None
        else:
            assert found["drift"] == {"maximum": 0.0, "rms": 0.0, "by_module": {}}
        if probe:
            for name, agreement in found["probe"].items():
                assert agreement["cosine"] > 1 - tolerance, name
                assert agreement["relative_error"] < 3 * tolerance, name
                assert (agreement["relative_error"] > 1e-6) is (compute != "fp32"), name


def test_the_probe_on_the_manifest_path_sees_the_rounding_of_each_region(pair, tmp_path):
    rule = {"match": "*.layers.1.*", "compute": "bf16", "reason": "a test"}
    manifest = {"default": "fp32", "rules": [rule]}
    for stage in (0, 1, 2, 3):
        arguments = {"stage": stage, "compute": "fp32", "probe": True, "folder": str(tmp_path), "manifest": manifest}
        for result in pair.run(telemetry_cases.measured, **arguments):
            assert result["unchanged"]
            errors = {name: agreement["relative_error"] for name, agreement in result["telemetry"]["probe"].items()}
            assert errors["model.layers.1.mlp.up_proj.weight"] > 1e-3
            assert all(error < 5e-2 for error in errors.values())


def test_what_fp8_flushes_is_measured_and_changes_nothing(pair, tmp_path):
    rule = {"match": "*.layers.*", "module_class": "Linear", "compute": "fp8", "reason": "test"}
    arguments = {"compute": "fp32", "probe": False, "folder": str(tmp_path)}
    for result in pair.run(
        telemetry_cases.measured, stage=3, manifest={"default": "bf16", "rules": [rule]}, **arguments
    ):
        assert result["unchanged"]
        found = result["telemetry"]["fp8_flushed"]
        assert len(found) == 14
        assert all(row.keys() == {"input", "weight", "gradient"} for row in found.values())
        lost = result["telemetry"]["lost_updates"]  # a step of 1e-3 of weights around 0.02, of which each has 4 bits
        assert 0.2 < lost["model.layers.0.mlp.down_proj"] < 0.8


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_weight_that_is_not_its_master_is_named(pair, stage):
    for drift in pair.run(telemetry_cases.apart, stage=stage):
        assert drift["by_module"] == {"model.layers.1.mlp.down_proj": pytest.approx(0.5, abs=0.01)}
        assert drift["maximum"] == pytest.approx(0.5, abs=0.01) and 0 < drift["rms"] < 0.01


def test_a_probe_that_cannot_be_is_refused(pair):
    for result in pair.run(telemetry_cases.measured, stage=3, compute="bf16", probe=True):
        assert result["refused"].startswith("telemetry.probe = true: at ZeRO-3")


def test_the_largest_value_over_ranks_is_torchs_nan_included(pair):
    for found, expected in pair.run(telemetry_cases.maxima):
        assert repr(found).replace("-0.0", "0.0") == repr(expected).replace("-0.0", "0.0")


def test_what_a_measured_step_exchanges_does_not_grow_with_ranks(pair):
    """No rank receives what grows with their number: a few numbers a parameter, and the signals, are reduced."""
    for counted in pair.run(telemetry_cases.sent, stage=1, compute="bf16", probe=False):
        modules = counted.pop("modules")
        assert counted.keys() == {"all_reduce"}
        assert counted["all_reduce"] < 256 * modules + 2**14
