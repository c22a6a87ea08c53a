"""Recompute as few blocks as a memory budget allows: `model.activation_checkpointing = budget`.

The tensors that autograd saves are counted in a forward pass of one micro-batch, once with no block recomputed and once
with all. Tensors saved inside a block are counted and released, so that counting needs no more memory than a pass
without gradients. A storage counts once, however many views of it are saved; parameters and buffers do not count.

The peak of a choice is the larger of two amounts: what is held when the backward pass begins, and what is held while a
block is recomputed, which is all that was kept up to that block plus what the block keeps when it is not recomputed.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from transformers import PreTrainedModel

from config.errors import UserError
from modeling.activation_checkpointing import blocks_of, recompute_blocks

GIB = 2**30
_CHECKPOINT = "_gradient_checkpointing_func"
"""Attribute of a block through which transformers calls torch's checkpoint function."""


@dataclass(frozen=True)
class Saved:
    """Activations that one forward pass saves for its backward pass."""

    before: int
    """[bytes] Saved before the first block begins."""
    blocks: tuple[int, ...]
    """[bytes] Saved in each block, including its input unless the previous block saved it."""
    after: int
    """[bytes] Saved elsewhere: the final norm, logits and the loss."""

    @property
    def total(self) -> int:
        """[bytes] Held when the backward pass begins."""
        return self.before + sum(self.blocks) + self.after


@dataclass(frozen=True)
class Choice:
    """Which blocks are recomputed, and the resulting memory."""

    recomputed: tuple[int, ...]
    """Indices of blocks."""
    peak: int
    """[bytes] Activation memory without parameters, counted with these blocks recomputed."""
    text: str
    """One line to log."""


def recompute_within_budget(
    model: PreTrainedModel,
    gib: float,
    *,
    forward: Callable[[], Any],
    largest: Callable[[Sequence[int]], list[int]] = list,
) -> Choice:
    """Recompute the fewest blocks, spread evenly, that keep peak activations within `gib` GiB. Raises UserError.

    The model must have activation checkpointing enabled. forward: runs one micro-batch as in training, loss included;
    the random state is preserved. largest: elementwise maximum over ranks, so that all ranks choose alike.
    """
    blocks = blocks_of(model)

    def count(chosen: Sequence[int]) -> Saved:
        recompute_blocks(blocks, chosen)
        saved = count_saved(model, forward)
        before, after, *each = largest([saved.before, saved.after, *saved.blocks])
        return Saved(before, tuple(each), after)

    kept, recomputed = count(()), count(range(len(blocks)))
    budget = gib * GIB
    choices = [spread(len(blocks), number) for number in range(len(blocks) + 1)]
    expected = [peak(kept, recomputed, chosen) for chosen in choices]
    for chosen, bytes_ in zip(choices, expected, strict=True):
        if bytes_ > budget:
            continue
        needed = max(peak(kept, recomputed, chosen), peak(kept, recomputed, chosen, counted=count(chosen)))
        if needed <= budget:
            text = (
                f"activations: {len(chosen)} of {len(blocks)} blocks are recomputed; {_gib(needed)} GiB a micro-batch "
                f"of model.activation_memory_gib = {gib:g} (none recomputed: {_gib(expected[0])}, "
                f"all: {_gib(expected[-1])})"
            )
            return Choice(chosen, needed, text)
    least = min(range(len(choices)), key=lambda number: expected[number])
    raise UserError(
        f"model.activation_memory_gib = {gib:g}: the activations of a micro-batch take {_gib(expected[least])} GiB at "
        f"least, with {least} of {len(blocks)} blocks recomputed, and {_gib(recomputed.after)} of it outside of them; "
        "raise it, or lower batch.micro_size or data.sequence_length"
    )


def spread(blocks: int, number: int) -> tuple[int, ...]:
    """`number` of the indices 0 ... blocks - 1, evenly spaced, from the first."""
    return tuple(index * blocks // number for index in range(number))


def peak(kept: Saved, recomputed: Saved, chosen: Sequence[int], *, counted: Saved | None = None) -> int:
    """[bytes] Peak activation memory when the blocks `chosen` are recomputed. counted: measured for this choice."""
    each = tuple(recomputed.blocks[index] if index in chosen else whole for index, whole in enumerate(kept.blocks))
    now = counted or Saved(kept.before, each, kept.after)
    return max(now.total, *(now.before + sum(now.blocks[: index + 1]) + kept.blocks[index] for index in chosen), 0)


def count_saved(model: PreTrainedModel, forward: Callable[[], Any]) -> Saved:
    """Count the activations that `forward`, a training pass with gradients, saves. No backward pass can follow it."""
    devices = [device for device in {p.device for p in model.parameters()} if device.type == "cuda"]
    with torch.random.fork_rng(devices), _Counter(model) as counter:
        forward()
    return Saved(counter.bytes[-1], tuple(counter.bytes[: len(counter.blocks)]), counter.bytes[-2])


class _Counter:
    """Sums the storages that autograd saves, by block. `bytes`: one entry a block, then after and before all blocks."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.blocks = blocks_of(model)
        self.bytes = [0] * (len(self.blocks) + 2)
        inside = {id(tensor) for block in self.blocks for tensor in _own(block)}
        elsewhere = [tensor for tensor in _own(model) if id(tensor) not in inside]
        self._persistent = [*map(_own, self.blocks), elsewhere, elsewhere]
        self._current = -1
        # A weak reference keeps the address of a freed storage from being reused.
        self._seen: set[StorageWeakRef] = set()
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        for index, block in enumerate(self.blocks):
            self._undo.callback(block.register_forward_pre_hook(partial(self._be_in, index)).remove)
            self._undo.callback(block.register_forward_hook(partial(self._be_in, -2)).remove)
            own: dict[str, Any] = vars(block)
            if _CHECKPOINT in own:
                self._undo.callback(own.update, {_CHECKPOINT: own[_CHECKPOINT]})
                own[_CHECKPOINT] = self._inside(index, own[_CHECKPOINT])
        hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda packed: packed)
        self._undo.enter_context(hooks)
        return self

    def __exit__(self, *error: Any) -> None:
        self._undo.close()

    def _inside(self, index: int, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a block's checkpoint function, which saves its input and, before transformers 5.20 or so, runs hooks."""

        def checkpoint(*args: Any, **kwargs: Any) -> Any:
            self._current = index
            output = function(*args, **kwargs)
            self._current = -2
            return output

        return checkpoint

    def _be_in(self, index: int, *_: Any) -> None:
        self._current = index

    def _pack(self, tensor: torch.Tensor) -> torch.Tensor | None:
        storage = tensor.untyped_storage()
        reference = StorageWeakRef(storage)
        persistent = any(item.untyped_storage()._cdata == storage._cdata for item in self._persistent[self._current])
        if not persistent and reference not in self._seen:
            self._seen.add(reference)
            self.bytes[self._current] += storage.nbytes()
        return None if self._current >= 0 else tensor  # a chunked loss runs its own backward pass


def _own(module: torch.nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


def _gib(size: float) -> str:
    """A size in GiB with three significant digits, rounded up."""
    digits = 2 - math.floor(math.log10(size / GIB)) if size else 0
    return f"{math.ceil(size / GIB * 10**digits) / 10**digits:g}"
