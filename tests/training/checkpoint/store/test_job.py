"""Whole jobs whose checkpoints are encrypted and live in an object store: a machine is lost, another one resumes."""

import json
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.jobs.launches import command, events, finish, trace
from tests.support.servers.store_server import CREDENTIALS, S3Server, s3_server

KEY = "7f" * 32


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as running:
        yield running


@pytest.fixture
def store(server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    for name, value in {**CREDENTIALS, "MANTISSA_KEY": KEY}.items():
        monkeypatch.setenv(name, value)
    server.proxy.clear()
    return server


def settings(store: S3Server, bucket: str) -> list[str]:
    return [
        f"checkpoint.dir=s3://{bucket}/mine",
        f"checkpoint.storage_options={{endpoint_url: '{store.proxy.url}'}}",
        "checkpoint.encryption_key=env:MANTISSA_KEY",
    ]


def test_a_run_goes_on_from_the_store_alone_as_if_nothing_had_been(store: S3Server, tmp_path: Path) -> None:
    """Two ranks; requests fail and connections are cut. Then the run folder is gone and the newest checkpoint rots."""
    store.direct.create_bucket(Bucket="jobs")
    given = settings(store, "jobs")
    for pattern, kind in (("PUT", 503), ("PUT", "done, then cut"), ("GET .*step-2", "cut inside"), ("PUT", 500)):
        store.proxy.fail(pattern, kind)
    finish(command("python", tmp_path, "lost", *given, "checkpoint.keep=3"), ranks=2)
    run = tmp_path / "runs" / "lost"
    whole = trace(tmp_path, "lost")
    saved = events(tmp_path, "lost", "checkpoint")
    assert [event["path"] for event in saved] == [f"s3://jobs/mine/lost/step-{step}" for step in (2, 4, 6)]
    assert all(event["verified"] for event in saved)
    assert [path.name for path in sorted((run / "checkpoints").glob("step-*"))] == ["step-6"]
    check_encryption(run / "checkpoints" / "step-6")
    names = set(store.names("jobs"))
    assert {"mine/lost/LATEST", "mine/lost/step-2/manifest.json", "mine/lost/step-4/state.json"} <= names
    shutil.rmtree(run)
    key = "mine/lost/step-6/state.json"
    store.direct.put_object(Bucket="jobs", Key=key, Body=store.content("jobs", key).replace(b"1", b"2", 1))

    output = finish(command("python", tmp_path, "lost", *given), ranks=2)
    assert "passed over checkpoint s3://jobs/mine/lost/step-6: " in output and "has SHA-256" in output
    assert events(tmp_path, "lost", "run_start")[0]["resumed_from"] == str(run / "checkpoints" / "step-4")
    assert trace(tmp_path, "lost") == whole[4:]
    output += finish(command("python", tmp_path, "lost", *given, "run.resume=never"), exit_code=2)
    assert "holds checkpoints of an earlier run, up to step 6" in output.splitlines()[-1]
    assert (run / "events.jsonl").is_file() and [path.name for path in run.parent.glob("lost.*")] == []
    assert "Traceback" not in output
    check_no_secret_is_written(tmp_path, output)


def test_a_store_that_is_away_fails_saves_and_not_training(store: S3Server, tmp_path: Path) -> None:
    """It is checked before training starts; a later error is a failed save, recorded, and the run continues."""
    store.direct.create_bucket(Bucket="away")
    given = settings(store, "away")
    output = finish(command("python", tmp_path, "none", *given, "checkpoint.dir=s3://nowhere/x"), exit_code=2)
    assert "NoSuchBucket" in output.splitlines()[-1] and "create the bucket" in output
    store.proxy.fail("PUT .*step-2/state.json", 403, times=100)
    finish(command("python", tmp_path, "denied", *given, "checkpoint.keep_every=2"))
    notes = [event["text"] for event in events(tmp_path, "denied", "note")]
    assert len(notes) == 1 and notes[0].startswith("checkpoint s3://away/mine/denied/step-2 was not saved: ")
    assert [event["step"] for event in events(tmp_path, "denied", "checkpoint")] == [4, 6]
    assert {path.name for path in tmp_path.glob("runs/denied/checkpoints/step-*")} == {"step-2", "step-6"}


@pytest.mark.slow
def test_what_was_not_uploaded_is_uploaded_by_the_next_start(store: S3Server, tmp_path: Path) -> None:
    """A job that is preempted while the store is away may be started again; one that ends says that it is unsaved."""
    store.direct.create_bucket(Bucket="late")
    given = settings(store, "late")

    def job(exit_code: int, *further: str) -> None:
        finish(command("python", tmp_path, "late", *given, *further), exit_code=exit_code)
        store.proxy.clear()

    def uploads() -> list[str]:
        notes = [event["text"] for event in events(tmp_path, "late", "note")]
        return [text for text in notes if "uploaded now" in text]

    store.proxy.fail("PUT .*step-1/", 403, times=100)
    job(75, "run.max_minutes=1e-9")
    store.proxy.fail("PUT .*step-6/manifest", 403, times=100)
    job(74)
    assert uploads() and "step-1: uploaded now" in uploads()[0]
    assert store.content("late", "mine/late/LATEST") == b"step-4\n"
    job(0)
    assert store.content("late", "mine/late/LATEST") == b"step-6\n" and len(uploads()) == 2


def check_encryption(path: Path) -> None:
    """Every .pt file begins as an encrypted one, and all are for their owner alone."""
    manifest = json.loads((path / "manifest.json").read_text())
    assert len(manifest["encryption"]["key"]) == 16
    for name in manifest["files"]:
        file = path / name
        assert stat.S_IMODE(file.stat().st_mode) == 0o600, name
        assert file.read_bytes().startswith(b"MNTSENC") is name.endswith(".pt"), name


def check_no_secret_is_written(folder: Path, output: str) -> None:
    """Neither the key nor a credential is in anything that a run leaves or says."""
    secrets = (KEY, CREDENTIALS["AWS_SECRET_ACCESS_KEY"], CREDENTIALS["AWS_ACCESS_KEY_ID"])
    texts = [output, *(path.read_bytes().decode("latin-1") for path in folder.rglob("*") if path.is_file())]
    assert not any(secret in text for secret in secrets for text in texts)
