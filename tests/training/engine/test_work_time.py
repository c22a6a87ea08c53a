"""A rank's own work is added up over its forward passes, and listed rank by rank only where there are few."""

from __future__ import annotations

import statistics
import time

import pytest
import torch

from tracking.ranks import spread
from training.engine.work_time import RANKS_LISTED, WorkTime, by_rank


def test_what_runs_inside_is_added_up_and_taken_once() -> None:
    work = WorkTime(torch.device("cpu"))
    for _ in range(2):
        with work.measured():
            time.sleep(0.05)
        time.sleep(0.05)  # a collective, say: not this rank's work
    assert work.take() == pytest.approx(0.1, abs=0.04)
    assert work.take() == 0.0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_it_is_that_of_the_step_before() -> None:
    device = torch.device("cuda")
    work, matrix = WorkTime(device), torch.randn(4096, 4096, device=device)
    for _ in range(3):
        with work.measured():
            matrix = torch.nn.functional.normalize(matrix @ matrix)
        seconds = work.take()
        torch.cuda.synchronize()
    assert 0 < seconds < 1


@pytest.mark.parametrize("ranks", [1, 2, RANKS_LISTED, RANKS_LISTED + 1, 1024])
def test_readers_find_the_slowest_rank_however_many_there_are(ranks: int) -> None:
    values = [float((7 * rank) % ranks) for rank in range(ranks)]
    event = {"by_rank": by_rank(memory_bytes=values, work_seconds=values)}
    assert spread(event, "memory_bytes") == (found := spread(event, "work_seconds"))
    assert found is not None and values[found.rank] == found.most == max(values)
    assert (found.least, found.median) == (min(values), statistics.median(values))
    assert len(found.all) == (ranks if ranks <= RANKS_LISTED else 0)
