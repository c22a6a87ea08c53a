"""The imports of this repository, read from the sources, and the order that they have to have."""

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

# Folder to the folders it may import beside itself.
MAY_IMPORT = {
    "config": set(),
    "data": {"config"},
    "modeling": {"config"},
    "precision": {"config"},
    "tracking": {"config"},
    "training": {"config", "data", "modeling", "precision", "tracking"},
    "launch": {"config", "data", "modeling", "precision", "tracking", "training"},
    "tools": {"config", "data", "modeling", "precision", "tracking", "training", "launch"},
    "lab": {"config", "data", "modeling", "precision", "tracking", "training", "launch", "tools"},
}
# The order inside training/, from below: a file or package imports itself and what stands on floors below its own.
FLOORS = (
    ("start", "tasks"),
    ("distributed", "progress", "schedule", "loss_scaler", "preemption"),
    ("engine", "watchdog"),
    ("checkpoint", "telemetry", "attribution", "sinks", "references", "early_warnings"),
    ("teacher", "corruption", "rollouts"),
    ("session", "profile"),
    ("parts",),
    ("build", "record"),
    ("reactions",),
    ("step",),
    ("loop",),
    ("finish",),
)
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names}


def source_files(root: Path) -> list[Path]:
    """Every module that is not a test."""
    return [root / "train.py"] * (root / "train.py").is_file() + sorted(
        path for folder in MAY_IMPORT for path in (root / folder).rglob("*.py")
    )


@cache
def imported_names(source: str) -> tuple[tuple[int, str], ...]:
    """Line and dotted name of everything a module imports, wherever in it, by statement or by importlib."""
    return tuple(_imported_names(ast.parse(source)))


def _imported_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
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


def module_name(path: Path, root: Path) -> str:
    return ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")


def imported_modules(path: Path, names: Mapping[str, Path]) -> Iterator[str]:
    """The modules of this repository that a file imports; a package stands for what its __init__ re-exports."""
    for _, dotted in imported_names(path.read_text(encoding="utf-8")):
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


def imported_by(start: str, root: Path) -> set[str]:
    """`start` and every module that is imported with it, the packages they are in included."""
    imports = imports_of(root)
    for name in imports:
        parts = name.split(".")
        imports[name] |= {".".join(parts[:depth]) for depth in range(1, len(parts))} & imports.keys()
    return {start} | reachable(start, imports)


def lines_imported(start: str, root: Path) -> int:
    """Lines of this repository in `start` and in everything that it imports, wherever the import stands."""
    names = {module_name(path, root): path for path in source_files(root)}
    return sum(len(names[name].read_text(encoding="utf-8").splitlines()) for name in imported_by(start, root))


def imports_of(root: Path) -> dict[str, set[str]]:
    """Every module to those of this repository that it imports, at run time or for types alone."""
    names = {module_name(path, root): path for path in source_files(root)}
    return {name: set(imported_modules(path, names)) - {name} for name, path in names.items()}
