"""Write the `run_end` of a run that did not end cleanly, from any surviving rank.

Any rank may write it directly into `events.jsonl`, because rank 0, which owns the record, may be the one that died.
Sinks that follow the file, such as wandb's, read it from there.
"""

import time
from contextlib import closing
from pathlib import Path

from config.errors import UserError
from config.redact import Redactor
from tracking.file_lock import exclusive_lock
from tracking.jsonl import JsonlSink
from tracking.status import newest_session

CRASHED = "crashed"
"""Status of such a `run_end`."""
_WAIT_SECONDS = 2.0
"""Seconds to wait for another rank that holds the lock and may be stuck."""


class Crash:
    """Writes the end of a session that began after this object was created; only the first rank to try succeeds."""

    def __init__(self, events: Path, rank: int) -> None:
        """rank: rank of this process, recorded as the writer of the event."""
        self._events, self._rank, self._opened = events, rank, time.time()

    def write(self, cause: str, exit_code: int) -> bool:
        """Write it unless the session has already ended or not begun. cause: human-readable. Never raises.

        Returns whether it was written; False also if this rank cannot see the run folder.
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
                with closing(JsonlSink(self._events)) as sink:
                    sink.write({"event": "run_end", **where, **how})
                return True
        except (OSError, UserError):  # the disk is full, or the folder is on another machine: nothing can be recorded
            return False
