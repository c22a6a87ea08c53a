"""Room and neighbours: small or full disks, few open files, a taken port, two jobs at once, one run folder for two."""

import os
import signal
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.jobs.launches import wait_until
from tests.support.machines.strange import (
    STEPS,
    Place,
    demo,
    ended,
    lives,
    look_at,
    losses_of,
    mounted,
    needs_mounts,
    start,
    starts,
)
from tracking.compare.surviving import read_events
from training.checkpoint.tool import main as checkpoint_tool

pytestmark = pytest.mark.machines


@needs_mounts
def test_a_small_dev_shm(ground: Path, losses) -> None:
    lives(Place(ground / "small shm", inside=mounted("mount -t tmpfs -o size=1m none /dev/shm")), losses)


@needs_mounts
def test_a_full_dev_shm(ground: Path, losses) -> None:
    fill = "head -c 900k /dev/zero >/dev/shm/theirs; head -c 200k /dev/zero >/dev/shm/more || true"
    lives(Place(ground / "full shm", inside=mounted("mount -t tmpfs -o size=1m none /dev/shm", fill)), losses)


@needs_mounts
def test_temporary_files_that_cannot_be_written(ground: Path, losses) -> None:
    lives(Place(ground / "no tmp", variables={"TMPDIR": "/proc/none"}, plain_user=True), losses)


@needs_mounts
def test_a_full_folder_of_temporary_files(ground: Path, losses) -> None:
    temporary = ground / "full tmp"
    temporary.mkdir()
    inside = mounted(
        f"mount -t tmpfs -o size=64k none '{temporary}'",
        f"head -c 100k /dev/zero >'{temporary}/theirs' 2>/dev/null || true",
    )
    lives(Place(ground / "beside full tmp", variables={"TMPDIR": str(temporary)}, inside=inside), losses)


@needs_mounts
@pytest.mark.parametrize("kilobytes", [40, 400, 900])
def test_a_disk_that_fills(ground: Path, losses, kilobytes: int) -> None:
    """Wherever it fills, in an event, in a save or in the report: the reason in a line, and what was saved is whole."""
    place = Place(ground / f"disk of {kilobytes} k", cache=ground / "ordinary" / "cache")
    place.folder.mkdir()
    inside = mounted(f"mount -t tmpfs -o size={kilobytes}k none '{place.folder}'")
    output = demo(replace(place, inside=inside), f"run.steps={STEPS}", exit_code=None)
    assert "Traceback" not in output, output
    assert "No space left" in output, output


@pytest.mark.parametrize("blocks", [16, 200])
def test_a_largest_size_of_files(ground: Path, losses, blocks: int) -> None:
    """RLIMIT_FSIZE: as a disk that is full for one file and has room for another."""
    limit = ("bash", "-c", f'ulimit -f {blocks}; exec "$@"', "bash")
    place = Place(ground / f"files of {blocks} k", inside=limit, cache=ground / "ordinary" / "cache")
    output = demo(place, f"run.steps={STEPS}", exit_code=None)
    assert "Traceback" not in output, output
    if (place.run / "checkpoints").is_dir() and any((place.run / "checkpoints").glob("step-*")):
        said: list[str] = []
        assert checkpoint_tool(["verify", str(place.run)], said.append) == 0, said
    if (place.run / "events.jsonl").exists():
        assert losses_of(place.run) == losses[: len(losses_of(place.run))]


def test_few_open_files(ground: Path, losses) -> None:
    limit = ("bash", "-c", 'ulimit -n 128; exec "$@"', "bash")
    starts(Place(ground / "few files", inside=limit), losses)


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
