"""Every supported Python that this machine has compiles all sources, and runs what needs pure Python only."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from config.cli import REPOSITORY
from config.version import VERSION
from tests.support.imports import module_name, source_files

SUPPORTED = ("3.11", "3.12", "3.13")
# Packages of this environment that run on every Python as they are: PyYAML and rich, and what rich imports.
PURE = ("yaml", "rich", "pygments", "markdown_it", "mdurl")

# Warnings are errors: what a newer Python deprecates in its syntax is to be known now.
COMPILE = """
import sys
from pathlib import Path
for name in sys.stdin.read().splitlines():
    compile(Path(name).read_text(encoding="utf-8"), name, "exec", dont_inherit=True)
"""
IMPORT = """
import importlib, sys
for name in sys.stdin.read().splitlines():
    importlib.import_module(name)
"""


def interpreter(version: str) -> str:
    """The Python of that version, on the PATH or of pyenv; skips the test where there is none."""
    pyenv = Path(os.environ.get("PYENV_ROOT", "~/.pyenv")).expanduser() / "versions"
    installed = pyenv.glob(f"{version}.*/bin/python{version}") if os.access(pyenv, os.R_OK | os.X_OK) else ()
    paths = [shutil.which(f"python{version}"), *map(str, installed)]
    for path in filter(None, paths):
        # A shim of pyenv is there for versions, too, that are not chosen.
        done = subprocess.run([path, "--version"], capture_output=True, text=True, check=False)
        if done.returncode == 0 and done.stdout.startswith(f"Python {version}."):
            return path
    pytest.skip(f"no python{version} on the PATH or under pyenv")


@pytest.fixture(params=SUPPORTED)
def python(request: pytest.FixtureRequest, tmp_path: Path) -> list[str]:
    """The command that starts one of them, with these packages and no other."""
    for name in PURE:
        (tmp_path / name).symlink_to(Path(yaml.__file__).parent.with_name(name))
    return [
        "env",
        f"PYTHONPATH={tmp_path}{os.pathsep}{REPOSITORY}",
        interpreter(request.param),
        "-S",
        "-B",
        "-W",
        "error",
    ]


def run(python: list[str], *arguments: str, typed: str = "") -> str:
    command = [*python, *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, input=typed, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_all_sources_compile(python: list[str]) -> None:
    files = [*source_files(REPOSITORY), *(REPOSITORY / "tests").rglob("*.py"), *(REPOSITORY / "docs").rglob("*.py")]
    run(python, "-c", COMPILE, typed="\n".join(map(str, files)))


def needs_torch(name: str) -> bool:
    """Whether a module runs with torch alone: what the planner's command imports when it plans, and vLLM's worker."""
    own = name.startswith("launch.plan.") and name != "launch.plan.command"
    return own or name == "launch.rollouts.vllm_worker"


def test_what_needs_pure_python_only_runs(python: list[str]) -> None:
    names = [module_name(path, REPOSITORY) for path in source_files(REPOSITORY) if path.name != "__main__.py"]
    names = [name for name in names if name.startswith(("config", "launch")) and not needs_torch(name)]
    assert len(names) > 50
    run(python, "-c", IMPORT, typed="\n".join([*names, "training.checkpoint.tool", "training.watchdog.witness"]))
    assert run(python, "train.py", "--version") == f"mantissa {VERSION}\n"
    assert "run.steps: integer" in run(python, "train.py", "--help", "all")
    assert "name: demo" in run(python, "train.py", "--config", "config/recipes/demo.yaml", "--show-config")
    assert "usage" in run(python, "-m", "launch.plan", "--help")


def test_github_tests_every_one_of_them() -> None:
    workflow = yaml.safe_load((REPOSITORY / ".github/workflows/tests.yml").read_text())
    assert tuple(workflow["jobs"]["tests"]["strategy"]["matrix"]["python"]) == SUPPORTED
    targets = re.search(r'target-version = "(.+)"', (REPOSITORY / "pyproject.toml").read_text())
    assert targets and targets[1] == f"py{SUPPORTED[0].replace('.', '')}"
