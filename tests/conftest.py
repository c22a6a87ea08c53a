"""Shared by all tests: real gloo process groups, each started once for the whole session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from config.machine import op_builds
from tests.support.process_group import ProcessGroup


def pytest_sessionstart() -> None:
    """A session that was killed in a build would stall those tests that start DeepSpeed without Mantissa."""
    op_builds.clear_abandoned("*", print)


@pytest.fixture(scope="session")
def pair() -> Iterator[ProcessGroup]:
    """Two real processes joined by gloo; `pair.run(function, **arguments)` gives both ranks' results."""
    with ProcessGroup(world_size=2) as group:
        yield group


@pytest.fixture(scope="session")
def solo() -> Iterator[ProcessGroup]:
    """The same with one process."""
    with ProcessGroup(world_size=1) as group:
        yield group
