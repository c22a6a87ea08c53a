"""The one test over two machines that is quick enough to be run each time; `make test-cluster` has the others."""

from __future__ import annotations

import pytest

from tests.launch.cluster_launches import (
    REASON,
    folder,
    machines,
    one_host,
    test_the_hostfile_of_two_machines_trains_as_one,
)

pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)

__all__ = ["folder", "machines", "one_host", "test_the_hostfile_of_two_machines_trains_as_one"]
