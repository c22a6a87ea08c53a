"""Reading a run in one pass: the same history as the reference, exact, and in little memory."""

import math
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.support.refusals import refused
from tests.support.runs.compare_runs import RunWriter
from tests.support.runs.synthetic_events import step_fields
from tracking import run_facts
from tracking.compare.surviving import read_events, surviving
from tracking.events import REQUIRED_FIELDS
from tracking.jsonl import encode
from tracking.run_facts import read_facts

_SESSION = st.tuples(
    st.integers(0, 12),  # the step it goes back to, as far as there is one
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["step", "scale", "eval", "checkpoint", "incident"]))),
    st.booleans(),  # announced by a run_start, or a rollback within the session
)


def _history(sessions: list[Any]) -> list[dict[str, Any]]:
    """Events of a run that goes back now and then; every one bears a mark of its own as its loss."""
    events, reached, mark = [{"event": "run_start", "step": 0}], 0, 0
    for back, recorded, announced in sessions:
        reached = min(back, reached)
        if announced:
            events.append({"event": "run_start", "step": reached})
        for _, kind in recorded:
            mark += 1
            reached += kind == "step"
            events.append({"event": kind, "step": reached, "loss": float(mark), "reason": "growth"})
    return [
        {**dict.fromkeys(REQUIRED_FIELDS[event["event"]]), "time": 10.0 + 3 * n, "tokens": event["step"] * 7, **event}
        for n, event in enumerate(events)
    ]


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(_SESSION, min_size=1, max_size=6))
def test_the_history_is_the_one_that_surviving_tells(tmp_path: Path, sessions: list[Any]) -> None:
    events = _history(sessions)
    path = tmp_path / "events.jsonl"
    lines = [encode(event) for event in events]
    path.write_bytes(b"".join(lines))
    facts, kept = read_facts(path, "x"), surviving(read_events(path))
    steps = [event for event in kept if event["event"] == "step"]
    assert facts.columns.step.tolist() == [event["step"] for event in steps]
    assert facts.columns.loss.tolist() == [event["loss"] for event in steps]
    for kind in ("scale", "eval", "checkpoint", "incident", "run_start"):
        assert facts.rare_events.get(kind, []) == [event for event in kept if event["event"] == kind]
    assert facts.abandoned == sum(event["event"] == "step" for event in events) - len(steps)
    whole = path.read_bytes()
    for offset, event in zip(facts.columns.offset.tolist(), steps, strict=True):
        assert whole[offset:].startswith(encode(event))


def test_numbers_that_are_not_finite_or_missing_are_kept_apart(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path, "x")
    writer.start()
    for step, loss in enumerate((math.inf, -math.inf, math.nan, 2.5), start=1):
        writer.step(step, loss=loss, grad_norm=None, applied=step != 2, sample_ids_sha256="ab" * 32)
    columns = read_facts(writer.end().events, "x").columns
    assert np.array_equal(columns.loss, [math.inf, -math.inf, math.nan, 2.5], equal_nan=True)
    assert np.isnan(columns.grad_norm).all() and columns.applied.tolist() == [True, False, True, True]
    assert columns.order.tolist() == [int(("ab" * 32)[:15], 16)] * 4


def test_running_time_counts_every_attempt_and_wall_time_no_pause(tmp_path: Path) -> None:
    """Killed after step 6, resumed from step 4 an hour later: 6 + 4 attempts of 2 s, sessions of 12 s and 8 s."""
    writer = RunWriter(tmp_path, "x")
    for begin, end, pause in ((0, 6, 0), (4, 8, 3600)):
        writer.time += pause
        writer.start(begin)
        for step in range(begin + 1, end + 1):
            writer.step(step, step_seconds=2.0)
    facts = read_facts(writer.end(8).events, "x")
    assert facts.columns.seconds.tolist() == [2.0, 4.0, 6.0, 8.0, 14.0, 16.0, 18.0, 20.0]
    assert (facts.running_seconds, facts.wall_seconds, facts.abandoned) == (20.0, 12.0 + 8.0, 2)


def test_a_torn_last_line_is_left_out_and_another_one_is_named(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    good = encode({"event": "step", "step": 1, "time": 1.0, "tokens": 1, **step_fields(1)})
    path.write_bytes(good + good[:40])
    assert len(read_facts(path, "x").columns) == 1
    no_number = good.replace(b'"loss":', b'"loss":"much","x":')
    for bad in (b"{}\n", b"[1]\n", b"\0\n", b'{"event":"step","step":2}\n', no_number):
        path.write_bytes(good + bad + good)
        assert "line 2 is not an event" in refused(read_facts, path, "x")
    path.write_bytes(good[:20])
    assert "nothing was recorded" in refused(read_facts, path, "x")


def test_of_too_many_rare_events_the_first_and_the_newest_are_kept(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(run_facts, "MAX_RARE_EVENTS", 10)
    writer = RunWriter(tmp_path, "x")
    writer.start()
    for step in range(1, 101):
        writer.event("eval", step, loss=float(step), perplexity=1.0)
    facts = read_facts(writer.end(100).events, "x")
    assert [event["step"] for event in facts.rare_events["eval"]] == [1, 2, 3, 4, 5, 96, 97, 98, 99, 100]
    assert facts.counts["eval"] == 100


def test_memory_is_a_few_numbers_a_step(tmp_path: Path) -> None:
    """Large telemetry is not kept, nor parsed: the lines here are no JSON beyond their beginning."""
    path = tmp_path / "events.jsonl"
    with path.open("wb") as file:
        for step in range(1, 20_001):
            file.write(encode({"event": "step", "step": step, "time": 1.0, "tokens": step, **step_fields(step)}))
            if step % 100 == 0:
                file.write(b'{"event":"telemetry",' + b"x" * 10_000 + b"\n")
    tracemalloc.start()
    facts = read_facts(path, "x")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert len(facts.columns) == 20_000 and facts.counts["telemetry"] == 200
    assert peak < 20_000 * 200 + 2 * (1 << 20), f"{peak / 20_000:.0f} bytes a step, the read buffer included"
