"""The gate's verdicts on comparisons of every step, and the probabilities that it states."""

import json
import random
from pathlib import Path

import pytest

from config.cli import REPOSITORY
from config.launcher import as_launched
from tools.parity.every_step import judge_every_step, power, settings

DEMO = ["--config", f"{REPOSITORY}/config/recipes/demo.yaml"]


@pytest.mark.parametrize(("steps", "every", "chance"), [(400, 8, 1 / 8), (400, 200, 0.7), (24, 8, 0.5), (24, 200, 1.0)])
def test_the_stated_power_is_the_share_of_runs_in_which_the_error_is_found(
    steps: int, every: int, chance: float
) -> None:
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
    assert [setting.partition("=")[0] for setting in every] == [
        *("guard.self_check_every", "guard.gradient_checks", "guard.replica_checks", "guard.update_checks"),
    ]
    assert settings([*DEMO, "optimizer.name=lion"], launched, 8) == every[:3]
    assert settings([*DEMO, "parallel.tensor=2"], launched, 8) == every[:1]
    assert settings(DEMO, launched, 0) == []


def test_what_a_run_said_of_its_steps_is_no_parity(tmp_path: Path) -> None:
    checks = {"gradients": {"compared": 14}}
    sound = [{"event": "step", "step": n} for n in range(1, 9)]
    sound += [{"event": "self_check", "step": n, "checks": checks} for n in range(1, 9)]
    reason = "a.weight, all ranks together, step 5: its reduced gradient is not ..."
    warning = {"event": "warning", "step": 5, "signal": "self_check", "modules": ["a.weight"], "reason": reason}
    flip = {"event": "corruption", "step": 7, "module": "b.weight", "text": "weight of b.weight on rank 1"}
    other = {"event": "warning", "step": 3, "signal": "gradient_jump", "modules": ["c"], "reason": "jump"}
    files = []
    for name, events in (("sound", [*sound, other]), ("unsound", [*sound, warning, flip])):
        files.append(tmp_path / f"{name}.jsonl")
        files[-1].write_text("".join(json.dumps(event) + "\n" for event in events))
    good, bad = judge_every_step(files[:1], 8), judge_every_step(files, 8)
    assert good.passed and "14 linear layers" in good.note
    assert (bad.passed, bad.measured, bad.where, bad.modules) == (False, 2, reason, ("a.weight", "b.weight"))
    assert "parity.whole_steps=0" in judge_every_step(files[:1], 0).note
