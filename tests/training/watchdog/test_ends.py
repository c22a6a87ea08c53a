"""However a job ends, its run folder says so, and names who and why; whichever ranks are left write it."""

import re
import time
from pathlib import Path

import pytest

from config.cli import LOST, REPOSITORY
from tests.support.jobs.launches import command, events, start
from tests.support.marks import slow
from tests.support.runs.synthetic_events import TOKENS_PER_STEP, start_fields, step_fields
from tracking.compare.surviving import read_events
from tracking.crash import Crash
from tracking.jsonl import JsonlSink
from tracking.record import Record
from tracking.status import run_status

QUICK = ("checkpoint.every_steps=0", "evaluate.every_steps=0", "generate.tokens=0")


def die(folder: Path, name: str, told: str) -> tuple[list[int | None], str]:
    """A job of two ranks in which one dies as dying_train.py is told: exit codes by rank, and output."""
    line = command("python", folder, name, f"run.hypothesis={told}", *QUICK)
    job = start([line[0], str(REPOSITORY / "tests/support/jobs/dying_train.py"), *line[2:]], ranks=2)
    output, _ = job.communicate(timeout=120)
    return job.exit_codes, output


@pytest.mark.parametrize(("lost", "left"), [(0, 1), slow(1, 0)])
def test_a_killed_rank_is_named_in_the_end_that_another_one_writes(folder, lost, left):
    name = f"killed-{lost}"
    codes, output = die(folder, name, f"SIGKILL,{lost},3,")
    assert (codes[lost], codes[left]) == (-9, LOST), output
    (end,) = events(folder, name, "run_end")
    assert (end["status"], end["exit_code"], end["step"], end["written_by_rank"]) == ("crashed", LOST, 3, left)
    assert re.match(rf"rank {lost} \(pid \d+ on .*\) was killed by SIGKILL, seen at ", end["reason"])
    assert f"error: {end['reason']}; rank {left} stops, exit code {LOST}" in output and "Traceback" not in output
    status = run_status(folder / "runs" / name)
    assert (status.state, status.cause, status.exit_code, status.step) == ("crashed", end["reason"], LOST, 3)


def test_an_exception_is_named_with_its_line_by_the_rank_that_raised_it(folder):
    codes, output = die(folder, "error", "error,1,2,")
    assert codes == [LOST, 1], output
    (end,) = events(folder, "error", "run_end")
    assert (end["status"], end["exit_code"], end["step"], end["written_by_rank"]) == ("crashed", 1, 2, 1)
    assert re.match(r"rank 1 \(pid \d+ on .*\) stopped: ValueError: a bug of our own ", end["reason"])
    assert re.search(r"\(in tests/support/jobs/dying_train.py:\d+ die\)$", end["reason"])


def session(path: Path, *, steps: int = 2) -> None:
    record = Record([JsonlSink(path)])
    record.event("run_start", step=0, tokens=0, **start_fields())
    for step in range(1, steps + 1):
        record.event("step", step=step, tokens=step * TOKENS_PER_STEP, **step_fields(step))
    record.close()


def test_one_end_is_written_however_many_ranks_try(tmp_path):
    path = tmp_path / "events.jsonl"
    crashes = [Crash(path, rank) for rank in range(3)]
    session(path)
    assert [crash.write("rank 9\nis gone", 69) for crash in crashes] == [True, False, False]
    end = list(read_events(path))[-1]
    assert (end["reason"], end["step"], end["tokens"]) == ("rank 9 is gone", 2, 2 * TOKENS_PER_STEP)


def test_an_end_written_before_the_last_step_of_rank_0_stays_the_only_one(tmp_path):
    path = tmp_path / "run" / "events.jsonl"
    path.parent.mkdir()
    crashes = [Crash(path, rank) for rank in range(2)]
    record = Record([JsonlSink(path)])
    record.event("run_start", step=0, tokens=0, **start_fields())
    record.event("step", step=1, tokens=TOKENS_PER_STEP, **step_fields(1))
    assert crashes[1].write("rank 1 stopped: ValueError", 1)
    record.event("step", step=2, tokens=2 * TOKENS_PER_STEP, **step_fields(2))
    record.close()
    assert not crashes[0].write("rank 1 is gone", 69)
    status = run_status(path.parent)
    assert (status.state, status.cause, status.exit_code, status.step) == (
        "crashed",
        "rank 1 stopped: ValueError",
        1,
        2,
    )


def test_no_end_is_written_into_an_earlier_session_or_a_folder_that_is_not_there(tmp_path):
    path = tmp_path / "events.jsonl"
    session(path)
    time.sleep(0.01)
    assert not Crash(path, 0).write("before its own start", 1)
    assert not Crash(tmp_path / "elsewhere" / "events.jsonl", 1).write("on another machine", 69)
    assert [event["event"] for event in read_events(path)] == ["run_start", "step", "step"]


def test_an_end_after_a_half_written_line_is_whole(tmp_path):
    path = tmp_path / "events.jsonl"
    crash = Crash(path, 1)
    session(path)
    with path.open("ab") as file:
        file.write(b'{"event":"step","step":3,"ti')
    assert crash.write("rank 0 was killed", 69)
    assert [event["event"] for event in read_events(path)] == ["run_start", "step", "step", "run_end"]
