"""Compute time of a step on this rank, excluding waits for other ranks, to find the slowest; and peak memory.

Forward passes at ZeRO 0 to 2 have no collective: a slow rank shows there and in its wait for data. At ZeRO-3 parameters
are gathered inside the forward pass, where the other ranks wait too, which partly hides a slow rank.
"""

import resource
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from config.machine.processes import peak_resident_bytes

RANKS_LISTED = 16
"""Largest number of ranks for which every rank's number is recorded."""


class WorkTime:
    """Sums the time spent inside `measured`. Does not synchronize: on CUDA it is the time of the previous step."""

    def __init__(self, device: torch.device) -> None:
        self._on_cuda = device.type == "cuda"
        self._seconds = 0.0
        self._pairs: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._before: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Context whose time counts."""
        if not self._on_cuda:
            started = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - started
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self._pairs.append((begin, end))

    def take(self) -> float:
        """Seconds since the last call; on CUDA between the two calls before, whose work the device has finished."""
        if not self._on_cuda:
            seconds, self._seconds = self._seconds, 0.0
            return seconds
        done, self._before, self._pairs = self._before, self._pairs, []
        return sum(start.elapsed_time(end) for start, end in done) / 1e3


def by_rank(*, memory_bytes: Sequence[float], work_seconds: Sequence[float]) -> dict[str, Any]:
    """Both measures of a step by rank, as a step event has them: to the byte and to the microsecond."""
    return {
        "memory_bytes": _listed([int(size) for size in memory_bytes]),
        "work_seconds": _listed([round(seconds, 6) for seconds in work_seconds]),
    }


def _listed(values: list[Any]) -> list[Any] | dict[str, Any]:
    """All values in small runs; in large ones least, median, most and the rank that has the most."""
    if len(values) <= RANKS_LISTED:
        return values
    most = max(values)
    return {"least": min(values), "median": statistics.median(values), "most": most, "rank": values.index(most)}


def forget_peak_memory(device: torch.device) -> None:
    """Reset the peak. Raises OSError if the system does not allow it (Linux does)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # proc(5)


def peak_memory_bytes(device: torch.device) -> int:
    """Peak so far in bytes: allocated device memory, or the resident set on a CPU. No device sync."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    # the fallback cannot be reset, and counts what started this process, up to the exec
    return peak_resident_bytes("self") or resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
