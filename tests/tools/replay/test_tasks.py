"""Every kind of fine-tuning: a NaN that is planted is an incident, its module is named, and the step is made again."""

import re
from pathlib import Path

import pytest

from tests.support.jobs.launches import command, events, finish, replay
from tests.support.jobs.task_jobs import JOBS, overrides_of, write_all

pytestmark = pytest.mark.slow
SHORT = ("run.steps=5", "checkpoint={every_steps: 2, keep: 9}", "schedule.warmup_steps=0", "deepspeed.config=null")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, and data of each kind."""
    return write_all(tmp_path_factory.mktemp("replayed"))


@pytest.mark.parametrize("what", JOBS)
def test_a_planted_nan_is_attributed_and_reproduced(folder: Path, what: str) -> None:
    """The step before it is finite, so that it says whether weights, moments, data and dropout are the run's."""
    if JOBS[what].quantised:
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    name, module = what.replace(", ", "-"), JOBS[what].module
    fault = f"faults=[{{kind: nan_activation, step: 4, rank: 1, module: {module}}}]"
    finish(command("python", folder, name, *overrides_of(folder, what, dropout=True), *SHORT, fault), ranks=2)
    assert [event["applied"] for event in events(folder, name, "step")] == [True, True, True, False, True]
    [incident] = events(folder, name, "incident")
    assert incident["step"] == 4 and "not finite" in incident["reason"]
    causes = events(folder, name, "nonfinite")
    assert (causes[0]["rank"], causes[0]["module"], causes[0]["tensor"]) == (1, module, "activation")
    said = replay(folder, name, 4, ranks=2)
    assert "checkpoints/step-2, 2 steps to go" in said
    assert re.search(r"^step 3: loss \d.*as recorded$", said, re.M), said
    assert re.search(r"^step 4: loss nan, .*as recorded$", said, re.M), said
    assert f"cause: rank 1, {module}: 1 nan in its activation" in said
    assert said.rstrip().endswith("\nreproduced"), said
