"""What a process finds at its start from those that were killed before it, and what it leaves when it is."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from config import op_builds

PROGRAM = """
import os, sys, torch
from training.distributed import start
rank = int(sys.argv[1])
place = start(rank=rank, world_size=2, local_rank=rank)
print("sum", int(place.sum(torch.ones(1))), os.path.exists(sys.argv[2]), flush=True)
sys.stdin.read()
"""


def begin(rank: int, port: int, name: str, **environment: str) -> subprocess.Popen[str]:
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "LOCAL_SIZE": "2", **environment}
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(rank), name],
        env={**os.environ, **variables},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def outputs(tmp_path_factory) -> list[str]:
    """What two ranks print that start beside an old lock; they are killed then."""
    extensions = tmp_path_factory.mktemp("extensions")
    for built in op_builds.extensions_folder().glob("*/deepspeed_shm_comm"):
        shutil.copytree(built, extensions / built.parent.name / built.name)
    for folder in extensions.glob("*/*"):
        (folder / "lock").touch()
        os.utime(folder / "lock", (0, 0))
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    name = f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_127.0.0.1_{port}_"
    ranks = [begin(rank, port, f"{name}{rank}", TORCH_EXTENSIONS_DIR=str(extensions)) for rank in (0, 1)]
    texts = []
    try:
        for rank in ranks:
            lines = []
            while not (lines and lines[-1].startswith("sum")):
                lines.append(rank.stdout.readline())
                assert lines[-1], "the process ended"
            texts.append("".join(lines))
    finally:
        for rank in ranks:
            rank.send_signal(signal.SIGKILL)
            rank.communicate()
    return [*texts, " ".join(str(path) for path in Path("/dev/shm").glob(Path(name).name + "*"))]


def test_a_start_is_not_held_up_by_the_lock_of_a_killed_build(outputs):
    assert "deepspeed_shm_comm/lock: the build of deepspeed_shm_comm that left it was killed" in outputs[0] + outputs[1]


def test_killed_ranks_leave_no_shared_memory(outputs):
    assert "sum 2 False" in outputs[0]
    assert "sum 2 False" in outputs[1]
    assert outputs[2] == ""
