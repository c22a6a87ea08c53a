"""Install missing packages from a folder of wheels, without a package registry. Runs on the standard library alone.

Packages that are already installed are used as they are, torch and transformers always. The remaining wheels go into a
separate folder appended to PYTHONPATH, so the machine's own environment is neither modified nor shadowed.
"""

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
"""Packages of requirements.txt that the check requires."""
AT_LEAST = {"torch": (2, 11), "transformers": (5, 17)}
"""Oldest versions Mantissa was run with."""
_TAKEN_AS_FOUND = re.compile(r"torch|transformers|triton|nvidia-.*|cuda-.*")


def provide(wheels: Path | None, target: Path) -> list[str]:
    """Install missing packages from `wheels` into `target`, and add it to PYTHONPATH for this process and its jobs.

    Returns lines to print. Raises UserError if the folder does not exist, has two wheels of one package or one that
    cannot be installed, or if a package is still missing or older than `AT_LEAST`.
    """
    target.mkdir(parents=True, exist_ok=True)
    if str(target) not in sys.path:
        sys.path.append(str(target))
    others = [part for part in os.environ.get("PYTHONPATH", "").split(os.pathsep) if part and part != str(target)]
    os.environ["PYTHONPATH"] = os.pathsep.join([*others, str(target)])
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
    """Wheels by normalised package name, except those of packages that are used as installed."""
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
    """Whether the package's metadata can be found."""
    try:
        distribution(name)
    except PackageNotFoundError:
        return False
    return True


def normalised(name: str) -> str:
    """The package name, normalised according to PEP 503."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _install(wheels: list[Path], target: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--upgrade"]
    command += ["--disable-pip-version-check", "--root-user-action=ignore", "--target", str(target)]
    code, _, said = run_program([*command, *map(str, wheels)], 600.0)
    if code:
        why = next((line for line in said.splitlines() if line.startswith("ERROR:")), error_line(said))
        raise UserError(f"--wheels: pip could not install them: {why.removeprefix('ERROR: ')}")
    invalidate_caches()
