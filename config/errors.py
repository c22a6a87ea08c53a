"""The one exception that means: the user can fix this, and here is how."""

from __future__ import annotations

import difflib
import sys
import time
from collections.abc import Iterable

from config.printable import shown


class UserError(Exception):
    """A user's mistake in one line that names the file, the key, the value and what to do; exit code 2."""

    reported: bool | None = None
    """Whether another rank prints this same error; None if the ranks could not agree on it."""


class Unreadable(UserError):
    """Data that could not be read this time: the same command may succeed later."""


def one_line(error: BaseException, limit: int = 300) -> str:
    """An exception's text on one line, at most `limit` characters; its class name when it has no text."""
    return " ".join(str(error).split())[:limit] or type(error).__name__


def meant(name: str, known: Iterable[str], otherwise: str) -> str:
    """`did you mean ...?` with the known name nearest to `name`; `otherwise` if none resembles it."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {near[0]}?" if near else otherwise


WAIT_SECONDS = 3.0
"""Longer than a launcher takes to stop the other ranks after rank 0 has ended."""


def report_error(error: UserError, rank: int) -> None:
    """Print the error once, whichever ranks raised it: on the rank they agreed on (`training.watchdog.watch`),
    otherwise on rank 0 at once, and on any other rank if it still runs after the wait."""
    if error.reported:
        return
    if rank and error.reported is None:
        time.sleep(WAIT_SECONDS)
    print(f"error: {shown(error)}" + (f" (rank {rank})" if rank else ""), file=sys.stderr, flush=True)
