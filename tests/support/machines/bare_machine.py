"""A machine whose Python has most packages and lacks some, as an image made by others, and wheels of those it lacks."""

import os
import venv
import zipfile
from collections.abc import Sequence
from importlib.metadata import distribution
from pathlib import Path


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
