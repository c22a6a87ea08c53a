"""Other jobs: a port that is taken, two jobs at once, one run folder for two."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.strange import STEPS, Place, ended, look_at, losses_of, start

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
    """One of them has it; the other is told so in a line, and nothing of it is in the record."""
    place = Place(ground / "one folder", cache=ground / "ordinary" / "cache")
    jobs = [start(place, f"run.steps={STEPS}") for _ in range(2)]
    outputs = [ended(job, exit_code=None) for job in jobs]
    codes = sorted(job.returncode for job in jobs)
    assert codes == [0, 2], outputs
    assert not any("Traceback" in output for output in outputs), outputs
    assert losses_of(place.run) == losses[:STEPS]
