"""Whole jobs on damaged folders, full disks and folders that may not be read or written."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.jobs.launches import command, events, finish
from tests.support.runs import damages as d
from tests.test_damage import CHECKPOINTS, SHARD

pytestmark = pytest.mark.machines

OVERRIDES = ["-dac_override,-dac_read_search", "--inh-caps", "-dac_override,-dac_read_search"]
AS_OTHERS = ["setpriv", "--bounding-set", *OVERRIDES] if os.getuid() == 0 else []
"""Root without the right to read and write whatever the permissions say."""


@pytest.fixture
def job(finished: Path, tmp_path: Path) -> Path:
    """A copy of a folder with a finished job of two ranks, to go on from."""
    return shutil.copytree(finished, tmp_path / "job")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KiB; needs the right to mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {mounted.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def restricted(arguments: list[str], exit_code: int, **variables: str) -> str:
    """The output of a job that obeys file permissions although root starts it."""
    if AS_OTHERS and shutil.which("setpriv") is None:
        pytest.skip("setpriv is not installed, and permissions do not count for root")
    words = ["env", *(f"{name}={value}" for name, value in variables.items()), *AS_OTHERS, *arguments]
    return finish(words, exit_code=exit_code)


def last_error(output: str) -> str:
    """The last line, which is the only error."""
    assert "Traceback" not in output
    last = output.splitlines()[-1]
    assert last.startswith("error: "), output
    return last


@pytest.mark.parametrize("what", [f"{SHARD}: a flipped bit", "manifest.json: nested", "a manifest of another run"])
def test_two_ranks_go_on_from_the_checkpoint_before_a_damaged_one(job: Path, what: str) -> None:
    name, act = CHECKPOINTS[what]
    act(job / "runs/it/checkpoints/step-6" / name)
    output = finish(command("torchrun", job, "it", "run.steps=8"))
    assert events(job, "it", "run_start")[-1]["resumed_from"].endswith("step-4")
    assert "passed over checkpoint" in output and "Traceback" not in output


def test_two_ranks_refuse_a_checkpoints_folder_that_cannot_be_read(job: Path) -> None:
    """A run must not start from scratch because of permissions."""
    folder = job / "runs/it/checkpoints"
    folder.chmod(0o300)
    try:
        output = restricted(command("torchrun", job, "it", "run.steps=8"), exit_code=1)
    finally:
        folder.chmod(0o700)
    assert f"error: run.dir: {folder} cannot be read" in output
    assert len(events(job, "it", "run_start")) == 1


@pytest.mark.parametrize("name", ["plots/run.png", "report.md", "sample.txt"])
def test_what_is_for_people_never_costs_a_run(job: Path, name: str) -> None:
    d.folder(job / "runs/it" / name)
    (job / "runs/it" / name / "something").write_text("so that it cannot be replaced")
    output = finish(command("python", job, "it", "run.steps=8"), ranks=2)
    assert "not written" in output and "Traceback" not in output
    assert events(job, "it", "run_end")[-1]["exit_code"] == 0


def test_a_tokenizer_that_rots_while_the_run_trains_costs_the_sample_alone(job: Path) -> None:
    """The settings beside tokenizer.json are hashed by nobody, and read only at the end."""
    for path in job.glob("cache/*/tokenizer/tokenizer_config.json"):
        d.halved(path)
    output = finish(command("python", job, "it", "run.steps=8"), ranks=2)
    assert "Traceback" not in output
    notes = [event["text"] for event in events(job, "it", "note")]
    assert any(note.startswith("no text was sampled: ") for note in notes)


def test_a_damaged_line_of_an_earlier_session_costs_the_report_alone(job: Path) -> None:
    d.line(2, d.BINARY.replace(b"\n", b""))(job / "runs/it/events.jsonl")
    output = finish(command("python", job, "it", "run.steps=8"), ranks=2)
    assert "report   was not written: " in output and "line 3 is not" in output


def test_a_full_disk_under_the_console_costs_its_lines_alone(job: Path) -> None:
    words = ["sh", "-c", 'exec "$@" > /dev/full 2>&1', "sh", *command("python", job, "it", "run.steps=8")]
    assert finish(words) == ""
    assert events(job, "it", "run_end")[-1]["exit_code"] == 0


def test_a_disk_that_is_full_when_a_run_starts_is_one_line(small_disk: Path, tmp_path: Path) -> None:
    (small_disk / "ballast").write_bytes(bytes(60 << 10))
    output = finish(command("python", tmp_path, "it", f"run.dir={small_disk}"), exit_code=2)
    assert "No space left on device" in last_error(output) and str(small_disk) in last_error(output)


def test_a_disk_that_fills_while_a_run_trains_is_one_line_and_lost_events_are_counted(small_disk, tmp_path) -> None:
    """The run folder's disk takes the start and a few steps. No checkpoint fits, so the exit code says so."""
    overrides = [f"run.dir={small_disk}", "run.steps=60", "checkpoint.max_failures=99", "evaluate.every_steps=0"]
    output = finish(command("python", tmp_path, "it", *overrides), exit_code=74)
    assert "Traceback" not in output
    assert "step-60 was not saved" in output.splitlines()[-1]
    lost, again = (output.count(text) for text in ("event not written", "writing works again"))
    assert lost - again in (0, 1) and lost > 0, "consecutive ones are told once; each save that fails frees the disk"


@pytest.mark.parametrize("what", ["data.path", "data.cache_dir", "run.dir"])
def test_a_folder_that_may_not_be_read_is_one_line(finished: Path, tmp_path: Path, what: str) -> None:
    folder = tmp_path / "closed"
    (folder / "inside").mkdir(parents=True)
    (folder / "inside" / "a.txt").write_text("text " * 2000)
    overrides = {"data.path": f"{folder}/inside/a.txt"}.get(what, f"{folder}/inside")
    folder.chmod(0o000)
    try:
        output = restricted(command("python", tmp_path, "it", f"{what}={overrides}"), exit_code=2)
    finally:
        folder.chmod(0o700)
    assert "ermission denied" in last_error(output) or "may not be written" in last_error(output)
    assert str(folder) in last_error(output)


def test_a_home_that_cannot_be_written_is_said_in_one_line_and_the_run_goes_on(tmp_path: Path) -> None:
    home, temporary = tmp_path / "home", tmp_path / "temporary"
    home.mkdir()
    temporary.mkdir()
    home.chmod(0o500)
    words = [word for word in command("python", tmp_path, "it") if not word.startswith("data.cache_dir")]
    output = restricted(words, exit_code=0, HOME=str(home), TMPDIR=str(temporary))
    assert f"Permission denied: '{home}/.cache': libraries keep their caches in {temporary}/mantissa-" in output
    assert list(temporary.glob("mantissa-*/*/index.json")) and not list(home.iterdir())
