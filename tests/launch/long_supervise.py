"""What torchrun's own restarts do with a job whose rank died; `make test-long`."""

from __future__ import annotations

import re

from tests.launch.test_supervise import NAMED, finish, folder, real, trace, unbroken
from tests.training.launches import events

__all__ = ["folder", "unbroken"]


def test_torchrun_restarts_a_job_whose_rank_0_was_killed(folder, unbroken):
    line = real(folder, "elastic", "torchrun", f"SIGKILL:0:3:{folder}/elastic.mark")
    lines, code = finish([line[0], "--max-restarts", "1", *line[1:]])
    output = "".join(text for _, text in lines)
    assert code == 0, output
    assert re.search(NAMED.format(0, 1), output)
    assert [event["resumed_from"] is not None for event in events(folder, "elastic", "run_start")] == [False, True]
    assert trace(folder, "elastic") == unbroken
