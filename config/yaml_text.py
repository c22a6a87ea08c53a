"""YAML as the run config reads and writes it: YAML 1.2 scalars, and no mapping that names a key twice.

PyYAML follows YAML 1.1, in which `3e-4` is text, `off` is false and `1:30` is ninety. A learning rate that
silently becomes text, or a value that silently becomes a boolean, must never occur in a run config.
"""

from __future__ import annotations

import re
from typing import Any

import yaml
from yaml.constructor import ConstructorError

_FLOAT = re.compile(
    r"[-+]?(?:(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]+)?|[0-9]+[eE][-+]?[0-9]+|\.(?:inf|Inf|INF))$|\.(?:nan|NaN)$"
)
_INT = re.compile(r"[-+]?(?:0|[1-9][0-9_]*)$")


class _Loader(yaml.SafeLoader):
    """SafeLoader with the scalars of YAML 1.2 (plus 1_000_000) that refuses a repeated key."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Build a mapping; PyYAML's own method silently keeps the last of two equal keys."""
        seen: dict[str, int] = {}
        for key_node, _ in node.value:
            name, line = str(key_node.value), key_node.start_mark.line + 1
            if name in seen and key_node.tag != "tag:yaml.org,2002:merge":
                problem = f"the key {name} is a duplicate (first on line {seen[name]}); remove one of them"
                raise ConstructorError(None, None, problem, key_node.start_mark)
            seen[name] = line
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver("tag:yaml.org,2002:null", re.compile(r"(?:~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:bool", re.compile(r"(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF")
)
_Loader.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:merge", re.compile(r"<<$"), ["<"])


class _Dumper(yaml.SafeDumper):
    """SafeDumper that also quotes text that only YAML 1.2 reads as a number, so that it reads back as text."""


_Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))


def parse(text: str) -> Any:
    """The value of a YAML text. Raises ValueError: one line saying what is wrong, and on which line of several."""
    try:
        return yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}: " if mark is not None else ""
        raise ValueError(f"{where}{error.problem or error.context}") from error
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from error
    except RecursionError:
        raise ValueError("is nested too deeply") from None


def dump(value: Any) -> str:
    """Block-style YAML of plain types, keys in the given order; `parse` reads back exactly `value`."""
    return yaml.dump(value, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
