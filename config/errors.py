"""The one exception that means: the user can fix this, and here is how."""

from __future__ import annotations

import sys
import time

from config.printable import shown


class UserError(Exception):
    """A mistake of the user's in one line that names the file, the key, the value and what to do; exit code 2."""

    reported: bool | None = None
    """Whether another rank prints this very error; None where the ranks could not agree on that."""


def one_line(error: BaseException, limit: int = 300) -> str:
    """An exception's text on one line, at most `limit` characters; its class name when it has no text."""
    return " ".join(str(error).split())[:limit] or type(error).__name__


WAIT_SECONDS = 3.0
"""Longer than a launcher takes to end the other ranks when rank 0 has ended."""


def report_error(error: UserError, rank: int) -> None:
    """Print the error once, whichever ranks raised it: the one that they agreed on (`training.watchdog.watch`); where
    they could not, rank 0 at once, another one if it still runs then."""
    if error.reported:
        return
    if rank and error.reported is None:
        time.sleep(WAIT_SECONDS)
    print(f"error: {shown(error)}" + (f" (rank {rank})" if rank else ""), file=sys.stderr, flush=True)
