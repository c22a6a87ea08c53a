"""The text of `train.py --help`: the options, then every key of the schema with its type, unit, default and meaning.

All of it is read from config/schema.py, docstrings included, so that the help cannot lag behind the code.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import json
import textwrap
import types
import typing
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from config import schema
from config.load import describe_bounds, field_types
from config.schema import Config

_WIDTH = 110

_USAGE = """\
usage: deepspeed train.py --config FILE [--deepspeed_config JSON] [--show-config] [key.sub=value ...]
       (or with torchrun, accelerate launch, or python for one process)

Trains a Hugging Face transformer with DeepSpeed.

options:
  --config FILE            run config, YAML or JSON; examples are in config/recipes/
  --deepspeed_config JSON  DeepSpeed JSON; wins over the key deepspeed.config
  --show-config            print the resolved run config and DeepSpeed JSON, start nothing
  --local_rank N           accepted from launchers that pass it; must agree with LOCAL_RANK
  --version                print Mantissa's version
  --help                   this text
  key.sub=value            sets a key of the run config; the value is YAML, such as optimizer.betas=[0.9,0.95]

exit codes: 0 done; 2 the config or the command line is wrong; 3 stopped by the numerics; 69 another rank is lost;
  71 a machine computes wrongly; 74 checkpoints cannot be written; 75 preempted and saved (docs/run-folder.md)

keys of the run config, as `key: type = default [unit]`; null turns off what 0 turns off:
"""


@dataclasses.dataclass(frozen=True)
class KeyHelp:
    """The help of one key."""

    key: str
    kind: str
    """Its type in words, with the allowed values or range."""
    default: str
    unit: str
    meaning: str


def render() -> str:
    """The whole help text."""
    lines = [_USAGE]
    section = None
    for item in keys():
        head, _, _ = item.key.rpartition(".")
        if head != section:
            section = head
            lines.append("")
        unit = f" [{item.unit}]" if item.unit else ""
        lines.append(f"  {item.key}: {item.kind} = {item.default}{unit}")
        lines += textwrap.wrap(item.meaning, _WIDTH, initial_indent=" " * 6, subsequent_indent=" " * 6)
    return "\n".join(lines) + "\n"


def keys(section: type = Config, prefix: str = "") -> Iterator[KeyHelp]:
    """Help for every key below `section`, in the order of the schema; sections themselves have none."""
    hints, texts = field_types(section), _field_docstrings()
    documents = {name: text for base in section.__mro__ for name, text in texts.get(base.__name__, {}).items()}
    for item in dataclasses.fields(section):
        hint, key = hints[item.name], prefix + item.name
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield from keys(hint, f"{key}.")
            continue
        unit, meaning = _split_unit(documents[item.name])
        bounds = describe_bounds(item.metadata)
        yield KeyHelp(key, _describe_type(hint) + (f", {bounds}" if bounds else ""), _default(item), unit, meaning)
        for element in typing.get_args(hint):
            if dataclasses.is_dataclass(element) and isinstance(element, type):
                yield from keys(element, f"{key}[].")


def _describe_type(hint: Any) -> str:
    """A type annotation in words."""
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


def _split_unit(document: str) -> tuple[str, str]:
    """`[unit] meaning` as two parts."""
    text = " ".join(document.split())
    if not text.startswith("["):
        return "", text
    # Units such as `[fraction, fraction]` never nest brackets.
    unit, _, meaning = text[1:].partition("]")
    return unit, meaning.strip()


@cache
def _field_docstrings() -> dict[str, dict[str, str]]:
    """Class name to field name to the docstring under the field; Python keeps no such docstrings at run time."""
    documents: dict[str, dict[str, str]] = {}
    for node in ast.parse(Path(inspect.getfile(schema)).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            found = documents.setdefault(node.name, {})
            for statement, following in zip(node.body, node.body[1:], strict=False):
                match statement, following:
                    case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                        found[name] = text
    return documents
