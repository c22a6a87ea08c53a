"""Worker processes: their results, and that the death of one is noticed in whatever it was doing."""

import os
import signal
import time
from concurrent.futures import FIRST_COMPLETED, wait
from pathlib import Path

import pytest

from data.text.workers import WorkerDied, Workers
from tests.data.workers_cases import multiplier
from tests.support.jobs.launches import children, wait_until


@pytest.fixture(autouse=True)
def _with_processes(request: pytest.FixtureRequest) -> None:
    """They are started by a thread, where a skip would be an error."""
    if request.config.getoption("--no-processes"):
        pytest.skip("starts a process")


def workers_of_this_process() -> set[int]:
    return {pid for pid in children(os.getpid()) if b"spawn_main" in _command(pid)}


def semaphores() -> list[str]:
    """This process's named ones, as they are mapped. Those of other processes come and go as they like."""
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "/sem." in line]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def test_results_come_from_as_many_processes_as_are_needed_and_none_is_left() -> None:
    before = workers_of_this_process()
    named = semaphores()
    with Workers(3, multiplier, 7) as workers:
        assert workers.submit(2).result() == 14
        assert len(workers_of_this_process() - before) == 1
        futures = [workers.submit(factor) for factor in range(20)]
        assert [future.result() for future in futures] == [7 * factor for factor in range(20)]
        with pytest.raises(ValueError, match="negative"):
            workers.submit(-1).result()
        assert workers.submit(1).result() == 7, "it goes on after an error"
        assert 1 <= len(workers_of_this_process() - before) <= 3
        assert semaphores() == named, "they would stay after a kill of the whole job"
        workers.submit(2000)
        started = time.monotonic()
    assert time.monotonic() - started < 5
    assert workers_of_this_process() <= before


def test_a_process_that_is_late_or_dies_leaves_nothing_open() -> None:
    """Rewards are late thousands of times in a run."""
    before, opened = workers_of_this_process(), set[int]()
    with Workers(1, multiplier, 7) as workers:
        for dies in (False, True, False):
            result = workers.submit(2000, None if dies else 0.05)
            if dies:
                wait_until(lambda: workers_of_this_process() - before)
                os.kill(min(workers_of_this_process() - before), signal.SIGKILL)
            with pytest.raises(WorkerDied):
                result.result()
            opened.add(len([*Path("/proc/self/fd").iterdir()]))
    assert len(opened) == 1


@pytest.mark.parametrize("seconds", [0.0, 1.5])
def test_a_killed_process_is_an_error_within_seconds(seconds: float) -> None:
    """It may be killed at its start, with more for it to read than a pipe holds."""
    before = workers_of_this_process()
    with Workers(2, multiplier, 1, "x" * (4 << 20)) as workers:
        results = [workers.submit(2000) for _ in range(2)]
        wait_until(lambda: workers_of_this_process() - before)
        time.sleep(seconds)
        os.kill(min(workers_of_this_process() - before), signal.SIGKILL)
        done, _ = wait(results, timeout=10, return_when=FIRST_COMPLETED)
        (first,) = done
        with pytest.raises(WorkerDied, match="a worker process was killed by SIGKILL"):
            first.result()
        started = time.monotonic()
    assert time.monotonic() - started < 5, "the other one is not waited for"
