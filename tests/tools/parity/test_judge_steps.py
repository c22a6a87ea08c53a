"""The judgement of parity: which measurements pass, what a failure names, and confidence in a verdict."""

import math
import random
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from config.cli import REPOSITORY
from config.launcher import as_launched
from config.schema import LossScaleSection, ModelSection, ParitySection, PrecisionSection
from modeling.build import model_config
from precision.loss_scale import make_policy
from tests.support.models.small_models import small_model
from tests.support.rows.jsonl import write_jsonl
from tools.parity.alternatives import moved_start
from tools.parity.every_step import judge_every_step, power, settings
from tools.parity.judge_runs import (
    Runs,
    Settling,
    Trajectory,
    confidence,
    confidence_line,
    first_departure,
    judge_trajectories,
    judge_whole,
    median_run,
    rounding_to,
    settling_of,
)
from tools.parity.judge_steps import Check, Walk, first_divergence, judge_dtypes, judge_steps
from tools.parity.power import detectable, half_width, pairs_needed
from tools.parity.rounding import FIELDS
from training.engine import build

BOUNDS = ParitySection()


def run(*, factor: float = 1.0, validation: float | None = 4.0, **changes: Any) -> Trajectory:
    """A falling, noisy loss curve of 100 steps, `factor` times what FP32's is."""
    noise = random.Random(0)
    losses = [factor * (7.0 * 0.99**step + noise.uniform(-0.05, 0.05)) for step in range(100)]
    norms = [noise.uniform(0.5, 1.5) for _ in range(100)]
    fields = {"steps": range(1, 101), "losses": losses, "grad_norms": norms, "skipped": 0, "nonfinite": 0}
    return Trajectory(**{**fields, "validation": validation, **changes})  # type: ignore[arg-type]


def trajectories(mine: Any, other: Any, controls: Any = ()) -> dict[str, Check]:
    """mine, other: a trajectory, or one for each seed."""
    runs = [[run] if isinstance(run, Trajectory) else run for run in (mine, other)]
    return {check.name: check for check in judge_trajectories(Runs(*runs, controls), BOUNDS)}


def step(number: int = 1, names: str = "ab", **changes: Any) -> dict[str, Any]:
    """A healthy measured step of modules with these letters as names."""
    weights = [f"{name}.weight" for name in names]
    agreement = {"relative_error": 0.01, "cosine": 0.9999, "sign_agreement": 0.99}
    fields = {"step": number, "loss": 4.0, "applied": True, "order": [*names], "own_error": dict.fromkeys(names, 0.002)}
    fields |= dict.fromkeys(("grad_norm", "own_grad_norm", "reference_grad_norm"), 1.0)
    fields |= {"parameters": dict.fromkeys(weights, agreement), "reference_norms": dict.fromkeys(weights, 0.7)}
    fields |= dict.fromkeys(("update_error", "drift"), dict.fromkeys(weights, 0.0)) | {"roundoff": 2.0**-8}
    fields |= {"signature": {"parts": [part()], "ranks": [{}, {}], "not_measured": {}}}
    return fields | changes


def part(module: str = "a", **sums: float) -> dict[str, Any]:
    """256 rows of 64 values of 1, with one rounding of BF16's each in the run as in plain torch; FP32's are smaller."""
    u, rows, values = 2.0**-8, 256, 256 * 64
    known = 1 / (u**2 * (1 + 1 / 6))  # by the expected error
    error = {"weighted_rr": values * u**2 / 6 * known, "rx2": values * u**2 / 6 * known**2}
    error |= {"rx": 0.0, "rx_rx": error["rx2"], "rx_xx": 0.0}
    found = {"rows": rows, "values": values, "xx": values, "run_rr": values * u**2 / 6, "plan_rr": values * u**2 / 6}
    found |= {"fp32_rr": values * u**2 / 6 * 2.0**-32, "run_plan": error["rx_rx"]}
    found |= {"weighted_xx": values * known, "weighted_x4": rows * (64 * known) ** 2}
    found |= {"walk": 0.0, "walk_fp32": 0.0, "floor": 0.0, "moved": 0.0, "own_rr": 0.0, "own_xx": 0.0}
    found |= {f"{who}_{name}": value for who in ("run", "plan") for name, value in error.items()}
    row = {"module": module, "part": "output", "kind": "linear", "roundoff": u, "terms": 64}
    return {**row, "sums": [(found | sums)[name] for name in FIELDS]}


def walked(*steps: dict[str, Any], **changes: Any) -> dict[str, Check]:
    walk = Walk(0, True, steps, recorded_loss=4.0)
    return {check.name: check for check in judge_steps([replace(walk, **changes)], BOUNDS)}


def failed(checks: dict[str, Check]) -> set[str]:
    return {name for name, check in checks.items() if not check.passed}


def test_a_run_agrees_with_itself_and_with_one_that_is_a_little_off() -> None:
    assert not failed(trajectories(run(), run()))
    assert not failed(trajectories(run(factor=1.01, validation=4.019), run()))


@pytest.mark.parametrize(
    ("mine", "name"),
    [
        (run(validation=4.021), "validation_delta"),
        (run(validation=3.979), "validation_delta"),  # better than FP32 is another model too
        (run(factor=1.03), "loss_gap"),
        (run(losses=[*run().losses[:90], *[math.nan] * 10]), "loss_gap"),
        (run(grad_norms=[2.0] * 100), "grad_norm_ratio"),
        (run(skipped=6), "skipped_share"),
        (run(nonfinite=1), "nonfinite_events"),
        (run(validation=None), "validation_delta"),
        (run(validation=math.nan), "validation_delta"),
    ],
)
def test_each_bound_of_a_trajectory_is_held(mine: Trajectory, name: str) -> None:
    assert failed(trajectories(mine, run())) == {name}


def scaled(*outcomes: str, policy: str = "deepspeed", **section: Any) -> Trajectory:
    """A run whose loss scale the real policy moves; outcomes: ``.`` a clean step, ``x`` an overflow, one a step."""
    scaler = make_policy(LossScaleSection(policy=policy, **section))  # type: ignore[arg-type]
    steps, scales = [], []
    for number, outcome in enumerate("".join(outcomes), start=1):
        before = scaler.scale
        scaler.update(outcome == "x")
        steps.append({"step": number, "applied": outcome == "."})
        if scaler.reason:
            scales.append({"step": number, "from": before, "to": scaler.scale, "reason": scaler.reason})
    found = settling_of(steps, scales)
    skipped = sum(not event["applied"] for event in steps)
    healthy = run()
    curve = {"steps": healthy.steps[: len(steps)], "losses": healthy.losses[: len(steps)]}
    return replace(healthy, **curve, grad_norms=healthy.grad_norms[: len(steps)], skipped=skipped, settling=found)


@pytest.mark.parametrize(
    ("outcomes", "section", "settled", "share"),
    [
        ("xx" + 22 * ".", {}, "of steps 1 to 2, from 65536 to 32768", 0.0),  # one tolerated, one that halves
        ("xxxxx" + 19 * ".", {"hysteresis": 1}, "of steps 1 to 5, from 65536 to 2048", 0.0),
        # the third squares the backoff
        ("xxx" + 21 * ".", {"policy": "adaptive"}, "of steps 1 to 3, from 4096 to 256", 0.0),
        ("xx" + 10 * "." + "x" + 11 * ".", {}, "from 65536 to 32768", 1 / 22),
        ("xx" + 10 * "." + "xx" + 10 * ".", {}, "from 65536 to 32768", 2 / 22),
        (".xx" + 21 * ".", {}, "", 2 / 24),  # it had trained already: no start
        (24 * "x", {}, "", 1.0),
        (13 * "x" + 11 * ".", {}, "", 13 / 24),  # longer than what is left of the run
        ("xx." + 7 * "xx.", {}, "", 16 / 24),
        (
            "xxx.x" + 19 * ".",
            {"hysteresis": 1},
            "4 while the loss scale settled: of steps 1 to 5, from 65536 to 4096",
            0.0,
        ),
        ("x" + 23 * ".", {}, "of steps 1 to 1, from 65536 to 65536", 0.0),  # tolerated
        ("xx" + 22 * ".", {"policy": "static"}, "", 2 / 24),
        ("xxx" + 21 * ".", {"hysteresis": 1, "initial": 2.0}, "", 3 / 24),  # at its minimum: an incident each
    ],
)
def test_the_settling_of_a_scale_that_starts_high_is_no_skipping(outcomes, section, settled, share) -> None:
    mine = scaled(outcomes, **section)
    check = trajectories(mine, run())["skipped_share"]
    assert check.measured == pytest.approx(share)
    assert check.passed is (share <= BOUNDS.skipped_share)
    assert check.note.endswith(settled) and bool(check.note) is bool(settled) is (mine.settling is not None)


def test_a_run_that_settled_is_compared_with_the_updates_that_it_made() -> None:
    """A loss falls by far more than the bound in its first steps: so do 40 steps less three."""
    falling = [7.0 * 0.9**step for step in range(40)]
    norms = [2.0 * 0.9**step for step in range(40)]
    whole = run(steps=range(1, 41), losses=falling, grad_norms=norms, validation=0.1)
    delayed = {"losses": [7.0] * 3 + falling[:-3], "grad_norms": [2.0] * 3 + norms[:-3], "skipped": 3}
    twin = replace(whole, **delayed, validation=0.137)
    mine = replace(twin, grad_norms=[math.inf] * 3 + norms[:-3], settling=Settling([1, 2, 3], 65536.0, 8192.0))
    mine = replace(mine, lost=[1, 2, 3])

    def against(twin: Trajectory, mine: Trajectory = mine) -> dict[str, Check]:
        runs = Runs([mine], [twin], [replace(whole, validation=0.1002)], whole)
        return {check.name: check for check in judge_trajectories(runs, BOUNDS)}

    checks = against(twin)
    assert not failed(checks)
    assert checks["validation_delta"].note.endswith(
        "+0.20%; with the updates that the loss scale lost, FP32 ends +37.00% apart"
    )
    assert failed(against(whole)) == {"validation_delta", "loss_gap", "grad_norm_ratio"}
    skipping = replace(mine, settling=None)
    assert failed(against(whole, skipping)) == {"validation_delta", "loss_gap", "grad_norm_ratio", "skipped_share"}
    later = replace(mine, losses=[*mine.losses[:20], *(loss * 1.03 for loss in mine.losses[20:])])
    assert failed(against(twin, later)) == {"loss_gap"}


def test_a_whole_run_is_not_judged_where_one_bit_of_fp32_grows_beyond_the_bound() -> None:
    mine, calm, whole = run(factor=1.03, validation=4.1), run(validation=4.001), run()

    def judged(*apart: Trajectory) -> dict[str, Check]:
        return {check.name: check for check in judge_whole(Runs([mine], [whole]), BOUNDS, apart=apart)}

    assert failed(judged(calm)) == {"validation_delta", "loss_gap"}
    found = judged(calm, run(validation=4.05))
    assert failed(found) == {"loss_gap"}, "what did not grow is judged"
    assert found["validation_delta"].note.startswith("not judged: chaotic at this rate: two FP32 runs a bit apart")
    assert failed(judged(calm, run(validation=4.03))) == {"validation_delta", "loss_gap"}, "2.5% beside 0.75%"


def test_medians_tell_one_run_that_is_far_off_from_a_defect() -> None:
    whole, far = run(), run(factor=1.03, validation=4.1)

    def judged(*again: Trajectory) -> dict[str, Check]:
        apart = (run(validation=4.001), run(validation=3.999), run(validation=4.0))
        checks = judge_whole(Runs([far], [whole]), BOUNDS, apart=apart, again=again)
        return {check.name: check for check in checks}

    assert not failed(judged(run(validation=4.002), run(validation=3.998)))
    both = {"validation_delta", "loss_gap"}
    assert failed(judged(run(factor=1.03, validation=4.09), run(factor=1.04, validation=4.11))) == both
    assert failed(judged(replace(run(), steps=[1]), far)) == both, "of as many steps"


def test_a_run_a_bit_apart_starts_from_weights_as_far_off_as_its_dtype_rounds() -> None:
    section = ModelSection(architecture="gpt2", config={"n_embd": 32, "n_layer": 1, "n_head": 2})
    config = model_config(section, vocab_size=64, sequence_length=16)
    whole = dict(build.build_model(section, config, seed=0).named_parameters())

    def moved_model(draw: int) -> PreTrainedModel:
        with moved_start(2.0**-12, draw):
            return build.build_model(section, config, seed=0)

    sections = [PrecisionSection(compute=compute) for compute in ("fp16", "bf16")]
    assert [rounding_to(each) for each in sections] == [2.0**-12, 2.0**-9]
    assert rounding_to(PrecisionSection(compute="fp32", path="manifest")) == 2.0**-9
    moved, other = (moved_model(draw) for draw in (0, 1))
    assert not torch.equal(moved.lm_head.weight, other.lm_head.weight)
    signs = torch.cat([((item / whole[name]).flatten() - 1) * 2**12 for name, item in moved.named_parameters()])
    signs = signs[signs.isfinite()]  # no bias, which is 0
    assert torch.allclose(signs.detach().abs(), torch.ones(()), atol=1e-2) and abs(float(signs.mean())) < 0.1
    assert torch.equal(build.build_model(section, config, seed=0).lm_head.weight, whole["transformer.wte.weight"])


def test_losses_that_end_at_zero_are_compared() -> None:
    """As a hinge's do once every pair is beyond its margin."""
    gone = run(losses=[0.0] * 100, validation=0.0)
    assert not failed(trajectories(gone, gone))
    assert {"validation_delta", "loss_gap"} <= failed(trajectories(run(), gone))


def test_a_single_odd_step_is_not_a_departure_but_a_lasting_one_is() -> None:
    losses = list(run().losses)
    losses[50] *= 3
    assert first_departure(run(losses=losses), run(), BOUNDS.loss_gap) is None
    late = [loss * (1.0 if index < 60 else 1.05) for index, loss in enumerate(run().losses)]
    departure = first_departure(run(losses=late), run(), BOUNDS.loss_gap)
    assert departure is not None
    assert 58 <= departure <= 64


@pytest.mark.parametrize(
    ("deltas", "apart", "verdict"),
    [
        ((0.06, 0.06, 0.06), 0.0, {"validation_delta"}),  # no chance, however far the seeds are apart: twins share them
        ((0.06, 0.06, 0.06), 0.02, {"validation_delta"}),
        ((0.01, -0.006, 0.014), 0.0, set()),
        ((0.01, 0.008, 0.012), 0.0, {"validation_delta"}),
        ((0.01, 0.008, 0.012), 0.001, {"validation_delta"}),
        ((0.01, 0.008, 0.012), 0.02, set()),
    ],
)
def test_with_seeds_a_mean_delta_is_held_against_the_scatter_of_deltas_and_controls(deltas, apart, verdict) -> None:
    twins = [run(validation=value) for value in (3.6, 4.0, 4.4)]
    mine = [run(validation=value * (1 + delta)) for value, delta in zip((3.6, 4.0, 4.4), deltas, strict=True)]
    controls = [run(validation=4.0 * (1 + delta)) for delta in ((apart, -apart) if apart else ())]
    found = judge_trajectories(Runs(mine, twins, controls, run()), BOUNDS)
    check = next(check for check in found if check.name == "validation_delta")
    squares = sum((delta - fmean(deltas)) ** 2 for delta in deltas) + 2 * apart**2
    degrees, t = (4, 2.7764) if apart else (2, 4.3027)
    assert check.bound == pytest.approx(max(0.005, t * math.sqrt(squares / degrees / 3)), rel=1e-4)
    assert check.measured == pytest.approx(fmean(deltas)) and check.note.startswith(f"deltas {deltas[0]:+.3%}, ")
    assert failed({each.name: each for each in found}) == verdict


def test_distances_that_controls_have_too_are_no_failure() -> None:
    mine = run(factor=1.03, validation=4.04)
    far = [run(factor=factor, validation=value) for factor, value in ((1.02, 4.03), (0.98, 3.97))]
    near = [run(factor=1.001, validation=4.004), run(factor=0.999, validation=3.996)]
    both, bounds = {"loss_gap", "validation_delta"}, []
    for controls, verdict in ((far, set()), (near, both), ([], both)):
        checks = trajectories(mine, run(), controls)
        assert failed(checks) == verdict
        bounds.append(checks["validation_delta"].bound)
    assert bounds[2] == BOUNDS.validation_delta
    assert bounds[0] == pytest.approx(2 * 0.0075)  # twice the root mean square of +0.75% and -0.75%


def test_a_healthy_step_passes_every_check() -> None:
    assert not failed(walked(step(1), step(2)))


def test_what_no_step_measured_passes_as_not_measured() -> None:
    checks = walked(step(accumulation_error={}, weighting_error={}, update_rounding={}))
    lacking = {name for name, check in checks.items() if math.isnan(check.measured)}
    assert lacking >= {"accumulation_error", "weighting_error", "loss_error", "update_rounding"} and not failed(checks)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"own_error": {"a": 0.003, "b": 0.05}}, "module_error"),
        ({"own_error": {"a": 0.003, "b": math.inf}}, "module_error"),
        ({"own_error": {"a": 0.003, "b": math.nan}}, "module_error"),
        ({"update_error": {"a.weight": 0.0, "b.weight": 0.01}}, "update_error"),
        ({"drift": {"a.weight": 0.0, "b.weight": 1e-9}}, "weight_drift"),
        ({"drift": {"b.weight": 0.0, "b.bias": math.nan}}, "weight_drift"),
        ({"drift": {"b.bias": math.nan, "b.weight": 0.0}}, "weight_drift"),
        ({"update_rounding": {"a.weight": 0.0, "b.weight": 1e-3}}, "update_rounding"),
        ({"accumulation_error": {"a.weight": 1e-7, "b.weight": 1e-3}}, "accumulation_error"),
        ({"weighting_error": {"a.weight": 1e-7, "b.weight": 1e-3}}, "weighting_error"),
    ],
)
def test_the_module_beyond_a_bound_is_named(changes: dict[str, Any], name: str) -> None:
    checks = walked(step(1), step(2, **changes))
    assert failed(checks) == {name}
    assert checks[name].modules == ("b",)
    assert checks[name].where == "b at step 2"


@pytest.mark.parametrize(
    ("what", "value", "name"),
    [
        ("relative_error", 0.3, "gradient_error"),
        ("relative_error", math.inf, "gradient_error"),
        ("cosine", 0.9, "gradient_cosine"),
        ("sign_agreement", 0.5, "sign_agreement"),
    ],
)
def test_gradients_are_held_to_each_of_their_bounds(what: str, value: float, name: str) -> None:
    good = step()["parameters"]["a.weight"]
    checks = walked(step(parameters={"a.weight": good, "b.weight": {**good, what: value}}))
    assert failed(checks) == {name}
    assert checks[name].modules == ("b",)


def test_gradients_that_are_rounding_noise_are_not_judged() -> None:
    good = step()["parameters"]["a.weight"]
    noise = {"relative_error": 5.0, "cosine": -0.3, "sign_agreement": 0.4}
    parameters = {"a.weight": good, "b.bias": noise}
    assert not failed(walked(step(parameters=parameters, reference_norms={"a.weight": 1.0, "b.bias": 1e-6})))
    assert failed(walked(step(parameters=parameters, reference_norms={"a.weight": 1.0, "b.bias": 1e-2})))


def test_a_gradient_is_no_failure_where_plain_torch_is_as_far_off_in_the_same_dtype() -> None:
    """Terms that cancel explain a gradient's error, but not one that may as well be lost or is beyond rounding."""
    good = step()["parameters"]["a.weight"]

    def measured(error: float, plain: float) -> dict[str, Any]:
        def agreement(off: float) -> dict[str, float]:
            return {"relative_error": off, "cosine": 1 - off**2 / 2, "sign_agreement": 1 - off / 3}

        return step(parameters={"a.weight": good, "b.weight": agreement(error)}, plain={"b.weight": agreement(plain)})

    explained = walked(measured(0.45, plain=0.4))
    assert not failed(explained)
    assert explained["gradient_error"].measured == pytest.approx(good["relative_error"])
    assert "without b.weight, whose error in plain torch is 0.4 in this dtype" in explained["gradient_error"].note
    for error, plain in ((0.45, 0.2), (0.8, 0.52), (1.0, 0.66), (math.nan, 0.4), (0.45, math.nan)):
        checks = walked(measured(error, plain=plain))
        assert failed(checks) >= {"gradient_error", "gradient_cosine", "sign_agreement"}
        assert checks["gradient_error"].modules == ("b",)

    sound = {"alternatives": {"sums in halves": 2.0}}  # as far apart as in a model where one token holds the energy
    assert not failed(walked({**measured(0.45, plain=0.2), **sound}))
    assert not failed(walked(measured(0.38, plain=0.66)))  # the dtype itself loses it
    for error, plain in ((0.65, 0.2), (0.8, 0.4), (1.0, 0.5)):
        assert "gradient_error" in failed(walked({**measured(error, plain=plain), **sound}))


@pytest.mark.parametrize(("error", "names"), [(0.05, set()), (0.07, {"gradient_excess"}), (math.nan, None)])
def test_a_gradient_is_no_further_off_than_plain_torchs(error: float, names: set[str] | None) -> None:
    """Within every bound on the error itself."""
    found = step()["parameters"]
    found["b.weight"] = found["b.weight"] | {"relative_error": error}
    checks = walked(step(parameters=found, plain_error={"a.weight": 0.01, "b.weight": 0.04}))
    assert failed(checks) == names if names is not None else "gradient_excess" in failed(checks)


def test_gradients_of_a_skipped_step_are_not_judged_but_its_outputs_are() -> None:
    bad = {"relative_error": math.inf, "cosine": math.nan, "sign_agreement": 0.0}
    skipped = step(1, applied=False, parameters={"a.weight": bad, "b.weight": bad}, update_error={})
    assert not failed(walked(skipped, step(2)))
    assert failed(walked({**skipped, "own_error": {"a": 0.003, "b": math.inf}}, step(2))) == {"module_error"}


def test_a_point_without_an_applied_step_fails() -> None:
    assert "applied_points" in failed(walked(step(1, applied=False, update_error={})))


def test_gradients_that_are_all_half_as_large_say_so() -> None:
    bad = {"relative_error": 0.5, "cosine": 1.0, "sign_agreement": 1.0}
    half = step(parameters={"a.weight": bad, "b.weight": bad}, grad_norm=0.5, own_grad_norm=0.5)
    check = walked(half)["gradient_error"]
    assert check.note == "all 2 modules; the whole gradient's norm is 0.500 of FP32's"


def test_a_reported_norm_that_is_not_the_gradients_fails() -> None:
    assert failed(walked(step(grad_norm=2.0))) == {"grad_norm_error"}
    own = step()["own_grad_norm"]
    assert failed(walked(step(grad_norm=own * (1 + 2e-4)))) == {"grad_norm_error"}
    assert failed(walked(step(grad_norm=own * (1 + 2e-6)))) == set()


def test_two_evaluations_of_a_batch_have_the_same_loss() -> None:
    assert failed(walked(step(evaluation_error=1e-3))) == {"evaluation_error"}
    assert failed(walked(step(evaluation_error=1e-6))) == set()
    assert failed(walked(step(evaluated_otherwise={"lm_head": "in training mode"}))) == {"evaluation_error"}


def test_a_point_has_to_come_back_as_it_was() -> None:
    assert failed(walked(step(), recorded_loss=4.001)) == {"restored_share"}
    assert not failed(walked(step(), recorded_loss=4.0 + 1e-6))
    assert not failed(walked(step(loss_scale=512.0), recorded_scale=512.0))
    recorded = {"lr": 1e-3, "position": 7, "sample_ids_sha256": "a"}
    assert not failed(walked(step(**recorded), recorded=recorded))
    for key, other in (("lr", 2e-3), ("position", 0), ("sample_ids_sha256", "b")):
        found = walked(step(**{**recorded, key: other}), recorded=recorded)
        assert failed(found) == {"restored_share"} and key in found["restored_share"].note
    checks = walked(step(loss_scale=1024.0), recorded_scale=512.0)
    assert failed(checks) == {"restored_share"}
    assert checks["restored_share"].note == "step 0: loss scale 1024 after restoring, 512 in the run"
    checks = walked(restored=False, why="a flipped byte")
    assert "a flipped byte" in checks["restored_share"].note


def dtypes(*lower: tuple[str, str, list[str]], blind: str = "") -> dict[str, Any]:
    keys = ("what", "computed", "modules")
    unobserved = [{"what": "softmax", "why": blind, "modules": ["a"]}] if blind else []
    return {"lower": [dict(zip(keys, entry, strict=True)) for entry in lower], "unobserved": unobserved}


def test_a_lower_dtype_inside_a_module_is_named_whatever_its_effect() -> None:
    sound, sick = dtypes(), dtypes(("softmax", "bf16", ["a"]), ("norm statistics", "bf16", ["b", "c"]))
    check = judge_dtypes([sound, sick, sick], BOUNDS)
    assert (check.passed, check.measured, check.modules) == (False, 3, ("a", "b", "c"))
    assert check.note == "softmax in bf16: a; norm statistics in bf16: b, c"
    assert judge_dtypes([sound], BOUNDS) == Check("lower_dtypes", 0, 0, True)
    assert judge_dtypes([sick], replace(BOUNDS, lower_dtypes=3)).passed
    many = [f"m{index}" for index in range(20)]
    check = judge_dtypes([dtypes(("norm statistics", "fp16", many))], BOUNDS)
    assert check.measured == 20 and check.modules == tuple(many[:8]) and check.note.endswith("m7 and 12 more")


def test_what_could_not_be_observed_is_said_and_no_failure_but_a_run_without_any_observation_is_one() -> None:
    check = judge_dtypes([dtypes(blind="a kernel of its own")], BOUNDS)
    assert check.passed and check.note == "not observable: softmax: a kernel of its own"
    check = judge_dtypes([], BOUNDS)
    assert not check.passed and math.isnan(check.measured) and check.note == "no step was observed"


def test_the_first_divergence_is_the_first_in_execution_of_the_first_step() -> None:
    bad = step(2, own_error={"a": 0.5, "b": 0.9})
    assert first_divergence([Walk(0, True, [step(1), bad])], BOUNDS) == {"step": 2, "module": "a", "own_error": 0.5}
    assert first_divergence([Walk(0, True, [step(1)])], BOUNDS) is None


DEMO = ["--config", f"{REPOSITORY}/config/recipes/demo.yaml"]


@pytest.mark.parametrize(("steps", "every", "chance"), [(400, 8, 1 / 8), (400, 200, 0.7), (24, 8, 0.5), (24, 200, 1.0)])
def test_the_stated_power_is_the_share_of_runs_in_which_the_error_is_found(steps, every, chance) -> None:
    """Each of `every` simulated steps is wrong from a random one on."""
    dice, runs, found = random.Random(0), 4000, 0
    for _ in range(runs):
        wrong = range(dice.randrange(every), steps, every)
        found += any(dice.random() < chance for _ in wrong)
    stated = power(steps, every, chance)
    assert found / runs == pytest.approx(stated, abs=4 * (stated * (1 - stated) / runs) ** 0.5 + 1e-9)


def test_a_run_compares_its_steps_as_far_as_its_config_allows() -> None:
    launched = as_launched(2)
    every = settings(DEMO, launched, 8)
    keys = ("self_check_every", "gradient_checks", "replica_checks", "update_checks")
    assert [setting.partition("=")[0] for setting in every] == [f"guard.{key}" for key in keys]
    assert settings([*DEMO, "optimizer.name=lion"], launched, 8) == every[:3]
    assert settings([*DEMO, "parallel.tensor=2"], launched, 8) == every[:1]
    assert settings(DEMO, launched, 0) == []


def test_what_a_run_said_of_its_steps_is_no_parity(tmp_path: Path) -> None:
    events = [{"event": "step", "step": n} for n in range(1, 9)]
    each, whole = ({"gradients": {"compared": n}, "norm": {"compared": 1}} for n in (14, 19))
    whole |= dict.fromkeys(("modules", "updates"), {"compared": 30})
    checks = [whole, *[each] * 7, {"evaluation": {"compared": 1}, "loss": {"compared": 1}}]
    sound = [*events, *({"event": "self_check", "step": n, "checks": found} for n, found in enumerate(checks, 1))]
    reason = "a.weight, all ranks together, step 5: its reduced gradient is not ..."
    warning = {"event": "warning", "step": 5, "signal": "self_check", "modules": ["a.weight"], "reason": reason}
    flip = {"event": "corruption", "step": 7, "module": "b.weight", "text": "weight of b.weight on rank 1"}
    other = {"event": "warning", "step": 3, "signal": "gradient_jump", "modules": ["c"], "reason": "jump"}
    (tmp_path / "config.yaml").write_text("guard: {gradient_checks: 1, replica_checks: 0}")
    files = []
    for name, said in (("sound", [*sound, other]), ("unsound", [*sound, warning, flip]), ("none", events)):
        files.append(write_jsonl(tmp_path / f"{name}.jsonl", said))
    good, bad = judge_every_step(files[:1], 8), judge_every_step(files[:2], 8)
    assert good.passed and good.note == (
        "power in 8 and in 400 steps: an error in every 8th step is found with probability 1 and 1, and one in 200 "
        "steps with 0.04 and 1, in 14 gradients, norm; with probability 0.125 and 0.999, and one in 200 steps with "
        "0.005 and 0.234, in modules, updates"
    ), "neither copies, which the config has not, nor the loss, which only an evaluation compared"
    assert (bad.passed, bad.measured, bad.where, bad.modules) == (False, 2, reason, ("a.weight", "b.weight"))
    (tmp_path / "config.yaml").write_text("guard: {gradient_checks: 0}")
    rare = judge_every_step(files[:1], 8).note
    assert rare.endswith("in 14 gradients, norm, modules, updates") and "probability 1" not in rare
    for some, every in ((files[2:], 8), (files[:1], 0)):
        assert judge_every_step(some, every).note == f"no step was compared for the gate: parity.whole_steps={every}"


@pytest.mark.parametrize("pairs", [4, 10])
def test_what_is_said_to_be_found_is_found_that_often_and_chance_no_more_than_it_is_allowed(pairs: int) -> None:
    """Normal deltas: it finds the stated shift in 9 of 10 series, and none where there is none in 19 of 20."""
    draw = random.Random(pairs)

    def share_found(shift: float, series: int = 4000) -> float:
        found = 0
        for _ in range(series):
            deltas = [draw.gauss(shift, 1.0) for _ in range(pairs)]
            found += abs(fmean(deltas)) > half_width(stdev(deltas), pairs, pairs - 1, confidence=0.95)
        return found / series

    assert share_found(detectable(1.0, pairs, pairs - 1)) == pytest.approx(0.9, abs=0.03)
    assert share_found(0.0) == pytest.approx(0.05, abs=0.012)


def test_the_number_of_pairs_is_the_fewest_that_suffice() -> None:
    needed = pairs_needed(0.01, 0.005, controls=2)
    assert needed is not None
    assert detectable(0.01, needed, needed + 1) <= 0.005 < detectable(0.01, needed - 1, needed)
    assert pairs_needed(1.0, 1e-4) is None
    assert pairs_needed(0.01, 0.005, power=0.5) < needed


def ended(loss: float) -> Trajectory:
    return Trajectory([1], [loss], [1.0], skipped=0, nonfinite=0, validation=loss)


def test_seeds_and_controls_are_pooled() -> None:
    """Three deltas of mean 0.1% around which they scatter, two controls around zero: four degrees of freedom."""
    mine, twins = [ended(4 * (1 + delta)) for delta in (0.0, 0.001, 0.002)], [ended(4.0)] * 3
    found = confidence(Runs(mine, twins, [ended(4.004), ended(3.996)]), BOUNDS)
    scatter = math.sqrt((2 * 0.001**2 + 2 * 0.001**2) / 4)
    assert (found["pairs"], found["controls"], found["degrees"]) == (3, 2, 4)
    assert found["scatter"] == pytest.approx(scatter)
    half = 2.1318 * scatter / math.sqrt(3)
    assert found["interval"] == pytest.approx([0.001 - half, 0.001 + half], rel=1e-3)
    assert found["detectable"] == pytest.approx((2.7764 + 1.5332) * scatter / math.sqrt(3), rel=1e-4)
    assert found["shown"]
    assert "shows equivalence within 0.500%" in confidence_line(found)
    far = confidence(Runs([ended(4.016)] * 3, twins, [ended(4.1), ended(3.9)]), BOUNDS)
    assert not far["shown"]
    assert f"takes {far['pairs_needed']} pairs" in confidence_line(far)


def test_one_pair_has_no_interval() -> None:
    found = confidence(Runs([ended(4.001)], [ended(4.0)]), BOUNDS)
    assert found["scatter"] is None
    assert "no power" in confidence_line(found)


def trained(seed: int, compute: torch.dtype, rate: float) -> Trajectory:
    """A tiny Llama on a synthetic language: FP32 masters and AdamW, its weights rounded to `compute` for each step."""
    model = small_model("llama", vocab_size=32)
    shadow = small_model("llama", vocab_size=32).to(compute)
    generator = torch.Generator().manual_seed(seed)
    table = torch.randint(32, (32, 4), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)

    def batch(rows: int) -> torch.Tensor:
        tokens = [torch.randint(32, (rows,), generator=generator)]
        for _ in range(24):
            choice = torch.randint(4, (rows,), generator=generator)
            tokens.append(table[tokens[-1], choice])
        return torch.stack(tokens, 1)

    def loss_of(tokens: torch.Tensor) -> torch.Tensor:
        for master, weight in zip(model.parameters(), shadow.parameters(), strict=True):
            weight.data.copy_(master.data)
        logits = shadow(tokens[:, :-1], use_cache=False).logits.float()
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    losses, norms = [], []
    for _ in range(60):
        loss = loss_of(batch(8))
        shadow.zero_grad()
        loss.backward()
        for master, weight in zip(model.parameters(), shadow.parameters(), strict=True):
            master.grad = weight.grad.float()
        norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        losses.append(float(loss))
    with torch.no_grad():
        validation = float(loss_of(batch(64)))
    return Trajectory(range(1, 61), losses, norms, skipped=0, nonfinite=0, validation=validation)


@pytest.mark.slow
def test_the_share_of_false_alarms_over_sound_pairs(capsys: pytest.CaptureFixture[str]) -> None:
    """Forty pairs of a BF16 run and its FP32 twin by another hand than the engine's; each judged as the gate does."""
    rate, alarms, deltas = 5e-3, {}, []
    for seed in range(40):
        mine, twin = (trained(seed, dtype, rate) for dtype in (torch.bfloat16, torch.float32))
        control = trained(seed, torch.float32, rate * (1 + 2.0**-8))
        deltas.append((mine.validation - twin.validation) / twin.validation)  # type: ignore[operator]
        for name, controls in (("alone", ()), ("with a control", (control,))):
            if beyond := failed(trajectories(mine, twin, controls)):
                alarms.setdefault(name, []).append((seed, beyond))
    covered = 0
    for start in range(0, 40, 4):  # series of four: does the interval have the mean of all?
        four = deltas[start : start + 4]
        covered += abs(fmean(four) - fmean(deltas)) <= half_width(stdev(four), 4, 3, confidence=0.9)
    with capsys.disabled():
        print(f"\nalarms of 40: {alarms}; deltas {fmean(deltas):+.4%}, sd {stdev(deltas):.4%}; covered {covered} of 10")
    assert len(alarms.get("with a control", [])) <= 2
    assert covered >= 6


def test_a_loss_that_is_not_finite_stays_so_among_repeated_runs() -> None:
    judged = Trajectory([1], [2.0], [math.inf], 0, 0, math.nan)
    again = [Trajectory([1], [loss], [1.0], 0, 0, 3.0) for loss in (2.1, math.nan)]
    found = median_run([judged, *again])
    assert math.isnan(found.validation) and found.grad_norms == [math.inf] and found.losses == [2.05]
