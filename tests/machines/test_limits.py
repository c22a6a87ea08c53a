"""Room: a small /dev/shm, temporary files that cannot be written, a disk that fills, few open files."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.machines.strange import STEPS, Place, demo, lives, look_at, losses_of, mounted, why_no_mounts
from training.checkpoint.tool import main as checkpoint_tool

NO_MOUNTS = why_no_mounts()
needs_mounts = pytest.mark.skipif(bool(NO_MOUNTS), reason=NO_MOUNTS)
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
    place = Place(ground / "few files", inside=limit)
    look_at(place.run, demo(place, f"run.steps={STEPS}"), losses[:STEPS])
