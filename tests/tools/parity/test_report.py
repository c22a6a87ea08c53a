"""The page about a parity run, from the content of parity.json alone, and the energy counters that it cites."""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pynvml
import pytest
from matplotlib.figure import Figure

from config.cli import REPOSITORY
from tools.parity import energy, jobs
from tools.parity.energy import of_processors, used
from tools.parity.jobs import plan
from tools.parity.report import _draw_steps, verdict_lines, write_report


def check(name: str, measured: Any, bound: float, **changes: Any) -> dict[str, Any]:
    fields = {"passed": True, "at_least": False, "where": "", "modules": [], "note": ""}
    return {"name": name, "measured": measured, "bound": bound, **fields, **changes}


def found() -> dict[str, Any]:
    """The content of parity.json of a passed gate, with two modules."""
    agreement = {"relative_error": 0.01, "cosine": 0.999, "sign_agreement": 0.99}
    step = {
        "step": 1,
        "order": ["embed", "head"],
        "applied": True,
        "own_error": {"embed": 0.001, "head": 0.002},
        "reference_norms": {"embed.weight": 1.0, "head.weight": 1.0},
        "parameters": {"embed.weight": agreement, "head.weight": agreement},
    }
    curve = {"steps": [1, 2, 3], "losses": [3.0, 2.0, 1.5], "grad_norms": [1.0, 1.0, 1.0]}
    pair = {"candidate": 1.0, "fp32": 2.0, "ratio": 0.5}
    return {
        "verdict": "parity",
        "failed": [],
        "checks": [
            check("validation_delta", 0.001, 0.005),
            check("loss_gap", 0.001, 0.02),
            check("module_error", 0.002, 0.02, where="head at step 1"),
            check("gradient_error", 0.01, 0.15),
            check("gradient_cosine", 0.999, 0.99, at_least=True),
        ],
        "confidence": {"scatter": None},
        "first_parting": None,
        "first_departure": None,
        "bought": {"step_seconds": pair, "energy_joules": {"candidate": None, "fp32": None, "ratio": None}},
        "conditions": {
            "hypothesis": "It holds.",
            "command": "python -m tools.parity",
            "compute": "bf16",
            "model": "Llama",
            "parameters": 1000,
            "zero_stage": 2,
            "offload": "none",
            "processes": 2,
            "steps": 3,
            "seeds": 1,
            "global_batch": 8,
            "compared_after": [0, 7],
            "accumulation": 1,
            "sequence_length": 32,
            "data": "abc",
            "environment": {"versions": {"torch": "2.13"}, "cpu": {"model": "X", "usable_cores": 2}},
        },
        "trajectories": {"candidate": [curve], "fp32": [curve]},
        "walks": [{"point": 0, "steps": [step]}],
    }


def test_a_failure_is_told_first_with_its_modules(tmp_path: Path) -> None:
    bad = copy.deepcopy(found())
    bad |= {"verdict": "no parity", "failed": ["module_error"]}
    bad["first_parting"] = {"step": 1, "module": "head", "own_error": "inf"}
    bad["checks"][2] |= {"measured": "inf", "passed": False, "modules": ["head"], "where": "head at step 1"}
    bad["walks"][0]["steps"][0]["own_error"]["head"] = "inf"
    lines = verdict_lines(bad)
    assert lines[0].endswith("1 of 5 checks are beyond their bounds.")
    assert lines[1] == "- module_error: not finite, bound 0.02; head"
    page = write_report(tmp_path, bad).read_text()
    assert page.index("- module_error") < page.index("## Checks")
    assert "`head` is the first module" in page


@pytest.mark.parametrize("losses", [["nan", "inf", 1.5], [3.0, 2.0, "nan"]])
def test_losses_that_are_not_finite_are_drawn_as_gaps(tmp_path: Path, losses: list[Any]) -> None:
    odd = copy.deepcopy(found())
    odd["trajectories"]["candidate"][0]["losses"] = losses
    assert write_report(tmp_path, odd).exists()


def test_a_run_without_single_steps_has_no_picture_of_them(tmp_path: Path) -> None:
    bare = copy.deepcopy(found())
    bare["walks"] = [{"point": 0, "steps": []}]
    assert "steps.png" not in write_report(tmp_path, bare).read_text()


def test_the_picture_of_steps_shows_the_worst_of_all_of_them_by_module_as_the_verdict_does(tmp_path: Path) -> None:
    """The worst value was in the middle: the last step, and another parameter of the same module, are better."""
    many = copy.deepcopy(found())
    first, middle, last = (copy.deepcopy(many["walks"][0]["steps"][0]) | {"step": step} for step in (1, 2, 3))
    middle["own_error"]["head"] = 0.7
    middle["parameters"]["head.weight"] = {"relative_error": 0.9, "cosine": 1.0, "sign_agreement": 1.0}
    for step in (first, middle, last):
        step["parameters"]["head.bias"] = {"relative_error": 0.05, "cosine": 1.0, "sign_agreement": 1.0}
        step["reference_norms"]["head.bias"] = 1.0
    last["own_error"]["embed"] = "nan"
    many["walks"] = [{"point": 0, "steps": [first, middle, last]}]
    figure = Figure()
    axes = figure.subplots(1, 2)
    _draw_steps(axes, many)
    drawn = [{tuple(point) for curve in axis.lines for point in curve.get_xydata().tolist()} for axis in axes]
    assert (1.0, 0.7) in drawn[0] and (1.0, 0.9) in drawn[1]
    assert (0.0, 0.98) in drawn[0], "what is not finite is at the edge"
    assert (0.0, 0.01) in drawn[1] and (1.0, 0.05) not in drawn[1]
    assert [text.get_text() for axis in axes for text in axis.texts] == ["embed", "head"]
    assert {axis.get_title() for axis in axes} == {
        "Output error by module, worst of all steps",
        "Gradient error by module, worst of all steps",
    }
    assert "steps 1 to 3" in {line.get_label() for line in axes[0].lines}


def test_packages_are_summed_and_their_parts_are_not(tmp_path):
    for name, value in (("intel-rapl:0", 2_000_000), ("intel-rapl:1", 500_000), ("intel-rapl:0:0", 99_000_000)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "energy_uj").write_text(f"{value}\n")
    assert of_processors(tmp_path) == 2.5


def test_a_machine_that_reports_nothing_gives_nothing(tmp_path):
    assert of_processors(tmp_path) is None
    (tmp_path / "intel-rapl:0").mkdir()
    assert of_processors(tmp_path) is None


def test_gpus_that_a_run_does_not_use_are_not_metered(tmp_path, monkeypatch):
    """Nor is this machine for a launcher, whose jobs may be on others."""
    (tmp_path / "intel-rapl:0").mkdir()
    (tmp_path / "intel-rapl:0/energy_uj").write_text("7000000\n")
    monkeypatch.setattr(energy, "POWERCAP", tmp_path)
    for name in ("nvmlInit", "nvmlShutdown"):
        monkeypatch.setattr(pynvml, name, lambda: None)
    for kind in ("Index", "UUID"):
        monkeypatch.setattr(pynvml, f"nvmlDeviceGetHandleBy{kind}", lambda name: name)
    millijoules = {0: 1000, 1: 20_000, 2: 300_000, "GPU-1a": 4000}
    monkeypatch.setattr(pynvml, "nvmlDeviceGetTotalEnergyConsumption", millijoules.__getitem__)
    chosen = plan(str(REPOSITORY / "config/recipes/demo.yaml"), [], folder=tmp_path, steps=20, processes=2)
    for visible, expected in (("1,0,2", 21), ("1", 20), ("GPU-1a", 4), ("", 7)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert jobs._joules(dataclasses.replace(chosen)) == expected
        assert jobs._joules(dataclasses.replace(chosen, launcher=("deepspeed",))) is None


def test_only_a_difference_of_two_readings_that_grew_is_energy():
    assert used(10.0, 12.5) == 2.5
    assert used(None, 12.5) is used(10.0, None) is used(12.0, 1.0) is None
