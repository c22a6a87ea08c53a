"""Every part of the GPU check from end to end, on a CPU, with models of a few thousand parameters.

The machine lacks what a GPU image lacks, and has a folder of wheels.
"""

import json
import subprocess
from pathlib import Path

import pytest

from config.cli import REPOSITORY
from lab.gpu_check.items import PARTS
from tests.support.machines.bare_machine import python_without, repack

LACKING = (
    *("deepspeed", "hjson", "py-cpuinfo", "orjson", "dill", "multiprocess", "datasets"),
    *("cryptography", "cffi", "pycparser"),
    *("pydantic", "pydantic-core", "annotated-types", "typing-inspection"),
)
"""Packages whose wheels are there."""
WITHOUT_WHEELS = (
    *("wandb", "s3fs", "bitsandbytes", "prometheus-client"),
    *("opentelemetry-api", "opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http"),
)
"""Optional, or for what no item measures."""
LACKS = {
    "kernels-liger": "Triton kernels need a GPU",
    "nan-liger": "Triton kernels need a GPU",
    "attention-flash": "FlashAttention 2 needs a GPU",
    "attention-flex": "FlexAttention has no backward pass on a CPU",
}
"""Items that are skipped on a CPU, and why."""
MINUTES = 180
"""Limit for a part: part 6's six items took 27 minutes on two cores that thirty processes share; part 1 has 19."""


@pytest.fixture(scope="module")
def machine(tmp_path_factory) -> tuple[str, dict[str, str], Path, Path]:
    folder = tmp_path_factory.mktemp("machine")
    wheels = folder / "wheels"
    wheels.mkdir()
    for name in LACKING:
        repack(name, wheels)
    python, environment = python_without((*LACKING, *WITHOUT_WHEELS), folder / "python")
    return python, environment | {"OMP_NUM_THREADS": "1"}, wheels, folder / "out"


@pytest.mark.slow
@pytest.mark.timeout(60 * (MINUTES + 30))  # later than the part's own end, which leaves a table
@pytest.mark.parametrize("part", PARTS)
def test_a_part_is_measured_from_end_to_end(part, machine) -> None:
    python, environment, wheels, out = machine
    command = [python, "-m", "lab.gpu_check", "--part", str(part), "--tiny", "--minutes", str(MINUTES)]
    done = subprocess.run(
        [*command, "--wheels", str(wheels), "--out", str(out), "--commit", "0123abc"],
        cwd=REPOSITORY,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    results = {item.name: json.loads((out / f"{part}-{item.name}.json").read_text()) for item in PARTS[part].items}
    failed = {name: result["error"] for name, result in results.items() if result["status"] not in ("done", "skipped")}
    skipped = {name: result["error"] for name, result in results.items() if result["status"] == "skipped"}
    assert not failed and done.returncode == 0, (failed, done.stderr)
    assert skipped.keys() == LACKS.keys() & results.keys()
    assert all(LACKS[name] in error for name, error in skipped.items())
    assert all(result["figures"] for name, result in results.items() if name not in skipped)
    table = (out / f"part-{part}.md").read_text()
    assert f"{len(results) - len(skipped)} of {len(results)} items done" in table and table in done.stdout
    assert ", commit 0123abc." in table
    unread = [line for line in table.splitlines() if line.endswith("| not measured |")]
    assert len(unread) == {2: 1, 3: 4}.get(part, 0), unread  # of what was skipped
    assert (out / ".packages/deepspeed").is_dir() and not (out / ".packages/torch").exists()
    if part == 1:
        resumed, replayed = results["resume"]["figures"], results["replay"]["figures"]
        assert resumed["bit-equal"] and resumed["steps after it"] > 10
        assert replayed["reproduced"] and replayed["named the right module"]
