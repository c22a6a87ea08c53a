"""The parts of every command line: exit codes, Mantissa's own folder, a parser, and how a UserError ends a tool."""

from __future__ import annotations

import argparse
import io
import os
import select
import sys
from collections.abc import Callable, Mapping
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn, ParamSpec

from config.errors import UserError
from config.printable import shown

P = ParamSpec("P")

REPOSITORY = Path(__file__).resolve().parent.parent
"""Mantissa's own folder."""
DONE, CRASH, CONFIG_ERROR, DIVERGED, LOST, BROKEN, UNSAVED, PREEMPTED = 0, 1, 2, 3, 69, 71, 74, 75
"""Exit codes (docs/run-folder.md): all steps done; an uncaught exception; the config or the command line is
wrong; stopped on numerics; another rank is lost; a rank's machine computes wrongly; checkpoints cannot be written;
stopped on request."""


class Arguments(argparse.ArgumentParser):
    """An argparse parser that keeps line breaks of the description, and raises UserError instead of exiting."""

    def __init__(self, prog: str, description: str | None = None, **options: Any) -> None:
        options.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(prog, description=description, **options)

    def error(self, message: str) -> NoReturn:
        raise UserError(f"command line: {message}; see {self.prog} --help")


def is_rank_0(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether this process may print: rank 0 of a launched job, or one whose RANK is missing or not a number."""
    rank = environment.get("RANK", "0")
    return not rank.isdecimal() or int(rank) == 0


def print_any_text() -> None:
    """Print `?` for characters that the terminal's encoding lacks, instead of ending the run with an error."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def entry_point(*, launched: bool = False, closed_pipe: int = 1) -> Callable[[Callable[P, int]], Callable[P, int]]:
    """Decorate the `main` of a `python -m` tool: a UserError becomes one line on stderr and exit code 2.

    When the reader of stdout has gone (`| head`), the rest of the output is dropped without a traceback, and the exit
    code is unchanged if main had finished. launched: the tool runs once per rank; only rank 0 prints the error.
    closed_pipe: exit code if a closed pipe cut main short, so that it may not know its verdict.
    """

    def decorate(main: Callable[P, int]) -> Callable[P, int]:
        @wraps(main)
        def run(*args: P.args, **kwargs: P.kwargs) -> int:
            code = closed_pipe
            print_any_text()
            try:
                code = main(*args, **kwargs)
                sys.stdout.flush()
            except UserError as error:
                if not launched or is_rank_0():
                    print(f"error: {shown(error)}", file=sys.stderr)
                return CONFIG_ERROR
            except BrokenPipeError:
                if not _reader_left():
                    raise  # a pipe other than stdout
                os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return code

        return run

    return decorate


def _reader_left() -> bool:
    """Whether nobody reads stdout any more."""
    stdout = select.poll()
    stdout.register(sys.stdout, 0)  # POLLERR is always reported
    return bool(stdout.poll(0))
