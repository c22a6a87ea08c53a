"""A process that dies while the data are prepared leaves no rank waiting; `make test-machines` has every phase."""

from pathlib import Path

from tests.support.jobs import preparation_kills


def test_the_death_of_the_rank_that_prepares_the_data_ends_the_job(tmp_path: Path) -> None:
    preparation_kills.check(tmp_path, "holder", "tokenizing", grace=2.0)
