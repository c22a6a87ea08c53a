"""A run's sessions, non-finite steps and drift, compared with a plain reading of every event."""

import math
import random
from pathlib import Path

import pytest

from tests.support.runs.report_runs import SessionWriter, session
from tests.support.runs.synthetic_events import TELEMETRY
from tracking.compare.surviving import read_events
from tracking.run_facts import RunFacts, read_facts


def _events(folder: Path) -> Path:
    return folder / "events.jsonl"


def _plainly(path: Path) -> tuple[int, int, int]:
    """(attempts, overflows, non-finite steps) from all events at once: those of a step come before the next step."""
    groups: list[list[dict]] = []
    for event in read_events(path):
        if event["event"] == "step":
            groups.append([event])
        elif groups and event["step"] == groups[-1][0]["step"] and event["event"] != "run_start":
            groups[-1].append(event)
    overflows = nonfinite = 0
    for step, *others in groups:
        kinds = {event["event"] for event in others}
        handled = any(event["event"] == "scale" and event["reason"] in ("overflow", "hysteresis") for event in others)
        broken = not math.isfinite(step["loss"]) or not math.isfinite(step["grad_norm"]) or "nonfinite" in kinds
        if broken and handled and math.isfinite(step["loss"]):
            overflows += 1
        elif broken:
            nonfinite += 1
    return len(groups), overflows, nonfinite


def _at_random(run: SessionWriter, draw: random.Random) -> None:
    match draw.randrange(8):
        case 0:
            run.overflow(reason=draw.choice(["overflow", "hysteresis", None]))
            if draw.random() < 0.5:
                run.event("nonfinite", rank=0, module="m", tensor="gradient", kind="inf", count=1)
        case 1:
            run.overflow(loss=draw.choice([math.nan, math.inf, -math.inf]), reason=draw.choice(["overflow", None]))
        case 2:
            run.steps(1, loss_scale=2.0)
            run.scale("growth")
        case 3:
            run.steps(1)
            run.event("nonfinite", rank=1, module="m", tensor="parameter", kind="nan", count=1)
        case _:
            run.steps(draw.randrange(1, 4))


@pytest.mark.parametrize("seed", range(8))
def test_steps_that_were_not_finite_are_counted_as_a_plain_reading_counts_them(tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    for start in (0, draw.randrange(3, 20)):  # the second session repeats steps: abandoned attempts count too
        with session(tmp_path, step=start) as run:
            for _ in range(60):
                _at_random(run, draw)
    run = read_facts(_events(tmp_path), "run")
    overflows, nonfinite = sum(attempt.handled for attempt in run.broken), len(run.nonfinite)
    assert (run.counts["step"], overflows, nonfinite) == _plainly(_events(tmp_path))
    assert overflows > 0 and nonfinite > 0


def _restarted(folder: Path) -> RunFacts:
    """Four sessions: no checkpoint to go on from; restored; started anew by mistake; an older checkpoint taken."""
    with session(folder, time=1e9) as run:
        run.steps(2)
    with session(folder, time=2e9) as run:
        run.steps(4)
        run.save()
    with session(folder, time=3e9, step=4, resumed_from="step-4") as run:
        run.incident("ROLLBACK", rolled_back_to="step-4")
        run.incident("ROLLBACK")
        run.end("preempted", 75)
    with session(folder, time=4e9) as run:
        run.incident("ABORT")
        run.incident("ABORT")
        run.end("aborted", 3)
    with session(folder, time=5e9, step=4, resumed_from="step-4") as run:
        run.event("note", text="passed over checkpoint step-9: rng-rank-1.pt is missing")
        run.event("note", text="a sink was lost")
    return read_facts(_events(folder), "run")


def test_sessions_and_restores(tmp_path: Path) -> None:
    run = _restarted(tmp_path)
    assert [item.should_restore for item in run.sessions] == [False, False, True, True, True]
    assert [item.restored for item in run.sessions] == [False, False, True, False, False]
    assert run.restores == (1 + 1, 1 + 3), "one rollback, and one of three sessions"
    assert [item.end and item.end["status"] for item in run.sessions] == [None, None, "preempted", "aborted", None]
    assert run.end is None and run.sessions[3].aborted == "the loss is nan"
    assert [item.began for item in run.sessions] == [1e9, 2e9, 3e9, 4e9, 5e9]
    assert [item.last for item in run.sessions] == [1e9 + 1, 2e9 + 2.5, 3e9 + 1.5, 4e9 + 1.5, 5e9 + 1]


def test_drift_is_the_largest_and_nan_stays(tmp_path: Path) -> None:
    with session(tmp_path) as run:
        for drift in (None, {"maximum": 0.0, "rms": 0.0}, {"maximum": 0.5, "rms": 0.1}, {"maximum": 0.25, "rms": 0.1}):
            run.event("telemetry", **TELEMETRY, drift=drift)
    assert read_facts(_events(tmp_path), "run").heat.drift == (3, 0.5)
    with session(tmp_path) as run:
        for drift in (math.nan, 0.75):
            run.event("telemetry", **TELEMETRY, drift={"maximum": drift, "rms": drift})
    assert math.isnan(read_facts(_events(tmp_path), "run").heat.drift[1])


def test_a_static_loss_scale_is_seen_without_scale_events(tmp_path: Path) -> None:
    with session(tmp_path / "static") as run:
        run.steps(3, loss_scale=128.0)
    with session(tmp_path / "none") as run:
        run.steps(3)
    assert read_facts(_events(tmp_path / "static"), "run").scaled
    assert not read_facts(_events(tmp_path / "none"), "run").scaled
