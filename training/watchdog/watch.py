"""A rank that dies or hangs is named by the others, and they stop within a bounded time (docs/restarts.md).

Every rank watches the processes on its own machine through the kernel, and learns about those on other machines through
the process group's store and a connection with rank 0, which also breaks when a machine is gone.
"""

import hashlib
import itertools
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from sysconfig import get_path
from types import FrameType
from typing import Any, cast

import torch.distributed as dist

from config.cli import BROKEN, CONFIG_ERROR, CRASH, DIVERGED, DONE, LOST, PREEMPTED, REPOSITORY, UNSAVED
from config.errors import WAIT_SECONDS, UserError
from config.machine.members import Member, MemoryKills, describe_exit, exit_status
from training.distributed import World
from training.watchdog.heartbeats import LEFT, Heartbeats
from training.watchdog.links import Links

GRACE_SECONDS = 10.0
"""How long the main thread has to stop by itself once a rank is lost; then the process is ended."""
BEAT_SECONDS = 5.0
"""The interval at which a rank writes a heartbeat to the store, and reads whether a rank is lost."""
SILENCE_SECONDS = 60.0
"""How long a rank hangs before that is reported. It may wake up, so no rank ends before a collective times out."""
_PYTHON = get_path("stdlib")

# exit codes with which this rank may be about to end as well; None: not known
_SHARED = (None, DONE, CONFIG_ERROR, DIVERGED, LOST, BROKEN, UNSAVED, PREEMPTED)
_SIGNS_OF_A_FAILED_COLLECTIVE = ("gloo", "NCCL", "Connection", "TCPStore", "Broken pipe", "Timed out waiting")


class LostRank(Exception):
    """The run cannot continue because of another rank. The line that names it has been printed."""


OnFailure = Callable[[str, int], object]
"""Called with the human-readable cause and this rank's exit code before the rank ends, perhaps more than once."""


@contextmanager
def watched(world: World, on_failure: OnFailure = lambda cause, exit_code: None) -> Iterator[None]:
    """Watch the other ranks while the body runs, and leave it together with them. A collective at both ends. Raises
    LostRank for the error of a collective that failed because of another rank; any other exception passes."""
    watch = Watch(world, on_failure)
    try:
        yield
        watch.close()
        world.wait_for_all()  # so that a rank that exits while another still writes its report is not lost
    except Exception as error:
        lost = watch.find_culprit(error) if _of_a_collective(error) else None
        if lost is None:
            if isinstance(error, UserError):
                error.reported = watch.is_reported(error)
            on_failure(watch.describe_failure(error), CONFIG_ERROR if isinstance(error, UserError) else CRASH)
            watch.publish_failure(error)
            raise
        watch.report(lost)
        on_failure(lost, LOST)
        raise LostRank(lost) from error
    except KeyboardInterrupt:
        on_failure(f"{watch.member} was interrupted from the keyboard (SIGINT)", 128 + signal.SIGINT)
        raise
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else CRASH
        on_failure(f"{watch.member} left by sys.exit {_raised_at(error)}", code)
        raise
    finally:
        watch.close(agreed=False)


class Watch:
    """Watches the other ranks from two threads: their processes on this machine, and the store for those elsewhere."""

    def __init__(self, world: World, on_failure: OnFailure = lambda cause, exit_code: None) -> None:
        """A collective: the ranks exchange which processes they are. on_failure: as in `watched`, from any thread."""
        self.member = self._me = Member.here(world.rank)
        self._on_failure = on_failure
        members: list[Member] = world.gather_objects(self._me)
        self._others = [member for member in members if member.rank != world.rank]
        self._local = [member for member in self._others if member.machine == self._me.machine]
        self._kills = MemoryKills.now()
        self._statuses = list[int | None]()  # of the ranks that have ended; None: not known
        self._lost = ""  # which rank is lost, and how
        self._reported = False
        self._lock = threading.Lock()
        self._known = threading.Event()
        self._over = threading.Event()
        self._main = threading.main_thread().ident
        self._beats: Heartbeats | None = None
        self._numbers = itertools.count(1)  # numbers of the heartbeats
        self._links: Links | None = None
        if self._others:
            if len({member.machine for member in members}) > 1:
                self._links = Links(
                    world, self._me, self._others, on_exit=self._on_remote_exit, on_unreachable=self._declare_lost
                )
            store = cast(Any, dist.distributed_c10d._get_default_store()).clone()  # never waits for training's requests
            seconds = {"beat_seconds": BEAT_SECONDS, "silence_seconds": SILENCE_SECONDS}
            self._beats = Heartbeats(world, members, store, self._report_silent, **seconds)
            for work in (self._watch_processes, self._watch_store):
                threading.Thread(target=work, daemon=True).start()

    def close(self, *, agreed: bool = True) -> None:
        """Stop watching: from now on a rank may exit. agreed: all ranks are done."""
        self._over.set()
        if self._links is not None:
            self._links.close(agreed=agreed)

    def report(self, lost: str) -> None:
        """Print the line that names the lost rank, once, unless a user's mistake ended it, which that rank prints. It
        is printed when this returns, by whichever thread."""
        with self._lock:
            if not self._reported and not self._is_mistake(lost):
                again = "start the run again to resume from its newest checkpoint"
                _print(f"error: {lost}; rank {self._me.rank} stops, exit code {LOST}; {again}")
            self._reported = True

    def find_culprit(self, error: Exception) -> str | None:
        """The rank that made a collective fail, human-readable; None when the others look healthy, or report this one.
        Waits up to 15 seconds for reports of other ranks; 10 on rank 0, whose end takes the store with it, so that the
        others can still read there whether it is about to report the same error."""
        ends = time.monotonic() + (3 if self._me.rank else 2) * BEAT_SECONDS * bool(self._others)
        if self._beats is not None:
            self._beat()
            self._beats.read_survey()
        self._known.wait(BEAT_SECONDS / 5 * bool(self._others))  # the watching thread may know the exit status
        while not self._lost and time.monotonic() < ends:
            self._learn_of_lost()  # before a rank that has published why is gone, and its store with it
            for member in self._local:
                if not member.alive:
                    self._declare_lost(describe_exit(member, exit_status(member), self._kills))
            self._known.wait(BEAT_SECONDS / 50)
        if self._lost:
            return None if f" stopped: {_named(error)}" in self._lost else self._lost
        if self._beats is None:
            return None
        self._beat()
        self._beats.read_survey()  # the same as before the wait if rank 0 is silent
        return "; ".join(self._beats.silent_members() or self._beats.at_other_lines(_innermost(self._main))) or None

    def describe_failure(self, error: Exception) -> str:
        """This rank's own exception, and the line that raised it."""
        return f"{self._me} stopped: {_named(error)} {_raised_at(error)}".rstrip()

    def publish_failure(self, error: Exception) -> None:
        """Tell the others about this rank's own exception, long before its process is gone."""
        if self._beats is not None and not self._lost:
            with suppress(RuntimeError):
                self._beats.store.set("lost", self.describe_failure(error))
            if not self._me.rank and _of_a_collective(error):  # the others look for its culprit in the store
                time.sleep(BEAT_SECONDS / 5)

    def is_reported(self, error: UserError) -> bool | None:
        """Whether another rank prints this mistake, which several may meet; None if that cannot be known. Only one
        prints it: rank 0, or the first to have waited a moment for rank 0 in vain. A rank that has ended with the exit
        code of a mistake has printed it, and may have taken the store with it."""
        if self._beats is None:
            return False
        key = f"error/{hashlib.sha256(str(error).encode(errors='replace')).hexdigest()}"
        ends = time.monotonic() + WAIT_SECONDS * bool(self._me.rank)
        while time.monotonic() < ends and CONFIG_ERROR not in self._statuses:
            with suppress(RuntimeError):
                if self._beats.store.check([key]):
                    break
            time.sleep(0.1)
        if CONFIG_ERROR in self._statuses:
            return True
        with suppress(RuntimeError):
            return bool(self._beats.store.add(key, 1) > 1)
        return None

    def _watch_processes(self) -> None:
        """Wait for any process on this machine to end. The kernel wakes this thread in time to read its status."""
        poller = select.poll()
        watched: dict[int, Member] = {}
        standing: dict[int, float] = {}
        for member in self._local:
            with suppress(OSError):  # a kernel before 5.3, or it has ended already: the collectives will fail
                handle = os.pidfd_open(member.pid)
                watched[handle] = member
                poller.register(handle, select.POLLIN)
        while not self._over.is_set():
            for handle, _ in poller.poll(1000):
                member = watched.pop(handle)
                status = exit_status(member, handle)
                self._statuses.append(status)
                poller.unregister(handle)
                os.close(handle)
                if not self._over.is_set():
                    self._learn_of_lost()  # it may have published why
                    self._declare_lost(describe_exit(member, status, self._kills), certain=status not in _SHARED)
            for member in watched.values():
                self._check_standstill(member, standing)

    def _check_standstill(self, member: Member, standing: dict[int, float]) -> None:
        """Report, once, that a process on this machine has hung for long; start over when it runs again."""
        why = member.standstill
        if why is None:
            standing.pop(member.rank, None)
        elif time.monotonic() - standing.setdefault(member.rank, time.monotonic()) > SILENCE_SECONDS:
            standing[member.rank] = float("inf")
            _print(f"{member} has been {why} for {SILENCE_SECONDS:.0f} s; rank {self._me.rank} waits for it")

    def _watch_store(self) -> None:
        """Write this rank's heartbeats and read what the others know. Rank 0 or its launcher hosts the store."""
        while not self._over.is_set():
            self._beat()
            self._learn_of_lost()
            self._over.wait(BEAT_SECONDS)
        self._beat(LEFT, "at its end")

    def _beat(self, number: int | str | None = None, line: str = "") -> None:
        """Write where the main thread is; on rank 0 also the survey of all ranks."""
        with suppress(RuntimeError):  # the lost rank may be the store's host
            if self._beats is not None:
                self._beats.write(number or next(self._numbers), line or _innermost(self._main))

    def _learn_of_lost(self) -> None:
        """Read from the store which rank is lost."""
        lost = ""
        with suppress(RuntimeError):  # the lost rank may be the store's host
            lost = self._beats.read() if self._beats is not None else ""
        if lost and not lost.startswith(f"{self._me} "):
            self._declare_lost(lost, certain=False, publish=False)

    def _report_silent(self, member: Member) -> None:
        """Report that a rank of another machine is silent although its connection is up."""
        if not self._lost:
            silent = f"silent for {SILENCE_SECONDS:.0f} s, stopped or too busy to run Python"
            _print(f"{member} has been {silent}; rank {self._me.rank} waits for it")

    def _on_remote_exit(self, text: str, status: int | None) -> None:
        self._statuses.append(status)
        if status is None or status > 0:  # it may have published why, or a rank of its machine may know
            self._known.wait(1.5 * BEAT_SECONDS)
        if not self._over.is_set():
            self._declare_lost(text, certain=status not in _SHARED)

    def _declare_lost(self, text: str, *, certain: bool = True, publish: bool = True) -> None:
        """Name the first rank that is lost: later ones may have ended because of it."""
        with self._lock:
            if self._lost:
                return
            self._lost = text
        self._known.set()
        threading.Thread(target=self._exit, args=(certain,), daemon=True).start()
        if publish and self._beats is not None:
            with suppress(RuntimeError):
                self._beats.store.set("lost", text)

    def _exit(self, certain: bool) -> None:
        """End this process, whatever its main thread is doing."""
        if not certain and self._over.wait(GRACE_SECONDS / 2):
            return
        mistake = self._is_mistake(self._lost)
        if mistake and self._over.wait(GRACE_SECONDS):  # this rank has met it too
            return
        signal.alarm(int(2 * GRACE_SECONDS))  # in case not even this thread runs
        self.report(self._lost)
        code = CONFIG_ERROR if mistake else LOST
        self._on_failure(self._lost, code)
        time.sleep(GRACE_SECONDS)
        os._exit(code)

    def _is_mistake(self, lost: str) -> bool:
        """Whether a rank was lost because of a user's mistake: it said so, or ended with that exit code."""
        return f" stopped: {UserError.__name__}: " in lost or CONFIG_ERROR in self._statuses


def _of_a_collective(error: Exception) -> bool:
    named = any(sign in str(error) for sign in _SIGNS_OF_A_FAILED_COLLECTIVE)
    # torch raises dist.DistError, a RuntimeError, for some backends only
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and named)


def _named(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"


def _raised_at(error: BaseException) -> str:
    """ "(in FILE:LINE function)": the innermost line of a traceback outside installed packages."""
    found = ""
    for frame in traceback.extract_tb(error.__traceback__):
        path = Path(frame.filename)
        installed = {"site-packages", "dist-packages"} & {*path.parts} or path.is_relative_to(_PYTHON)
        if not installed and path.is_file():
            shown = path.relative_to(REPOSITORY) if path.is_relative_to(REPOSITORY) else path
            found = f"(in {shown}:{frame.lineno} {frame.name})"
    return found


def _innermost(thread: int | None) -> str:
    """The innermost line of Mantissa's own code, outside this package, that the thread is in."""
    frame: FrameType | None = sys._current_frames().get(thread or 0)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        ours = path.is_relative_to(REPOSITORY) and "site-packages" not in path.parts
        if ours and path.parent != Path(__file__).parent:
            return f"in {path.relative_to(REPOSITORY)}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "outside Mantissa's code"


def _print(line: str) -> None:
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
