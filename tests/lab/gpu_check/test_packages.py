"""Packages from a folder of wheels, where no registry can be reached."""

import base64
import hashlib
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


def wheel(folder: Path, name: str, *, version: str = "1.0", tag: str = "py3-none-any") -> Path:
    """A wheel with one module, made by hand."""
    module, info = name.replace("-", "_"), f"{name.replace('-', '_')}-{version}.dist-info"
    files = {
        f"{module}.py": f"VALUE = '{name} {version}'\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: by hand\nRoot-Is-Purelib: true\nTag: {tag}\n",
    }
    records = []
    path = folder / f"{module}-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for place, content in files.items():
            archive.writestr(place, content)
            digest = base64.urlsafe_b64encode(hashlib.sha256(content.encode()).digest()).rstrip(b"=").decode()
            records.append(f"{place},sha256={digest},{len(content)}")
        archive.writestr(f"{info}/RECORD", "\n".join([*records, f"{info}/RECORD,,", ""]))
    return path


def test_what_is_missing_is_installed_aside_and_found_by_jobs(tmp_path) -> None:
    """torch's and numpy's wheels are no wheels at all: installing them would fail."""
    wheels, target = tmp_path / "wheels", tmp_path / "packages"
    wheels.mkdir()
    wheel(wheels, "a-small-one")
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


def test_a_wheel_of_another_machine_is_one_line(tmp_path) -> None:
    wheel(tmp_path, "a-small-one", tag="cp27-none-win32")
    command = [sys.executable, "-m", "lab.gpu_check", "--part", "1", "--wheels", str(tmp_path)]
    nvidias = os.environ | {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "out")], cwd=REPOSITORY, env=nvidias, capture_output=True, text=True
    )
    assert done.stdout == "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE is not passed on: FP32 is measured without TF32\n"
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: --wheels: pip could not install them: ") and "a_small_one-1.0" in done.stderr


def test_what_is_needed_is_in_the_requirements() -> None:
    lines = (REPOSITORY / "requirements.txt").read_text().splitlines()
    required = {normalised(line.partition("==")[0]) for line in lines if "==" in line}
    assert {normalised(name) for name in NEEDED} <= required | {"ninja"}
