"""A rank that dies or stands still is named by the others, and they stop within a bounded time.

Without this they learn of it from a failed collective, which names an address at best (gloo), or not before its
time-out (NCCL, whose watchdog then ends the process without a Python exception). Here every rank watches the processes
of its own machine through the kernel, and hears of those of other machines through the store of the process group and
through a connection with rank 0, which also tells when a machine has gone.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, cast

import torch.distributed as dist

from config.cli import CONFIG_ERROR, DIVERGED, DONE, LOST, PREEMPTED, REPOSITORY, UNSAVED
from training.distributed import Place
from training.watchdog.links import Links
from training.watchdog.process import Member, MemoryKills, exit_status, obituary

GRACE_SECONDS = 10.0
"""How long the main thread has to stop by itself once a rank is lost; then the process ends where it stands."""
BEAT_SECONDS = 5.0
"""How often a rank tells the store that it is there, and asks whether one is lost."""
SILENCE_SECONDS = 60.0
"""After how long a rank that stands still is spoken of. It may wake up, so nobody ends before a collective does."""
_LEFT = "left"  # in place of the number of a beat: it is done, and waits for the others to be

# exit codes that may be about to be ours as well; None is not known
_SHARED = (None, DONE, CONFIG_ERROR, DIVERGED, LOST, UNSAVED, PREEMPTED)
_SIGNS_OF_A_FAILED_COLLECTIVE = ("gloo", "NCCL", "Connection", "TCPStore", "Broken pipe", "Timed out waiting")


class LostRank(Exception):
    """The run cannot go on because of another rank. The line that names it has been printed."""


@contextmanager
def watched(place: Place) -> Iterator[None]:
    """Watch the other ranks while the body runs, and leave it together with them. A collective at both ends.

    Raises LostRank in place of a failed collective that another rank is to blame for. Any other exception is ours and
    passes with its traceback.
    """
    watch = Watch(place)
    try:
        yield
        watch.close()
        place.wait_for_all()  # nobody is missed who leaves while another one still writes its report
    except Exception as error:
        line = watch.blame() if _of_a_collective(error) else None
        if line is None:
            watch.confess(error)
            raise
        watch.tell(line)
        raise LostRank(line) from error
    finally:
        watch.close(well=False)


class Watch:
    """Watches the other ranks from two threads: their processes on this machine, and the store for those elsewhere."""

    def __init__(self, place: Place) -> None:
        """A collective: the ranks tell each other which processes they are."""
        self._me = Member.here(place.rank)
        members: list[Member] = place.gather_objects(self._me)
        self._others = [member for member in members if member.rank != place.rank]
        self._near = [member for member in self._others if member.machine == self._me.machine]
        self._kills = MemoryKills.now()
        self._line = ""
        self._told = False
        self._lock = threading.Lock()
        self._known = threading.Event()
        self._over = threading.Event()
        self._main = threading.main_thread().ident
        now = time.monotonic()
        # Rank -> what it last told the store, and when that changed: the number of its beat, where its main thread is.
        self._beats = {member.rank: ("", now) for member in self._others}
        self._places = {member.rank: ("at its start", now) for member in self._others}
        self._spoken_of: set[int] = set()
        self._store: Any = None
        self._links: Links | None = None
        if self._others:
            if len({member.machine for member in members}) > 1:
                self._links = Links(place, self._me, self._others, ended=self._hear_end, gone=self._lose)
            # A connection of its own, which never waits for training's; and a name of its own, since torchrun over
            # several machines keeps a store through a restart, with what was said of those who died.
            store = cast(Any, dist.distributed_c10d._get_default_store()).clone()
            self._store = dist.PrefixStore(place.from_main(os.urandom(8).hex()), store)
            self._store.set(f"beat/{self._me.rank}", "0 at its start")  # whoever stops now has been heard of once
            for work in (self._watch_near, self._watch_store):
                threading.Thread(target=work, daemon=True).start()

    def close(self, *, well: bool = True) -> None:
        """Stop watching: from now on a rank may leave. well: this one leaves as agreed."""
        self._over.set()
        if self._links is not None:
            self._links.close(well=well)

    def tell(self, line: str) -> None:
        """Print the line that names the lost rank, once; it is out when this returns, whichever thread printed it."""
        with self._lock:
            if not self._told:
                _say(f"error: {line}")
            self._told = True

    def blame(self) -> str | None:
        """The line that says which rank a collective failed for; None when the others are well as far as one can see.

        Takes up to 15 seconds, in which what others know still comes in.
        """
        ends = time.monotonic() + 3 * BEAT_SECONDS * bool(self._others)
        self._known.wait(BEAT_SECONDS / 5 * bool(self._others))  # the watching thread knows how it ended, we need not
        while not self._line and time.monotonic() < ends:
            for member in self._near:
                if not member.alive:
                    self._lose(obituary(member, exit_status(member), self._kills))
            self._known.wait(0.1)
        if self._line:
            return self._line
        found = self._standing_still() or self._elsewhere()
        return f"{'; '.join(found)}; {self._stops}" if found else None

    def confess(self, error: Exception) -> None:
        """Let the others know that this rank is to blame, long before its process is gone."""
        if self._store is not None and not self._line:
            with suppress(RuntimeError):
                self._store.set("lost", f"{self._me} stopped: {type(error).__name__}: {str(error)[:200]}")

    def _watch_near(self) -> None:
        """Wait for the end of any process of this machine. The kernel wakes us in time to still read its status."""
        poller = select.poll()
        watched: dict[int, Member] = {}
        standing: dict[int, float] = {}
        for member in self._near:
            with suppress(OSError):  # a kernel before 5.3, or it has gone already: the collectives will tell
                handle = os.pidfd_open(member.pid)
                watched[handle] = member
                poller.register(handle, select.POLLIN)
        while not self._over.is_set():
            for handle, _ in poller.poll(1000):
                member = watched.pop(handle)
                status = exit_status(member, handle)
                poller.unregister(handle)
                os.close(handle)
                if not self._over.is_set():
                    self._lose(obituary(member, status, self._kills), certain=status not in _SHARED)
            for member in watched.values():
                self._look_at(member, standing)

    def _look_at(self, member: Member, standing: dict[int, float]) -> None:
        """Say once that a process of this machine has stood still for long; forget it when it goes on."""
        why = member.standstill
        if why is None:
            standing.pop(member.rank, None)
        elif time.monotonic() - standing.setdefault(member.rank, time.monotonic()) > SILENCE_SECONDS:
            standing[member.rank] = float("inf")
            _say(f"{member} has been {why} for {SILENCE_SECONDS:.0f} s; rank {self._me.rank} waits for it")

    def _watch_store(self) -> None:
        """Say where this rank is, and hear what the others know. Rank 0 or its launcher keeps the store."""
        beat = 0
        while not self._over.is_set():
            beat += 1
            with suppress(RuntimeError):  # the store may be what was lost
                self._exchange(beat)
            self._over.wait(BEAT_SECONDS)
        with suppress(RuntimeError):
            self._store.set(f"beat/{self._me.rank}", _LEFT)

    def _exchange(self, beat: int) -> None:
        store = self._store
        store.set(f"beat/{self._me.rank}", f"{beat} {_innermost(self._main)}")
        if store.check(["lost"]):
            told = store.get("lost").decode()
            if not told.startswith(f"{self._me} "):
                self._lose(told, certain=False, publish=False)
        keys = [f"beat/{member.rank}" for member in self._others]
        if not store.check(keys):
            return
        now = time.monotonic()
        for member, said in zip(self._others, store.multi_get(keys), strict=True):
            number, _, where = said.decode().partition(" ")
            if self._beats[member.rank][0] != number:
                self._beats[member.rank] = (number, now)
                self._spoken_of.discard(member.rank)
            if self._places[member.rank][0] != where:
                self._places[member.rank] = (where, now)
            silent = now - self._beats[member.rank][1] > SILENCE_SECONDS and number != _LEFT
            if silent and member not in self._near:
                self._speak_of(member)

    def _speak_of(self, member: Member) -> None:
        """Say once that a rank of another machine is silent, though the machine is there: its connection stands."""
        if member.rank not in self._spoken_of and not self._line:
            self._spoken_of.add(member.rank)
            _say(
                f"{member} has been silent for {SILENCE_SECONDS:.0f} s, stopped or too busy to run Python; "
                f"rank {self._me.rank} waits for it"
            )

    def _hear_end(self, text: str, status: int | None) -> None:
        """A rank of another machine has ended."""
        if status is None or status > 0:  # it may have said why, or a rank of its machine may know; the store tells
            self._known.wait(1.5 * BEAT_SECONDS)
        if not self._over.is_set():
            self._lose(text, certain=status not in _SHARED)

    def _lose(self, text: str, *, certain: bool = True, publish: bool = True) -> None:
        """The first rank that is lost is the one to name: those after it may only have followed."""
        with self._lock:
            if self._line:
                return
            self._line = f"{text}; {self._stops}"
        self._known.set()
        threading.Thread(target=self._end, args=(certain,), daemon=True).start()
        if publish and self._store is not None:
            with suppress(RuntimeError):
                self._store.set("lost", text)

    def _end(self, certain: bool) -> None:
        """End this process, whatever its main thread waits for."""
        if not certain and self._over.wait(GRACE_SECONDS / 2):
            return
        signal.alarm(int(2 * GRACE_SECONDS))  # for when not even this thread runs
        self.tell(self._line)
        time.sleep(GRACE_SECONDS)
        os._exit(LOST)

    @property
    def _stops(self) -> str:
        return f"rank {self._me.rank} stops, exit code {LOST}; start the run again to go on from its newest checkpoint"

    def _standing_still(self) -> list[str]:
        """A part of the line for each rank that has not been heard of for three beats."""
        found = []
        for member in self._others:
            seconds = time.monotonic() - self._beats[member.rank][1]
            why = member.standstill if member in self._near else None
            if seconds > 3 * BEAT_SECONDS:
                found.append(f"{member} has been {why or 'silent'} for {seconds:.0f} s")
        return found

    def _elsewhere(self) -> list[str]:
        """A part of the line for each rank whose main thread is not where this one's is."""
        now, mine = time.monotonic(), _innermost(self._main)
        places = [(member, *self._places[member.rank]) for member in self._others]
        return [f"{member} is {where} for {now - since:.0f} s" for member, where, since in places if where != mine]


def _of_a_collective(error: Exception) -> bool:
    if not isinstance(error, RuntimeError):  # torch has an exception of its own for some backends only
        return False
    return isinstance(error, dist.DistError) or any(sign in str(error) for sign in _SIGNS_OF_A_FAILED_COLLECTIVE)


def _innermost(thread: int | None) -> str:
    """Where in Mantissa's own code the thread is: the innermost line of it."""
    frame: FrameType | None = sys._current_frames().get(thread or 0)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(REPOSITORY) and "site-packages" not in path.parts and path != Path(__file__):
            return f"in {path.relative_to(REPOSITORY)}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "outside Mantissa's code"


def _say(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
