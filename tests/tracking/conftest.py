"""A run folder filled through the real record, with the kinds of trouble a real run has, and a browser."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.runs.report_runs import session
from tests.support.servers.browser import Tab, tab
from tracking.run_dir import RunDir


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Tab]:
    """A tab of a browser for all tests of a file."""
    with tab(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "runs", "demo", fresh=False)


@pytest.fixture
def fp16_run(run_dir: RunDir) -> RunDir:
    """A finished FP16 run of 60 steps: two overflows, one growth of the scale, two evaluations, a checkpoint."""
    scale, skipped = 65536.0, 0
    with session(run_dir.path, compute="fp16") as run:
        for step in range(1, 61):
            overflow = step in (3, 40)
            skipped += overflow
            broken = {"grad_norm": math.inf, "clip_coefficient": None} if overflow else {}
            run.steps(1, loss_scale=scale, applied=not overflow, skipped_total=skipped, **broken)
            if overflow or step == 20:
                new, reason = (scale / 2, "overflow") if overflow else (scale * 2, "growth")
                run.scale(reason, previous=scale, new=new, consecutive_overflows=int(overflow))
                scale = new
            if step % 30 == 0:
                run.evaluate(3.2 + 10 / step)
        run.save(str(run_dir.checkpoints / "step-60"))
        run.end("done")
    return run_dir
