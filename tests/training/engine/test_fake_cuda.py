"""A training step on a CUDA device that is not there: no tensor on the wrong device, and each wait of the host allowed.

Tensors have shapes, dtypes and devices, and no values (tests/support/fake_cuda). What this cannot see: races, numbers,
and the kernels that a GPU would choose.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from typing import Any

import pytest

from config.cli import REPOSITORY
from tests.support.fake_cuda.cases import NAMES, cases

SECONDS = 600
_ROW = re.compile(r"\| `(\w+) ([^`]+)` \| (\d+) \|")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What the third step of each case did, by its name."""
    if shutil.which("g++") is None:
        pytest.skip("the fake device is built with g++")
    folder = tmp_path_factory.mktemp("fake_cuda")
    given, results = folder / "cases.json", folder / "results.jsonl"
    given.write_text(json.dumps(cases(folder)), encoding="utf-8")
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.fake_cuda.run", str(given), str(results)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:]
    return {row["name"]: row for row in map(json.loads, results.read_text(encoding="utf-8").splitlines())}


def allowance() -> dict[tuple[str, str], int]:
    """Kind and place to how often a step may do it, from the table in docs/performance.md."""
    text = (REPOSITORY / "docs/performance.md").read_text(encoding="utf-8")
    return {(kind, place): int(count) for kind, place, count in _ROW.findall(text)}


@pytest.mark.parametrize("name", NAMES)
def test_steps_are_taken_on_the_device(found: dict[str, dict[str, Any]], name: str) -> None:
    step = found[name]
    assert "error" not in step, step["error"]
    assert step["devices"] == ["cuda:0"] and step["applied"] == 3


@pytest.mark.parametrize("name", NAMES)
def test_the_host_waits_where_it_may(found: dict[str, dict[str, Any]], name: str) -> None:
    allowed = allowance()
    waits = {tuple(wait.split(" ", 1)): count for wait, count in found[name]["waits"].items()}
    assert waits[("item", "engine/health.py:__init__")] == 1
    assert {wait: count for wait, count in waits.items() if count > allowed.get(wait, 0)} == {}


def test_the_allowance_has_no_row_too_many(found: dict[str, dict[str, Any]]) -> None:
    seen = {tuple(wait.split(" ", 1)) for step in found.values() for wait in step["waits"]}
    assert set(allowance()) == seen
