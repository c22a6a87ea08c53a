"""What the modules of ranks that share matrices get and make, whole, to compare it with a reference on one rank.

A rank has its heads of an attention and its inner values of an MLP. Which tensors are such slices, and along which
dimension, shows beside the reference's pass: its tensors of the same place have other shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from modeling.tensor_parallel import Cut, cut
from tools.parity.recompute import Call
from training.distributed import TensorGroup
from training.engine.tensor_slices import joined_in

_Shapes = Sequence[torch.Size]


class Slices:
    """Joins what the ranks of a group have of a module. Every method that joins is a collective of the group."""

    def __init__(self, group: TensorGroup | None) -> None:
        """group: None where each rank has whole matrices; then everything is whole as it is."""
        self.group = group
        self.given: dict[str, tuple[int, list[int]]] = {}
        """Of modules that get a slice: along which dimension, and the sizes of all slices."""
        self._inputs: dict[str, _Shapes] = {}
        self._outputs: dict[str, _Shapes] = {}

    @contextmanager
    def of_reference(self, reference: torch.nn.Module) -> Iterator[None]:
        """Around a pass of the reference on the same batch."""
        with ExitStack() as stack:
            for name, module in reference.named_modules() if self.group is not None else ():

                def hook(_: Any, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
                    self._inputs.setdefault(name, _shapes((args, kwargs)))
                    self._outputs.setdefault(name, _shapes(output))

                stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
            yield

    def inputs(self, name: str, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """What a module got, as (args, kwargs)."""
        shapes, floats = self._inputs.get(name, ()), _floats((args, kwargs))
        if self.group is not None and name not in self.given and shapes and floats:
            dim = _smaller(floats[0].shape, shapes[0])
            if dim is not None:
                self.given[name] = dim, self._sizes(floats[0], dim)
        found: tuple[Any, Any] = self._tree((args, kwargs), shapes)
        return found

    def output(self, name: str, output: Any) -> Any:
        """What it returned."""
        return self._tree(output, self._outputs.get(name, ()))

    def call(self, call: Call) -> Call:
        """A call with everything whole: its own tensors, those of the calls inside, and the gradients of all.

        What had changed since it was got or returned still counts as changed.
        """
        if self.group is None:
            return call
        args, kwargs = self.inputs(call.name, call.args, call.kwargs)
        found = replace(
            call,
            args=args,
            kwargs=kwargs,
            output=self.output(call.name, call.output),
            inside=[self.call(inner) for inner in call.inside],
            came=self._numbered(call.came, self._outputs.get(call.name, ())),
            made=self._numbered(call.made, self._inputs.get(call.name, ())),
        )
        found.versions = found.now() if call.versions == call.now() else []
        return found

    def parameter(self, gradient: torch.Tensor, parameter: Any) -> torch.Tensor:
        """The gradient of a whole parameter, of that of this rank's slice."""
        return joined_in(self.group, gradient, parameter)

    def _tree(self, tree: Any, shapes: _Shapes) -> Any:
        if self.group is None or len(_floats(tree)) != len(shapes):
            return tree
        left = iter(shapes)
        return tree_map(lambda item: self._whole(item, next(left)) if _is_float(item) else item, tree)

    def _numbered(self, gradients: Mapping[int, torch.Tensor], shapes: _Shapes) -> dict[int, torch.Tensor]:
        return {
            number: self._whole(gradients[number], shapes[number]) if number < len(shapes) else gradients[number]
            for number in sorted(gradients)
        }

    def _whole(self, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """`values`, joined where they are smaller than `shape`; with a gradient if they have one."""
        assert self.group is not None
        dim = _smaller(values.shape, shape)
        if dim is None:
            return values
        sizes = self._sizes(values, dim)
        padded = list(values.shape)
        padded[dim] = max(sizes)
        row = values.new_zeros(padded)
        row.narrow(dim, 0, values.shape[dim]).copy_(values.detach())
        rows = zip(self.group.gather(row), sizes, strict=True)
        joined = torch.cat([found.narrow(dim, 0, size) for found, size in rows], dim)
        return joined.requires_grad_(values.requires_grad)

    def _sizes(self, values: torch.Tensor, dim: int) -> list[int]:
        """Of the slices of all ranks along a dimension."""
        assert self.group is not None
        own = torch.tensor([values.shape[dim]], device=values.device)
        return [int(size) for size in self.group.gather(own)]


def cuts_of(model: torch.nn.Module) -> dict[str, Cut]:
    """How the parameters that are cut are, by name."""
    found = ((name, cut(parameter)) for name, parameter in model.named_parameters())
    return {name: how for name, how in found if how is not None}


def _smaller(own: torch.Size, whole: torch.Size) -> int | None:
    """The dimension in which a tensor is a slice; None where it is whole, or another tensor."""
    if len(own) != len(whole):
        return None
    found = [dim for dim, (size, of_whole) in enumerate(zip(own, whole, strict=True)) if size != of_whole]
    return found[0] if len(found) == 1 and own[found[0]] < whole[found[0]] else None


def _is_float(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.is_floating_point()


def _floats(tree: Any) -> list[torch.Tensor]:
    return [item for item in tree_leaves(tree) if _is_float(item)]


def _shapes(tree: Any) -> list[torch.Size]:
    return [item.shape for item in _floats(tree)]
