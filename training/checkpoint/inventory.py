"""The tensors of a checkpoint's files by name, dtype and shape."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch

from training.checkpoint.manifest import Tensors


def tensors_of(value: Any) -> Tensors:
    """Tensors inside nested dictionaries, lists and tuples, by the path of keys to them, joined by `/`."""
    return {name: (str(leaf.dtype).removeprefix("torch."), list(leaf.shape)) for name, leaf in leaves(value)}


def leaves(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor inside nested dictionaries, lists and tuples, with its name."""
    if type(value) in (dict, OrderedDict):
        for key, item in value.items():
            yield from leaves(item, (*path, str(key)))
    elif type(value) in (list, tuple):
        for index, item in enumerate(value):
            yield from leaves(item, (*path, str(index)))
    elif isinstance(value, torch.Tensor):
        yield "/".join(path), value
