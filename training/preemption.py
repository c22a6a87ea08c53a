"""Turn a stop signal or a time limit into a flag, so that the run can save first."""

import math
import signal
import time
from types import FrameType


class Preemption:
    """SIGTERM, SIGUSR1 and a time limit as a flag. The ranks agree on it in each step's health gather."""

    def __init__(self, max_minutes: float | None = None, *, signals: bool = True) -> None:
        """max_minutes: from now; None is no limit. signals: handle SIGTERM and SIGUSR1; else they end the process, as
        they should in a tool that saves nothing."""
        self._signalled = False
        self._ends = math.inf if max_minutes is None else time.monotonic() + 60 * max_minutes
        for number in (signal.SIGTERM, signal.SIGUSR1) if signals else ():
            signal.signal(number, self._note)

    @property
    def requested_here(self) -> bool:
        """Whether this rank must stop after the current step."""
        return self._signalled or time.monotonic() >= self._ends

    @property
    def reason(self) -> str:
        """Why the run stops, as far as this rank knows."""
        if self._signalled:
            return "asked to stop by SIGTERM or SIGUSR1"
        if time.monotonic() >= self._ends:
            return "run.max_minutes is up"
        return "another rank was asked to stop by SIGTERM or SIGUSR1"

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signalled = True
