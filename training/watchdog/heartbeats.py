"""Heartbeats in the process group's store: each rank writes its own, rank 0 reads them all and writes one survey.

The survey is as short for any number of ranks, so the work of all is linear in their number.
"""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from config.machine.members import Member
from training.distributed import World

LISTED = 16
"""Ranks of which a survey tells, however many there are."""
LEFT = "left"
"""Replaces the number of a beat: the rank is done, and waits for the others."""


class Heartbeats:
    """The heartbeats that this rank has read; `store` also carries other messages to the ranks of this run."""

    def __init__(
        self,
        world: World,
        members: list[Member],
        store: Any,
        on_silent: Callable[[Member], object],
        *,
        beat_seconds: float,
        silence_seconds: float,
    ) -> None:
        """A collective. members: by rank. store: on a connection of its own, which never waits for training's.

        on_silent: called once with a rank of another machine that has written nothing for silence_seconds.
        beat_seconds: how often a rank writes and reads.
        """
        self._members, self._me = members, members[world.rank]
        self._beat_seconds, self._silence_seconds, self._on_silent = beat_seconds, silence_seconds, on_silent
        self._local = {member.rank for member in members if member.machine == self._me.machine}
        self._speaks = self._me.rank == min(self._local)  # of its machine, of rank 0
        self._silent: set[int] = set()  # those of which on_silent was told
        now = time.monotonic()
        self._beats = [(("", now), ("", now))] * len(members)  # of rank 0: number and line of each, and since when
        self._survey: dict[str, Any] = {"beat": 0, "ranks": []}
        self._surveyed = now
        # A prefix, since torchrun over several machines keeps a store through a restart, with the messages about the
        # ranks that died.
        prefix = os.urandom(8).hex()
        if world.is_main:  # from the start, since reading waits for a key that is not there
            keys = {f"beat/{member.rank}": "0 at its start" for member in members}
            keys["survey"] = json.dumps(self._survey)
            store.multi_set([f"{prefix}/{key}" for key in keys], [*keys.values()])
        self.store: Any = dist.PrefixStore(world.from_main(prefix), store)

    def write(self, beat: int | str, line: str) -> None:
        """This rank's heartbeat; of rank 0 the survey, too. line: where its main thread is. Raises RuntimeError."""
        self.store.set(f"beat/{self._me.rank}", f"{beat} {line}")
        if self._me.rank == 0:
            self.store.set("survey", json.dumps({"beat": beat, "ranks": self._take_survey()}))

    def read(self) -> str:
        """The lost rank, as another rank published it; empty while there is none. Raises RuntimeError."""
        if self._speaks:
            self.read_survey()
        return self.store.get("lost").decode() if self.store.check(["lost"]) else ""

    def read_survey(self) -> None:
        """Rank 0's survey of all ranks; read by one rank of each machine at every beat, by others to find a culprit."""
        with suppress(RuntimeError):  # the store's host may be what was lost
            survey = json.loads(self.store.get("survey"))
            if survey["beat"] != self._survey["beat"]:
                self._survey, self._surveyed = survey, time.monotonic()
        if self._speaks:
            self._note_silence(self._members[0], self._main_silence)

    @property
    def _main_silence(self) -> float:
        """[s] How long rank 0 has written no survey, though it is not done; 0 on rank 0."""
        return (time.monotonic() - self._surveyed) * (self._me.rank != 0 and self._survey["beat"] != LEFT)

    def _take_survey(self) -> list[tuple[int, float, str, float]]:
        """Rank, seconds for which it has been silent, where it is, for how many seconds: of the LISTED ranks that have
        been silent for the longest, then those at lines with the fewest ranks."""
        now, rows = time.monotonic(), []
        texts = self.store.multi_get([f"beat/{member.rank}" for member in self._members])
        for member, text in zip(self._members, texts, strict=True):
            number, _, line = text.decode().partition(" ")
            beat, place = self._beats[member.rank]
            beat, place = beat if beat[0] == number else (number, now), place if place[0] == line else (line, now)
            self._beats[member.rank] = (beat, place)
            silent = (now - beat[1]) * (number != LEFT)
            rows.append((member.rank, silent * (silent > 3 * self._beat_seconds), line, now - place[1]))
            self._note_silence(member, silent)
        there = Counter(line for _, _, line, _ in rows)
        return sorted(rows, key=lambda row: (-row[1], there[row[2]], -row[3]))[:LISTED]

    def _note_silence(self, member: Member, seconds: float) -> None:
        if seconds <= self._silence_seconds:
            self._silent.discard(member.rank)
        elif member.rank not in self._local | self._silent:
            self._silent.add(member.rank)
            self._on_silent(member)

    def silent_members(self) -> list[str]:
        """A clause for each other rank whose last heartbeat is more than three beats old."""
        age, found = time.monotonic() - self._surveyed, []
        silent = [(rank, seconds + age) for rank, seconds, _, _ in self._survey["ranks"] if seconds]
        for rank, seconds in [(0, self._main_silence), *silent]:
            member = self._members[rank]
            if seconds > 3 * self._beat_seconds and member is not self._me:
                why = member.standstill if rank in self._local else None
                found.append(f"{member} has been {why or 'silent'} for {seconds:.0f} s")
        return found

    def at_other_lines(self, mine: str) -> list[str]:
        """A clause for each other rank of the survey whose main thread is not at the line `mine`."""
        age = time.monotonic() - self._surveyed
        places = [(self._members[rank], line, seconds + age) for rank, _, line, seconds in self._survey["ranks"]]
        others = [row for row in places if row[0] is not self._me and row[1] != mine]
        return [f"{member} is {line} for {seconds:.0f} s" for member, line, seconds in others]
