"""A process that dies while the data are prepared leaves no rank waiting; `make test-machines` has every phase."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import preparation_kills


@pytest.mark.parametrize(("who", "phase"), [("holder", "tokenizing")])
def test_a_kill_while_the_data_are_prepared_ends_the_job(tmp_path: Path, who: str, phase: str) -> None:
    preparation_kills.check(tmp_path, who, phase, grace=2.0)
