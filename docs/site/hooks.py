"""Hooks of the documentation's site (mkdocs.yml): generated pages, and links out of docs/."""

import ast
import re
import textwrap
from itertools import groupby
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from config.help_text import KeyHelp, keys

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+)([^)#]+)(?:#[^)]*)?\)")
"""A link to a file of the repository that is no page: text, dots, path."""


def on_files(files: Files, config: Any) -> Files:
    """Add the home page, which is the table of docs/README.md, and the references of keys and commands."""
    home = (Path(config.docs_dir) / "README.md").read_text(encoding="utf-8")
    home = re.sub(r"# Documentation, by task\n\n.*\n", f"# Mantissa\n\n{config.site_description}\n", home)
    home = home.replace("(../config/schema.py)", "(reference/keys.md#section-schedule)")
    files.append(File.generated(config, "index.md", content=home))
    files.append(File.generated(config, "reference/keys.md", content=key_reference()))
    files.append(File.generated(config, "reference/commands.md", content=command_reference()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Name files outside of docs/ by their path, lead to the home page where docs/README.md is meant, and show pictures
    in Mermaid as tables: their script would come from the network."""

    def named(link: re.Match[str]) -> str:
        depth, text, path = page.file.src_uri.count("/"), link[1], link[3]
        if link[2].count("../") <= depth:
            return link[0]
        return text if text.strip("`") == path else f"{text} (`{path}`)"

    markdown = re.sub(r"```mermaid\n(.*?)```\n", lambda found: _as_table(found[1]), markdown, flags=re.DOTALL)
    return re.sub(r"\]\((?:\./)?README\.md(#[^)]*)?\)", r"](index.md\1)", _OUTSIDE.sub(named, markdown))


def _as_table(picture: str) -> str:
    """A flowchart as a table: each box, what it holds, and the boxes that its arrows lead to."""
    boxes = {name: text.split("<br/>") for name, text in re.findall(r'(\w+)\["([^"]+)"\]', picture)}
    arrows = re.findall(r"(\w+) --> (\w+)", picture)
    rows = ["| | holds | imports |", "|---|---|---|"]
    for name, (title, *held) in boxes.items():
        imports = (boxes[other][0] for one, other in arrows if one == name)
        rows.append(f"| {title} | {', '.join(held)} | {'; '.join(imports)} |")
    return "\n".join(rows) + "\n"


def key_reference() -> str:
    """Every config key with an anchor of its own, by section, from config/schema.py."""
    lines = [
        "# Config keys",
        "",
        "Every key of a run config, from its schema. `train.py --help KEY` prints the same; `key=value` on the command "
        "line sets one. The anchor of a key is its name.",
    ]
    for section, members in groupby(keys(), key=lambda item: item.key.rpartition(".")[0]):
        lines += ["", f"## {section or 'Top level'} {{ #section-{section.replace('[]', '') or 'top'} }}", ""]
        for item in members:
            lines += _entry(item)
    return "\n".join(lines) + "\n"


def command_reference() -> str:
    """Every command, as the docstring of its module describes it."""
    lines = [
        "# Commands",
        "",
        "Every command of Mantissa beside `train.py`, as its `--help` begins. `--help` lists the options.",
    ]
    titles = {
        "tools": "Around a run",
        "launch": "Starting runs",
        "tracking": "Looking at runs",
        "training": "Of a run",
        "data": "Data",
        "lab": "Measuring",
    }
    for folder, title in titles.items():
        lines += ["", f"## {title}"]
        for path in sorted((Path(__file__).parent.parent.parent / folder).rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            described = ast.get_docstring(ast.parse(text)) or ""
            named = re.search(rf"python -m ({folder}\.[\w.]+)", described)
            if "@entry_point" in text and "@entry_point(launched" not in text and named:
                lines += ["", f"### {named[1]}", "", *_described(described)]
    return "\n".join(lines) + "\n"


def _described(docstring: str) -> list[str]:
    """A docstring as Markdown; what it indents is code."""
    parts = (part for part in docstring.split("\n\n"))
    shown = (f"```\n{textwrap.dedent(part)}\n```" if part.startswith("    ") else part for part in parts)
    return [line for part in shown for line in (part, "")]


def _entry(item: KeyHelp) -> list[str]:
    unit = f", in {item.unit}" if re.match("integer|number", item.kind) and item.unit else ""
    facts = f"{item.kind}; default `{item.default}`{unit}".replace("|", "or")
    return [f"### `{item.key}` {{ #{item.key.replace('[]', '')} }}", "", f"*{facts}*", "", item.meaning, ""]
