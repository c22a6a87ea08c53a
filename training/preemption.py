"""Notice that this process was asked to stop, so that the run can save first."""

from __future__ import annotations

import signal
from types import FrameType


class Preemption:
    """Turns SIGTERM and SIGUSR1 into a flag. The ranks agree on it in the health gather of each step."""

    def __init__(self) -> None:
        self.requested_here = False
        for number in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(number, self._note)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.requested_here = True
