"""Whole inputs, outputs and optimizer states of modules whose matrices ranks share, to compare with a single rank's.

A rank has some heads of an attention and some inner values of an MLP. Which tensors are such slices, and along which
dimension, follows from the reference's pass, whose tensors in the same places have other shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from modeling.tensor_parallel import cut
from tools.parity.recompute import Call, leaves_of, map_floats
from training.distributed import TensorGroup
from training.engine import Engine
from training.engine.tensor_slices import gathered, joined, slice_group
from training.engine.tensors import shape_of, shard_of

_Shapes = Sequence[torch.Size]


class Slices:
    """Joins the slices of a module that ranks of a group have. Each method that joins is a collective of the group."""

    def __init__(self, group: TensorGroup | None) -> None:
        """group: None if each rank has whole matrices; then nothing needs joining."""
        self.group = group
        self.given: dict[str, tuple[int, list[int]]] = {}
        """Modules whose input is a slice, to its dimension and the sizes of all slices."""
        self._inputs: dict[str, _Shapes] = {}
        self._outputs: dict[str, _Shapes] = {}

    @contextmanager
    def of_reference(self, reference: torch.nn.Module) -> Iterator[None]:
        """Context manager around a pass of the reference on the same batch."""
        with ExitStack() as stack:
            for name, module in reference.named_modules() if self.group is not None else ():

                def hook(_: Any, args: Any, kwargs: Any, output: Any, name: str = name) -> None:
                    self._inputs.setdefault(name, _shapes((args, kwargs)))
                    self._outputs.setdefault(name, _shapes(output))

                stack.enter_context(module.register_forward_hook(hook, with_kwargs=True))
            yield

    def call(self, call: Call) -> Call:
        """A call with everything whole: its own tensors, those of the calls inside, and all their gradients.

        Tensors that had changed since the call still count as changed.
        """
        if self.group is None:
            return call
        inputs, outputs = self._inputs.get(call.name, ()), self._outputs.get(call.name, ())
        floats = leaves_of((call.args, call.kwargs))
        if call.name not in self.given and inputs and floats:
            dim = _smaller(floats[0].shape, inputs[0])
            if dim is not None:
                self.given[call.name] = dim, self._sizes(floats[0], dim)
        args, kwargs = self._tree((call.args, call.kwargs), inputs)
        found = replace(
            call,
            args=args,
            kwargs=kwargs,
            output=self._tree(call.output, outputs),
            inside=[self.call(inner) for inner in call.inside],
            came=self._numbered(call.came, outputs),
            made=self._numbered(call.made, inputs),
        )
        found.versions = found.now() if call.versions == call.now() else []
        return found

    def _tree(self, tree: Any, shapes: _Shapes) -> Any:
        if len(leaves_of(tree)) != len(shapes):
            return tree
        left = iter(shapes)
        return map_floats(lambda item: self._whole(item, next(left)), tree)

    def _numbered(self, gradients: Mapping[int, torch.Tensor], shapes: _Shapes) -> dict[int, torch.Tensor]:
        return {
            number: self._whole(gradients[number], shapes[number]) if number < len(shapes) else gradients[number]
            for number in sorted(gradients)
        }

    def _whole(self, values: torch.Tensor, shape: torch.Size) -> torch.Tensor:
        """`values`, joined if they are smaller than `shape`; with a gradient if they have one."""
        assert self.group is not None
        dim = _smaller(values.shape, shape)
        if dim is None:
            return values
        whole = gathered(self.group, values.detach(), dim, self._sizes(values, dim))
        return whole.requires_grad_(values.requires_grad)

    def _sizes(self, values: torch.Tensor, dim: int) -> list[int]:
        """Sizes of all ranks' slices along a dimension."""
        assert self.group is not None
        own = torch.tensor([values.shape[dim]], device=values.device)
        return [int(size) for size in self.group.gather(own)]


def _smaller(own: torch.Size, whole: torch.Size) -> int | None:
    """The dimension in which a tensor is a slice; None if it is whole, or another tensor."""
    if len(own) != len(whole):
        return None
    found = [dim for dim, (size, of_whole) in enumerate(zip(own, whole, strict=True)) if size != of_whole]
    return found[0] if len(found) == 1 and own[found[0]] < whole[found[0]] else None


def _shapes(tree: Any) -> list[torch.Size]:
    return [item.shape for item in leaves_of(tree)]


def whole_state(engine: Engine, parameter: torch.nn.Parameter, name: str) -> torch.Tensor:
    """A copy of one of the optimizer's state tensors, FP32, in the parameter's shape; zero before the first update.

    DeepSpeed's own getter is linked too late for a first step at ZeRO-1 and 2.
    """
    shape, how = shape_of(parameter), cut(parameter)
    group = engine.world.tensor or slice_group(parameter, engine.world)
    longest = shape.numel() if how is None else shape.numel() // shape[how.dimension] * max(how.sizes)
    slices = torch.zeros(group.size if group else 1, longest, device=engine.world.device)
    own = slices[group.rank if group else 0][: shape.numel()]
    shard = shard_of(engine, parameter)
    held = shard.states(engine) if shard is not None else {}
    if shard is not None and name in held:
        own[shard.start : shard.start + shard.length] = held[name]
    if engine.stage > 0:
        engine.world.sum(slices)
    return joined(own.view(shape), parameter, engine.world)
