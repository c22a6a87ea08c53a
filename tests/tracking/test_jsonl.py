"""The record checks and fans out; events.jsonl keeps every number, survives a crash, and yields one history."""

import errno
import io
import json
import math
import random
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.refusals import refused
from tests.support.runs.compare_runs import start_fields, step_fields, ticking_clock
from tracking import jsonl
from tracking.compare.surviving import read_events, surviving
from tracking.events import COMMON_FIELDS, REQUIRED_FIELDS, Event
from tracking.jsonl import Follower, JsonlSink, encode
from tracking.record import Record

_FLOATS = st.floats(allow_nan=True, allow_infinity=True, width=64)
_WORDS = st.text(max_size=8).filter(lambda word: word not in ("inf", "-inf", "nan"))
_VALUES = st.recursive(
    _FLOATS | st.integers() | st.booleans() | st.none() | _WORDS,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.from_regex(r"x_[a-z]{1,5}", fullmatch=True), inner),
    max_leaves=12,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "events.jsonl"


def _event(step: int, kind: str = "step", **fields: Any) -> dict[str, Any]:
    return {"event": kind, "step": step, "time": 1.5, "tokens": step * 10, **fields}


def _same(left: Any, right: Any) -> bool:
    """Equality under which nan equals nan, and 1 does not equal 1.0 or True."""
    if type(left) is not type(right):
        return False
    if isinstance(left, float):
        return left == right or (math.isnan(left) and math.isnan(right))
    if isinstance(left, list):
        return len(left) == len(right) and all(map(_same, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_same(left[key], right[key]) for key in left)
    return left == right


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.dictionaries(st.from_regex(r"x_[a-z]{1,5}", fullmatch=True), _VALUES), min_size=1, max_size=4))
def test_every_value_comes_back_as_it_was(path: Path, payloads: list[dict[str, Any]]) -> None:
    path.unlink(missing_ok=True)
    sink = JsonlSink(path)
    events = [_event(index, **payload) for index, payload in enumerate(payloads)]
    for event in events:
        sink.write(event)
    sink.close()
    assert _same(list(read_events(path)), events)


def test_non_finite_numbers_are_strings_in_the_file_and_words_stay_words(tmp_path: Path) -> None:
    sink = JsonlSink(tmp_path / "events.jsonl")
    numbers = {"loss": math.nan, "deep": {"a": [math.inf, -math.inf]}}
    sink.write(_event(1, "nonfinite") | numbers | {"kind": "nan", "module": "inf"})
    sink.close()
    raw = json.loads(sink.path.read_text())
    assert (raw["loss"], raw["deep"]) == ("nan", {"a": ["inf", "-inf"]})
    (event,) = read_events(sink.path)
    assert math.isnan(event["loss"]) and event["deep"] == {"a": [math.inf, -math.inf]}
    assert (event["kind"], event["module"]) == ("nan", "inf")


def test_every_line_is_with_the_system_before_write_returns(path: Path) -> None:
    """A process that is killed outright has lost nothing it wrote."""
    code = (
        "import os, sys; from pathlib import Path; from tracking.jsonl import JsonlSink\n"
        "sink = JsonlSink(Path(sys.argv[1]))\n"
        "[sink.write({'event': 'step', 'step': n, 'time': 0.0, 'tokens': 0}) for n in range(50)]\n"
        "os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(path)], check=False).returncode == -9
    assert [event["step"] for event in read_events(path)] == list(range(50))


@pytest.mark.parametrize("seed", range(3))
def test_a_file_torn_at_any_byte_goes_on_with_whole_lines(path: Path, seed: int) -> None:
    lines = [encode(_event(step, loss=step / 3, note="ü" * seed)) for step in range(3)]
    whole = b"".join(lines)
    for cut in range(seed, len(whole) + 1, 3):
        path.write_bytes(whole[:cut])
        finished = [line for end, line in enumerate(lines) if cut >= sum(map(len, lines[: end + 1])) - 1]
        assert len(list(read_events(path))) == len(finished), "a reader leaves a torn last line out"
        sink = JsonlSink(path)
        sink.write(_event(99))
        sink.close()
        assert path.read_bytes() == b"".join(finished) + encode(_event(99))


def test_a_long_torn_line_is_found_across_chunks(path: Path) -> None:
    path.write_bytes(encode(_event(1)) + b'{"event":"step","x":"' + b"y" * 300_000)
    JsonlSink(path).close()
    assert path.read_bytes() == encode(_event(1))


def test_a_damaged_line_in_the_middle_is_named(path: Path) -> None:
    path.write_bytes(encode(_event(1)) + b"\0\0\0\n" + encode(_event(2)))
    assert "line 2" in refused(list, read_events(path))


def test_a_value_that_is_no_plain_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="complex"):
        encode(_event(1, loss=1j))
    assert json.loads(encode(_event(1, path=tmp_path)))["path"] == str(tmp_path)


def test_no_folder_is_a_user_error(tmp_path: Path) -> None:
    assert "run.dir" in refused(JsonlSink, tmp_path / "absent" / "events.jsonl")
    assert "run folder" in refused(list, read_events(tmp_path / "events.jsonl"))


def _step(step: int, **changes: Any) -> dict[str, Any]:
    return _event(step, **step_fields(step, **changes))


def test_a_growing_file_gives_every_event_once(path: Path) -> None:
    noise = random.Random(9)
    events = [_step(n, loss=noise.choice([1.0, math.nan, -math.inf]), place=f"caf\udce9{n}") for n in range(1, 300)]
    data = b"".join(map(encode, events))
    file, found, written = Follower(path), [], 0
    assert list(file.events()) == [] and file.at_end
    while written < len(data):
        size = noise.randrange(1, 3000)
        with path.open("ab") as growing:
            growing.write(data[written : written + size])
        written += size
        found += list(file.events())
    assert repr(found) == repr(events), "numbers that are not finite are numbers again"
    assert (file.number, file.offset) == (299, len(data)) and not file.replaced()


def test_half_a_line_that_a_resumed_run_cuts_off_is_forgotten(path: Path) -> None:
    path.write_bytes(encode(_step(1)) + b'{"event":"step","st')
    file = Follower(path)
    assert [event["step"] for event in file.events()] == [1]
    sink = JsonlSink(path)  # as a resumed run opens it
    sink.write(_step(2))
    sink.close()
    assert [event["step"] for event in file.events()] == [2]


def test_a_file_in_the_place_of_another_is_read_from_its_start(path: Path) -> None:
    path.write_bytes(b"".join(encode(_step(n)) for n in range(1, 10)))
    file = Follower(path)
    assert len(list(file.events())) == 9
    path.with_name("new").write_bytes(b"".join(encode(_step(n)) for n in range(1, 21)))
    path.with_name("new").rename(path)
    assert file.replaced() and len(list(file.events())) == 20 and not file.replaced()
    path.write_bytes(encode(_step(1)))
    assert file.replaced() and len(list(file.events())) == 1


def test_damaged_lines_are_passed_over_and_long_ones_are_not_cut(path: Path) -> None:
    large = encode(_event(1, "note", text="x" * 3_000_000))
    path.write_bytes(b'rubbish\n[1]\n{"event":"step","step":1}\n' + large + encode(_step(1)))
    file = Follower(path)
    assert [event["event"] for event in file.events()] == ["note", "step"]


def test_events_of_other_kinds_are_not_parsed(path: Path) -> None:
    spaced = json.dumps(_event(2, "note", text="a")).encode() + b"\n"  # as other programs write it
    path.write_bytes(
        encode(_step(1)) + b'{"event":"telemetry", no JSON\n' + spaced + encode(_event(3, "note", text="b"))
    )
    file = Follower(path)
    assert [event["text"] for event in file.events("note")] == ["a", "b"]
    assert file.number == 4


def test_a_file_is_followed_for_a_limited_time(path: Path) -> None:
    path.write_bytes(encode(_step(1)))
    file = Follower(path)
    assert list(file.lines(seconds=0.0)) == [] and not file.at_end
    assert len(list(file.lines(seconds=5.0))) == 1 and not list(file.lines(seconds=5.0)) and file.at_end


def test_events_that_may_not_be_read_are_the_users_to_mend(path: Path) -> None:
    path.mkdir()
    assert "cannot read the events" in refused(list, Follower(path).events())


@given(st.binary(max_size=300), st.integers(1, 40))
def test_lines_backwards_are_the_lines(content: bytes, chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl, "_CHUNK", chunk)
        assert list(jsonl.lines_backwards(io.BytesIO(content))) == content.split(b"\n")[::-1]


def test_a_rollback_within_a_session_drops_what_it_undid() -> None:
    """The scale event of step 3 that comes before the second `step` 3 belongs to the new attempt, and stays."""
    events = [
        *[_event(0, "run_start"), _event(1), _event(2), _event(3), _event(3, "eval", loss=1.0), _event(4)],
        *[_event(4, "incident"), _event(3, "scale", reason="overflow"), _event(3, loss=9.0)],
    ]
    kept = [(e["event"], e["step"]) for e in surviving(events)]
    assert kept == [("run_start", 0), ("step", 1), ("step", 2), ("incident", 4), ("scale", 3), ("step", 3)]


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(1, 12)), min_size=1, max_size=6), st.booleans())
def test_surviving_steps_always_rise_and_end_with_the_newest(sessions: list[tuple[int, int]], announced: bool) -> None:
    events, reached, mark = [_event(0, "run_start")], 0, 0
    for back, count in sessions:
        start = min(back, reached)
        if announced:
            events.append(_event(start, "run_start"))
        for step in range(start + 1, start + count + 1):
            mark += 1
            events.append(_event(step, mark=mark))
        reached = start + count
    steps = [event for event in surviving(events) if event["event"] == "step"]
    assert [event["step"] for event in steps] == list(range(1, reached + 1))
    newest = {event["step"]: event["mark"] for event in events if event["event"] == "step"}
    assert [event["mark"] for event in steps] == [newest[step] for step in range(1, reached + 1)]


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


def _attempt(record: Record, step: int, **changes: Any) -> None:
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
        _attempt(record, step)
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
        _attempt(record, step)
    record.close()
    record.close()
    assert len(capsys.readouterr().err.splitlines()) == 3
    assert [e["event"] for e in read_events(run_dir.events)] == ["step", "step", "note", "note", "step"]


def test_an_event_that_was_written_but_not_flushed_is_not_lost(run_dir, capsys, monkeypatch) -> None:
    monkeypatch.setattr("os.fsync", Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    record = Record([JsonlSink(run_dir.events)])
    record.event("run_end", step=1, tokens=2, status="done", exit_code=0)
    _attempt(record, 2)
    assert "may not survive a power failure (Input/output error)" in capsys.readouterr().err
    assert [event["event"] for event in read_events(run_dir.events)] == ["run_end", "step"]


def test_a_full_disk_is_logged_once_and_writing_resumes_when_there_is_room(run_dir, capsys) -> None:
    memory = Memory()
    record = Record([JsonlSink(run_dir.events), memory])
    _attempt(record, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (run_dir.events.stat().st_size + 7, hard))
    try:
        for step in (2, 3, 4):
            _attempt(record, step)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    _attempt(record, 5, loss=math.inf)
    record.close()
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2 and "not written" in lines[0] and "3 events were lost" in lines[1]
    assert [e["step"] for e in read_events(run_dir.events) if e["event"] == "step"] == [1, 5]
    assert [e["step"] for e in memory.events if e["event"] == "step"] == [1, 2, 3, 4, 5]
    assert any(e["event"] == "note" and e["text"].startswith("3 events") for e in read_events(run_dir.events))
