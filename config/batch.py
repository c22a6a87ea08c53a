"""How the global batch is divided among ranks and accumulation steps."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, dataclass

from config.errors import UserError
from config.schema import BatchSection, ParallelSection


@dataclass(frozen=True)
class BatchPlan:
    """One optimizer step in numbers; `global_size == micro_size * accumulation * data_ranks` always holds."""

    global_size: int
    """[sequences] Size of one optimizer step, over all ranks."""
    micro_size: int
    """[sequences] Size of one forward pass on one rank."""
    accumulation: int
    """[micro-batches] Forward and backward passes per rank in one optimizer step."""
    world_size: int
    sequence: int = 1
    """[processes] Processes that share each sequence."""
    tensor: int = 1
    """[processes] Processes that share each matrix and have the same sequences."""
    expert: int = 1
    """[processes] Processes that share the experts of each layer; each has its own sequences."""

    @property
    def sharing(self) -> int:
        """[processes] Processes that work on the same sequences together."""
        return self.sequence * self.tensor

    @property
    def data_ranks(self) -> int:
        """[groups of processes] Number of groups with their own sequences."""
        return self.world_size // self.sharing


def plan_batch(batch: BatchSection, parallel: ParallelSection, world_size: int, *, where: str) -> BatchPlan:
    """Divide the batch among `world_size` ranks.

    The ranks that share experts have to divide their number, which has no other effect. where: the file that errors
    name. Raises UserError, which says which numbers would work.
    """
    global_size, micro_size, sharing = batch.global_size, batch.micro_size, parallel.sequence * parallel.tensor
    key = "parallel.sequence" if parallel.tensor == 1 else "parallel.tensor"
    processes = f"{world_size} process{'es' if world_size > 1 else ''}"
    for name, ranks in ((key, sharing), ("parallel.expert", parallel.expert)):
        if world_size % ranks:
            numbers = _listed(divisors(world_size))
            fix = f"set it to one of {numbers}, or run on a multiple of it"
            raise UserError(f"{where}: {name} = {ranks} does not divide {processes}; {fix}")
    data_ranks = world_size // sharing
    accumulation, left_over = divmod(global_size, micro_size * data_ranks)
    if not left_over:
        return BatchPlan(global_size, micro_size, accumulation, world_size, **asdict(parallel))
    problem = (
        f"{where}: batch.global_size = {global_size} cannot be cut into micro-batches of "
        f"batch.micro_size = {micro_size} on {processes}"
    )
    if sharing > 1:
        problem += f", {sharing} to a {key.partition('.')[2]} ({key})"
    ways = []
    if global_size % data_ranks == 0:
        sizes = divisors(global_size // data_ranks)
        ways.append(f"set batch.micro_size to one of {_listed(sizes)}")
    if global_size % micro_size == 0:
        worlds = [sharing * number for number in divisors(global_size // micro_size)]
        ways.append(f"run on one of {_listed(worlds)} processes")
    unit = micro_size * data_ranks
    below, above = global_size // unit * unit, (global_size // unit + 1) * unit
    ways.append(f"set batch.global_size to {f'{below} or ' if below else ''}{above}")
    raise UserError(f"{problem}; {', or '.join(ways)}")


def refuse_sharing(batch: BatchPlan, *, but: Collection[str] = (), why: str = "") -> None:
    """Raise UserError if ranks share sequences, matrices or experts, except those in `but`. why: the reason."""
    for key, what in (("sequence", "whole sequences"), ("tensor", "whole matrices"), ("expert", "all experts")):
        ranks = getattr(batch, key)
        if ranks > 1 and key not in but:
            reason = why.format(what=what) or f"this command is verified with {what} on each rank"
            raise UserError(f"parallel.{key} = {ranks}: {reason}; set it to 1")


WHOLE_POSITIONS = "whole_position_ids"
"""Input of a micro-batch of slices of sequences: positions of the whole sequences, (micro, whole length) int64."""


def slice_length(sequence_length: int, ranks: int) -> int:
    """[tokens] Length of each rank's slice of a shared sequence; the end of the last slice may be padding."""
    return -(-sequence_length // ranks)


def divisors(number: int) -> list[int]:
    """Every positive divisor of a positive `number`, ascending."""
    low = [item for item in range(1, int(number**0.5) + 1) if number % item == 0]
    return low + [number // item for item in reversed(low) if item * item != number]


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:12])) + (", ..." if len(numbers) > 12 else "")
