"""Early warnings and telemetry: figures against an oracle in FP64, on two real processes, without a trace."""

import json
import math
import re
from dataclasses import replace
from random import Random
from typing import Any

import pytest

from config.schema import GuardSection, WarningsSection
from precision.guard import Guard, Verdict
from precision.step_health import Health
from tests.support.models import planted_trouble
from tests.support.models.small_run import manifest_of
from tests.training import telemetry_cases
from training.early_warnings import REARM, EarlyWarning, EarlyWarnings

CASES = [(0, "fp32"), (3, "bf16"), (1, "fp16"), (2, "fp32"), (2, "bf16"), (1, "fp32"), (3, "fp32"), (3, "fp16")]


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("stage", "compute"), CASES)
def test_the_figures_are_those_of_the_whole_batch_in_fp64(pair, stage, compute):
    near = {"fp32": 1e-4, "fp16": 1e-2, "bf16": 6e-2}[compute]
    for result in pair.run(telemetry_cases.figures, stage=stage, compute=compute):
        found, oracle = result["found"], result["oracle"]
        assert 0 < result["clip"] < 0.9  # or clipping would not be tested
        for kind in ("attentions", "adam"):
            assert found[kind].keys() == oracle[kind].keys()
            for module, figures in oracle[kind].items():
                assert found[kind][module] == pytest.approx(figures, rel=near, abs=near), (kind, module)
        for block, kurtosis in oracle["channels"].items():
            assert found["channels"][block]["kurtosis"] == pytest.approx(kurtosis, rel=near)
        assert found["embedding_share"] == pytest.approx(oracle["embedding_share"], rel=near)


def _judge(beta2: float | None = 0.9, clipping: float = 0.0, **section: Any) -> EarlyWarnings:
    return EarlyWarnings(
        WarningsSection(**section), beta2=beta2, clipping=clipping, in_fp16=lambda name: name == "half"
    )


def _event(**fields: Any) -> dict[str, Any]:
    absent: dict[str, Any] = dict.fromkeys(("embedding_share", "update_ratio"))
    return absent | {name: {} for name in ("attentions", "adam", "channels", "activation_max")} | fields


def test_a_gradient_jumps_against_an_average_that_remembers_the_squares_and_knows_their_age():
    judge, random = _judge(beta2=0.9, clipping=3.0, gradient_jump=1.5), Random(0)
    norms = [random.uniform(0.1, 1.0) for _ in range(30)] + [50.0]
    for step, norm in enumerate(norms, 1):
        found = judge.before_step(Health(loss=1.0, grad_norm=norm, step=step))
        seen = [min(value, 3.0) for value in norms[:step]]
        weights = [0.9 ** (step - 1 - index) for index in range(step)]
        average = sum(w * value**2 for w, value in zip(weights, seen, strict=True)) / sum(weights)
        jump = seen[-1] / average**0.5
        assert [warning.value for warning in found] == ([pytest.approx(jump, rel=1e-5)] if step == 31 else [])
        if step < 31:
            assert jump < 1.5
            judge.after_step(Health(loss=1.0, grad_norm=norm, step=step), applied=True, warm=True)
            energy = sum(w * value**2 for w, value in zip(weights, seen, strict=True))
            aged = sum(w * (step - 1 - i) * seen[i] ** 2 for i, w in enumerate(weights))
            assert judge.memory_age == pytest.approx(aged / energy)
    again = _judge(beta2=0.9, clipping=3.0, gradient_jump=1.5)
    again.load_state_dict(json.loads(json.dumps(judge.state_dict())))
    assert again.before_step(Health(loss=1.0, grad_norm=50.0)) == [] != again.jumps  # it has been said
    for _ in range(REARM):
        assert again.before_step(Health(loss=1.0, grad_norm=0.5)) == []
    assert again.before_step(Health(loss=1.0, grad_norm=50.0)) == [replace(found[0])]


def test_a_bound_speaks_once_names_the_worst_and_speaks_again_after_it_held():
    judge = _judge()
    bad = {"a": {"logit": 120.0, "entropy": 0.5}, "b": {"logit": 150.0, "entropy": 0.5}}
    good = {"a": {"logit": 20.0, "entropy": 0.5}}
    looks = [bad, bad, *[good] * (REARM - 1), bad, *[good] * REARM, bad]
    said = [judge.after_telemetry(step, _event(attentions=it), warm=True) for step, it in enumerate(looks)]
    assert [step for step, found in enumerate(said) if found] == [0, len(looks) - 1]
    (warning,) = said[0]
    assert warning == replace(warning, signal="attention_logit", module="b", value=150.0, modules=("b", "a"))
    told = "b: largest attention logit 150 .*at most 100 .*warnings.attention_logit.* 1 more .*learning rate"
    assert re.search(told, warning.reason)
    low = judge.after_telemetry(9, _event(attentions={"a": {"logit": 1.0, "entropy": 0.001}}), warm=True)
    assert [found.signal for found in low] == ["attention_entropy"]
    assert _judge(attention_logit=None).after_telemetry(1, _event(attentions=bad), warm=True) == []


def test_a_look_at_gradients_alone_does_not_count_as_activations_in_range():
    judge = _judge()
    growing = [_event(activation_max={"half": 400.0 * 1.01**step}) for step in range(500)]
    said = [found for step, event in enumerate(growing, 1) for found in judge.after_telemetry(step, event, warm=True)]
    assert [found.signal for found in said] == ["overflow_steps"]
    for step in range(REARM):
        assert judge.after_telemetry(501 + step, _event(), warm=True) == []
    assert judge.state_dict()["active"] == {"overflow_steps": 0}


def test_answers_that_are_alike_are_a_warning_unless_their_prompts_are_solved():
    """A policy that collapsed before it learned, and one whose answers are alike because they are right."""

    def said(judge: EarlyWarnings, reward: float, spread: float, *, silent: float = 1.0, entropy: float = 1e-3) -> Any:
        """Warnings of a step whose gradient is nine times as large as before where it is not the judge's first."""
        metrics = {"reward/mean": reward, "reward/spread": spread, "reward/no_signal": silent, "entropy": entropy}
        health = Health(loss=0.0, grad_norm=1.0 if silent < 1 else 9.0, metrics=metrics)
        found = judge.before_step(health) + judge.after_step(health, applied=True, warm=True)
        return [warning.signal for warning in found]

    alike = ["answer_entropy", "no_signal"]
    for reward in (0.0, 1.0):
        judge = _judge(beta2=0.99)
        steps = [said(judge, reward, 0.0) for _ in range(8)]
        assert steps == [[]] * 7 + [alike], "from the start on there is no signal"
    for reward, spread, solved in ((0.3, 0.46, False), (0.95, 0.2, True)):
        judge = _judge(beta2=0.99)
        for step in range(64):  # few prompts: of every fourth step all answers are alike
            assert said(judge, reward * step / 64, spread, silent=0.99 * (step % 4 == 0), entropy=0.02) == []
        state = json.loads(json.dumps(judge.state_dict()))
        judge = _judge(beta2=0.99)
        judge.load_state_dict(state)
        steps = [said(judge, reward, spread) for _ in range(8)]
        assert steps[7] == ([] if solved else ["no_signal"]) and (steps[0] == []) == solved, steps


def test_answers_without_rewards_are_judged_over_several_steps_too():
    judge, said = _judge(), []
    for step, share in enumerate((0.5, 0.25, 1.0, 0.5, 0.25, 0.75, 0.5, 0.25, *[1.0] * 8)):
        health = Health(loss=0.0, grad_norm=1.0, metrics={"truncated": share, "length": 9.0})
        said += [(step, found.value) for found in judge.after_step(health, applied=True, warm=True)]
    assert said == [(14, 0.90625)], "the one step of 1.0 before is few answers"


def test_kurtosis_is_compared_with_its_own_past_and_an_activation_in_fp16_with_the_format():
    judge = _judge()
    for step in range(1, 9):
        assert judge.after_telemetry(step, _event(channels={"block": {"kurtosis": 3.0}}), warm=True) == []
    (grown,) = judge.after_telemetry(9, _event(channels={"block": {"kurtosis": 6.3}}), warm=True)
    assert (grown.signal, grown.value) == ("kurtosis_growth", pytest.approx(2.1))
    found = []
    for step in range(0, 400, 10):
        maxima = {"half": 400.0 * 1.01**step, "wide": 400.0 * 1.01**step}
        found += [(step, warning) for warning in judge.after_telemetry(step, _event(activation_max=maxima), warm=True)]
    ((step, warning),) = found
    overflow = math.log(65504 / 400) / math.log(1.01)
    assert overflow - 200 <= step <= overflow - 190
    assert warning.module == "half" and warning.value == pytest.approx(overflow - step, rel=0.01)


def test_updates_are_compared_with_what_they_were_before_a_slow_rise():
    judge, said = _judge(), []
    for step in range(120):
        ratio = None if step == 70 else 0.01 * 1.05 ** max(0, step - 80)
        said += [(step, warning) for warning in judge.after_telemetry(step, _event(update_ratio=ratio), warm=step > 20)]
        state = json.loads(json.dumps(judge.state_dict()))
        judge = _judge()
        judge.load_state_dict(state)
    ((step, warning),) = said
    assert (step, warning.signal, warning.module) == (95, "update_growth", "")  # 1.05^15 is the first power above 2
    assert "learning rate" in warning.reason
    del state["updates"]  # of an older checkpoint
    judge.load_state_dict(state)
    assert judge.after_telemetry(0, _event(update_ratio=9.0), warm=True) == []


def test_the_guard_answers_the_warnings_that_it_is_told_to():
    warning = _judge().before_step(Health(loss=1.0, grad_norm=1.0))
    assert warning == []
    jump = EarlyWarning("gradient_jump", "", 9.0, 2.3, ("",), "the gradient jumped")
    for chosen, verdict in (((), Verdict.STEP), (("adam_rms",), Verdict.STEP), (("gradient_jump",), Verdict.CUT_LR)):
        guard, health = Guard(GuardSection(warnings=chosen, reactions=("cut_lr",))), Health(loss=1.0, grad_norm=1.0)
        guard.warn([(jump.signal, jump.reason)])
        judgement = guard.judge(health)
        assert judgement.verdict is verdict
        assert ("the gradient jumped" in judgement.reason) == (verdict is Verdict.CUT_LR)
        guard.note(health, judgement, applied=verdict is Verdict.STEP)
        assert guard.judge(health).verdict is Verdict.STEP


@pytest.mark.slow
@pytest.mark.parametrize("name", planted_trouble.CASES)
def test_trouble_is_warned_of_before_the_loss_rises(solo, name):
    ((warned, rose),) = solo.run(planted_trouble.found, name=name, seconds=3600)
    assert warned is not None
    assert rose is None if not planted_trouble.CASES[name].rises else warned < rose


def test_a_jump_is_looked_at_in_its_own_step_and_skipped_where_the_guard_is_told_to(pair):
    told = "guard.warnings=[gradient_jump]"
    applied, skipped = (pair.run(telemetry_cases.spiked, stage=2, guard=it) for it in ("guard.warnings=[]", told))
    for result, refused in ((applied, [7]), (skipped, [7, 8, 9])):
        by_kind: dict[str, list[Any]] = {}
        for event in result[0]["events"]:
            by_kind.setdefault(event["event"], []).append(event)
        (measured,) = by_kind["telemetry"]  # not due by telemetry.every_steps, and after a due step that was not finite
        assert measured["step"] == 8 and measured["activation_max"] == {} == measured["attentions"]
        largest = max(measured["gradients"], key=lambda module: measured["gradients"][module]["norm"])
        assert largest == "model.layers.1.mlp.down_proj"
        first = by_kind["warning"][0]
        assert (first["step"], first["signal"]) == (8, "gradient_jump") and first["value"] > 2.3
        found = [(event["step"], event["verdict"]) for event in by_kind["incident"]]
        assert found == [(step, "SKIP") for step in refused]
    assert "adam_rms" in [event["signal"] for event in applied[0]["events"] if event["event"] == "warning"]
    assert skipped[0]["loss"] < applied[0]["loss"]


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


def test_the_probe_runs_recomputed_blocks_with_the_masters_too(pair):
    for result in pair.run(telemetry_cases.recomputed_probe, stage=2):
        assert len(result) == 3
        for override, same in result.items():
            assert same and all(same.values()), (override, same)


@pytest.mark.parametrize("default", [None, "bf16"])
def test_the_probe_attends_in_fp32_beside_a_kernel_for_16_bits(pair, tmp_path, default):
    overrides = manifest_of(tmp_path, {"default": default, "rules": []}) if default else []
    compute = "fp32" if default else "bf16"
    assert pair.run(telemetry_cases.probed_beside_flash_attention, compute=compute, overrides=overrides) == [[], []]


def test_the_probe_on_the_manifest_path_sees_the_rounding_of_each_region(pair, tmp_path):
    rule = {"match": "*.layers.1.*", "compute": "bf16", "reason": "a test"}
    for stage, default in ((0, "fp32"), (1, "fp32"), (2, "fp32"), (3, "fp32"), (2, "bf16")):
        manifest = {"default": default, "rules": [rule]}
        arguments = {"stage": stage, "compute": "fp32", "probe": True, "folder": str(tmp_path), "manifest": manifest}
        for result in pair.run(telemetry_cases.measured, **arguments):
            assert result["unchanged"]
            errors = {name: agreement["relative_error"] for name, agreement in result["telemetry"]["probe"].items()}
            assert errors["model.layers.1.mlp.up_proj.weight"] > 1e-3
            assert all(error < 5e-2 for error in errors.values())
            assert result["probed"] == pytest.approx(result["reference"], rel=1e-5)


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


def test_a_module_that_one_rank_calls_is_measured_on_all(pair):
    first, second = pair.run(telemetry_cases.called_on_one_rank)
    assert first == second and first["lm_head"] > 0


def test_the_largest_value_over_ranks_is_torchs_nan_included(pair):
    for found, expected in pair.run(telemetry_cases.maxima):
        assert repr(found).replace("-0.0", "0.0") == repr(expected).replace("-0.0", "0.0")


def test_what_a_measured_step_exchanges_does_not_grow_with_ranks(pair):
    """No rank receives what grows with their number: a few numbers a parameter, and the signals, are reduced."""
    for counted in pair.run(telemetry_cases.sent, stage=1, compute="bf16", probe=False):
        modules = counted.pop("modules")
        assert counted.keys() == {"all_reduce"}
        assert counted["all_reduce"] < 256 * modules + 2**14
