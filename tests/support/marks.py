"""Marked cases of parametrized tests."""

import pytest
from _pytest.mark import ParameterSet


def slow(*values: object) -> ParameterSet:
    """A case that `make test-long` runs and `make test` leaves out."""
    return pytest.param(*values, marks=pytest.mark.slow)
