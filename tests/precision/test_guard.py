"""The guard's judgement, without a process group: which trouble or flipped bit meets which reaction, and its end."""

import json
import math
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from config.schema import GuardSection
from precision.corruption import different_bits, judge_reexecution, majority, odd_ranks
from precision.guard import Guard, Judgement, Verdict, rollback_skip
from precision.manifest import load_manifest
from precision.promotions import Promotions, demote_due, promote
from precision.regions import Regions
from precision.step_health import Health

NONE_USED = dict.fromkeys(("skip", "cut_lr", "correct", "promote", "rollback"), 0)
EVERYTHING = ("skip", "cut_lr", "promote", "rollback", "abort")


@dataclass(frozen=True)
class Step(Health):
    """A step, what could be done about it, and how large the update before it was."""

    can_promote: bool = True
    can_roll_back: bool = True
    update_ratio: float | None = None

    def judged(self, guard: Guard) -> Judgement:
        guard.update_ratio = self.update_ratio
        return guard.judge(self, can_promote=self.can_promote, can_roll_back=self.can_roll_back)


HEALTHY = Step(loss=2.5, grad_norm=1.0)
NAN_LOSS = replace(HEALTHY, loss=math.nan, grad_norm=math.nan)
BROKEN_GRADIENT = replace(HEALTHY, grad_norm=math.inf)
OVERFLOW = replace(BROKEN_GRADIENT, scales_dynamically=True)


class Run:
    """A training loop as far as the guard can tell: it counts skips, and goes back to a checkpoint on ROLLBACK."""

    def __init__(self, section: GuardSection) -> None:
        self.guard = Guard(section)
        self.step = self.skips = 0
        self.saved: tuple[int, dict[str, Any]] = (0, self.guard.state_dict())

    def attempt(self, health: Step, *, refused: bool = False) -> Judgement:
        self.step += 1
        health = replace(health, step=self.step, consecutive_skips=self.skips)
        judgement = health.judged(self.guard)
        applied = judgement.verdict is Verdict.STEP and not refused
        self.guard.note(health, judgement, applied=applied)
        self.skips = 0 if applied else self.skips + 1
        if judgement.verdict is Verdict.ROLLBACK:
            self.skips, state = self.saved
            self.guard.roll_back(json.loads(json.dumps(state)))
        return judgement

    def save(self) -> None:
        self.saved = (self.skips, self.guard.state_dict())

    def verdicts(self, health: Step, times: int) -> list[str]:
        return [self.attempt(health).verdict.value for _ in range(times)]


def plan(*reactions: str, **settings: Any) -> GuardSection:
    return GuardSection(reactions=reactions, **settings)


def trained(section: GuardSection, *, loss: float = 2.5, norm: float = 1.0) -> Run:
    """A run with a full window of healthy noise."""
    run, noise = Run(section), numpy.random.default_rng(7).normal(0.0, 0.1, (section.spike_window, 2))
    for a, b in noise.tolist():
        health = replace(HEALTHY, loss=loss + a, grad_norm=norm * math.exp(b))
        assert run.attempt(health).verdict is Verdict.STEP
    return run


def ratio(value: float) -> Step:
    return replace(HEALTHY, update_ratio=value)


NO_OVERFLOW = replace(NAN_LOSS, scales_dynamically=True)


@pytest.mark.parametrize("health", [NAN_LOSS, NO_OVERFLOW, BROKEN_GRADIENT, replace(HEALTHY, loss=math.inf)])
def test_what_is_not_finite_is_skipped_with_its_numbers(health: Step) -> None:
    judgement = Run(GuardSection()).attempt(health)
    assert judgement.verdict is Verdict.SKIP and not judgement.routine
    for word in (f"loss {health.loss:g}", f"gradient norm {health.grad_norm:g}", "1 of 100", "guard.skip_budget"):
        assert word in judgement.reason


def test_an_fp16_overflow_is_routine_and_uses_no_budget_until_it_persists() -> None:
    run = Run(plan("skip", "promote", "abort", max_consecutive_skips=4, skip_budget=1))
    judgements = [run.attempt(OVERFLOW) for _ in range(4)]
    assert [item.verdict.value for item in judgements] == ["SKIP", "SKIP", "SKIP", "PROMOTE"]
    assert [item.routine for item in judgements] == [True, True, True, False]
    assert run.guard.used == NONE_USED | {"promote": 1}
    assert "4 steps in a row were skipped (guard.max_consecutive_skips = 4)" in judgements[3].reason
    # A reaction gets as many steps to work as the plan waited for the first.
    assert run.verdicts(OVERFLOW, 4) == ["SKIP", "SKIP", "SKIP", "PROMOTE"]
    # And an applied step forgets both.
    assert run.verdicts(HEALTHY, 1) + run.verdicts(OVERFLOW, 4) == ["STEP", "SKIP", "SKIP", "SKIP", "PROMOTE"]


def test_an_overflow_at_the_smallest_scale_is_never_skipped_and_ends_with_advice() -> None:
    smallest = replace(OVERFLOW, scale_at_minimum=True)
    run = Run(plan(*EVERYTHING, promote_budget=1, rollback_budget=1))
    assert run.verdicts(smallest, 3) == ["PROMOTE", "ROLLBACK", "ABORT"]
    reason = run.attempt(smallest).reason
    assert "precision.loss_scale.minimum" in reason and "precision.compute=bf16" in reason
    assert Run(GuardSection()).attempt(replace(HEALTHY, scale_at_minimum=True)).verdict is Verdict.STEP


def test_an_activation_beyond_fp16_is_skipped_once_after_an_update_and_no_scale_answers_it() -> None:
    """The weights are the same after a skip, and at the start."""
    for health in (OVERFLOW, NAN_LOSS):
        beyond = replace(health, overflowed=("model.layers.7",), scales_dynamically=True)
        assert not beyond.scale_overflowed
        run = Run(plan(*EVERYTHING, promote_budget=1, rollback_budget=0))
        assert run.verdicts(HEALTHY, 1) + run.verdicts(beyond, 3) == ["STEP", "SKIP", "PROMOTE", "ABORT"]
        first = Run(GuardSection()).attempt(replace(beyond, can_roll_back=False))
        assert first.verdict is Verdict.ABORT
        assert first.reason.startswith("an activation of model.layers.7 exceeds FP16's 65,504")
        assert "no loss scale helps; use precision.compute=bf16" in first.reason


def test_weights_that_are_not_finite_are_left_for_an_older_checkpoint() -> None:
    spoiled = replace(NAN_LOSS, spoiled=("model.norm.weight",))
    run = Run(plan(*EVERYTHING, rollback_budget=1))
    assert run.verdicts(HEALTHY, 1) + run.verdicts(spoiled, 2) == ["STEP", "ROLLBACK", "ABORT"]
    assert run.attempt(spoiled).reason.startswith("model.norm.weight holds values that are not finite")


def test_without_budgets_or_a_checkpoint_skips_in_a_row_end_the_run_at_the_limit() -> None:
    run = Run(GuardSection(max_consecutive_skips=3))
    lonely = replace(NAN_LOSS, can_roll_back=False)
    assert run.verdicts(lonely, 2) == ["SKIP", "SKIP"]
    last = run.attempt(lonely)
    assert last.verdict is Verdict.ABORT
    assert last.reason.startswith("3 steps in a row were skipped (guard.max_consecutive_skips = 3)")
    assert "skip would not help" in last.reason and "rollback has no checkpoint" in last.reason
    assert "abort" not in last.reason


def test_an_optimizer_that_keeps_refusing_healthy_steps_is_noticed() -> None:
    run = Run(plan("skip", "abort", max_consecutive_skips=3))
    assert [run.attempt(HEALTHY, refused=True).verdict.value for _ in range(4)] == ["STEP", "STEP", "STEP", "ABORT"]


def test_the_plan_is_walked_in_its_order_and_past_what_is_impossible_or_used_up() -> None:
    run = Run(plan("cut_lr", "skip", "rollback", cut_lr_budget=2, skip_budget=1, rollback_budget=1))
    assert run.verdicts(BROKEN_GRADIENT, 5) == ["CUT_LR", "CUT_LR", "SKIP", "ROLLBACK", "ABORT"]
    helpless = replace(BROKEN_GRADIENT, can_promote=False, can_roll_back=False)
    ending = Run(plan("promote", "rollback", "skip", skip_budget=0)).attempt(helpless)
    assert ending.verdict is Verdict.ABORT
    for words in ("promote has no module to promote", "rollback has no checkpoint", "guard.skip_budget = 0"):
        assert words in ending.reason
    assert Run(plan()).attempt(NAN_LOSS).verdict is Verdict.ABORT


def test_spikes_are_judged_above_the_median_only_and_not_at_all_by_default() -> None:
    section = GuardSection(spike_sigmas=6.0, spike_window=64)
    loss_spike = replace(HEALTHY, loss=9.0)
    norm_spike = replace(HEALTHY, grad_norm=40.0)
    assert "the loss 9 is" in trained(section).attempt(loss_spike).reason
    reason = trained(section).attempt(norm_spike).reason
    assert "the gradient norm 40 is" in reason and "over 64 healthy steps (guard.spike_sigmas = 6)" in reason
    suspicion = trained(GuardSection(spike_window=64)).guard.suspicion(norm_spike) or ""
    assert suspicion.endswith("(the bound of guard.reexecute = 6)")
    low = replace(HEALTHY, loss=0.1, grad_norm=1e-3)
    assert trained(section).attempt(low).verdict is Verdict.STEP
    for health in (loss_spike, norm_spike):
        assert trained(GuardSection(spike_window=64)).attempt(health).verdict is Verdict.STEP


def test_a_gradient_norm_of_zero_is_judged_and_remembered() -> None:
    run = trained(GuardSection(spike_sigmas=6.0, spike_window=16))
    assert run.verdicts(replace(HEALTHY, grad_norm=0.0), 3) == ["STEP"] * 3


def test_rejected_spikes_do_not_pollute_the_window() -> None:
    section = plan("skip", spike_sigmas=6.0, spike_window=32, max_consecutive_skips=1000, skip_budget=1000)
    run = trained(section)
    before = run.guard.state_dict()
    for _ in range(200):
        assert run.attempt(replace(HEALTHY, loss=30.0, grad_norm=50.0)).verdict is Verdict.SKIP
        run.attempt(NAN_LOSS)
    after = run.guard.state_dict()
    assert (after["loss"], after["log_norm"]) == (before["loss"], before["log_norm"])
    run.attempt(HEALTHY, refused=True)
    assert run.guard.state_dict()["loss"] == before["loss"]
    run.attempt(HEALTHY)
    assert run.guard.state_dict()["loss"]["values"][-1] == HEALTHY.loss


@pytest.mark.parametrize("seed", range(3))
def test_a_healthy_noisy_run_is_never_judged(seed: int) -> None:
    """Measured: 0 of 40,000 steps at 6 sigmas and a window of 128, where 1 in 1,400 is judged with a window of 16."""
    generator, run = numpy.random.default_rng(seed), Run(GuardSection(spike_sigmas=6.0))
    steps = 2000
    losses = 2.0 + 8.0 * numpy.exp(-numpy.arange(steps) / 200) + generator.normal(0, 0.05, steps)
    norms = generator.lognormal(0.0, 0.3, steps) * (1.0 + 10.0 * numpy.exp(-numpy.arange(steps) / 50))
    for loss, norm in zip(losses.tolist(), norms.tolist(), strict=True):
        assert run.attempt(replace(HEALTHY, loss=loss, grad_norm=norm)).verdict is Verdict.STEP


def test_an_update_out_of_range_meets_only_what_can_repair_it() -> None:
    section = plan(*EVERYTHING, min_update_ratio=1e-6, max_update_ratio=0.1, cut_lr_budget=1, rollback_budget=1)
    run = Run(section)
    assert [run.attempt(ratio(value)).verdict.value for value in (1e-6, 1e-3, 0.1)] == ["STEP"] * 3
    judgement = run.attempt(ratio(0.25))
    assert judgement.verdict is Verdict.CUT_LR
    assert "0.25 of the weights' norm (guard.max_update_ratio = 0.1)" in judgement.reason
    assert run.verdicts(ratio(math.inf), 2) == ["ROLLBACK", "ABORT"]
    assert run.attempt(ratio(1e-9)).verdict is Verdict.PROMOTE
    assert Run(section).attempt(ratio(math.nan)).verdict is Verdict.CUT_LR
    unbounded = Run(GuardSection())
    assert [unbounded.attempt(ratio(value)).verdict for value in (0.0, math.inf)] == [Verdict.STEP] * 2


def test_a_cut_lasts_so_many_applied_steps_and_overlapping_cuts_multiply() -> None:
    run = Run(plan("cut_lr", "skip", cut_lr_budget=2, cut_lr_steps=3, cut_lr_factor=0.25))
    assert run.guard.lr_factor == 1.0
    run.attempt(BROKEN_GRADIENT)
    factors = []
    for health in (HEALTHY, BROKEN_GRADIENT, BROKEN_GRADIENT, HEALTHY, HEALTHY, HEALTHY, HEALTHY):
        factors.append(run.guard.lr_factor)
        run.attempt(health)
    assert factors == [0.25, 0.25, 0.0625, 0.0625, 0.0625, 0.25, 1.0]
    assert run.guard.lr_factor == 1.0


def test_a_promotion_is_taken_back_after_its_probation_and_only_once() -> None:
    run = Run(plan("promote", "skip", promote_budget=2, probation_steps=3))
    run.attempt(BROKEN_GRADIENT)
    run.verdicts(HEALTHY, 2)
    assert run.guard.take_due_demotions() == []
    run.attempt(OVERFLOW)  # routine: neither clean nor an incident
    run.attempt(HEALTHY)
    assert run.guard.take_due_demotions() == [1]
    assert run.guard.take_due_demotions() == []


def test_an_incident_starts_probation_over_and_zero_is_for_good() -> None:
    run = Run(plan("promote", "skip", promote_budget=1, probation_steps=2))
    run.attempt(BROKEN_GRADIENT)
    run.verdicts(HEALTHY, 1)
    assert run.attempt(BROKEN_GRADIENT).verdict is Verdict.SKIP
    run.verdicts(HEALTHY, 1)
    assert run.guard.take_due_demotions() == []
    run.verdicts(HEALTHY, 1)
    run.attempt(BROKEN_GRADIENT)  # too late to keep what is already due
    assert run.guard.take_due_demotions() == [1]
    for_good = Run(plan("promote", promote_budget=1, probation_steps=0))
    for_good.attempt(BROKEN_GRADIENT)
    for_good.verdicts(HEALTHY, 50)
    assert for_good.guard.take_due_demotions() == []
    resumed = Run(plan("promote", "skip", promote_budget=2, probation_steps=0))
    resumed.guard.load_state_dict(Run(plan("promote")).guard.state_dict() | {"probation": [[1, 1]]})
    resumed.attempt(BROKEN_GRADIENT)
    resumed.verdicts(HEALTHY, 2)
    assert resumed.guard.take_due_demotions() == []


def test_the_last_update_is_judged_by_whoever_resumes_and_not_again_after_a_rollback() -> None:
    section = plan("rollback", max_update_ratio=0.01)
    guard, resumed = Guard(section), Guard(section)
    guard.note(HEALTHY, guard.judge(HEALTHY), applied=True, update_ratio=0.5)
    resumed.load_state_dict(json.loads(json.dumps(guard.state_dict())))
    assert resumed.judge(HEALTHY, can_roll_back=True).verdict is Verdict.ROLLBACK
    resumed.roll_back(guard.state_dict())
    assert resumed.judge(HEALTHY, can_roll_back=True).verdict is Verdict.STEP


def test_a_module_that_was_promoted_twice_returns_to_the_manifests_dtype() -> None:
    run, promotions = Run(plan("promote", promote_budget=2, probation_steps=2)), Promotions()
    regions: Any = SimpleNamespace(dtypes={"mlp": "fp8"})
    regions.usual, regions.set = lambda name: "fp8", lambda name, compute: regions.dtypes.update({name: compute})
    for compute in ("bf16", "fp32"):
        run.attempt(BROKEN_GRADIENT)
        promote(regions, promotions, ["mlp"], to=compute, step=run.step)
    run.verdicts(HEALTHY, 2)
    assert demote_due(regions, promotions, run.guard) == regions.dtypes == {"mlp": "fp8"}


def test_a_module_returns_to_the_dtype_of_the_manifest_in_force(tmp_path) -> None:
    """Its promotion was in a checkpoint; FP16 again, where nothing else is, it would train without a loss scale."""
    model = torch.nn.ModuleDict({"up_proj": torch.nn.Linear(4, 4), "down_proj": torch.nn.Linear(4, 4)})
    rule = {"match": "up_proj", "compute": "fp32", "reason": "it overflowed"}
    manifests = []
    for name, document in (("old", {"default": "fp16"}), ("new", {"default": "bf16", "rules": [rule]})):
        (tmp_path / name).write_text(json.dumps(document))
        manifests.append(load_manifest(tmp_path / name))
    run, saved, loaded = Run(plan("promote", promote_budget=1, probation_steps=2)), Promotions(), Promotions()
    before = Regions(model, manifests[0])
    run.attempt(BROKEN_GRADIENT)
    promote(before, saved, ["up_proj"], to="fp32", step=run.step)
    state = json.loads(json.dumps(saved.state_dict(before)))
    before.close()
    regions = Regions(model, manifests[1])
    loaded.load_state_dict(state, regions)
    run.verdicts(HEALTHY, 2)
    assert demote_due(regions, loaded, run.guard) == {"up_proj": "fp32"}
    assert regions.dtypes == {"up_proj": "fp32", "down_proj": "bf16"}


def test_a_rollback_restores_everything_but_the_budgets() -> None:
    run = trained(plan("cut_lr", "rollback", cut_lr_budget=1, rollback_budget=2, spike_sigmas=6.0, spike_window=16))
    run.save()
    saved = run.guard.state_dict()
    run.attempt(BROKEN_GRADIENT)
    run.verdicts(HEALTHY, 3)
    assert run.attempt(BROKEN_GRADIENT).verdict is Verdict.ROLLBACK
    state = run.guard.state_dict()
    assert state.pop("used") == NONE_USED | {"cut_lr": 1, "rollback": 1}
    assert saved.pop("used") == NONE_USED
    assert state == saved and run.guard.lr_factor == 1.0


def test_a_warning_is_answered_by_one_rollback() -> None:
    run = Run(plan("rollback", warnings=("attention_logit",), rollback_budget=3))
    run.verdicts(HEALTHY, 3)
    run.guard.warn([("attention_logit", "layer 3: 200")])
    run.save()
    assert run.verdicts(HEALTHY, 3) == ["ROLLBACK", "STEP", "STEP"]


@pytest.mark.parametrize("what", ["warning", "ratio"])
def test_a_routine_overflow_answers_neither_a_warning_nor_a_large_update(what: str) -> None:
    guard = Guard(plan("cut_lr", warnings=("attention_logit",), max_update_ratio=0.1))
    guard.note(HEALTHY, guard.judge(HEALTHY), applied=True, update_ratio=0.5 if what == "ratio" else None)
    guard.warn([("attention_logit", "layer 3: 200")] if what == "warning" else [])
    judgement = guard.judge(OVERFLOW)
    assert judgement.routine
    guard.note(OVERFLOW, judgement, applied=False)
    assert guard.judge(HEALTHY).verdict is Verdict.CUT_LR


def test_repeated_rollbacks_leave_out_more_each_time() -> None:
    assert [rollback_skip(used, 10) for used in (1, 2, 3, 4)] == [10, 20, 40, 80]
    assert rollback_skip(1, 1) == 1 and rollback_skip(50, 1) == rollback_skip(51, 1) == 64


SECTIONS = st.builds(
    GuardSection,
    max_consecutive_skips=st.integers(1, 6),
    spike_window=st.just(16),
    spike_sigmas=st.sampled_from([0.0, 4.0]),
    min_update_ratio=st.sampled_from([None, 1e-5]),
    max_update_ratio=st.sampled_from([None, 1e-2]),
    reactions=st.lists(st.sampled_from(EVERYTHING[:4]), unique=True).map(tuple),
    skip_budget=st.integers(0, 5),
    cut_lr_steps=st.integers(1, 4),
    probation_steps=st.integers(0, 4),
    **dict.fromkeys(("cut_lr_budget", "promote_budget", "rollback_budget"), st.integers(0, 3)),
)
ANY = {"step": st.just(1), "can_promote": st.booleans(), "can_roll_back": st.booleans()}
BAD = st.builds(
    Step,
    **ANY,
    loss=st.sampled_from([2.5, math.nan, math.inf]),
    grad_norm=st.sampled_from([math.inf, math.nan]),
    scales_dynamically=st.booleans(),
    scale_at_minimum=st.booleans(),
)
GOOD = st.builds(
    Step,
    **ANY,
    loss=st.floats(2.0, 3.0) | st.just(50.0),
    grad_norm=st.floats(0.5, 2.0) | st.just(1e4),
    update_ratio=st.sampled_from([None, 1e-7, 1e-3, 0.5]),
)


def others(section: GuardSection) -> int:
    return section.cut_lr_budget + section.promote_budget + section.rollback_budget


@settings(max_examples=300, deadline=None)
@given(section=SECTIONS, data=st.data())
def test_a_run_that_never_gets_healthy_ends_within_the_stated_bound(section: GuardSection, data: st.DataObject) -> None:
    run = Run(section)
    bound = section.max_consecutive_skips * (1 + others(section))
    for count in range(1, bound + 1):
        judgement = run.attempt(data.draw(BAD))
        assert judgement.verdict is not Verdict.STEP
        assert judgement.reason and "\n" not in judgement.reason
        if judgement.verdict is Verdict.ABORT:
            return
        if data.draw(st.booleans()):
            run.save()
        assert count < bound


@settings(max_examples=200, deadline=None)
@given(section=SECTIONS, healths=st.lists(BAD | GOOD, max_size=150))
def test_incidents_are_bounded_by_the_budgets_and_only_finite_steps_are_taken(section, healths) -> None:
    run, incidents, ended = Run(section), 0, False
    for health in healths:
        judgement = run.attempt(health)
        assert health.finite or judgement.verdict is not Verdict.STEP
        assert judgement.reason or judgement.verdict is Verdict.STEP
        if judgement.verdict is Verdict.ABORT:
            ended = True
            break
        incidents += judgement.verdict is not Verdict.STEP and not judgement.routine
    assert incidents == sum(run.guard.used.values()) <= section.skip_budget + others(section)
    assert not ended or run.guard.used.keys() == NONE_USED.keys()


@settings(max_examples=150, deadline=None)
@given(section=SECTIONS, before=st.lists(BAD | GOOD, max_size=60), after=st.lists(BAD | GOOD, max_size=40))
def test_a_run_resumed_anywhere_judges_as_an_unbroken_one(section, before, after) -> None:
    unbroken, resumed = Run(section), Run(section)
    for health in before:
        unbroken.attempt(health)
    resumed.step, resumed.skips, resumed.saved = unbroken.step, unbroken.skips, unbroken.saved
    resumed.guard.load_state_dict(json.loads(json.dumps(unbroken.guard.state_dict())))
    for health in after:
        assert resumed.attempt(health) == unbroken.attempt(health)
        assert resumed.guard.lr_factor == unbroken.guard.lr_factor
        assert resumed.guard.take_due_demotions() == unbroken.guard.take_due_demotions()
    assert resumed.guard.state_dict() == unbroken.guard.state_dict()


def test_a_checkpoint_from_before_a_reaction_existed_has_used_none_of_its_budget() -> None:
    guard = Guard(plan(*EVERYTHING))
    state = guard.state_dict()
    del state["used"]["promote"]
    guard.load_state_dict(state | {"used": {**state["used"], "rollback": 1}})
    assert guard.used == NONE_USED | {"rollback": 1}


@pytest.mark.parametrize(
    ("metrics", "verdict"),
    [
        ({"clip_share": 0.0}, Verdict.CORRECT),
        ({}, Verdict.PROMOTE),  # opd
        ({"clip_share": 0.0, "gap/corrected": 1.0, "left_out": 0.5}, Verdict.STEP),
        ({"clip_share": 0.0, "gap/corrected": 1.0, "left_out": 0.6}, Verdict.PROMOTE),
    ],
)
def test_a_gap_of_sampler_and_trainer_is_corrected_while_enough_is_left(metrics, verdict):
    gap = {"gap/of_bound": 1.5, "gap/k1": 0.1, "gap/k3": 0.2, "gap/self_k3": 0.01, "gap/one_sided": 0.9}
    guard = Guard(GuardSection(reactions=("correct", "promote", "abort")))
    health = Health(1.0, 1.0, metrics={**gap, **metrics})
    judgement = guard.judge(health, can_promote=True)
    assert judgement.verdict is verdict
    assert ("the sampler's policy is not the trainer's" in judgement.reason) == (verdict is not Verdict.STEP)


def test_the_bits_of_two_values_that_differ() -> None:
    assert different_bits(0b1010, 0b0011, 16) == (0, 3)
    assert different_bits(-1, -1 << 15, 16) == tuple(range(15)), "signed and unsigned readings are the same bits"
    assert different_bits(-(1 << 31), 0, 32) == (31,)
    assert different_bits(2**64 - 1, -1, 64) == ()


def test_the_value_of_most_ranks_is_right_and_nobody_knows_it_of_two() -> None:
    assert majority([4, 4, 9]) == 4 and majority([4, 9]) is None and majority([1, 1, 2, 2]) is None
    assert odd_ranks([4, 9, 4], 4) == (1,)
    assert odd_ranks([4, 9], None) == (0, 1)


STEPS = {
    "the same again": ({}, ("none", ())),
    "suspicious, the same again": ({"suspicious": True, "healthy": False}, ("numeric", ())),
    "another one, and healthy": ({"changed": [1, 1, 0], "named": [0, 1, 0]}, ("transient", (1,))),
    "only after the reduction": ({"changed": [0, 0, 1], "signed": True}, ("transient", (2,))),
    "only after the reduction, gradients not signed": ({"changed": [0, 0, 1]}, ("transient", ())),
    "everybody's": ({"changed": [1, 1, 1], "named": [1, 1, 1]}, ("transient", ())),
    "another one, never healthy": ({"changed": [0, 1, 0], "named": [0, 1, 0], "healthy": False}, ("persistent", (1,))),
    "rank 1 answers its own inputs and those of rank 2": ({"disagreed": [0, 1, 1]}, ("persistent", (1,))),
    "one batch alone": ({"disagreed": [0, 1, 0]}, ("persistent", (0, 1))),
    "one batch alone, and rank 0 was not finite": (
        {"disagreed": [0, 1, 0], "finite": [(True, True), (True, False), (True, True)]},
        ("persistent", (0,)),
    ),
    "of two ranks each may be it": ({"changed": [0, 0], "named": [0, 0], "disagreed": [1, 1]}, ("persistent", (0, 1))),
    "one rank, never healthy": (
        {"changed": [1], "named": [1], "disagreed": None, "healthy": False},
        ("persistent", (0,)),
    ),
    "one rank, healthy now": ({"changed": [1], "named": [1], "disagreed": None}, ("transient", (0,))),
}


@pytest.mark.parametrize("case", STEPS)
def test_what_a_step_says_that_was_run_again(case: str) -> None:
    told, (kind, ranks) = STEPS[case]
    usual = {"suspicious": False, "changed": [0] * 3, "healthy": True, "disagreed": [0] * 3, "named": [0] * 3}
    found = judge_reexecution(**(usual | told))
    assert (found.kind, found.ranks) == (kind, ranks), found.why
