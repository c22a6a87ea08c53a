"""Packages from a folder of wheels, where no registry can be reached."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

from config.cli import REPOSITORY
from lab.gpu_check.packages import NEEDED, normalised

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
