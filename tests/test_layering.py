"""Imports run one way and never in a circle, heavy libraries stay where they belong, every module says what it is for.

The folders' order is config <- {data, modeling, precision, tracking} <- training <- {train.py, launch} <- tools <- lab.
The floors inside training/ are in tests/support/imports.py, and docs/architecture.md has the picture.
"""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import get_args, get_type_hints

import pytest

from config.cli import REPOSITORY
from config.schema import Config
from tests.support import architecture
from tests.support.imports import (
    FLOOR_OF,
    FLOORS,
    MAY_IMPORT,
    imported_by,
    imported_names,
    imports_of,
    lines_imported,
    module_name,
    reachable,
    source_files,
)

NEEDS_THE_ENGINE = ("deepspeed", "torch.distributed")
HOLD_THE_ENGINE = ("training", "tools", "lab")
# Files that must start in no time: they may import the standard library, these and Mantissa's own config.
LIGHT = {"config": {"yaml"}}
WITHOUT_TORCH = ("config", "launch", "tracking")
# Runs a model that transformers has built. Its command imports it when it has read its arguments.
RUNS_A_MODEL = ("launch/plan/", "launch/rollouts/vllm_worker.py")


def starts_with(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def import_violations(root: Path) -> list[str]:
    """One line for every import that breaks a rule."""
    found = []
    for path in source_files(root):
        relative = path.relative_to(root)
        folder = relative.parts[0] if len(relative.parts) > 1 else ""
        for line, name in imported_names(path.read_text(encoding="utf-8")):
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
    if starts_with(name, "tests") and not (path.startswith("lab/detection/") and starts_with(name, "tests.support")):
        yield "nothing imports the tests"
    allowed = folder in HOLD_THE_ENGINE or path == "launch/rollouts/vllm_worker.py"  # which runs in vLLM's process
    if not allowed and any(starts_with(name, heavy) for heavy in NEEDS_THE_ENGINE):
        yield f"only {', '.join(HOLD_THE_ENGINE)} may hold the process group and the engine"
    if folder in LIGHT and package not in sys.stdlib_module_names | LIGHT[folder] | {folder}:
        yield f"{folder}/ is the standard library and {', '.join(LIGHT[folder])} only"
    if folder in WITHOUT_TORCH and package == "torch" and not path.startswith(RUNS_A_MODEL):
        yield f"{folder}/ has to work without torch"


def floor_violations(root: Path) -> list[str]:
    """One line for every import inside training/ that does not run down."""
    found = []
    for importer, imported in imports_of(root).items():
        for name in imported:
            if not (importer.startswith("training.") and name.startswith("training.")):
                continue
            above, below = importer.split(".")[1], name.split(".")[1]
            found += [
                f"training/{part}: has no floor in tests/support/imports.py" for part in {above, below} - set(FLOOR_OF)
            ]
            if above != below and FLOOR_OF.get(below, -1) >= FLOOR_OF.get(above, len(FLOORS)):
                found.append(f"{importer} imports {name}: {below} does not stand below {above}")
    return sorted(set(found))


def missing_docstrings(root: Path) -> list[str]:
    """Every module that does not say what it is for."""
    modules = source_files(root)
    return [path.relative_to(root).as_posix() for path in modules if not ast.get_docstring(ast.parse(path.read_text()))]


def circles(root: Path) -> list[list[str]]:
    """Groups of modules that import each other, in either direction, at run time or for types alone."""
    imports = imports_of(root)
    found: list[list[str]] = []
    for name in sorted(imports):
        circle = sorted(other for other in reachable(name, imports) if name in reachable(other, imports))
        if len(circle) > 1 and circle not in found:
            found.append(circle)
    return found


def test_imports_run_one_way() -> None:
    assert import_violations(REPOSITORY) == []


def test_imports_inside_training_run_down() -> None:
    assert floor_violations(REPOSITORY) == []


def test_every_part_of_training_has_a_floor_and_every_floor_its_parts() -> None:
    parts = {
        path.stem
        for path in (REPOSITORY / "training").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    assert parts - {"__init__"} == set(FLOOR_OF)


ROLLOUTS = [module_name(path, REPOSITORY) for path in (REPOSITORY / "training/rollouts").rglob("*.py")]
# What is in training/ beside a run, to the reason.
NOT_OF_A_RUN = {
    "training.checkpoint.__main__": "python -m training.checkpoint",
    "training.checkpoint.tool": "what it does",
    "training.profile.__main__": "python -m training.profile, of what a run imports",
    **{f"training.tasks.{task}": "imported by its name" for task in get_args(get_type_hints(Config)["task"])},
    "training.tasks.cached_teacher": "of task distill",
    "training.references": "of task dpo, imported by its name",
    **dict.fromkeys(ROLLOUTS, "of a task that samples answers, imported by its name"),
    "training.teacher": "of a distillation, imported by its name",
    "training.engine.faults": "of a run with faults, by its name",
}
MOST_LINES_OF_A_RUN = 35_000
MOST_LINES_OF_TRAINING = 14_500


def test_a_run_imports_all_of_training() -> None:
    inside = {name for name in imports_of(REPOSITORY) if starts_with(name, "training")}
    assert inside - imported_by("train", REPOSITORY) == NOT_OF_A_RUN.keys()


def test_a_run_imports_no_more_lines_than_this() -> None:
    assert 30_000 < lines_imported("train", REPOSITORY) <= MOST_LINES_OF_A_RUN


def test_training_has_no_more_lines_than_this() -> None:
    files = (REPOSITORY / "training").rglob("*.py")
    assert 10_000 < sum(len(path.read_text(encoding="utf-8").splitlines()) for path in files) <= MOST_LINES_OF_TRAINING


def test_what_a_package_imports_is_imported_with_its_modules(tmp_path: Path) -> None:
    (tmp_path / "data" / "a").mkdir(parents=True)
    (tmp_path / "data" / "a" / "__init__.py").write_text("from data import b\n")
    (tmp_path / "data" / "a" / "c.py").write_text("x = 1\ny = 2\n")
    (tmp_path / "data" / "b.py").write_text("")
    (tmp_path / "data" / "d.py").write_text("")
    (tmp_path / "train.py").write_text("def f():\n    from data.a.c import x\n")
    assert imported_by("train", tmp_path) == {"train", "data.a", "data.a.c", "data.b"}
    assert lines_imported("train", tmp_path) == 5


def test_the_picture_of_the_architecture_is_current(tmp_path: Path) -> None:
    written = architecture.PAGE.read_text(encoding="utf-8")
    assert f"```mermaid\n{architecture.picture(REPOSITORY)}```\n" in written, "draw it again: make architecture"
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.py").write_text("import modeling.b")
    (tmp_path / "modeling").mkdir()
    (tmp_path / "modeling" / "b.py").write_text("")
    assert "  data --> modeling\n" in architecture.picture(tmp_path)


# What starts on a machine that has nothing installed, or in no time, to what it may load beside the standard library.
STARTS_WITH = {
    "config.machine.binding": set(),
    "launch.canary.command": {"yaml"},
    "launch.doctor.agent": set(),
    "launch.doctor.command": {"yaml"},
    "launch.plan.command": {"yaml"},
    "launch.supervise": {"yaml"},
    "launch.sweep.command": {"yaml"},
    "tools.audit.command": {"yaml", "packaging"},
    "tracking.compare.command": {"yaml", "numpy", "orjson", "rich"},
    "tracking.report.command": {"yaml", "numpy", "orjson", "rich"},
    "tracking.watch.command": {"yaml", "numpy", "orjson", "rich"},
    "training.checkpoint.tool": set(),
    "config.machine.cores": set(),
    "config.machine.op_builds": set(),
    "training.start.process": set(),
    "training.watchdog.witness": set(),
}


@pytest.mark.parametrize("module", STARTS_WITH)
def test_what_starts_light_loads_no_more(module: str) -> None:
    script = (
        f"import sys; before = set(sys.modules); import {module}; new = set(sys.modules) - before; "
        "print(*{name for name in new if '.' not in name and getattr(sys.modules[name], '__file__', None)})"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.split()) - sys.stdlib_module_names - MAY_IMPORT.keys() <= STARTS_WITH[module]


@pytest.mark.parametrize("program", ["launch.doctor", "launch.plan", "train"])
def test_help_loads_no_torch(program: str) -> None:
    script = (
        "import atexit, runpy, sys; sys.argv = ['x', '--help']; "
        "atexit.register(lambda: print('loaded:', *{'torch', 'deepspeed', 'transformers'} & sys.modules.keys())); "
        f"runpy.run_module({program!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1].strip() == "loaded:"


def test_every_module_says_what_it_is_for() -> None:
    assert missing_docstrings(REPOSITORY) == []


def test_no_files_import_each_other_in_a_circle() -> None:
    assert circles(REPOSITORY) == []


def test_only_the_engine_touches_deepspeeds_engine() -> None:
    """Whoever needs more of DeepSpeed asks `training/engine/` for it; planted defects reach into it on purpose."""
    inside = (REPOSITORY / "training" / "engine", REPOSITORY / "lab" / "detection" / "plants")
    outside = [path for path in source_files(REPOSITORY) if not any(path.is_relative_to(folder) for folder in inside)]
    assert [path.name for path in outside if re.search(r"engine\.deepspeed\b", path.read_text())] == []


def test_no_folder_of_code_has_more_than_thirty_entries() -> None:
    entries: dict[Path, set[str]] = {}
    for path in [*source_files(REPOSITORY), *(REPOSITORY / "tests").rglob("*.py")]:
        inside = path.relative_to(REPOSITORY)
        for parent, child in zip(inside.parents, (inside, *inside.parents), strict=False):
            entries.setdefault(parent, set()).add(child.name)
    assert {str(folder): len(names) for folder, names in entries.items() if len(names) > 30} == {}


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
        ("launch/a.py", "from tools.parity import gate", "launch/ may import only config"),
        ("tracking/a.py", "def f():\n    import deepspeed", "only training, "),
        ("modeling/a.py", "from torch import distributed", "only training, "),
        ("precision/a.py", "import torch\n\ntorch.distributed.barrier()", "only training, "),
        ("train.py", "import torch.distributed as dist", "only training, "),
        ("data/a.py", "import importlib\nimportlib.import_module('deepspeed.comm')", "only training, "),
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


def test_a_circle_and_a_missing_docstring_are_found(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "a.py").write_text('"""A."""\n\nfrom data.b import f\n')
    (tmp_path / "data" / "b.py").write_text("def f():\n    from data import c\n")
    (tmp_path / "data" / "c.py").write_text('"""C."""\n\nif TYPE_CHECKING:\n    from data.a import g\n')
    assert circles(tmp_path) == [["data.a", "data.b", "data.c"]]
    assert missing_docstrings(tmp_path) == ["data/b.py"]


@pytest.mark.parametrize(
    ("path", "line", "message"),
    [
        ("training/step.py", "from training.loop import train", "loop does not stand below step"),
        ("training/checkpoint/a.py", "from training.telemetry import x", "telemetry does not stand below checkpoint"),
        ("training/attic.py", "from training.step import x", "training/attic: has no floor"),
    ],
)
def test_an_import_that_runs_up_is_found(tmp_path: Path, path: str, line: str, message: str) -> None:
    for name in ("step", "loop", "telemetry"):
        (tmp_path / "training").mkdir(exist_ok=True)
        (tmp_path / "training" / f"{name}.py").write_text("")
    (tmp_path / path).parent.mkdir(exist_ok=True)
    (tmp_path / path).write_text(f"def f():\n    {line}\n")
    assert any(message in found for found in floor_violations(tmp_path))
