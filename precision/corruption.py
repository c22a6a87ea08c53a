"""Flipped bits: how they are recognised, which rank is blamed, and how a repeated step is judged.

Pure decisions on numbers that all ranks share; `training/corruption/` gathers them. Rerunning a step tells the three
cases of Megatron-LM's rerun state machine apart: a *transient* fault (a different and healthy answer the second time),
a *persistent* one (the rank's answer differs from other ranks', or keeps changing), and a *numeric* event (every rank
gives the same answer bit for bit, so it comes from the model). docs/corruption.md has more.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["transient", "persistent", "numeric", "none"]


@dataclass(frozen=True)
class Flip:
    """A value that is not the correct one."""

    found_by: Literal["copies", "masters", "update"]
    """copies: replicas that differ. masters: a weight that is not its rounded master. update: an optimizer step that
    differs from the one computed in FP64."""
    ranks: tuple[int, ...]
    """The rank that holds the wrong value, or all ranks that may."""
    parameter: str
    """Name of the parameter or buffer."""
    tensor: str
    """weight, buffer, master, or one of the optimizer's state tensors."""
    index: int
    """Index of the value in the whole parameter, or in this rank's part of it (`update`)."""
    bits: tuple[int, ...] = ()
    """Positions of the wrong bits, 0 being the lowest of the mantissa; empty if unknown."""
    repaired: bool = False
    """Overwritten with the right value."""

    @property
    def text(self) -> str:
        """Human-readable finding, without the hosts."""
        bits = f", bit{'s' * (len(self.bits) > 1)} {', '.join(map(str, self.bits))}" if self.bits else ""
        *others, last = map(str, self.ranks)
        who = f"one of ranks {', '.join(others)} and {last}" if others else f"rank {last}"
        how = {
            "copies": "differs from the other ranks' value",
            "masters": "does not match the other one" if " or " in self.tensor else "does not match its copies",
            "update": "is not the result of the optimizer's rule",
        }[self.found_by]
        return f"{self.tensor} of {self.parameter} on {who} (value {self.index}{bits}) {how}"


@dataclass(frozen=True)
class Corruption:
    """A machine fault that makes a step untrustworthy, for the guard to judge."""

    what: str
    """The finding, with rank and host."""
    look_at: str
    """The advice about the machine."""
    state_is_good: bool
    """Whether masters and moments are right. If they are not, only an older checkpoint has the right ones."""


@dataclass(frozen=True)
class Reexecution:
    """Outcome of running a step again."""

    kind: Kind
    """none: the step was not suspicious, and every answer was the same."""
    ranks: tuple[int, ...]
    """Ranks that are or may be to blame; empty if none is or if it is unknown."""
    why: str
    """Human-readable reason for the verdict."""


def different_bits(a: int, b: int, width: int) -> tuple[int, ...]:
    """Positions at which two values of `width` bits differ, lowest first; a, b: read as signed or unsigned integers."""
    changed = (a ^ b) & ((1 << width) - 1)
    return tuple(bit for bit in range(width) if changed >> bit & 1)


def majority(values: Sequence[int]) -> int | None:
    """The value that more than half of `values` have; None if there is none."""
    value, count = Counter(values).most_common(1)[0]
    return value if 2 * count > len(values) else None


def odd_ranks(values: Sequence[int], right: int | None) -> tuple[int, ...]:
    """Ranks whose value is not the right one; all ranks if it is unknown. values: by rank."""
    return tuple(rank for rank, value in enumerate(values) if right is None or value != right)


def judge_reexecution(
    *,
    suspicious: bool,
    changed: Sequence[bool],
    healthy: bool,
    disagreed: Sequence[bool] | None,
    finite: Sequence[tuple[bool, bool]] = (),
    named: Sequence[bool] = (),
    signed: bool = False,
) -> Reexecution:
    """Judge a repeated step.

    suspicious: it was repeated because it looked wrong, not because a check was due. changed: by rank, whether the
    answer to its own inputs differs between the first and the last run. healthy: the last run was. disagreed: by rank
    b, whether rank b and the rank before it gave different answers to the inputs of rank b; None with a single rank.
    finite: by rank b, whether these two answers were finite. named: by rank, whether its own result before the
    reduction, its loss and if `signed` its gradients, differs between the first and the last run.
    """
    again = any(changed)
    agreed = disagreed is None or not any(disagreed)
    own = tuple(rank for rank, was in enumerate(named) if was)
    if signed and not own:  # no rank computed a different result: the network delivered a wrong part to some rank
        own = tuple(rank for rank, was in enumerate(changed) if was)
    if 1 < len(own) == len(changed):
        own = ()
    if not again and agreed:
        if not suspicious:
            return Reexecution("none", (), "the same answer bit for bit")
        who = "the same answer bit for bit, twice" + (" and on another rank" if disagreed is not None else "")
        return Reexecution("numeric", (), who)
    if again and agreed and healthy:
        return Reexecution("transient", own, "a different answer the second time")
    if again and agreed:
        return Reexecution("persistent", own, "a different answer each time, and never a healthy one")
    assert disagreed is not None, "one rank agrees with itself"
    return Reexecution("persistent", _blamed(disagreed, finite), "answers that differ from other ranks'")


def _blamed(disagreed: Sequence[bool], finite: Sequence[tuple[bool, bool]]) -> tuple[int, ...]:
    """The rank f that spoiled the answers to its own inputs and to those of rank f + 1; several if they tie."""
    ranks = len(disagreed)
    votes: Counter[int] = Counter()
    bad: Counter[int] = Counter()
    for owner, differ in enumerate(disagreed):
        if not differ:
            continue
        pair = (owner, (owner - 1) % ranks)
        votes.update(pair)
        if finite:
            bad.update(rank for rank, good in zip(pair, finite[owner], strict=True) if not good)
    if bad and len([rank for rank in bad if bad[rank] == max(bad.values())]) == 1:
        return (max(bad, key=lambda rank: bad[rank]),)
    most = max(votes.values())
    return tuple(sorted(rank for rank, count in votes.items() if count == most))
