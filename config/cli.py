"""Command lines whose mistakes are one line and exit code 2, as those of a run config are."""

from __future__ import annotations

import argparse
from typing import NoReturn

from config.errors import UserError


class Arguments(argparse.ArgumentParser):
    """argparse that raises UserError instead of printing its usage and leaving."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"command line: {message}; see {self.prog} --help")
