"""Module names: parse block and kind, fold by either, and summarise many names in a few words."""

import re
from collections.abc import Iterable, Sequence
from typing import Literal

from config.printable import first_of

_BLOCK = re.compile(r"^(?P<stem>.*?)\.(?P<index>\d+)(?:\.(?P<kind>.+))?$", re.ASCII)
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)", re.ASCII)
_DIGITS = 6  # maximum for a block number; a longer number is not a block

Fold = Literal["blocks", "kinds", "modules"]
FOLDS: tuple[Fold, ...] = ("blocks", "kinds", "modules")


def place_of(name: str) -> tuple[str, int | None, str]:
    """(stem, block, kind) of a module: ("model.layers", 3, "mlp.experts.*.up_proj") for
    `model.layers.3.mlp.experts.5.up_proj`. block is None outside blocks; kind is empty for a whole block."""
    found = _BLOCK.match(name)
    if found is None or len(found["index"]) > _DIGITS:
        return name, None, name
    return found["stem"], int(found["index"]), _NUMBER.sub("*", found["kind"] or "")


def folded_name(name: str, fold: Fold) -> str:
    """Name of the row that a module falls into when rows are `fold`."""
    stem, block, kind = place_of(name)
    if fold == "modules" or block is None:
        return name
    return f"{stem}.{block}" if fold == "blocks" else f"{stem}.*.{kind}".rstrip(".")


def short_name(name: str, most: int) -> str:
    """A row's name in at most `most` characters, cut at the front; a row folded by kind is called by its kind."""
    short = re.sub(r"^.*\.\*\.", "", name).removeprefix("model.")
    return short if len(short) <= most else "..." + short[3 - most :]


def leaves(names: Sequence[str]) -> list[bool]:
    """Mask of the modules that contain no other module (blocks and whole models do)."""
    parents = {name[:end] for name in names for end in range(len(name)) if name[end] == "."}
    return [name not in parents and "." in name or name not in parents and len(names) == 1 for name in names]


def in_words(names: Iterable[str]) -> str:
    """Summary of module names, such as `layers 20-31 down_proj`; at most three kinds, then the number of others."""
    kinds: dict[tuple[str, str], list[int]] = {}
    for name in names:
        stem, block, kind = place_of(name)
        kinds.setdefault((stem, kind), []).extend([] if block is None else [block])
    parts = []
    for (stem, kind), indices in kinds.items():
        last = _last(kind)
        numbers = _runs(sorted(set(indices)))
        blocks = stem.rpartition(".")[2]
        blocks = f"{blocks.removesuffix('s') if numbers.isdecimal() else blocks} {numbers}"
        parts.append(f"{blocks} {last}".strip() if indices else stem.removeprefix("model."))
    return first_of(parts, 3)


def _last(kind: str) -> str:
    """Last part of a kind, such as `down_proj`; for LoRA modules `q_proj.lora_A`, without the adapter's name."""
    inside, _, last = kind.rpartition(".")
    layer, _, adapter = inside.rpartition(".")
    if adapter.startswith("lora_"):
        return f"{layer.rpartition('.')[2]}.{adapter}"
    return f"{adapter}.{last}" if last == "base_layer" else last


def _runs(numbers: Sequence[int]) -> str:
    """Sorted numbers as ranges, such as `0-3, 7`."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
