"""Before anything trains the gate says whether single steps and the oracle fit into memory."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from config.cli import REPOSITORY
from config.errors import UserError
from tools.parity.gate import main
from tools.parity.jobs import Plan, plan
from tools.parity.room import _estimate, estimates

DEMO = str(REPOSITORY / "config/recipes/demo.yaml")
HUGE = "model.config={hidden_size: 65536, intermediate_size: 65536, num_hidden_layers: 2, num_attention_heads: 64}"
"""A model of 50 billion parameters, more than any machine holds in FP32 beside an engine."""


def of(folder: Path, *overrides: str) -> Plan:
    return plan(DEMO, ["data.tokenizer=bytes", *overrides], folder=folder, steps=20, processes=2)


def test_what_cannot_fit_is_one_line_and_trains_nothing(tmp_path: Path, refusal: Any) -> None:
    line = refusal(main, ["--config", DEMO, "--report", str(tmp_path / "out"), "data.tokenizer=bytes", HUGE])
    assert "single steps would take at least" in line and "give the model fewer layers" in line
    assert not (tmp_path / "out").exists()


def test_jobs_of_a_launcher_are_on_machines_that_are_not_asked(tmp_path: Path) -> None:
    assert list(estimates(dataclasses.replace(of(tmp_path, HUGE), launcher=("somewhere",)))) == []


def test_what_is_needed_is_said_and_what_does_not_fit_now_is_a_warning(tmp_path: Path) -> None:
    said = [line.split(" will take about ")[0] for line in estimates(of(tmp_path))]
    assert [line.removeprefix("warning: ") for line in said] == ["single steps", "the oracle"]
    given = ("the oracle", 4e9, 6e9)
    line = "the oracle will take about 6.0 GB, and 7.0 are free on this machine"
    assert _estimate(*given, 7e9, 8e9, "this machine", "wait") == line
    line = f"warning: {line.replace('7.0', '5.0')}; wait"
    assert _estimate(*given, 5e9, 8e9, "this machine", "wait") == line
    with pytest.raises(UserError, match=r"at least 4\.0 GB, and this machine has 3\.0; wait"):
        _estimate(*given, 2e9, 3e9, "this machine", "wait")
