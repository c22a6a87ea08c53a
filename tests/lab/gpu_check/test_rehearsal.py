"""Every part of the GPU check from end to end, on a CPU, with models of a few thousand parameters.

The machine lacks what a GPU image lacks, and has a folder of wheels, where no registry can be reached.
"""

import json
import os
import subprocess
import sys
import venv
import zipfile
from collections.abc import Sequence
from importlib.metadata import distribution
from pathlib import Path

import pytest

from config.cli import REPOSITORY
from lab.gpu_check.items import PARTS
from lab.gpu_check.packages import NEEDED, normalised


def repack(name: str, folder: Path) -> Path:
    """A wheel of an installed package, from the files that its RECORD names; programs in bin/ are left out."""
    installed = distribution(name)
    tags = [line.partition(": ")[2] for line in (installed.read_text("WHEEL") or "").splitlines() if "Tag: " in line]
    files = [file for file in installed.files or () if ".." not in file.parts and file.suffix != ".pyc"]
    [info] = {file.parts[0] for file in files if file.parts[0].endswith(".dist-info")}
    path = folder / f"{info.removesuffix('.dist-info')}-{tags[0]}.whl"
    left_out = {f"{info}/{own}" for own in ("RECORD", "INSTALLER", "REQUESTED", "direct_url.json")}
    with zipfile.ZipFile(path, "w") as archive:
        inside = [file for file in files if str(file) not in left_out]
        for file in inside:
            archive.write(installed.locate_file(file), str(file))
        archive.writestr(f"{info}/RECORD", "".join(f"{file},,\n" for file in [*inside, f"{info}/RECORD"]))
    return path


def python_without(names: Sequence[str], folder: Path) -> tuple[str, dict[str, str]]:
    """The interpreter and the environment of a machine that has this one's packages but for these."""
    site = Path(str(distribution("pytest").locate_file(".")))
    lacking = {Path(file).parts[0] for name in names for file in distribution(name).files or ()} - {".."}
    venv.create(folder, symlinks=True)
    packages = folder / "packages"
    packages.mkdir()
    for entry in site.iterdir():
        if entry.name not in lacking and entry.suffix != ".pth":
            (packages / entry.name).symlink_to(entry)
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("VIRTUAL_ENV", "PYTHON"))}
    return str(folder / "bin/python"), environment | {"PYTHONPATH": str(packages)}


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
    found = out / "tiny"
    results = {item.name: json.loads((found / f"{part}-{item.name}.json").read_text()) for item in PARTS[part].items}
    failed = {name: result["error"] for name, result in results.items() if result["status"] not in ("done", "skipped")}
    skipped = {name: result["error"] for name, result in results.items() if result["status"] == "skipped"}
    assert not failed and done.returncode == 0, (failed, done.stderr)
    assert skipped.keys() == LACKS.keys() & results.keys()
    assert all(LACKS[name] in error for name, error in skipped.items())
    assert all(result["figures"] for name, result in results.items() if name not in skipped)
    table = (found / f"part-{part}.md").read_text()
    assert f"{len(results) - len(skipped)} of {len(results)} items done" in table and table in done.stdout
    assert ", commit 0123abc." in table
    unread = [line for line in table.splitlines() if line.endswith("| not measured |")]
    assert len(unread) == {1: 3, 2: 1, 3: 4}.get(part, 0), unread  # of what was skipped
    assert (out / ".packages/deepspeed").is_dir() and not (out / ".packages/torch").exists()
    if part == 1:
        resumed, replayed = results["resume"]["figures"], results["replay"]["figures"]
        assert resumed["bit-equal"] and resumed["steps after it"] > 10
        assert replayed["reproduced"] and replayed["named the right module"]


PROVIDE = """
import json, os, subprocess, sys
from pathlib import Path
from lab.gpu_check.packages import provide
said = provide(Path(sys.argv[1]), Path(sys.argv[2]))
job = [sys.executable, "-c", "import a_small_one; print(a_small_one.VALUE)"]
child = subprocess.run(job, capture_output=True, text=True)
import a_small_one
print(json.dumps([said, a_small_one.VALUE, child.stdout.strip(), os.environ["PYTHONPATH"]]))
"""


def wheel(folder: Path) -> None:
    """A wheel with one module, made by hand."""
    info = "a_small_one-1.0.dist-info"
    files = {
        "a_small_one.py": "VALUE = 'a-small-one 1.0'\n",
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: a-small-one\nVersion: 1.0\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: by hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{place},,\n" for place in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(folder / "a_small_one-1.0-py3-none-any.whl", "w") as archive:
        for place, content in files.items():
            archive.writestr(place, content)


def test_what_is_missing_is_installed_aside_and_found_by_jobs(tmp_path) -> None:
    """torch's and numpy's wheels are no wheels at all: installing them would fail."""
    wheels, target = tmp_path / "wheels", tmp_path / "packages"
    wheels.mkdir()
    wheel(wheels)
    for taken in ("torch-9.9.9-cp312-cp312-linux_x86_64.whl", "numpy-9.9.9-cp312-cp312-linux_x86_64.whl"):
        (wheels / taken).write_text("not a wheel")
    command = [sys.executable, "-c", PROVIDE, str(wheels), str(target)]
    outcomes = []
    for _ in range(2):
        done = subprocess.run(
            command, cwd=REPOSITORY, env=os.environ | {"PYTHONPATH": "/before"}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        outcomes.append(json.loads(done.stdout.splitlines()[-1]))
    for _, here, in_a_job, path in outcomes:
        assert here == in_a_job == "a-small-one 1.0" and path == f"/before:{target}"
    assert f"installed from {wheels}: a_small_one-1.0-py3-none-any.whl" in outcomes[0][0]
    assert not any("installed from" in line for line in outcomes[1][0])
    assert {path.name for path in target.iterdir()} <= {"a_small_one.py", "a_small_one-1.0.dist-info", "__pycache__"}


def test_what_is_needed_is_in_the_requirements() -> None:
    lines = (REPOSITORY / "requirements.txt").read_text().splitlines()
    required = {normalised(line.partition("==")[0]) for line in lines if "==" in line}
    assert {normalised(name) for name in NEEDED} <= required | {"ninja"}
