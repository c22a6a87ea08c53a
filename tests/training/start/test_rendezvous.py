"""The ranks of one job find each other, and never those of another one, whatever listens at MASTER_PORT."""

import os
import socket
from collections.abc import Iterator
from datetime import timedelta

import pytest

from config.errors import UserError
from training.start.rendezvous import open_store

TIMEOUT = timedelta(seconds=20)


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A port at which something listens."""
    for name in ("LOCAL_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "SLURM_JOB_ID", "MANTISSA_START"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.create_server(("", 0)) as server:
        monkeypatch.setenv("MASTER_PORT", str(server.getsockname()[1]))
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    ("variables", "flag"),
    [
        ({"LOCAL_SIZE": "2"}, "give deepspeed --master_port "),
        ({}, "set MASTER_PORT="),
    ],
)
def test_a_port_in_use_is_one_line_with_the_launchers_flag(port, monkeypatch, variables, flag):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as caught:
        open_store(rank=0, world_size=2, timeout=TIMEOUT, job="ours")
    assert str(caught.value).startswith(f"environment: MASTER_PORT = {port} is in use on {socket.gethostname()}, by")
    assert flag in str(caught.value)


def test_a_single_process_takes_another_port(port):
    store = open_store(rank=0, world_size=1, timeout=TIMEOUT, job="ours")
    assert int(os.environ["MASTER_PORT"]) == store.port != port


def test_a_rank_does_not_join_the_store_of_another_job(monkeypatch, port):
    monkeypatch.setenv("MASTER_PORT", "0")
    theirs = open_store(rank=0, world_size=2, timeout=TIMEOUT, job="theirs")
    where = f"127.0.0.1:{theirs.port}"
    with pytest.raises(UserError, match=f"{where}, is another job, theirs, not this one, ours; set MASTER_PORT="):
        open_store(rank=1, world_size=2, timeout=TIMEOUT, job="ours")
    assert open_store(rank=1, world_size=2, timeout=TIMEOUT, job="theirs").get("mantissa/job") == b"theirs"
