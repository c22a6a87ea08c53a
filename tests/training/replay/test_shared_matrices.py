"""Runs whose ranks share matrices: what is recorded of a step is made again to the bit, and its cause found again."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.launches import command, events, finish

SHARED = ("parallel.tensor=2", "batch.micro_size=4", "telemetry.every_steps=0", "generate.tokens=0")
FAULT = "faults=[{kind: nan_activation, step: 4, rank: 1, module: model.layers.1.mlp.up_proj}]"


def replayed(folder: Path, name: str, step: int, *, ranks: int, exit_code: int = 0) -> str:
    run = ["python", "-m", "training.replay", str(folder / "runs" / name), "--step", str(step)]
    return finish(run, exit_code=exit_code, ranks=ranks)


@pytest.mark.parametrize(
    "how",
    [
        ("bf16", 2),
        pytest.param(("fp32", 0), marks=pytest.mark.slow),
        pytest.param(("fp16", 3), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_failed_step_is_reproduced_to_the_bit_with_its_rank_and_module(tmp_path, how):
    compute, stage = how
    given = [f"precision.compute={compute}", f"deepspeed.config=ds_configs/zero{stage}_{compute}.json"]
    job = command("python", tmp_path, "bad", *SHARED, *given, FAULT, "run.steps=4", "evaluate.every_steps=0")
    finish(job, ranks=2)
    cause = events(tmp_path, "bad", "nonfinite")[0]
    assert (cause["rank"], cause["module"]) == (1, "model.layers.1.mlp.up_proj")
    said = replayed(tmp_path, "bad", 4, ranks=2)
    assert said.count("as recorded") == 2 and re.search(r"^step 4: loss nan, .*as recorded$", said, re.M), said
    assert "cause: rank 1, model.layers.1.mlp.up_proj" in said
    assert said.rstrip().endswith("\nreproduced"), said


def test_a_step_of_another_session_with_whole_matrices_is_no_such_step(tmp_path):
    """The config in the folder is that of the last session."""
    for overrides in (SHARED[:2], ("batch.micro_size=4",)):
        steps = 2 if "parallel.tensor=2" in overrides else 4
        job = command(
            "python", tmp_path, "two", *SHARED[2:], *overrides, f"run.steps={steps}", "evaluate.every_steps=0"
        )
        finish(job, ranks=2)
    said = replayed(tmp_path, "two", 2, ranks=2, exit_code=2)
    assert "with parallel.tensor = 1; the step was made with 2" in said
