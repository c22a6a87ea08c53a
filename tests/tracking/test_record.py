"""The record checks, stamps and fans out; no sink can stop training (user-pains row 25)."""

import math
import resource
from typing import Any

import pytest

from tests.support.runs.synthetic_events import start_fields, step_fields, ticking_clock
from tracking.compare.surviving import read_events
from tracking.events import COMMON_FIELDS, REQUIRED_FIELDS, Event
from tracking.jsonl import JsonlSink
from tracking.record import Record


class Memory:
    """A sink that keeps events, and fails from the `fail_at`-th on."""

    def __init__(self, fail_at: int | None = None) -> None:
        self.events: list[Event] = []
        self.closed = False
        self._fail_at = fail_at

    def write(self, event: Event) -> None:
        if self._fail_at is not None and len(self.events) + 1 >= self._fail_at:
            raise ConnectionError("server\nwent away")
        self.events.append(event)

    def close(self) -> None:
        self.closed = True
        if self._fail_at is not None:
            raise OSError("cannot close")


def _step(record: Record, step: int, **changes: Any) -> None:
    record.event("step", step=step, tokens=step * 100, **step_fields(step, **changes))


def test_an_event_is_stamped_and_reaches_every_sink() -> None:
    sinks = [Memory(), Memory()]
    record = Record(sinks, clock=lambda: 12.5)
    record.event("run_start", step=0, tokens=0, **start_fields(model="llama"))
    record.close()
    for sink in sinks:
        (event,) = sink.events
        assert [event[name] for name in COMMON_FIELDS] == ["run_start", 0, 12.5, 0]
        assert event["model"] == "llama" and sink.closed


@pytest.mark.parametrize("kind", REQUIRED_FIELDS)
def test_a_missing_field_is_loud_on_every_rank(kind: str) -> None:
    required = dict.fromkeys(REQUIRED_FIELDS[kind], 1)
    for record in (Record([Memory()]), Record.silent()):
        record.event(kind, step=1, tokens=1, **required)
        for name in required:
            rest = {key: value for key, value in required.items() if key != name}
            with pytest.raises(ValueError, match=name):
                record.event(kind, step=1, tokens=1, **rest)


def test_an_unknown_event_names_the_nearest_and_time_is_the_clocks() -> None:
    with pytest.raises(ValueError, match="'step'"):
        Record.silent().event("steps", step=1, tokens=1)
    with pytest.raises(ValueError, match="clock"):
        Record.silent().event("step", step=1, tokens=1, **step_fields(1), time=3.0)


def test_a_sink_that_raises_is_dropped_with_one_line_and_a_note(run_dir, capsys) -> None:
    good, bad = Memory(), Memory(fail_at=3)
    record = Record([JsonlSink(run_dir.events), bad, good], clock=ticking_clock())
    for step in range(1, 7):
        _step(record, step)
    record.close()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "Memory" in lines[0] and "server went away" in lines[0]
    assert [event["step"] for event in bad.events] == [1, 2]
    written = list(read_events(run_dir.events))
    assert [event["step"] for event in written if event["event"] == "step"] == [1, 2, 3, 4, 5, 6]
    assert [event["step"] for event in written if event["event"] == "note"] == [3]
    assert written == good.events


def test_all_windows_may_break_at_once_and_closing_may_fail(run_dir, capsys) -> None:
    record = Record([Memory(fail_at=2), JsonlSink(run_dir.events), Memory(fail_at=2), Memory(fail_at=99)])
    for step in (1, 2, 3):
        _step(record, step)
    record.close()
    record.close()
    assert len(capsys.readouterr().err.splitlines()) == 3
    assert [e["event"] for e in read_events(run_dir.events)] == ["step", "step", "note", "note", "step"]


def test_a_full_disk_is_logged_once_and_writing_resumes_when_there_is_room(run_dir, capsys) -> None:
    memory = Memory()
    record = Record([JsonlSink(run_dir.events), memory])
    _step(record, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (run_dir.events.stat().st_size + 7, hard))
    try:
        for step in (2, 3, 4):
            _step(record, step)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    _step(record, 5, loss=math.inf)
    record.close()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and "not written" in lines[0] and "3 events were lost" in lines[1]
    assert [e["step"] for e in read_events(run_dir.events) if e["event"] == "step"] == [1, 5]
    assert [e["step"] for e in memory.events if e["event"] == "step"] == [1, 2, 3, 4, 5]
    assert any(e["event"] == "note" and e["text"].startswith("3 events") for e in read_events(run_dir.events))
