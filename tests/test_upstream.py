"""The defects that Mantissa repairs or refuses are still in the pinned DeepSpeed, and every one is listed.

A failure after an upgrade is good news: the repair can go.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from config.cli import REPOSITORY

UPSTREAM = REPOSITORY / "docs/upstream"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fp16_zero0_loss_not_scaled", "autocast_zero0_skip_reported_as_applied"])
def test_the_defect_is_still_there(name: str, tmp_path: Path) -> None:
    """Exit code 1 alone would also be a crash: the script has to have come to its verdict."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "1"]
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    job = subprocess.run(
        [*launcher, str(UPSTREAM / f"{name}.py")],
        cwd=tmp_path,
        env={**os.environ, "PATH": programs, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "verdict: the defect is there" in job.stdout, job.stdout + job.stderr
    assert job.returncode == 1


def test_every_script_is_listed_and_every_listed_script_exists() -> None:
    listed = re.findall(r"^\|[^|]+\| `(\w+\.py)`, [12] \|", (UPSTREAM / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(path.name for path in UPSTREAM.glob("*.py"))


def test_every_script_holds_its_output() -> None:
    for path in UPSTREAM.glob("*.py"):
        assert "verdict: the defect is there" in path.read_text().split('"""')[1], path.name
