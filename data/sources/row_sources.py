"""Rows of a source, including those made of the standard library, and which of them are held out."""

from __future__ import annotations

import ast
import json
import sysconfig
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from config.schema import DataSection
from data.sources.file_rows import LONE_SURROGATE
from data.sources.labelled_rows import TASK_FORMATS
from data.sources.row_formats import BadRow, Found
from data.sources.sources import Source
from data.text.encode import is_validation

_LONGEST_FUNCTION = 40
"""[lines] Functions longer than this are left out."""
_LONGEST_DOCSTRING = 4
"""[lines] The longer answer of a pair is at most this much of a docstring."""
_TESTS = {"test", "tests", "idle_test"}
_Function = ast.FunctionDef | ast.AsyncFunctionDef


def located_rows(data: DataSection, source: Source) -> Iterator[Found]:
    """Every row of the source in order. Raises UserError for a source that cannot be read."""
    if data.source != "stdlib":
        return iter(source.rows())
    if data.format in TASK_FORMATS:
        return _functions_by_folder(source)
    if data.format == "preference":
        return _short_and_long(source)
    return ((where, {"prompt": code, "completion": lines[0]}) for where, code, lines in _functions(source))


def is_held_out(row: dict[str, Any], validation_fraction: float) -> bool:
    """Whether a row belongs to the validation set, by a hash of all its fields. Raises BadRow for a lone surrogate."""
    try:
        text = json.dumps(row, sort_keys=True, ensure_ascii=False, default=str)  # str: parquet also has dates
        return is_validation(text, validation_fraction)
    except UnicodeEncodeError as error:
        raise BadRow("", LONE_SURROGATE) from error


def _functions(source: Source) -> Iterator[tuple[str, str, list[str]]]:
    """The place, code and docstring lines of every short function of the standard library that has a docstring."""
    for number, text in enumerate(source.documents(Counter()), 1):
        for node in _functions_in(text):
            lines = [line.strip() for line in (ast.get_docstring(node) or "").splitlines() if line.strip()]
            code = _code_of(node) if lines else None
            if code is not None:
                yield f"{source.label}: file {number}, line {node.lineno}", f"{code}\n\n# In words: ", lines


def _short_and_long(source: Source) -> Iterator[Found]:
    """{prompt, chosen, rejected}: a function, the first line of its docstring, and that line with more lines."""
    for where, code, lines in _functions(source):
        if len(lines) > 1:
            yield where, {"prompt": code, "chosen": lines[0], "rejected": "\n".join(lines[:_LONGEST_DOCSTRING])}


def _functions_by_folder(source: Source) -> Iterator[Found]:
    """{text, label} of every short function of the standard library except tests: its code, and its package's name."""
    root = Path(sysconfig.get_path("stdlib"))
    for path in map(Path, source.files):
        folders = path.relative_to(root).parts[:-1]
        package = root / folders[0] / "__init__.py" if folders else None
        if package is None or not package.is_file() or _TESTS & set(folders) or folders[0].startswith("_"):
            continue
        for node in _functions_in(path.read_bytes()):
            code = _code_of(node, documented=ast.get_docstring(node) is not None)
            if code is not None:
                yield f"{path}:{node.lineno}", {"text": code, "label": folders[0]}


def _functions_in(text: str | bytes) -> Iterator[_Function]:
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):  # the library has files that are invalid on purpose
        return
    yield from (node for node in ast.walk(tree) if isinstance(node, _Function))


def _code_of(node: _Function, *, documented: bool = True) -> str | None:
    """The function without its docstring and decorators; None if nothing is left, or it is too long."""
    if len(node.body) < 1 + documented or (node.end_lineno or 0) - node.lineno > _LONGEST_FUNCTION:
        return None
    node.body, node.decorator_list = node.body[documented:], []
    return ast.unparse(node)
