"""The parity gate judges every kind of fine-tuning: 16 bits against FP32, whole jobs of two ranks."""

from pathlib import Path

import pytest

from config.cli import REPOSITORY
from tests.support.jobs.forked_launcher import forked_launcher
from tests.support.jobs.task_jobs import JOBS, overrides_of, write_all
from tools.parity import gate as parity

pytestmark = pytest.mark.slow
DEMO = str(REPOSITORY / "config/recipes/demo.yaml")
SMALL = ["optimizer.learning_rate=1e-3", "schedule={name: constant, warmup_steps: 1}", "parity.points=1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models, and data of each kind."""
    return write_all(tmp_path_factory.mktemp("gate"))


@pytest.mark.parametrize("name", JOBS)
def test_half_precision_is_within_the_gates_bounds(folder: Path, name: str) -> None:
    if JOBS[name].quantised:
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    with forked_launcher(2) as launcher:
        out, given = folder / name.replace(", ", "-"), [*overrides_of(folder, name), *SMALL]
        chosen = parity.plan(DEMO, given, folder=out, steps=8, processes=2, launcher=launcher)
        found = parity.gate(chosen, references=parity.train_references(chosen))
    assert (found["verdict"], found["failed"]) == ("parity", [])
    checks = {check["name"]: check for check in found["checks"]}
    assert checks["module_error"]["measured"] > 0, "it was compared"
