"""Rows of a source, each with where it is: file and line, or its number.

JSONL is read line by line and not through `datasets`, which knows no line numbers and gives every row the keys of all
others. Compressed files (.gz, .zst, .bz2) are read as they are.
"""

from __future__ import annotations

import ast
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pyarrow

from config.errors import UserError, one_line
from config.schema import DataSection
from data.row_formats import BadRow
from data.sources import Source

Found = tuple[str, dict[str, Any] | BadRow]
"""Where a row is, and the row, or why it is none."""
_LONGEST_FUNCTION = 40
"""[lines] Of code with a docstring."""


def located_rows(data: DataSection, source: Source) -> Iterator[Found]:
    """Every row of the source in its order. Raises UserError for a source that cannot be read."""
    if data.source == "stdlib":
        return _functions(source)
    if data.source == "jsonl":
        return (found for path in source.files for found in _json_rows(path))
    return ((f"{source.label}: row {number}", row) for number, row in enumerate(source.rows(), 1))


def _json_rows(path: str) -> Iterator[Found]:
    """The rows of a JSONL file by line, or of a JSON file that holds one list by item."""
    try:
        with pyarrow.input_stream(path) as stream:
            opening = stream.read(64).lstrip()[:1]
        with pyarrow.input_stream(path) as stream:
            if opening == b"[":
                for number, row in enumerate(json.loads(stream.read()), 1):
                    yield f"{path}: item {number}", _as_row(row)
                return
            for number, line in enumerate(_lines(stream), 1):
                if line.strip():
                    yield f"{path}:{number}", _parsed(line)
    except (OSError, ValueError, RecursionError, pyarrow.ArrowException) as error:
        raise UserError(
            f"{path}: cannot be read ({one_line(error)}). Check that it is whole, and its format."
        ) from error


def _lines(stream: pyarrow.NativeFile) -> Iterator[bytes]:
    rest = b""
    while block := stream.read(1 << 20):
        *whole, rest = (rest + block).split(b"\n")
        yield from whole
    yield rest


def _parsed(line: bytes) -> dict[str, Any] | BadRow:
    try:
        return _as_row(json.loads(line))
    except (ValueError, RecursionError) as error:
        return BadRow("", f"is not JSON ({one_line(error, 120)})")


def _as_row(value: Any) -> dict[str, Any] | BadRow:
    return value if isinstance(value, dict) else BadRow("", f"is {json.dumps(value)[:40]}, not an object with fields")


def _functions(source: Source) -> Iterator[Found]:
    """{prompt, completion} of every short function of the standard library that has a docstring.

    The prompt is its code without the docstring, as Python writes it, the completion the docstring's first line.
    """
    for number, text in enumerate(source.documents(Counter()), 1):
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError, RecursionError):  # the library has files that are wrong on purpose
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                summary = (ast.get_docstring(node) or "").partition("\n")[0].strip()
                code = _code_of(node) if summary else None
                if code is not None:
                    where = f"{source.label}: file {number}, line {node.lineno}"
                    yield where, {"prompt": f"{code}\n\n# In words: ", "completion": summary}


def _code_of(node: ast.FunctionDef | ast.AsyncFunctionDef) -> str | None:
    """The function without its docstring and decorators; None where nothing is left, or it is long."""
    if len(node.body) < 2 or (node.end_lineno or 0) - node.lineno > _LONGEST_FUNCTION:
        return None
    node.body, node.decorator_list = node.body[1:], []
    return ast.unparse(node)
