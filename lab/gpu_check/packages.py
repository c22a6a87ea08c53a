"""The packages of a machine without a package registry, from a folder of wheels. Standard library alone.

torch and transformers are taken as the machine has them, and so is every other package that is there already. The rest
of the wheels is installed into a folder of its own, which is put on PYTHONPATH: nothing of the machine changes, and
nothing that it has is hidden.
"""

from __future__ import annotations

import os
import re
import sys
from importlib import invalidate_caches
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path

from config.errors import UserError
from launch.doctor.facts import run_program
from launch.job import error_line

NEEDED = (
    *("torch", "transformers", "deepspeed", "accelerate", "datasets", "tokenizers", "safetensors", "numpy", "PyYAML"),
    *("filelock", "rich", "matplotlib", "orjson", "Jinja2", "markdown-it-py", "psutil", "ninja"),
)
"""Packages of requirements.txt that the check cannot do without."""
AT_LEAST = {"torch": (2, 11), "transformers": (5, 17)}
"""Oldest versions that Mantissa was run on."""
_TAKEN_AS_FOUND = re.compile(r"torch|transformers|triton|nvidia-.*|cuda-.*")


def provide(wheels: Path | None, target: Path) -> list[str]:
    """Install into `target` what of the wheels is not there, and put it on PYTHONPATH, for this process and its jobs.

    Returns lines to print. Raises UserError: no such folder, two wheels of one package, one that cannot be installed
    here, a package that is missing all the same or older than `AT_LEAST`.
    """
    _use(target)
    said = []
    if wheels is not None:
        chosen = [path for name, path in sorted(wheels_of(wheels).items()) if not is_installed(name)]
        if chosen:
            _install(chosen, target)
            said.append(f"installed from {wheels}: {', '.join(path.name for path in chosen)}")
    lacking = [name for name in NEEDED if not is_installed(name)]
    if lacking:
        raise UserError(f"not installed: {', '.join(lacking)}; give --wheels DIR (WHEELS=DIR) a folder with wheels")
    for name, least in AT_LEAST.items():
        found = tuple(map(int, re.findall(r"\d+", version(name))[:2]))
        if found < least:
            raise UserError(f"{name} {version(name)}: is older than {'.'.join(map(str, least))}; install a newer one")
    return said


def wheels_of(folder: Path) -> dict[str, Path]:
    """The folder's wheels by the normalised name of their package, without those that are taken as found."""
    if not folder.is_dir():
        raise UserError(f"--wheels {folder}: there is no such folder")
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.whl")):
        name = normalised(path.name.split("-")[0])
        if _TAKEN_AS_FOUND.fullmatch(name):
            continue
        if name in found:
            raise UserError(f"--wheels {folder}: {found[name].name} and {path.name} are of one package; keep one")
        found[name] = path
    return found


def is_installed(name: str) -> bool:
    """Whether the package's metadata is found."""
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def normalised(name: str) -> str:
    """The package name normalised as PEP 503 defines."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _use(target: Path) -> None:
    target.mkdir(parents=True, exist_ok=True)
    if str(target) not in sys.path:
        sys.path.append(str(target))
    others = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part and part != str(target)]
    os.environ["PYTHONPATH"] = os.pathsep.join([*others, str(target)])


def _install(wheels: list[Path], target: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--upgrade"]
    command += ["--disable-pip-version-check", "--root-user-action=ignore", "--target", str(target)]
    code, said = run_program([*command, *map(str, wheels)], 600.0)
    if code:
        why = next((line for line in said.splitlines() if line.startswith("ERROR:")), error_line(said))
        raise UserError(f"--wheels: pip could not install them: {why.removeprefix('ERROR: ')}")
    invalidate_caches()
