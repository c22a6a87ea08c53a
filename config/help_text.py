"""The text of `train.py --help`: a page (config/help.txt), or keys of the schema with type, unit, default and meaning.

These are read from config/schema.py, docstrings included, so that the help cannot become outdated.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import re
import shutil
import textwrap
import types
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from config import schema
from config.errors import UserError
from config.load import all_keys, describe_bounds, field_types, suggest
from config.schema import Config

_WIDEST = 110


@dataclasses.dataclass(frozen=True)
class KeyHelp:
    key: str
    kind: str
    """Its type, human-readable, with the allowed values or range."""
    default: str
    unit: str
    meaning: str


def render(about: str = "") -> str:
    """The help on "all" keys, a section or a key; the overview page if empty. Raises UserError for an unknown key."""
    if not about:
        return Path(__file__).with_name("help.txt").read_text(encoding="utf-8")
    known = list(keys())
    found = [item for item in known if about in ("all", item.key) or re.match(re.escape(about) + r"[.\[]", item.key)]
    if not found:
        names = [*all_keys(), *(item.key for item in known)]
        raise UserError(f"command line: --help {about}: no such section or key{suggest(about, names)}")
    width = min(_WIDEST, shutil.get_terminal_size((_WIDEST, 0)).columns)
    lines, section = ["key: type = default [unit]; null turns off a bound, and what 0 turns off"], None
    for item in found:
        if (head := item.key.rpartition(".")[0]) != section:
            section = head
            lines.append("")
        unit = f" [{item.unit}]" if item.unit else ""
        for text, first, later in ((f"{item.key}: {item.kind} = {item.default}{unit}", 2, 10), (item.meaning, 6, 6)):
            wrapper = textwrap.TextWrapper(width, " " * first, " " * later, break_long_words=False)
            wrapper.break_on_hyphens = False
            lines += wrapper.wrap(text)
    return "\n".join(lines) + "\n"


def keys(section: type = Config, prefix: str = "") -> Iterator[KeyHelp]:
    """Help for every key below `section`, in schema order; sections themselves have none."""
    hints, texts = field_types(section), _field_docstrings()
    documents = {name: text for base in section.__mro__ for name, text in texts.get(base.__name__, {}).items()}
    for item in dataclasses.fields(section):
        hint, key = hints[item.name], prefix + item.name
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield from keys(hint, f"{key}.")
            continue
        said = re.fullmatch(r"(?:\[([^]]*)\] ?)?(.*)", " ".join(documents[item.name].split()))
        unit, meaning = said.groups("") if said else ("", "")
        bounds = describe_bounds(item.metadata)
        yield KeyHelp(key, _describe_type(hint) + (f", {bounds}" if bounds else ""), _default(item), unit, meaning)
        for element in typing.get_args(hint):
            if dataclasses.is_dataclass(element) and isinstance(element, type):
                yield from keys(element, f"{key}[].")


def _describe_type(hint: Any) -> str:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(_describe_type(argument) for argument in arguments)
    if origin is typing.Literal:
        return " | ".join(arguments)
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            element = _describe_type(arguments[0])
            return f"list of {element}" if " | " in element else f"list of {element}s"
        return f"list of {len(arguments)} {_describe_type(arguments[0])}s"
    if origin is dict:
        return "mapping"
    names = {str: "text", int: "integer", float: "number", bool: "true | false", type(None): "null"}
    return names.get(hint) or hint.__name__


def _default(item: dataclasses.Field[Any]) -> str:
    if item.default is not dataclasses.MISSING:
        value = item.default
    elif item.default_factory is not dataclasses.MISSING:
        value = item.default_factory()
    else:
        return "(must be given)"
    return json.dumps(value)


@cache
def _field_docstrings() -> dict[str, dict[str, str]]:
    """Class name to field name to the docstring under the field; Python discards these at run time."""
    documents: dict[str, dict[str, str]] = {}
    for node in ast.parse(Path(inspect.getfile(schema)).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            found = documents.setdefault(node.name, {})
            for statement, following in zip(node.body, node.body[1:], strict=False):
                match statement, following:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                        found[name] = text
    return documents
