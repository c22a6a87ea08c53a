"""Heartbeats of many ranks in one store: their cost is linear in the ranks, and what ranks say of others holds."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from config.machine.members import Member
from training.distributed import World
from training.watchdog import heartbeats
from training.watchdog.heartbeats import LEFT, LISTED, Heartbeats

BEAT, SILENCE = 5.0, 60.0


class _Counting:
    """A store that counts requests, keys and bytes."""

    def __init__(self, store: Any) -> None:
        self._store, self.counts = store, Counter[str]()

    def set(self, key: str, value: str) -> None:
        self.counts.update(requests=1, keys=1, bytes=len(value))
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        return self.multi_get([key])[0]

    def check(self, keys: list[str]) -> bool:
        self.counts.update(requests=1, keys=len(keys))
        return bool(self._store.check(keys))

    def multi_get(self, keys: list[str]) -> list[bytes]:
        values: list[bytes] = self._store.multi_get(keys)
        self.counts.update(requests=1, keys=len(keys), bytes=sum(map(len, values)))
        return values


class _World(World):
    """One of many ranks in one process; rank 0 is made first."""

    said: Any = None

    def from_main(self, value: Any) -> Any:
        """The answer of rank 0."""
        if self.is_main:
            _World.said = value
        return _World.said


class Ranks:
    """All ranks of a world, whose clock the test moves."""

    def __init__(self, count: int, monkeypatch: pytest.MonkeyPatch, *, machines: int = 1) -> None:
        self.now = 1000.0
        monkeypatch.setattr(heartbeats.time, "monotonic", lambda: self.now)
        here, store = Member.here(0), dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        size = -(-count // machines)
        members = [replace(here, rank=rank, machine=f"machine {rank // size}") for rank in range(count)]
        self.silent: list[tuple[int, int]] = []
        self.ranks = []
        for rank in range(count):
            world = _World(rank, count, rank, torch.device("cpu"))

            def told(member: Member, by: int = rank) -> None:
                self.silent.append((by, member.rank))

            seconds = {"beat_seconds": BEAT, "silence_seconds": SILENCE}
            self.ranks.append(Heartbeats(world, members, store, told, **seconds))

    def beat(self, number: int, lines: dict[int, str] | None = None, without: tuple[int, ...] = ()) -> None:
        """A beat of all ranks but those; lines: of ranks whose main threads are not in step.py."""
        self.now += BEAT
        for rank, beats in enumerate(self.ranks):
            if rank not in without:
                beats.write(number, (lines or {}).get(rank, "in step.py:7 wait"))
                beats.read()

    def look(self) -> None:
        """Read the survey on every rank, as when a collective has failed on all."""
        for beats in self.ranks:
            beats.read_survey()


def cost(count: int, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """The store's traffic for one beat of all ranks, each at a different source line."""
    ranks = Ranks(count, monkeypatch, machines=count // 8)
    lines = {rank: f"in step.py:{rank:04} wait" for rank in range(count)}
    ranks.beat(1, lines)
    counting = [_Counting(beats.store) for beats in ranks.ranks]
    for beats, store in zip(ranks.ranks, counting, strict=True):
        beats.store = store
    ranks.beat(2, lines)
    return sum((store.counts for store in counting), Counter[str]())


def test_a_beat_costs_each_rank_the_same_for_any_number_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for count in (16, 64, 256):
        found, machines = cost(count, monkeypatch), count // 8
        assert found["requests"] == 2 * count + machines + 2  # rank 0 reads all beats, and writes the survey
        assert found["keys"] == 3 * count + machines + 1
        assert found["bytes"] < count * 100 + (machines + 1) * LISTED * 100


def test_ranks_that_are_silent_or_elsewhere_are_named_to_all(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(40, monkeypatch, machines=5)
    for number in range(1, 7):  # rank 0 sees a beat of the others at its own next one
        ranks.beat(number, {7: "in data.py:3 read"}, without=(33,) if number > 2 else ())
    ranks.look()
    ranks.now += 1
    for rank in (0, 1, 39):
        (line,) = ranks.ranks[rank].at_other_lines("in step.py:7 wait")
        assert line.startswith("rank 7 (pid ") and line.endswith("is in data.py:3 read for 21 s")
        assert ranks.ranks[rank].silent_members() == []  # 33 is, for three beats and no more
    ranks.beat(7, {7: "in data.py:3 read"}, without=(33,))
    ranks.look()
    for rank in (0, 1, 39):
        (line,) = ranks.ranks[rank].silent_members()
        assert line.startswith("rank 33 (pid ") and line.endswith("has been silent for 21 s")
    others = ranks.ranks[7].at_other_lines("in data.py:3 read")
    assert len(others) == LISTED - 1 and all("is in step.py:7 wait for" in text for text in others)


def test_of_a_silent_rank_rank_0_speaks_once_and_of_rank_0_one_rank_a_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(8, monkeypatch, machines=4)
    for number in range(1, 20):
        ranks.beat(number, without=(5,) if number > 1 else ())
    assert ranks.silent == [(0, 5)]
    ranks.beat(20)
    for number in range(21, 40):
        ranks.beat(number, without=(5,))
    assert ranks.silent == [(0, 5)] * 2, "it was back, and is silent again"
    ranks.silent.clear()
    for number in range(40, 60):
        ranks.beat(number, without=(0,))
    assert ranks.silent == [(2, 0), (4, 0), (6, 0)]
    ranks.look()
    ranks.now += 3 * BEAT + 1
    ranks.look()
    assert ranks.ranks[3].silent_members()[0].startswith("rank 0 (pid ")
    assert ranks.ranks[1].silent_members(), "on its own machine it is named as well"


def test_a_rank_that_is_done_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(4, monkeypatch, machines=4)
    ranks.beat(1)
    ranks.ranks[3].write(LEFT, "at its end")
    for number in range(2, 20):
        ranks.beat(number, without=(3,))
    ranks.ranks[0].write(LEFT, "at its end")
    for number in range(20, 40):
        ranks.beat(number, without=(0, 3))
    assert ranks.silent == []
    assert [ranks.ranks[rank].silent_members() for rank in (1, 2)] == [[], []]
