"""A rank's own work is added up over its forward passes, and listed rank by rank only where there are few."""

import statistics
import time
from pathlib import Path

import pytest
import torch

from data.text.prepare import prepare
from tests.support.jobs.process_group import ProcessGroup
from tests.training.checkpoint import resume_cases
from tracking.events import spread
from training.distributed import World
from training.engine.work_time import RANKS_LISTED, WorkTime, by_rank, peak_memory_bytes
from training.session import session


def test_what_runs_inside_is_added_up_and_taken_once() -> None:
    work = WorkTime(torch.device("cpu"))
    for _ in range(2):
        with work.measured():
            time.sleep(0.05)
        time.sleep(0.05)  # a collective, say: not this rank's work
    assert work.take() == pytest.approx(0.1, abs=0.04)
    assert work.take() == 0.0


@pytest.mark.parametrize("ranks", [1, 2, RANKS_LISTED, RANKS_LISTED + 1, 1024])
def test_readers_find_the_slowest_rank_however_many_there_are(ranks: int) -> None:
    values = [float((7 * rank) % ranks) for rank in range(ranks)]
    event = {"by_rank": by_rank(memory_bytes=values, work_seconds=values)}
    assert spread(event, "memory_bytes") == (found := spread(event, "work_seconds"))
    assert found is not None and values[found.rank] == found.most == max(values)
    assert (found.least, found.median) == (min(values), statistics.median(values))
    assert len(found.all) == (ranks if ranks <= RANKS_LISTED else 0)


def _peaks(world: World, *, folder: str) -> tuple[int, int]:
    """Peak memory [bytes] after 768 MiB were held for a moment, and in the session that begins then."""
    with Path("/dev/zero").open("rb") as zeros:
        zeros.read(768 * 2**20)
    before = peak_memory_bytes(world.device)
    with session(resume_cases.resolve(folder, "peaks", ["run.resume=never"]), world=world) as opened:
        return before, opened.engine.health(
            opened.engine.forward_backward(opened.batches.next_step(), step=1)
        ).memory_bytes


def test_what_prepared_the_data_is_not_in_the_peak_of_training(solo: ProcessGroup, tmp_path: Path) -> None:
    """The first run of a text makes its tokenizer and tokens; the second, which has them, must not look leaner."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text/one.txt").write_text("some words to learn, " * 400)
    prepare(resume_cases.resolve(str(tmp_path), "peaks", []).config.data, progress=False)
    [(before, training)] = solo.run(_peaks, folder=str(tmp_path))
    assert before > 768 * 2**20 and training < before - 512 * 2**20
