"""Bind this process to some CPUs of the machine, and undo it for its children. Standard library only."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_before: frozenset[int] | None = None
_outcome: str | None = None


@dataclass(frozen=True)
class Binding:
    """The decision for one rank."""

    threads: int
    """Threads for CPU compute: one per core of the rank's share."""
    cpus: frozenset[int] | None
    """CPUs to bind the rank to; None: not bound."""
    reason: str
    """Why it is not bound, or what it is bound to."""
    logged: bool


def usable_cpus() -> frozenset[int]:
    """The CPUs that this process may use, ignoring the binding by `apply_binding`."""
    if _before is not None:
        return _before
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def apply_binding(binding: Binding) -> str | None:
    """Bind all threads of this process except those with their own affinity; returns a log line, also on refusal."""
    global _before, _outcome
    _outcome, logged, before = f"not bound, {binding.reason}", binding.logged, usable_cpus()
    if binding.cpus is not None:
        logged = True
        try:
            now = os.sched_getaffinity(0)
            os.sched_setaffinity(0, binding.cpus)
        except (OSError, AttributeError) as error:  # in a sandbox, or not on Linux
            _outcome = f"not bound, the system refuses: {getattr(error, 'strerror', None) or error}"
        else:
            _outcome, _before = f"bound to {binding.reason}", before
            for task in Path("/proc/self/task").glob("*"):
                with suppress(OSError):  # the thread has ended
                    if os.sched_getaffinity(int(task.name)) == now:
                        os.sched_setaffinity(int(task.name), binding.cpus)
    return f"cores: {_outcome}" if logged else None


def binding_outcome() -> str | None:
    """The result of `apply_binding` and its reason; None before it is called."""
    return _outcome


def unbind(pid: int) -> None:
    """Let a child process use all CPUs that this one could use before `apply_binding`."""
    if _before is not None:
        with suppress(OSError):
            os.sched_setaffinity(pid, _before)
