"""What every command line shares: exit codes, Mantissa's own folder, and a parser whose mistakes are UserErrors."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import NoReturn

from config.errors import UserError

REPOSITORY = Path(__file__).resolve().parent.parent
"""Mantissa's own folder."""
CONFIG_ERROR = 2
"""Exit code: the config or the command line is wrong; nothing was started."""


class Arguments(argparse.ArgumentParser):
    """argparse that raises UserError instead of printing its usage and leaving."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"command line: {message}; see {self.prog} --help")


def positive_int(text: str) -> int:
    """For `type=` of an option: a whole number of 1 or more."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of 1 or more")
    return int(text)


def positive_number(text: str) -> float:
    """For `type=` of an option: a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a number above 0")
    return value
