"""Every part of the GPU check from end to end, on a CPU, with models of a few thousand parameters.

The machine lacks what a GPU image lacks, and has a folder of wheels.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from config.cli import REPOSITORY
from tests.support.bare_machine import python_without, repack
from training.gpu_check.items import PARTS

LACKING = (
    *("deepspeed", "hjson", "py-cpuinfo", "orjson", "dill", "multiprocess", "datasets"),
    *("cryptography", "cffi", "pycparser"),
)
NEEDS_A_GPU = {
    "kernels-liger": "liger-kernel is not installed",
    "nan-liger": "liger-kernel is not installed",
    "attention-flash": "flash_attention_2",
    "attention-flex": "FlexAttention does not support backward on CPU",
}
"""Items that fail on a CPU, and what they say."""


@pytest.fixture(scope="module")
def machine(tmp_path_factory) -> tuple[str, dict[str, str], Path, Path]:
    folder = tmp_path_factory.mktemp("machine")
    wheels = folder / "wheels"
    wheels.mkdir()
    for name in LACKING:
        repack(name, wheels)
    python, environment = python_without(LACKING, folder / "python")
    return python, environment | {"OMP_NUM_THREADS": "1"}, wheels, folder / "out"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_measured_from_end_to_end(part, machine) -> None:
    python, environment, wheels, out = machine
    command = [python, "-m", "training.gpu_check", "--part", str(part), "--tiny", "--minutes", "60"]
    done = subprocess.run(
        [*command, "--wheels", str(wheels), "--out", str(out)],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    results = {item.name: json.loads((out / f"{part}-{item.name}.json").read_text()) for item in PARTS[part].items}
    failed = {name: result["error"] for name, result in results.items() if result["status"] != "done"}
    assert failed.keys() == NEEDS_A_GPU.keys() & results.keys(), (failed, done.stderr)
    assert all(NEEDS_A_GPU[name] in error for name, error in failed.items())
    assert done.returncode == (3 if failed else 0), done.stderr
    assert all(result["figures"] for name, result in results.items() if name not in failed)
    table = (out / f"part-{part}.md").read_text()
    assert f"{len(results) - len(failed)} of {len(results)} items done" in table and table in done.stdout
    assert (out / ".packages/deepspeed").is_dir() and not (out / ".packages/torch").exists()
    if part == 1:
        resumed, replayed = results["resume"]["figures"], results["replay"]["figures"]
        assert resumed["bit-equal"] and resumed["steps after it"] > 10
        assert replayed["reproduced"] and replayed["named the right module"]
