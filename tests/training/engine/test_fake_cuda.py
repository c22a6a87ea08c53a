"""A training step on a CUDA device that is not there: no tensor on the wrong device, each wait of the host allowed, and
operators and collectives counted.

Tensors have shapes, dtypes and devices, and no values (tests/support/fake_cuda). What this cannot see: races, numbers,
and the kernels that a GPU would choose.
"""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Collection
from typing import Any

import pytest
import torch

from config.cli import REPOSITORY
from tests.support.fake_cuda.cases import BARE, NAMES, QUICK, SCALED, cases

SECONDS = 1800
_ROW = re.compile(r"\| `(\w+) ([^`]+)` \| (\d+) \|")
_KINDS = ("all_reduce", "all_gather", "reduce_scatter")


def each(names: Collection[str]) -> pytest.MarkDecorator:
    """Cases by name, slow but for those that every run takes."""
    marked = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in names]
    return pytest.mark.parametrize("name", marked)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> dict[str, dict[str, Any]]:
    """The fifth step's operations in each requested case, by its name: one process takes all of them."""
    if shutil.which("g++") is None:
        pytest.skip("the fake device is built with g++")
    if torch.backends.cuda.is_built():
        pytest.skip("the fake device takes the place of CUDA's hooks, which torch's builds for CUDA have")
    items = [item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function)]
    asked = {item.callspec.params["name"] for item in items}
    folder = tmp_path_factory.mktemp("fake_cuda")
    given, results = folder / "cases.json", folder / "results.jsonl"
    chosen = {name: case for name, case in cases(folder).items() if name in asked}
    given.write_text(json.dumps(chosen), encoding="utf-8")
    command = [sys.executable, "-W", "ignore", "-m", "tests.support.fake_cuda.run", str(given), str(results)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    options: dict[str, Any] = {"cwd": REPOSITORY, "env": environment, "capture_output": True, "text": True}
    run = subprocess.run(command, timeout=SECONDS, check=False, **options)
    assert run.returncode == 0, run.stderr[-3000:]
    return {row["name"]: row for row in map(json.loads, results.read_text(encoding="utf-8").splitlines())}


def page() -> str:
    """docs/performance.md."""
    return (REPOSITORY / "docs/performance.md").read_text(encoding="utf-8")


def allowance() -> dict[tuple[str, ...], int]:
    """Kind and place to how often a step may wait there, from the table in docs/performance.md."""
    return {(kind, place): int(count) for kind, place, count in _ROW.findall(page())}


@each(NAMES)
def test_steps_are_taken_on_the_device_and_the_host_waits_where_it_may(found, name) -> None:
    step, allowed = found[name], allowance()
    assert "error" not in step, step["error"]
    assert step["devices"] == ["cuda:0"] and step["applied"] == 5
    waits = {tuple(wait.split(" ", 1)): count for wait, count in step["waits"].items()}
    assert waits["item", "engine/health.py:__init__"] == 1
    if "offload" not in name:  # where DeepSpeed waits for each parameter
        assert {wait: count for wait, count in waits.items() if count > allowed.get(wait, 0)} == {}


@each(BARE)
def test_a_step_calls_no_more_operators_than_deepspeeds_own_loop(found: dict[str, dict[str, Any]], name: str) -> None:
    step = found[name]
    assert "error" not in step, step["error"]
    assert 1000 < sum(step["operators"].values()) <= sum(step["bare"]["operators"].values())


@each(SCALED)
def test_a_step_makes_the_collectives_that_are_listed(found: dict[str, dict[str, Any]], name: str) -> None:
    step = found[name]
    assert "error" not in step, step["error"]
    assert step["waits"] == {"item engine/health.py:__init__": 1}
    assert set(step["collectives"]) <= set(_KINDS)
    counted = ((step["collectives"].get(kind, 0), step["bytes"].get(kind, 0) / 1e6) for kind in _KINDS)
    row = " | ".join([name, *(f"{calls}, {size:,.3f} MB" if calls else "-" for calls, size in counted)])
    assert f"| {row} |\n" in page()
