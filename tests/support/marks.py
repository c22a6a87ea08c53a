"""Marked cases of parametrized tests."""

from collections.abc import Iterable

import pytest
from _pytest.mark import ParameterSet


def slow(*values: object) -> ParameterSet:
    """A case that `make test-long` runs and `make test` leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)


def some_slow(cases: Iterable[str], *quick: str) -> list[str | ParameterSet]:
    """All of these cases, of which `make test` runs those that are named `quick`."""
    return [case if case in quick else slow(case) for case in cases]
