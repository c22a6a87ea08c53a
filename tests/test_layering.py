"""Imports run one way, heavy libraries stay where they belong, and files stay small enough to read.

The folders' order is config <- {data, modeling, precision, tracking} <- training <- train.py; launch sees config only.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent

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
MOST_LINES = {"train.py": 60, "training/loop.py": 150, "config/schema.py": 500}  # the schema is a list of keys
MOST_LINES_OF_A_FILE, MOST_LINES_OF_A_FUNCTION = 300, 60


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


def size_violations(root: Path) -> list[str]:
    """One line for every file or function that is too long, or module without a docstring."""
    found = []
    for path in source_files(root):
        text, relative = path.read_text(encoding="utf-8"), path.relative_to(root).as_posix()
        most, lines = MOST_LINES.get(relative, MOST_LINES_OF_A_FILE), len(text.splitlines())
        if lines >= most:
            found.append(f"{relative}: {lines} lines; the limit is under {most}")
        tree = ast.parse(text)
        if text.strip() and not ast.get_docstring(tree):
            found.append(f"{relative}:1: no docstring says what the module is for")
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length >= MOST_LINES_OF_A_FUNCTION:
                    limit = f"the limit is under {MOST_LINES_OF_A_FUNCTION}"
                    found.append(f"{relative}:{node.lineno}: {node.name} has {length} lines; {limit}")
    return found


def test_imports_run_one_way() -> None:
    assert import_violations(ROOT) == []


def test_files_and_functions_are_small() -> None:
    assert size_violations(ROOT) == []


def test_every_folder_of_code_is_held() -> None:
    """A new top-level folder of Python must be given a place in the order."""
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and not path.name.startswith(".")}
    with_code = {name for name in folders if any((ROOT / name).glob("*.py"))}
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
    (tmp_path / path).parent.mkdir(exist_ok=True)
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


def test_what_is_too_long_is_found(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.py").write_text("x = 1\n" * 240 + "def f():\n" + "    x = 1\n" * 59)
    (tmp_path / "train.py").write_text('"""Doc."""\n' + "x = 1\n" * 59)
    assert size_violations(tmp_path) == [
        "train.py: 60 lines; the limit is under 60",
        "data/a.py: 300 lines; the limit is under 300",
        "data/a.py:1: no docstring says what the module is for",
        "data/a.py:241: f has 60 lines; the limit is under 60",
    ]
