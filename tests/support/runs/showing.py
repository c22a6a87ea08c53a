"""`python -m data.show` on a config that a test has written."""

from collections.abc import Callable
from pathlib import Path

import pytest

from data.show import main

Show = Callable[..., str]
"""Called with overrides and `code`, the exit code: what was printed, or the errors if it is not 0."""


def shower(config: Path, text: str, capsys: pytest.CaptureFixture[str]) -> Show:
    """Write the config; the tool on it."""
    config.write_text(text)

    def show(*overrides: str, code: int = 0) -> str:
        assert main(["--config", str(config), *overrides]) == code
        printed = capsys.readouterr()
        return printed.err if code else printed.out

    return show


def error_of(printed: str) -> str:
    """The only line that is not about the data's progress."""
    [line] = [line for line in printed.splitlines() if not line.startswith("data: ")]
    assert line.startswith("error: ")
    return line
