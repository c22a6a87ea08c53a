"""Comparison of redundant values: those that several ranks hold, and 16-bit weights with their FP32 masters.

They are cut into chunks; each step sums the bits of some of them, and the sums ride on the gather that a step makes
anyway. Only if they differ do the ranks look for the chunk, value and bit. docs/corruption.md says how the right value
is chosen, and what is left out.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from precision.corruption import Flip, different_bits, majority, odd_ranks
from training.engine import Engine
from training.engine.flips import as_integers, bit_sum, halves
from training.engine.tensors import local_weight, own_shards, shape_of, shard_of, trainable_parameters

_CHUNKS = 1 << 16, 1 << 22
"""[values] Smallest and largest chunk: few kernel launches, and no step that has to sum a whole large matrix."""
_MOST = 8  # differing chunks that are reported; any others are repaired all the same
_WHOLE = 1 << 64


class Chunk(NamedTuple):
    """A part of a tensor that every rank holds. kind: weight, buffer, or one of the optimizer's state tensors."""

    name: str
    kind: str
    start: int
    length: int
    constant: bool  # never trained


class Copies:
    """The replicas of one rank's engine. Every method but `sums` is a collective."""

    def __init__(self, engine: Engine, *, every: int) -> None:
        """every: period in steps, in which each value is summed once."""
        self._engine, self._every = engine, every
        self._parameters = trainable_parameters(engine)
        self._chunks: list[Chunk] = []
        self._own: list[tuple[str, int, int]] = []
        self._first: torch.Tensor | None = None
        self._with_state = False

    @torch.no_grad()
    def sums(self, step: int) -> torch.Tensor:
        """(3,) float64: both halves of the sum of this step's chunks, which all ranks should have in common, and the
        number of chunks in which this rank's weights are not its rounded masters. No collective and no device sync."""
        self._cut()
        total, wrong = self._sum(_share(self._chunks, step, self._every)), self._zero()
        for name, at, length in _share(self._own, step, self._every):
            weight, rounded = self._weight_and_master(name, at, length)
            wrong = wrong + (bit_sum(weight) != bit_sum(rounded))
        return torch.stack([*halves(total).double(), wrong.double()])

    @torch.no_grad()
    def examine(self, *, repair: bool = True) -> list[Flip]:
        """The chunks that differ. repair: overwrite wrong copies wherever the right one is known."""
        self._cut()
        world = self._engine.world
        mine = torch.stack([self._sum([chunk]) for chunk in self._chunks] or [self._zero()])
        sums = gather_integers(self._engine, mine)
        differing = [row for row, values in enumerate(zip(*sums, strict=True)) if len(set(values)) > 1]
        first = gather_integers(self._engine, self._first if self._first is not None else mine)
        found = []
        for row in differing:
            unchanged = [sums[rank][row] == first[rank][row] for rank in range(world.world_size)]
            found.append(self._examine_chunk(self._chunks[row], unchanged, repair=repair))
        found += self._examine_masters()
        return found[:_MOST]

    def _cut(self) -> None:
        """Cut all values into chunks: at the start, and again once the optimizer has state."""
        engine = self._engine
        state = engine.stage == 0 and any(self._states(name) for name in list(self._parameters)[:1])
        if self._chunks and (self._with_state or not state):
            return
        self._with_state = state
        held = list(self._held())
        total = sum(values.numel() for _, _, values, _ in held)
        size = min(max(total // self._every, _CHUNKS[0]), _CHUNKS[1])
        self._chunks = [
            Chunk(name, kind, start, min(size, values.numel() - start), constant)
            for name, kind, values, constant in held
            for start in range(0, values.numel(), size)
        ]
        self._first = torch.stack([self._sum([chunk]) for chunk in self._chunks] or [self._zero()])
        self._own = []
        for name, _, shard in own_shards(engine) if engine.stage > 0 and engine.split_masters is None else ():
            if shard.flat.device == engine.world.device:
                self._own += [(name, at, min(size, shard.length - at)) for at in range(0, shard.length, size)]

    def _held(self) -> Iterator[tuple[str, str, torch.Tensor, bool]]:
        """(name, kind, values, whether it is constant) of everything that each rank holds in full."""
        engine = self._engine
        for name, parameter in engine.model.named_parameters():
            if engine.stage < 3 or getattr(parameter, "ds_persist", False):
                yield name, "weight", torch.empty(shape_of(parameter), device="meta"), not parameter.requires_grad
        for name, module in engine.model.named_modules():
            if not follows_length(module):
                for own, buffer in module.named_buffers(name, recurse=False):
                    if buffer.is_contiguous() and buffer.element_size() <= 8:
                        yield own, "buffer", buffer, True
        for name in self._parameters if engine.stage == 0 else ():
            for kind, values in self._states(name).items():
                yield name, kind, values, False

    def _states(self, name: str) -> dict[str, torch.Tensor]:
        """The optimizer's state of a parameter by kind, at ZeRO-0; empty before the first update."""
        shard = shard_of(self._engine, self._parameters[name])
        return shard.states(self._engine) if shard is not None else {}

    def _values(self, chunk: Chunk) -> torch.Tensor:
        """The chunk's values; empty if ZeRO-3 has not gathered the weight."""
        if chunk.kind == "buffer":
            whole = self._engine.model.get_buffer(chunk.name)
        else:
            weight = chunk.kind == "weight"
            whole = self._engine.model.get_parameter(chunk.name) if weight else self._states(chunk.name)[chunk.kind]
        return whole.detach().reshape(-1)[chunk.start : chunk.start + chunk.length]

    def _zero(self) -> torch.Tensor:
        return torch.zeros((), dtype=torch.int64, device=self._engine.world.device)

    def _sum(self, chunks: Sequence[Chunk]) -> torch.Tensor:
        total = self._zero()
        for chunk in chunks:
            values = self._values(chunk)
            if values.device == total.device:  # offloaded weights are whole only while a module computes
                total = total + bit_sum(values)
        return total

    def _weight_and_master(self, name: str, at: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(length,) values of this rank's part of a weight, and of its master in the weight's dtype and alignment."""
        parameter = self._parameters[name]
        shard = shard_of(self._engine, parameter)
        assert shard is not None
        weight = local_weight(parameter, shard, self._engine.stage)[at : at + length]
        per = 8 // weight.element_size()
        room = weight.storage_offset() % per
        rounded = weight.new_empty(length + room)[room:]
        rounded.copy_(shard.master(at, length))
        return weight, rounded

    def _examine_chunk(self, chunk: Chunk, unchanged: Sequence[bool], *, repair: bool) -> Flip:
        """Find the first differing value and the ranks at fault. repair: copy the chunk from a rank that is right."""
        engine = self._engine
        index = self._first_difference(chunk)
        values = [row[0] for row in gather_integers(engine, as_integers(self._values(chunk)[index : index + 1]).long())]
        width = 8 * self._values(chunk).element_size()
        right = majority(values)
        if right is None and chunk.constant:
            right = next((value for value, same in zip(values, unchanged, strict=True) if same), None)
        elif right is None and chunk.kind == "weight" and engine.stage > 0 and engine.split_masters is None:
            right = self._of_master(chunk, index)
        odd = odd_ranks(values, right)
        if right is None:
            bits = different_bits(values[0], next((value for value in values if value != values[0]), values[0]), width)
        else:
            bits = different_bits(values[odd[0]], right, width)
        repaired = repair and right is not None and len(odd) < len(values)
        flip = Flip("copies", odd, chunk.name, chunk.kind, chunk.start + index, bits, repaired)
        if flip.repaired:
            source = next(rank for rank in range(len(values)) if rank not in odd)
            engine.world.copy_from(self._values(chunk), source)
        return flip

    def _first_difference(self, chunk: Chunk) -> int:
        """Index in the chunk of the first value that differs from rank 0's on any rank."""
        mine = self._values(chunk)
        of_main = mine.clone()
        self._engine.world.copy_from(of_main, 0)
        differ = (as_integers(mine) != as_integers(of_main)).nonzero()
        return min(self._engine.world.gather_objects(int(differ[0]) if len(differ) else chunk.length))

    def _of_master(self, chunk: Chunk, index: int) -> int | None:
        """The bits of a value's rounded master, from the rank that owns it."""
        shard = shard_of(self._engine, self._parameters[chunk.name])
        at, mine = chunk.start + index, None
        if shard is not None and shard.start <= at < shard.start + shard.length:
            value = shard.master(at - shard.start, 1)[0].to(self._values(chunk).dtype)
            mine = int(as_integers(value[None])[0]) % _WHOLE
        return next((bits for bits in self._engine.world.gather_objects(mine) if bits is not None), None)

    def _examine_masters(self) -> list[Flip]:
        """Weights that are not their rounded masters, of all ranks. Called with equal replicas, so that the master is
        the one at fault, unless no other rank has a copy of the weight."""
        engine = self._engine
        mine: list[Flip] = []
        for name, at, length in self._own:
            weight, rounded = self._weight_and_master(name, at, length)
            differ = (as_integers(weight) != as_integers(rounded)).nonzero()
            if not len(differ):
                continue
            index, shard = int(differ[0]), shard_of(engine, self._parameters[name])
            assert shard is not None
            width = 8 * weight.element_size()
            bits = different_bits(int(as_integers(weight)[index]), int(as_integers(rounded)[index]), width)
            if weight.dtype == torch.bfloat16:
                bits = tuple(bit + 16 for bit in bits)  # of the FP32 number whose upper half it is
            whole = engine.world.world_size > 1 and engine.stage < 3
            what = "master" if whole else "weight or master"
            mine.append(Flip("masters", (engine.world.rank,), name, what, shard.start + at + index, bits))
        return [flip for of_rank in engine.world.gather_objects(mine[:_MOST]) for flip in of_rank]


def follows_length(module: Any) -> bool:
    """Whether the module is a rotary table that depends on the length of the rank's last input."""
    return any(kind in str(getattr(module, "rope_type", "")) for kind in ("dynamic", "longrope"))


def _share(items: Sequence[Any], step: int, every: int) -> Sequence[Any]:
    """The items that are due at a step."""
    turn = step % every
    return items[len(items) * turn // every : len(items) * (turn + 1) // every]


def gather_integers(engine: Engine, values: torch.Tensor) -> list[list[int]]:
    """values: (n,) int64 -> each rank's, by rank, modulo 2**64. A collective."""
    return [[value % _WHOLE for value in row] for row in engine.world.gather(values).tolist()]
