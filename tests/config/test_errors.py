"""A mistake is told once, and by somebody."""

import time

import pytest

from config import errors


@pytest.mark.parametrize(
    ("rank", "reported", "said", "waits"),
    [
        (0, None, "error: no such folder\n", False),
        (1, None, "error: no such folder (rank 1)\n", True),  # rank 0's line ends the others before that
        (1, False, "error: no such folder (rank 1)\n", False),
        (1, True, "", False),
    ],
)
def test_a_rank_tells_of_a_mistake_that_no_other_has_told(capsys, monkeypatch, rank, reported, said, waits) -> None:
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    error = errors.UserError("no such folder")
    error.reported = reported
    errors.report_error(error, rank)
    assert capsys.readouterr().err == said
    assert waited == [errors.WAIT_SECONDS] * waits
