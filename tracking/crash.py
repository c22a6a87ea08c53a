"""The `run_end` of a run that did not end by itself, written by whichever rank is left.

Any rank may write it, straight into `events.jsonl`: rank 0, which has the record, may be the one that is gone. Sinks
that follow the file, such as wandb's, have it from there.
"""

import time
from pathlib import Path

from config.errors import UserError
from config.redact import Redactor
from tracking.file_lock import exclusive_lock
from tracking.jsonl import JsonlSink
from tracking.status import newest_session

CRASHED = "crashed"
"""Status of such a `run_end`."""
_WAIT_SECONDS = 2.0
"""Seconds that a rank waits for another one that looks and writes, which may be stuck."""


class Crash:
    """Writes the end of a session that began after this object was made, once, whichever ranks try."""

    def __init__(self, events: Path, rank: int) -> None:
        """rank: this process's, which the event names as its writer."""
        self._events, self._rank, self._opened = events, rank, time.time()

    def write(self, cause: str, exit_code: int) -> bool:
        """Write it, unless the session has an end, or has not begun. cause: in words, one line. Raises nothing.

        Returns whether it was written. False also where this rank does not see the run folder.
        """
        if not self._events.is_file():
            return False
        try:
            with exclusive_lock(self._events, _WAIT_SECONDS):
                end, newest = newest_session(self._events)
                if end is not None or newest is None or newest["time"] < self._opened:
                    return False
                where = {"step": newest["step"], "time": time.time(), "tokens": newest["tokens"]}
                reason = Redactor().text(" ".join(cause.split()))
                how = {"status": CRASHED, "exit_code": exit_code, "reason": reason, "written_by_rank": self._rank}
                sink = JsonlSink(self._events)
                try:
                    sink.write({"event": "run_end", **where, **how})
                finally:
                    sink.close()
                return True
        except (OSError, UserError):  # the disk is full, or the folder is on another machine: nobody can be told
            return False
