"""Heartbeats in the process group's store: each rank writes its own, rank 0 reads them all and writes a survey whose
length does not depend on the number of ranks, so that the total work is linear in it."""

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
"""Most ranks that a survey describes, however many there are."""
LEFT = "left"
"""Replaces a beat's number once the rank is done and waits for the others."""


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
        """A collective. members: by rank. store: on its own connection, which never waits for training's. on_silent:
        called once with a rank of another machine that has written nothing for silence_seconds. beat_seconds: interval
        at which a rank writes and reads."""
        self._members, self._me = members, members[world.rank]
        self._beat_seconds, self._silence_seconds, self._on_silent = beat_seconds, silence_seconds, on_silent
        self._local = {member.rank for member in members if member.machine == self._me.machine}
        self._speaks = self._me.rank == min(self._local)  # reads rank 0's survey for its machine
        self._silent: set[int] = set()  # ranks that on_silent was called with
        now = time.monotonic()
        self._beats = [(("", now), ("", now))] * len(members)  # on rank 0: number and line of each rank, and since when
        self._survey: dict[str, Any] = {"beat": 0, "ranks": []}
        self._surveyed = now
        # A prefix, since torchrun on several machines keeps a store through a restart, with the messages about the
        # ranks that died.
        prefix = os.urandom(8).hex()
        if world.is_main:  # from the start, since reading a missing key blocks
            keys = {f"beat/{member.rank}": "0 at its start" for member in members}
            keys["survey"] = json.dumps(self._survey)
            store.multi_set([f"{prefix}/{key}" for key in keys], [*keys.values()])
        self.store: Any = dist.PrefixStore(world.from_main(prefix), store)

    def write(self, beat: int | str, line: str) -> None:
        """Write this rank's heartbeat, on rank 0 the survey too. line: the main thread's. Raises RuntimeError."""
        self.store.set(f"beat/{self._me.rank}", f"{beat} {line}")
        if self._me.rank == 0:
            self.store.set("survey", json.dumps({"beat": beat, "ranks": self._take_survey()}))

    def read(self) -> str:
        """The lost rank as published by another rank; empty while there is none. Raises RuntimeError."""
        if self._speaks:
            self.read_survey()
        return self.store.get("lost").decode() if self.store.check(["lost"]) else ""

    def read_survey(self) -> None:
        """Read rank 0's survey of all ranks: one rank per machine at every beat, others to find a culprit."""
        with suppress(RuntimeError):  # the lost rank may be the store's host
            survey = json.loads(self.store.get("survey"))
            if survey["beat"] != self._survey["beat"]:
                self._survey, self._surveyed = survey, time.monotonic()
        if self._speaks:
            self._note_silence(self._members[0], self._main_silence)

    @property
    def _main_silence(self) -> float:
        """[s] How long rank 0 has written no survey although it is not done; 0 on rank 0."""
        return (time.monotonic() - self._surveyed) * (self._me.rank != 0 and self._survey["beat"] != LEFT)

    def _take_survey(self) -> list[tuple[int, float, str, float]]:
        """(rank, seconds of silence, line, seconds at that line) of up to LISTED ranks: first those that have been
        silent for the longest, then those at lines with the fewest ranks."""
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
