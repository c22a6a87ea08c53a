"""Imports run one way and never in a circle, heavy libraries stay where they belong, every module says what it is for.

The folders' order is config <- {data, modeling, precision, tracking} <- training <- train.py; launch sees config only.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from config.cli import REPOSITORY

# Folder to the folders it may import beside itself.
MAY_IMPORT = {
    "config": set(),
    "data": {"config"},
    "modeling": {"config"},
    "precision": {"config"},
    "tracking": {"config"},
    "training": {"config", "data", "modeling", "precision", "tracking"},
    "launch": {"config"},
}
ONLY_IN_TRAINING = ("deepspeed", "torch.distributed")
# Files that must start in no time: they may import the standard library, these and Mantissa's own config.
LIGHT = {"config": {"yaml"}}
WITHOUT_TORCH = ("config", "launch", "tracking")


def source_files(root: Path) -> list[Path]:
    """Every module that is not a test."""
    return [root / "train.py"] * (root / "train.py").is_file() + sorted(
        path for folder in MAY_IMPORT for path in (root / folder).rglob("*.py")
    )


def imported_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Line and dotted name of everything a module imports, wherever in it, by statement or by importlib."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from ((node.lineno, item.name) for item in names)
            case ast.ImportFrom(module=str(module), level=0, names=names):
                yield from ((node.lineno, f"{module}.{item.name}") for item in names)
            case ast.ImportFrom(level=level) if level:
                yield node.lineno, "." * level
            case ast.Attribute(value=ast.Name(id="torch"), attr="distributed"):
                yield node.lineno, "torch.distributed"
            case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]):
                if ast.unparse(function) in ("__import__", "import_module", "importlib.import_module"):
                    yield node.lineno, name


def starts_with(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def import_violations(root: Path) -> list[str]:
    """One line for every import that breaks a rule."""
    found = []
    for path in source_files(root):
        relative = path.relative_to(root)
        folder = relative.parts[0] if len(relative.parts) > 1 else ""
        for line, name in imported_names(ast.parse(path.read_text(encoding="utf-8"))):
            for rule in broken_rules(relative.as_posix(), folder, name):
                found.append(f"{relative}:{line}: {name}: {rule}")
    return found


def broken_rules(path: str, folder: str, name: str) -> Iterator[str]:
    package = name.partition(".")[0]
    if name.startswith("."):
        yield "write the import from the repository's root"
    if folder and package in MAY_IMPORT and package not in MAY_IMPORT[folder] | {folder}:
        yield f"{folder}/ may import only {', '.join(sorted(MAY_IMPORT[folder])) or 'itself'}"
    if folder and starts_with(name, "train"):
        yield "nothing imports train.py"
    if starts_with(name, "tests"):
        yield "nothing imports the tests"
    if folder != "training" and any(starts_with(name, heavy) for heavy in ONLY_IN_TRAINING):
        yield "only training/ holds the process group and the engine"
    if folder in LIGHT and package not in sys.stdlib_module_names | LIGHT[folder] | {folder}:
        yield f"{folder}/ is the standard library and {', '.join(LIGHT[folder])} only"
    if folder in WITHOUT_TORCH and package == "torch":
        yield f"{folder}/ has to work without torch"


def missing_docstrings(root: Path) -> list[str]:
    """Every module that does not say what it is for."""
    modules = source_files(root)
    return [path.relative_to(root).as_posix() for path in modules if not ast.get_docstring(ast.parse(path.read_text()))]


def circles(root: Path) -> list[list[str]]:
    """Groups of modules that import each other, in either direction, at run time or for types alone."""
    names = {module_name(path, root): path for path in source_files(root)}
    imports = {name: set(imported_modules(path, names)) - {name} for name, path in names.items()}
    found: list[list[str]] = []
    for name in sorted(imports):
        circle = sorted(other for other in reachable(name, imports) if name in reachable(other, imports))
        if len(circle) > 1 and circle not in found:
            found.append(circle)
    return found


def module_name(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def imported_modules(path: Path, names: Mapping[str, Path]) -> Iterator[str]:
    """The modules of this repository that a file imports; a package stands for what its __init__ re-exports."""
    for _, dotted in imported_names(ast.parse(path.read_text(encoding="utf-8"))):
        known = [dotted, dotted.rpartition(".")[0]]
        yield from (name for name in known[:1] if name in names)
        if dotted not in names and known[1] in names:
            yield known[1]


def reachable(start: str, imports: Mapping[str, set[str]]) -> set[str]:
    """Every module that `start` imports, directly or through others."""
    found: set[str] = set()
    left = [start]
    while left:
        for name in imports[left.pop()] - found:
            found.add(name)
            left.append(name)
    return found


def test_imports_run_one_way() -> None:
    assert import_violations(REPOSITORY) == []


def test_every_module_says_what_it_is_for() -> None:
    assert missing_docstrings(REPOSITORY) == []


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circles(REPOSITORY) == []


def test_every_folder_of_code_is_held() -> None:
    """A new top-level folder of Python must be given a place in the order."""
    folders = {path.name for path in REPOSITORY.iterdir() if path.is_dir() and not path.name.startswith(".")}
    with_code = {name for name in folders if any((REPOSITORY / name).glob("*.py"))}
    assert with_code - MAY_IMPORT.keys() <= {"tests"}


@pytest.mark.parametrize(
    ("path", "line", "rule"),
    [
        ("data/a.py", "import modeling.build", "data/ may import only config"),
        ("config/a.py", "from training import engine", "config/ may import only itself"),
        ("launch/a.py", "from precision.guard import judge", "launch/ may import only config"),
        ("tracking/a.py", "def f():\n    import deepspeed", "only training/"),
        ("modeling/a.py", "from torch import distributed", "only training/"),
        ("precision/a.py", "import torch\n\ntorch.distributed.barrier()", "only training/"),
        ("train.py", "import torch.distributed as dist", "only training/"),
        ("data/a.py", "import importlib\nimportlib.import_module('deepspeed.comm')", "only training/"),
        ("config/a.py", "import torch", "config/ is the standard library"),
        ("tracking/compare/command.py", "import torch", "tracking/ has to work without torch"),
        ("data/a.py", "from . import b", "write the import"),
        ("training/a.py", "import train", "nothing imports train.py"),
    ],
)
def test_a_forbidden_import_is_found(tmp_path: Path, path: str, line: str, rule: str) -> None:
    (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / path).write_text(f'"""A module."""\n\n{line}\n')
    assert [found for found in import_violations(tmp_path) if rule in found]


@pytest.mark.parametrize(
    "line",
    ["import deepspeed", "import torch.distributed", "from modeling import build", "from config.schema import Config"],
)
def test_training_may_import_all_of_it(tmp_path: Path, line: str) -> None:
    (tmp_path / "training").mkdir()
    (tmp_path / "training" / "a.py").write_text(f"{line}\n")
    assert import_violations(tmp_path) == []


def test_a_circle_and_a_missing_docstring_are_found(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.py").write_text('"""A."""\n\nfrom data.b import f\n')
    (tmp_path / "data" / "b.py").write_text("def f():\n    from data import c\n")
    (tmp_path / "data" / "c.py").write_text('"""C."""\n\nif TYPE_CHECKING:\n    from data.a import g\n')
    assert circles(tmp_path) == [["data.a", "data.b", "data.c"]]
    assert missing_docstrings(tmp_path) == ["data/b.py"]
