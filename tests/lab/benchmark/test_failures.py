"""What a benchmark of several jobs does when one of them fails: the others are measured, and the failure is a row."""

from __future__ import annotations

import json

import pytest

from config.cli import REPOSITORY
from lab.benchmark import activations, loss
from tests.support.launches import SMALL

RECIPE = str(REPOSITORY / "config/recipes/benchmark.yaml")


def test_a_loss_that_cannot_be_computed_is_a_row(capsys) -> None:
    """One that nobody knows stands for one that has no memory."""
    options = ["--vocabulary", "64", "--hidden", "8", "--tokens", "16", "--repeats", "0", "--json"]
    assert loss.main([*options, "--ways", "of nobody", "chunked"]) == 3
    failed, chunked = map(json.loads, capsys.readouterr().out.splitlines())
    assert failed["way"] == "of nobody" and "of nobody" in failed["failed"]
    assert "failed" not in chunked and 3 < chunked["loss"] < 6


@pytest.mark.slow
def test_a_mode_that_does_not_fit_is_a_line_of_the_report(tmp_path) -> None:
    counts = ["--rounds", "2", "--steps", "2", "--processes", "1", "--modes", "budget:0.0000001,none,full"]
    where = ["--out", str(tmp_path), f"data.cache_dir={tmp_path}/cache"]
    assert activations.main(["--config", RECIPE, *counts, *where, *SMALL]) == 3
    found = json.loads((tmp_path / "activations.json").read_text())
    assert list(found["modes"]) == ["none", "full"] and list(found["failed"]) == ["budget:0.0000001"]
    assert len(found["modes"]["full"]["runs"]) == 2 and found["modes"]["none"]["time_ratio"] == 1.0
    assert "activation_memory_gib" in found["failed"]["budget:0.0000001"]
    assert "budget-0.0000001-1 failed: " in (tmp_path / "activations.md").read_text()
