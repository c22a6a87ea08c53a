"""Other jobs: a port that is taken, two jobs at once, one run folder for two."""

import os
import signal
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.jobs.launches import wait_until
from tests.support.machines.strange import STEPS, Place, ended, look_at, losses_of, start
from tracking.compare.surviving import read_events

pytestmark = pytest.mark.machines


def test_the_launchers_port_is_taken(ground: Path, losses) -> None:
    """One line that names the port, and no run folder; the next start, on another one, is an ordinary one."""
    place = Place(ground / "port")
    with socket.create_server(("0.0.0.0", 0)) as listener:
        port = str(listener.getsockname()[1])
        output = ended(start(replace(place, port=port), f"run.steps={STEPS}"), exit_code=None)
    assert "Traceback" not in output and port in output, output
    look_at(place.run, ended(start(place, f"run.steps={STEPS}")), losses[:STEPS])


def test_two_jobs_at_once(ground: Path, losses) -> None:
    """They share the prepared data, which neither finds prepared."""
    cache = ground / "shared cache"
    places = [Place(ground / f"job {number}", cache=cache) for number in (1, 2)]
    jobs = [start(place, f"run.steps={STEPS}") for place in places]
    for place, job in zip(places, jobs, strict=True):
        look_at(place.run, ended(job), losses[:STEPS])


def test_one_run_folder_for_two(ground: Path, losses) -> None:
    """The first has it; the other is told so in a line, and nothing of it is in the record."""
    place = Place(ground / "one folder", cache=ground / "ordinary" / "cache")
    first = start(place, "run.steps=100000")
    try:
        events = place.run / "events.jsonl"
        wait_until(lambda: events.exists() and len(losses_of(place.run)) >= STEPS, seconds=120, why=first.poll)
        other = start(place, "run.steps=100000")
        output = ended(other, exit_code=2)
        assert "Traceback" not in output and "is still writing this run" in output, output
    finally:
        os.killpg(first.pid, signal.SIGTERM)
        ended(first, exit_code=None)
    assert losses_of(place.run)[:STEPS] == losses[:STEPS]
    assert [event["event"] for event in read_events(events)].count("run_start") == 1
