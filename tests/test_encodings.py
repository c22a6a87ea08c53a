"""No text is read or written in the locale's encoding, which is ASCII on many a cluster: every file is UTF-8."""

import ast
from collections.abc import Iterator
from pathlib import Path

from config.cli import REPOSITORY
from tests.support.imports import source_files

MODE_AT = {"open": 1, "Path.open": 0, "fdopen": 1}
"""Position of the mode among the arguments of each."""
NOT_FILES = ("os", "self", "archive")
"""Modules whose `open` opens no text file: a descriptor, a stream of documents, a member of a zip file in bytes."""


def by_locale(tree: ast.AST) -> Iterator[ast.Call]:
    """Calls that decode or encode text and do not name the encoding."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or any(word.arg in ("encoding", None) for word in node.keywords):
            continue
        given = {word.arg: word.value for word in node.keywords}
        match node.func:
            case ast.Attribute(attr="read_text") if not node.args:
                yield node
            case ast.Attribute(attr="write_text") if len(node.args) < 2:
                yield node
            case ast.Attribute(value=ast.Name(id="os"), attr="fdopen") if _is_text(node, MODE_AT["fdopen"]):
                yield node
            case ast.Name(id="open") if _is_text(node, MODE_AT["open"]):
                yield node
            case ast.Attribute(value=owner, attr="open") if ast.unparse(owner) not in NOT_FILES:
                if _is_text(node, MODE_AT["Path.open"]):
                    yield node
            case ast.Attribute(attr="run" | "Popen" | "check_output"):
                if any(_is_true(given.get(name)) for name in ("text", "universal_newlines")):
                    yield node


def _is_text(call: ast.Call, place: int) -> bool:
    given = [word.value for word in call.keywords if word.arg == "mode"] + call.args[place : place + 1]
    mode = given[0].value if given and isinstance(given[0], ast.Constant) else "r"
    return isinstance(mode, str) and "b" not in mode


def _is_true(value: ast.expr | None) -> bool:
    return isinstance(value, ast.Constant) and value.value is True


def test_every_file_and_every_pipe_of_text_names_its_encoding() -> None:
    found = [
        f"{path.relative_to(REPOSITORY)}:{call.lineno}: {ast.unparse(call)[:90]}"
        for path in source_files(REPOSITORY)
        for call in by_locale(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert found == []


def test_what_names_none_is_found(tmp_path: Path) -> None:
    locale = "open(a)", "p.open()", "p.open('w')", "p.read_text()", "p.write_text(t)", "os.fdopen(1, 'w')"
    pipes = "subprocess.run(c, text=True)", "subprocess.Popen(c, universal_newlines=True)"
    fine = "open(a, 'rb')", "p.open('wb')", "p.open(encoding='utf-8')", "p.write_text(t, 'utf-8')", "os.open(a, 0)"
    for text in (*locale, *pipes):
        assert list(by_locale(ast.parse(text))), text
    for text in (*fine, "subprocess.run(c)", "store.open(**options)"):
        assert not list(by_locale(ast.parse(text))), text
