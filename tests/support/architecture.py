"""Draw docs/architecture.md from the imports: `python -m tests.support.architecture [--check]`, or `make architecture`.

An edge is an import. One that follows from others is left out, so that only neighbours are joined.
"""

import re
import sys
from collections.abc import Mapping
from pathlib import Path

from config.cli import REPOSITORY
from tests.support.imports import FLOOR_OF, FLOORS, MAY_IMPORT, imports_of, reachable

PAGE = REPOSITORY / "docs" / "architecture.md"
_PICTURE = re.compile(r"(?<=```mermaid\n).*?(?=```)", re.DOTALL)


def picture(root: Path) -> str:
    """Mermaid text: the folders, and the floors inside training/ from top to bottom."""
    edges = reduced(group_edges(root))
    inside = [name for name in edges if name.startswith("floor")]
    lines = ["flowchart TD"]
    lines += [f'  {name}["{name}{_packages(root / name)}"]' for name in sorted(MAY_IMPORT.keys() - {"training"})]
    lines += ['  train["train.py"]', '  subgraph training["training/"]']
    for name in reversed(inside):
        lines.append(f'    {name}["{" · ".join(FLOORS[int(name.removeprefix("floor"))])}"]')
    lines += [f"    {one} --> {other}" for one in reversed(inside) for other in sorted(edges[one]) if other in inside]
    lines.append("  end")
    lines += [f"  {one} --> {other}" for one in sorted(edges.keys() - set(inside)) for other in sorted(edges[one])]
    return "\n".join(lines) + "\n"


def group_edges(root: Path) -> dict[str, set[str]]:
    """Group to the groups it imports. A group is a top-level folder, a floor of training/, or train.py (`train`).

    training/ as a whole is a group too, for what it imports outside itself.
    """
    edges: dict[str, set[str]] = {name: set() for name in (*MAY_IMPORT, "train")}
    edges |= {f"floor{floor}": set() for floor in range(len(FLOORS))}
    for importer, imported in imports_of(root).items():
        folder = importer.partition(".")[0]
        for name in imported:
            target = name.partition(".")[0]
            if importer == "training":  # its __init__
                continue
            if folder == target == "training":
                edges[_floor(importer)].add(_floor(name))
            else:
                edges[folder].add(target)
    return {name: others - {name} for name, others in edges.items()}


def reduced(edges: Mapping[str, set[str]]) -> dict[str, set[str]]:
    """Without the edges that a longer way makes superfluous."""
    return {
        one: {other for other in others if not any(other in reachable(near, edges) for near in others - {other})}
        for one, others in edges.items()
    }


def _floor(module: str) -> str:
    return f"floor{FLOOR_OF[module.split('.')[1]]}"


def _packages(folder: Path) -> str:
    names = sorted(path.parent.name for path in folder.glob("*/__init__.py"))
    return f"<br/>{', '.join(names)}" if names else ""


def main(arguments: list[str]) -> int:
    """Write the picture into the page; with --check only say whether it is current (exit code 1: it is not)."""
    written = PAGE.read_text(encoding="utf-8")
    current = _PICTURE.sub(lambda _: picture(REPOSITORY), written)
    if "--check" not in arguments:
        PAGE.write_text(current, encoding="utf-8")
    elif current != written:
        print(
            "docs/architecture.md is not what the imports are; draw it again with `make architecture`", file=sys.stderr
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
