"""Checkpoints in a store: a real S3 server on loopback, behind a proxy that loses, corrupts and refuses requests."""

import hashlib
import random
import re
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from config.errors import UserError
from config.json_text import sealed
from config.secrets import refuse_secrets
from tests.support.servers.store_server import CREDENTIALS, SMALLEST_PART, S3Server, s3_server
from training.checkpoint.manifest import FORMAT, Damaged, Unusable
from training.checkpoint.store.errors import StoreError
from training.checkpoint.store.store import Store

PART = SMALLEST_PART
ONCE = {"retries": {"total_max_attempts": 1}}
STORES: dict[str, Store] = {}


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as server:
        server.direct.create_bucket(Bucket="runs")
        yield server


def open_uploads(server: S3Server) -> list[dict[str, Any]]:
    """Multipart uploads that were neither completed nor aborted."""
    return server.direct.list_multipart_uploads(Bucket="runs").get("Uploads", [])


@pytest.fixture
def s3(server: S3Server) -> Iterator[S3Server]:
    """The server, with an empty bucket and no faults."""
    server.proxy.clear()
    for name in server.names("runs"):
        server.direct.delete_object(Bucket="runs", Key=name)
    for upload in open_uploads(server):
        server.direct.abort_multipart_upload(Bucket="runs", Key=upload["Key"], UploadId=upload["UploadId"])
    yield server
    server.proxy.clear()


def store_of(s3: S3Server, url: str = "s3://runs/demo/checkpoints", **further: Any) -> Store:
    """A store that does not wait long; only we try again, not the client under us. One for all tests that want it so:
    what takes time is the client's start."""
    options = {"endpoint_url": s3.proxy.url, "config_kwargs": ONCE} | further.pop("options", {})
    arguments = {"attempts": 4, "first_wait": 0.001, "longest_wait": 0.01, "part": PART} | further
    kept = f"{url} {options} {arguments}"
    if kept not in STORES:
        STORES[kept] = Store(url, options, **arguments)
    STORES[kept].retries = 0
    return STORES[kept]


def made(folder: Path, *, size: int, seed: int = 0) -> tuple[Path, str]:
    path = folder / f"file-{size}-{seed}"
    path.write_bytes(random.Random(seed).randbytes(size))
    return path, hashlib.sha256(path.read_bytes()).hexdigest()


def checkpoint(folder: Path, step: int, sizes: dict[str, int]) -> dict[str, Any]:
    """Files of a checkpoint on disk, and its manifest."""
    files = {}
    for name, size in sizes.items():
        path = folder / f"step-{step}" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(random.Random(f"{step} {name}").randbytes(size))
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        files[name] = {"sha256": digest, "bytes": size, "rank": 0, "layout": ""}
    further = {
        "world_size": 1,
        "zero_stage": 0,
        "went_back": 0,
        "layouts": {},
        "precision": {},
        "data": {},
        "versions": {},
    }
    return {"format": FORMAT, "step": step, "written": "2026-01-01", "files": files, **further}


def steps_of(store: Store) -> list[int]:
    """The candidates' steps, the newest first."""
    return [step for step, _ in store.candidates()]


def put(store: Store, folder: Path, manifest: dict[str, Any]) -> None:
    """Upload as a save does."""
    step = manifest["step"]
    store.delete(step)
    for name, file in manifest["files"].items():
        store.upload(folder / f"step-{step}" / name, f"step-{step}/{name}", sha256=file["sha256"], size=file["bytes"])
    store.publish(step, sealed(manifest))


def usable(store: Store, folder: Path) -> list[int]:
    """The candidates, in order, each of which is downloaded whole."""
    found = steps_of(store)
    for step in found:
        for name, file in store.manifest(step)["files"].items():
            store.download(
                f"step-{step}/{name}", folder / f"back-{step}" / name, sha256=file["sha256"], size=file["bytes"]
            )
    return found


SIZES = {"state.json": 100, "deepspeed/a_optim_states.pt": 3000, "empty": 0}


@pytest.mark.parametrize("kind", ["s3", "memory", "file"])
def test_a_checkpoint_goes_there_and_back(s3: S3Server, tmp_path: Path, kind: str) -> None:
    url = {"s3": "s3://runs/demo", "memory": "memory://demo", "file": f"file://{tmp_path}/far/demo"}[kind]
    options = {"endpoint_url": s3.proxy.url} if kind == "s3" else {}
    store, other = Store(url, options), store_of(s3, url) if kind == "s3" else Store(url)
    assert (steps_of(store), store.unfinished(), store.read_text("LATEST")) == ([], [], None)
    with pytest.raises(Damaged, match=r"manifest.json is missing"):
        store.manifest(7)
    manifests = {step: checkpoint(tmp_path, step, SIZES) for step in (9, 10, 20)}
    for manifest in manifests.values():
        put(store, tmp_path, manifest)
        assert steps_of(other)[0] == manifest["step"], "a listing was kept from before"
    assert store.steps() == [9, 10, 20]
    assert store.manifest(9) == manifests[9]
    store.upload_text("LATEST", "step-10\n")
    assert usable(other, tmp_path) == [20, 10, 9], "LATEST is a hint"
    for name in SIZES:
        assert (tmp_path / "back-9" / name).read_bytes() == (tmp_path / "step-9" / name).read_bytes()
    store.delete(20)
    store.delete(20)
    assert steps_of(other) == [10, 9]
    assert not [name for name in other.find() if "step-20" in name]


def test_large_files_go_in_parts(s3: S3Server, tmp_path: Path) -> None:
    small, large = made(tmp_path, size=2 * PART - 1), made(tmp_path, size=3 * PART + 1)
    store = store_of(s3)
    store.upload(small[0], "small", sha256=small[1], size=2 * PART - 1)
    assert s3.proxy.count("uploadId") == 0
    store.upload(large[0], "large", sha256=large[1], size=3 * PART + 1)
    assert [s3.proxy.count(rf"PUT .*large\?.*partNumber={part}\b") for part in range(1, 6)] == [1, 1, 1, 1, 0]
    assert s3.content("runs", "demo/checkpoints/large") == large[0].read_bytes()
    assert s3.proxy.count("GET .*/large") == 4, "it was read back"
    assert store.retries == 0


def test_a_part_that_fails_is_sent_again_alone(s3: S3Server, tmp_path: Path) -> None:
    """The client's default is three tries of each request."""
    path, sha256 = made(tmp_path, size=3 * PART)
    store = Store("s3://runs/demo", {"endpoint_url": s3.proxy.url}, part=PART)
    fault = s3.proxy.fail("partNumber=2", 503)
    store.upload(path, "large", sha256=sha256, size=3 * PART)
    assert fault.seen == 1
    assert [s3.proxy.count(f"partNumber={part}") for part in (1, 2, 3)] == [1, 2, 1]
    assert store.retries == 0


FAULTS = ["cut before", "cut inside", "done, then cut", 500, 503]
REQUESTS = {
    "list": r"GET /runs\?list",
    "read": r"GET /runs/.*manifest.json",
    "read a part": r"GET /runs/.*/large",
    "size": "HEAD .*/large",
    "begin an upload": r"POST .*\?uploads",
    "part": "partNumber=2",
    "complete": r"POST .*\?uploadId",
    "small": "PUT .*/manifest.json",
    "latest": "PUT .*/LATEST",
    "delete": r"DELETE [^?]*step-6/large(?!.*uploadId)",
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", FAULTS)
def test_every_request_may_fail_in_every_way(s3: S3Server, tmp_path: Path, kind: str | int) -> None:
    """One of each kind of request fails, and the checkpoint arrives, is chosen and comes back."""
    times = 2 if isinstance(kind, str) else 1  # the client itself repeats one that is lost with its connection
    manifest, store = checkpoint(tmp_path, 6, {"large": 2 * PART + 9}), store_of(s3, attempts=9)
    put(store, tmp_path, manifest)
    s3.proxy.clear()
    faults = {name: s3.proxy.fail(pattern, kind, times) for name, pattern in REQUESTS.items()}
    put(store, tmp_path, manifest)
    assert usable(store, tmp_path) == [6]
    assert (tmp_path / "back-6" / "large").read_bytes() == (tmp_path / "step-6" / "large").read_bytes()
    if isinstance(kind, int):
        assert {name: fault.seen for name, fault in faults.items()} == dict.fromkeys(REQUESTS, 1)
        assert store.retries == len(REQUESTS)
        assert open_uploads(s3) == [], "one that failed was left open"
    else:  # an answer that has no body is not cut inside
        assert sum(fault.seen for fault in faults.values()) >= len(REQUESTS)
        assert 3 <= store.retries <= 2 * len(REQUESTS)


def test_what_was_corrupted_on_the_way_is_sent_again(s3: S3Server, tmp_path: Path) -> None:
    path, sha256 = made(tmp_path, size=2 * PART)
    fault, store = s3.proxy.fail("PUT .*partNumber=1", "corrupt"), store_of(s3)
    store.upload(path, "large", sha256=sha256, size=2 * PART)
    assert (fault.seen, store.retries) == (1, 1)
    assert s3.content("runs", "demo/checkpoints/large") == path.read_bytes()
    s3.proxy.fail("PUT .*LATEST", "corrupt")
    store.upload_text("LATEST", "step-3\n")
    assert store.read_text("LATEST") == "step-3\n"


def test_a_file_that_rotted_on_the_local_disk_is_not_sent_again_and_again(s3: S3Server, tmp_path: Path) -> None:
    path, sha256 = made(tmp_path, size=1000)
    path.write_bytes(bytes(1000))
    with pytest.raises(StoreError, match="changed since it was written, so it is not uploaded"):
        store_of(s3).upload(path, "one", sha256=sha256, size=1000)
    assert s3.proxy.count("PUT") == 1


def test_tries_and_waits_are_bounded(s3: S3Server) -> None:
    store = store_of(s3, attempts=6, first_wait=0.05, longest_wait=0.1)
    assert store.read_text("LATEST") is None
    s3.proxy.clear()
    s3.proxy.fail("GET", 503, times=99)
    started = time.perf_counter()
    with pytest.raises(StoreError, match=r"LATEST: cannot read after 6 tries: SlowDown: .*Please reduce"):
        store.read_text("LATEST")
    # 0.05 and four times 0.1, less up to half; the client itself sleeps 0.1 s after each failure
    assert 0.225 <= time.perf_counter() - started <= 0.45 + 6 * 0.1 + 1.5
    assert (s3.proxy.count("GET"), store.retries) == (6, 5)


def test_a_start_outlasts_a_busy_store_as_an_upload_does(s3: S3Server) -> None:
    s3.proxy.fail("PUT", 503, times=3)
    store_of(s3).require_usable()
    assert s3.proxy.count("PUT") == 4


def test_permanent_errors_are_reported_at_once(s3: S3Server, tmp_path: Path) -> None:
    path, sha256 = made(tmp_path, size=10)

    def problem(act: Any, pattern: str, requests: int) -> None:
        s3.proxy.requests.clear()
        with pytest.raises((StoreError, UserError), match=pattern) as error:
            act()
        assert s3.proxy.count("") == requests, s3.proxy.requests
        assert "\n" not in str(error.value)
        assert not [value for value in list(CREDENTIALS.values())[:2] if value in str(error.value)]

    store, nowhere = store_of(s3), store_of(s3, "s3://no-such-bucket/demo")
    no_bucket = r"s3://no-such-bucket/demo/.*NoSuchBucket: .*create the bucket, or correct checkpoint.dir"
    problem(lambda: nowhere.upload(path, "one", sha256=sha256, size=10), no_bucket, 1)
    problem(nowhere.candidates, no_bucket, 1)
    problem(nowhere.steps, no_bucket, 1)
    problem(lambda: nowhere.delete(3), no_bucket, 1)
    problem(nowhere.require_usable, "^checkpoint.dir = " + no_bucket, 1)
    denied = "check that these credentials may read, write, list and delete there"
    s3.proxy.fail("", 403, times=99)
    problem(lambda: store.upload(path, "one", sha256=sha256, size=10), f"/one: cannot upload: .*{denied}", 1)
    problem(
        lambda: store.upload_text("LATEST", "step-3\n"),
        f"LATEST: cannot upload: AccessDenied: Access Denied; {denied}",
        1,
    )
    problem(store.steps, f"cannot list: .*{denied}", 1)
    problem(store.require_usable, f"^checkpoint.dir = s3://.*{denied}", 1)


def test_a_store_that_is_not_there_and_missing_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in CREDENTIALS.items():
        monkeypatch.setenv(name, value)
    options = {"endpoint_url": "http://127.0.0.1:9", "config_kwargs": ONCE}
    store = Store("s3://runs/demo", options, first_wait=0.001)
    with pytest.raises(
        UserError, match=r"after 8 tries: .*check the network and checkpoint.storage_options.endpoint_url"
    ):
        store.require_usable()
    for name in list(CREDENTIALS)[:2]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(UserError, match=r"cannot upload: .*credentials.*keep credentials in the environment"):
        Store("s3://runs/demo", options).require_usable()


def cut_off(s3: S3Server, after: int) -> None:
    """Let nothing reach the store after this many requests, as when the process is killed."""
    s3.proxy.clear()
    s3.proxy.fail("", "none", times=after)
    s3.proxy.fail("", 403, times=10_000)


def whole(s3: S3Server, store: Store) -> list[int]:
    """The candidates, in order, after seeing that each one's files are there as its manifest has them."""
    found = steps_of(store)
    for step in found:
        for name, file in store.manifest(step)["files"].items():
            content = s3.content("runs", f"demo/checkpoints/step-{step}/{name}")
            assert hashlib.sha256(content).hexdigest() == file["sha256"]
    return found


@pytest.mark.one_in(2)
@pytest.mark.parametrize("saved_before", [True, False])
def test_wherever_an_upload_ends_the_checkpoint_before_stays_the_chosen_one(s3, tmp_path, saved_before) -> None:
    """saved_before: a run that went back saves a step again, of which older files are in the store."""
    one, two = (checkpoint(tmp_path, step, {"large": 2 * PART}) for step in (1, 2))
    older = checkpoint(tmp_path / "older", 2, {"large": 60, "b": 60})
    store = store_of(s3)
    put(store, tmp_path, one)
    for after in range(100):
        s3.proxy.clear()
        if saved_before:
            put(store, tmp_path / "older", older)
        else:
            store.delete(2)
        store.upload_text("LATEST", "step-1\n")
        cut_off(s3, after)
        try:
            put(store, tmp_path, two)
            published = True
        except StoreError:
            published = False
        sealing = "PUT .*step-2/manifest.json"
        sealed_there = s3.proxy.count(sealing) == 1 and not re.match(sealing, s3.proxy.requests[-1])
        s3.proxy.clear()
        found = whole(s3, store)
        untouched = saved_before and after == 0
        assert found[0] == (2 if sealed_there or untouched else 1), after
        assert published <= sealed_there
        if published or (saved_before and after == 6):
            break
    assert after >= 6


def test_wherever_a_deletion_ends_no_half_checkpoint_is_chosen(s3: S3Server, tmp_path: Path) -> None:
    one, two = (checkpoint(tmp_path, step, {"a": 5, "b": 5, "z": 5}) for step in (1, 2))
    put(store_of(s3), tmp_path, two)
    for after in range(100):
        s3.proxy.clear()
        put(store_of(s3), tmp_path, one)
        store_of(s3).upload_text("LATEST", "step-2\n")
        cut_off(s3, after)
        try:
            store_of(s3).delete(1)
            deleted = True
        except StoreError:
            deleted = False
        s3.proxy.clear()
        store = store_of(s3)
        assert usable(store, tmp_path) == ([2, 1] if after == 0 else [2])
        assert store.unfinished() == ([] if after == 0 or deleted else [1])
        if deleted:
            break
    assert after == 5  # the manifest, the listing, three files


def test_a_manifest_that_is_not_as_it_was_sealed(s3: S3Server, tmp_path: Path) -> None:
    store, manifest = store_of(s3), checkpoint(tmp_path, 4, {"a": 5})
    store.upload_text("step-4/manifest.json", sealed(manifest).replace('"bytes": 5', '"bytes": 6'))
    with pytest.raises(Damaged, match="does not have the SHA-256"):
        store.manifest(4)
    store.upload_text("step-4/manifest.json", sealed(manifest | {"format": 99}))
    with pytest.raises(Unusable, match="format 99"):
        store.manifest(4)


def test_neighbours_are_not_ours(s3: S3Server, tmp_path: Path) -> None:
    for name in ("demo/checkpoints2/step-8/manifest.json", "demo/step-7/manifest.json"):
        s3.direct.put_object(Bucket="runs", Key=name, Body=b"1")
    for name in ("step-x/manifest.json", "step-05/manifest.json", "step-3", "old/step-2/manifest.json", "step-11/a"):
        s3.direct.put_object(Bucket="runs", Key=f"demo/checkpoints/{name}", Body=b"1")
    s3.direct.put_object(Bucket="runs", Key="demo/checkpoints/step-1/manifest.json", Body=b"1")
    store = store_of(s3)
    assert (store.steps(), store.unfinished()) == ([1], [11])
    store.delete(1)
    assert "demo/checkpoints/step-11/a" in s3.names("runs")


def test_server_side_encryption_reaches_the_server(s3: S3Server, tmp_path: Path) -> None:
    key = "arn:aws:kms:us-east-1:123456789012:key/11111111-2222-3333-4444-555555555555"
    further = {"s3_additional_kwargs": {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": key}}
    put(store_of(s3, options=further), tmp_path, checkpoint(tmp_path, 4, {"small": 5, "large": 2 * PART}))
    assert len(s3.names("runs")) == 4
    for name in s3.names("runs"):
        head = s3.direct.head_object(Bucket="runs", Key=name)
        assert (head.get("ServerSideEncryption"), head.get("SSEKMSKeyId")) == ("aws:kms", key), name


def test_a_download_is_whole_or_not_there(s3: S3Server, tmp_path: Path) -> None:
    store, local = store_of(s3), tmp_path / "back" / "one"
    path, sha256 = made(tmp_path, size=2 * PART)
    for corrupted, pattern in (
        (None, "one is missing"),
        (path.read_bytes()[:-1], "has 131,071 bytes; it was written with 131,072"),
        (path.read_bytes()[:-1] + b"\0", "has SHA-256 .*; it was written with"),
    ):
        if corrupted is not None:
            s3.direct.put_object(Bucket="runs", Key="demo/checkpoints/one", Body=corrupted)
        with pytest.raises(Damaged, match=pattern):
            store.download("one", local, sha256=sha256, size=2 * PART)
        assert list(local.parent.iterdir()) == []
    store.upload(path, "one", sha256=sha256, size=2 * PART)
    s3.proxy.clear()
    s3.proxy.fail("GET .*/one", "cut inside")
    store.download("one", local, sha256=sha256, size=2 * PART, private=True)
    assert s3.proxy.count("GET .*/one") == 3, "only the part that was cut is fetched again"
    assert stat.S_IMODE(local.stat().st_mode) == 0o600
    assert local.read_bytes() == path.read_bytes()


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"key": "AKIA1234"}, "checkpoint.storage_options.key"),
        ({"client_kwargs": {"aws_secret_access_key": "hush"}}, "storage_options.client_kwargs.aws_secret_access_key"),
        ({"s3_additional_kwargs": {"SSECustomerKey": "hush"}}, "s3_additional_kwargs.SSECustomerKey"),
        ({"token": {"private_key": "hush"}}, "token.private_key"),
        ({"client_kwargs": [{"api-key": "hush"}]}, "client_kwargs.api-key"),
        ({"endpoint_url": "https://user:hush@store.example"}, "endpoint_url"),
    ],
)
def test_a_secret_in_the_options_is_refused(options: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError, match=rf"{re.escape(key)}: looks like a credential.*AWS_SECRET_ACCESS_KEY") as error:
        Store("s3://runs/demo", options)
    assert "hush" not in str(error.value)
    assert "AKIA" not in str(error.value)


def test_what_is_no_secret_is_not_refused() -> None:
    kms = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "arn:aws:kms:us-east-1:1:key/2", "BucketKeyEnabled": True}
    refuse_secrets("s3://runs/demo", {"endpoint_url": "https://store.example", "s3_additional_kwargs": kms})
    refuse_secrets("gs://runs/demo", {"token": "google_default", "project": "mine"})
    refuse_secrets("s3://runs/demo", {"profile": "train", "key": None, "anon": False})
    with pytest.raises(UserError, match="checkpoint.dir: holds a user or password"):
        refuse_secrets("ftp://user:hush@host/runs", {})
