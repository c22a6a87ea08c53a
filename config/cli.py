"""What every command line shares: exit codes, Mantissa's own folder, and a parser whose mistakes are UserErrors."""

from __future__ import annotations

import argparse
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
