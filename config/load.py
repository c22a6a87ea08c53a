"""Loads a YAML or JSON file and `key.sub=value` overrides into a checked, frozen `Config`.

Every mistake is one line that names the file or the command line, the key, the value and what to do.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import functools
import json
import math
import operator
import re
import shlex
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from config import rules, yaml_text
from config.deepspeed.choice import Place, settle
from config.errors import UserError, meant
from config.not_offered import known_elsewhere, why_not
from config.schema import Config, LossScaleSection
from config.task import ALGORITHMS, DECIDED, settle_task, source_of

T = typing.TypeVar("T")
COMMAND_LINE = "command line"
"""Origin of a value that is in no file, for messages."""
_BOUNDS = {"at_least": operator.ge, "above": operator.gt, "at_most": operator.le, "below": operator.lt}


def load_config(path: Path, overrides: Sequence[str], deepspeed_config: str | None, *, started: bool = False) -> Config:
    """The run config in `path` with `overrides` (`key.sub=value`, values in YAML), and with its DeepSpeed JSON chosen.

    Later overrides win. A mapping given to a section is merged into it; `model.config.hidden_size=64` sets one key of a
    free mapping, `model.config={...}` replaces it. deepspeed_config: from the command line. started: by a run,
    whose checkpoint, data and model folders may be gone since. Raises UserError.
    """
    tree = read_file(path)
    if tree.get("defects") == []:  # runs before version 0.2.0 recorded this section, since removed
        del tree["defects"]
    origins: dict[str, str] = {"": str(path)}
    before = copy.deepcopy(tree)
    for text in overrides:
        key, value = _parse_override(text)
        _apply_override(tree, key.split("."), value, origins, key)
    if deepspeed_config is not None:
        _apply_override(tree, ["deepspeed", "config"], deepspeed_config, origins, "deepspeed.config")
    _reopen(tree, before, origins)
    builder = _Builder(origins)
    config = _with_home(builder.section(Config, tree, ""))

    def place(key: str) -> Place:
        section, _, name = key.rpartition(".")
        if name not in (tree.get(section) or {}):
            return Place.NOWHERE
        return Place.COMMAND_LINE if builder.origin(key) == COMMAND_LINE else Place.FILE

    try:
        config = settle(config, path, place)
    except UserError as error:
        raise UserError(f"{builder.origin('deepspeed.offload')}: {error}") from None
    run, later = config.run, place("run.epochs") - place("run.steps")
    if run.epochs is not None and later:  # the later of the two counts
        run = dataclasses.replace(run, steps=0) if later > 0 else dataclasses.replace(run, epochs=None)
        config = dataclasses.replace(config, run=run)
    rules.check(settle_task(config), builder.origin, started=started)
    return config


def _reopen(tree: dict[str, Any], before: dict[str, Any], origins: Mapping[str, str]) -> None:
    """Open again in `tree` what followed from a key that the command line changes, as in a run folder's config, where
    every open value is filled in. before: without overrides."""

    def at(of: Any, key: str) -> Any:
        return functools.reduce(lambda it, part: it.get(part) if isinstance(it, dict) else None, key.split("."), of)

    def old(key: str) -> Any:
        found = at(before, key)
        return functools.reduce(getattr, key.split("."), Config()) if found is None else found

    scale = vars(LossScaleSection(policy=old("precision.loss_scale.policy")).resolved())
    chosen = dict(zip(DECIDED, ALGORITHMS.get(str(old("grpo.algorithm")), ALGORITHMS["grpo"]), strict=True))
    reference = "precomputed" if old("adapter.kind") == "none" else "adapter_off"
    named = {"tokenizer": old("model.name_or_path")} if at(tree, "model.name_or_path") else {}
    source, implied = (source_of(str(at(given, "data.path"))) for given in (before, tree))
    for key, section, followed, opened in (
        ("grpo.algorithm", "grpo", chosen, {}),
        ("precision.loss_scale.policy", "precision.loss_scale", scale, {}),
        ("model.name_or_path", "data", named, {"tokenizer": "model"}),
        ("data.path", "data", {"source": source}, {"source": source if implied == "hub" else implied}),
        ("data.sequence_length", "data", {"target_length": old("data.sequence_length")}, {}),
        ("grpo.max_new_tokens", "data", {"target_length": old("grpo.max_new_tokens")}, {}),
        ("adapter.kind", "preference", {"reference": reference}, {}),
    ):
        held = at(tree, section)
        if not isinstance(held, dict) or at(before, key) == at(tree, key):
            continue
        for name in followed.keys() & held.keys():
            if held[name] == followed[name] and f"{section}.{name}" not in origins:
                del held[name]
                held |= opened


def _with_home(config: Config) -> Config:
    """The config with the home folder in the names of models, in place of a `~/` that transformers would not find."""
    model, distill = config.model, config.distill
    if (name := model.name_or_path) is not None and name.startswith("~/"):
        model = dataclasses.replace(model, name_or_path=str(Path(name).expanduser()))
    if (name := distill.teacher) is not None and name.startswith("~/"):
        distill = dataclasses.replace(distill, teacher=str(Path(name).expanduser()))
    return dataclasses.replace(config, model=model, distill=distill)


def to_dict(config: Config) -> dict[str, Any]:
    """`config` as dicts, lists and scalars, in the order of the schema."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        return [plain(item) for item in value] if isinstance(value, list | tuple) else value

    return plain(dataclasses.asdict(config))


def to_yaml(config: Config) -> str:
    """`config` as YAML text that `load_config` reads back to an equal Config."""
    return yaml_text.dump(to_dict(config))


@functools.cache
def field_types(section: type) -> dict[str, Any]:
    """Field name to its resolved type annotation."""
    return typing.get_type_hints(section)


def build_section(kind: type[T], tree: Any, path: Path, prefix: str = "") -> T:
    """A dataclass instance from a file's mapping, checked as the run config is. Raises UserError."""
    section: T = _Builder({"": str(path)}, kind).section(kind, tree, prefix)
    return section


def all_keys(section: type = Config, prefix: str = "") -> Iterator[str]:
    """Every dotted key of the schema, sections included."""
    for name, hint in field_types(section).items():
        yield prefix + name
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield from all_keys(hint, f"{prefix}{name}.")


def describe_bounds(limits: Mapping[str, float]) -> str:
    """A field's range, such as `at least 0 and below 1`; empty without one."""
    return " and ".join(f"{name.replace('_', ' ')} {limits[name]:g}" for name in _BOUNDS if name in limits)


def read_file(path: Path) -> dict[str, Any]:
    """The mapping in a YAML or JSON file; an empty file is an empty mapping. Raises UserError."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [item.name for item in path.parent.glob("*")], n=1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else "; give the path of a YAML or JSON file"
        raise UserError(f"{path}: no such run config{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as a run config: {error}") from error
    try:
        tree = yaml_text.parse(text)
    except ValueError as error:
        raise UserError(f"{path}: not valid YAML: {error}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise UserError(f"{path}: holds {show(tree)} where sections (run:, model:, ...) are expected")
    return tree


def show(value: Any) -> str:
    """`value` on one line, as a user would write it, shortened to 80 characters."""
    text = f"'{value}'" if isinstance(value, str) else json.dumps(value, default=str)
    text = " ".join(text.split())
    return text if len(text) <= 80 else text[:77] + "..."


def nearest(key: str, known: Sequence[str]) -> str | None:
    """The known key most likely meant by an unknown dotted `key`; None if no known key resembles it."""
    prefix, _, name = key.rpartition(".")
    siblings = {item.rpartition(".")[2]: item for item in known if item.rpartition(".")[0] == prefix}
    alike = [item for item in known if item.rpartition(".")[2] == name]
    if found := known_elsewhere(name) or (alike and not prefix and alike[0]):
        return found
    near = [siblings[match] for match in difflib.get_close_matches(name, siblings, n=1)]
    near = near or [item for short, item in siblings.items() if len(name) > 2 and short.startswith(name)] or alike
    leaves = {item.rpartition(".")[2]: item for item in reversed(known)}
    near = near or [leaves[match] for match in difflib.get_close_matches(name, leaves, n=1, cutoff=0.7)]
    near = near or [item for item in difflib.get_close_matches(prefix, known, n=1) if prefix not in known]
    return next(iter(near), None)


def suggest(key: str, known: Sequence[str]) -> str:
    """`; did you mean ...?` for an unknown dotted `key`, or a list of its siblings."""
    if near := nearest(key, known):
        return f"; did you mean {near}?"
    prefix = key.rpartition(".")[0]
    siblings = dict.fromkeys(item.rpartition(".")[2] for item in known if item.rpartition(".")[0] == prefix)
    further = "; model.config.KEY sets a key of the architecture" if prefix == "model" else ""
    place = prefix if prefix and siblings else "the top level"
    return f"; {place} has: {', '.join(siblings or field_types(Config))}{further}"


def _can_be_written(text: str) -> bool:
    """Whether text from a command line or a file can be written to a file, or used as a path."""
    return re.search("[\0\ud800-\udfff]", text) is None


def _parse_override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key or not all(key.split(".")):
        raise UserError(f"command line: '{text}' is not an override; write key.sub=value, such as run.steps=20")
    try:
        read = yaml_text.parse(value)
    except ValueError as error:
        raise UserError(f"command line: {key} = {show(value)} is not valid YAML ({error}); quote it") from error
    cut = isinstance(read, str) and read != value and value.lstrip()[0] not in "'\"!|>"
    if cut or (read is None and "#" in value):  # by a comment, an anchor, space at an end or a line break
        quoted = shlex.quote(json.dumps(value, ensure_ascii=False))
        raise UserError(f"command line: {text!r} is {show(read)} in YAML; write {key}={quoted}")
    return key, read


def _apply_override(tree: dict[str, Any], parts: list[str], value: Any, origins: dict[str, str], key: str) -> None:
    """Set the key `parts` of `tree`; a mapping assigned to a section is merged key by key."""
    node: Any = tree
    owner: Any = Config
    for depth, part in enumerate(parts[:-1]):
        owner = field_types(owner).get(part) if isinstance(owner, type) else None
        if node.get(part) is None:
            node[part] = {}
            origins[".".join(parts[: depth + 1])] = COMMAND_LINE
        node = node[part]
        if not isinstance(node, dict):
            parent = ".".join(parts[: depth + 1])
            raise UserError(
                f"command line: {key}: {parent} is {show(node)}, which has no keys; set {parent} as a whole"
            )
    hint = field_types(owner).get(parts[-1]) if isinstance(owner, type) else None
    if isinstance(value, dict) and isinstance(hint, type) and dataclasses.is_dataclass(hint):
        for name, item in value.items():
            _apply_override(tree, [*parts, str(name)], item, origins, f"{key}.{name}")
        return
    node[parts[-1]] = value
    origins[key] = COMMAND_LINE


def _alone(value: Any) -> str:
    """Advice on a value that may be a number with a unit or commas."""
    number = isinstance(value, str) and re.match(r"[-+]?\.?\d", value)
    return "; write digits alone, without a unit" if number else "; give a number"


class _Builder:
    """Builds the schema's dataclasses from plain mappings, knowing where each value was written."""

    def __init__(self, origins: Mapping[str, str], root: type = Config) -> None:
        self._origins, self._root = origins, root

    def origin(self, key: str) -> str:
        """`command line` or the file, for a dotted key."""
        parts = key.replace("[", ".[").split(".")
        for length in range(len(parts), 0, -1):
            prefix = ".".join(parts[:length]).replace(".[", "[")
            if prefix in self._origins:
                return self._origins[prefix]
        return self._origins[""]

    def wrong(self, key: str, value: Any, problem: str) -> UserError:
        return UserError(f"{self.origin(key)}: {key} = {show(value)} {problem}")

    def section(self, kind: type, tree: Any, prefix: str) -> Any:
        """An instance of the dataclass `kind` from a mapping; `prefix` is its dotted key."""
        if not isinstance(tree, dict):
            raise self.wrong(prefix, tree, f"is not a mapping; it has the keys {', '.join(field_types(kind))}")
        dot = f"{prefix}." if prefix else ""
        hints = field_types(kind)
        for name in tree:
            if name not in hints:
                known, key, value = [*all_keys(self._root), *(dot + item for item in hints)], f"{dot}{name}", tree[name]
                while isinstance(value, dict) and len(value) == 1:  # the section is also unknown
                    (further, value), *_ = value.items()
                    key += f".{further}"
                raise UserError(f"{self.origin(key)}: {key}: no such key{suggest(key, known)}")
        values = {}
        for item in dataclasses.fields(kind):
            key = f"{dot}{item.name}"
            hint = hints[item.name]
            if item.name in tree and not (tree[item.name] is None and dataclasses.is_dataclass(hint)):
                values[item.name] = self.value(hint, tree[item.name], key, item.metadata)
            elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
                raise UserError(f"{self.origin(prefix)}: {key} is missing; it has no default, so give it")
        return kind(**values)

    def value(self, hint: Any, value: Any, key: str, limits: Mapping[str, float]) -> Any:
        """`value`, checked against the annotation `hint` and the bounds in `limits`."""
        origin, arguments = typing.get_origin(hint), typing.get_args(hint)
        if origin in (types.UnionType, typing.Union):
            words = [word for item in arguments[1:] for word in typing.get_args(item)]
            if value is None or value in words:
                return value
            if words and isinstance(value, str):
                raise self.wrong(key, value, f"is neither a number nor {' nor '.join([*words, 'null'])}")
            return self.value(arguments[0], value, key, limits)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            return self.section(hint, value, key)
        if value is None and "null" in limits:
            return hint(limits["null"])
        if value is None:
            raise self.wrong(key, value, "is empty; give a value or leave the key out")
        if origin is typing.Literal:
            if not isinstance(value, str) or value not in arguments:
                reason = why_not(key, str(value))
                if reason is not None:
                    raise self.wrong(key, value, f"is not offered: {reason}")
                hint = meant(str(value), arguments, "")
                raise self.wrong(key, value, f"is not one of {', '.join(arguments)}" + (hint and f"; {hint}"))
            return value
        if origin is tuple:
            if not isinstance(value, list):
                raise self.wrong(key, value, "is not a list; write it as [...]")
            if arguments[-1] is Ellipsis:
                arguments = arguments[:1] * len(value)
            if len(value) != len(arguments):
                raise self.wrong(key, value, f"has {len(value)} elements; {key} takes {len(arguments)}")
            pairs = enumerate(zip(arguments, value, strict=True))
            return tuple(self.value(kind, item, f"{key}[{index}]", limits) for index, (kind, item) in pairs)
        if origin is dict:
            if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
                raise self.wrong(key, value, "is not a mapping of names to values")
            if not _can_be_written(json.dumps(value, default=str, ensure_ascii=False)):
                raise self.wrong(key, value, "has a character that no file can hold (not UTF-8); leave it out")
            return value
        return self.scalar(hint, value, key, limits)

    def scalar(self, hint: type, value: Any, key: str, limits: Mapping[str, float]) -> Any:
        """A bool, an integer, a number or text; nothing is converted except an integer to a float."""
        if hint is bool and not isinstance(value, bool):
            raise self.wrong(key, value, "is not true or false")
        if hint is int and (isinstance(value, bool) or not isinstance(value, int)):
            whole = isinstance(value, float) and value.is_integer()
            raise self.wrong(key, value, "is not an integer" + (f"; write {int(value)}" if whole else _alone(value)))
        if hint is float:
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise self.wrong(key, value, f"is not a number{_alone(value)}")
            value = float(value)
            if not math.isfinite(value):
                raise self.wrong(key, value, "is not a finite number")
        if hint is str and not isinstance(value, str):
            raise self.wrong(key, value, "is not text; put it in quotes (on a command line in two pairs: '\"...\"')")
        if hint is str and not _can_be_written(value):
            raise self.wrong(key, value, "has a character that no file can hold (a NUL, or not UTF-8); leave it out")
        if not all(holds(value, limits[name]) for name, holds in _BOUNDS.items() if name in limits):
            raise self.wrong(key, value, f"is out of range; it must be {describe_bounds(limits)}")
        return value
