"""The store through which the ranks of one job, and no others, find each other and form the process group.

torchrun's agent keeps that store, otherwise rank 0 at MASTER_PORT, which may be another job's, so the store names its
job. Ranks that one launcher started on this machine agree on a free port in a file instead.
"""

import errno
import os
import socket
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from config.errors import UserError
from config.files import write_atomically
from config.machine.processes import DEEPSPEED_NODE, free_port, launchers

_JOB = "mantissa/job"  # key in the store of the job's name


def open_store(*, rank: int, world_size: int, timeout: timedelta, job: str) -> dist.Store:
    """The store of this job, at MASTER_PORT from now on. job: the same text on every rank, another one in other jobs.
    Raises UserError when rank 0 cannot have the launcher's port, and when another job answers there."""
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store: dist.Store = next(dist.rendezvous("env://", rank, world_size, timeout=timeout))[0]
        restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0)
        if restarts and os.environ.get("GROUP_WORLD_SIZE") == "1":  # machines may count restarts differently
            # torch 2.13 keeps that store through a restart, with the addresses of the processes that died: gloo then
            # fails with `connectFullMesh ... Connection refused`, unless all ranks connect at the same moment.
            store = dist.PrefixStore(f"restart-{restarts}", store)
    elif rank == 0:
        store = _host(world_size, timeout)
    else:
        file = _port_file(world_size)
        port = _wait_for(file, timeout) if file is not None else int(os.environ["MASTER_PORT"])
        store = _store_at(port, world_size, timeout)
    if rank == 0:
        store.set(_JOB, job)
    else:
        found = store.get(_JOB).decode(errors="replace")
        if found != job:
            where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
            raise UserError(
                f"environment: at MASTER_ADDR and MASTER_PORT, {where}, is another job, {found}, not this one, "
                f"{job}; {_another_port()}"
            )
    return store


def _host(world_size: int, timeout: timedelta) -> dist.Store:
    """Rank 0's store, at MASTER_PORT or at a port that the other ranks are told."""
    file = _port_file(world_size)
    given = int(os.environ.get("MASTER_PORT") or 0)
    try:
        server = listen(given)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        if world_size > 1 and file is None:
            raise UserError(
                f"environment: MASTER_PORT = {given} is in use on {socket.gethostname()}, by another job or what is "
                f"left of one; {_another_port()}"
            ) from error
        server = listen(0)
        if world_size > 1:
            print(f"port {given} is in use; this job's ranks meet at {server.getsockname()[1]}", flush=True)
    port = int(server.getsockname()[1])
    store = _store_at(port, world_size, timeout, is_master=True, master_listen_fd=server.detach())
    if file is not None:
        write_atomically(file, str(port).encode())
    return store


def _store_at(port: int, world_size: int, timeout: timedelta, **server: Any) -> dist.Store:
    os.environ["MASTER_PORT"] = str(port)
    host = os.environ["MASTER_ADDR"]
    return dist.TCPStore(host, port, world_size, timeout=timeout, wait_for_workers=False, **server)


def forget_port() -> None:
    """Remove the file with the port, once all ranks have read it."""
    file = _port_file(int(os.environ["WORLD_SIZE"]))
    if file is not None:
        file.unlink(missing_ok=True)


def _port_file(world_size: int) -> Path | None:
    """The file in which the ranks of this launcher agree on a port; None if it did not start all of them."""
    if world_size == 1 or os.environ.get("LOCAL_SIZE") != str(world_size):
        return None
    above = launchers()
    if not above or above[0].program != DEEPSPEED_NODE:
        return None
    name = f"mantissa-{os.getuid()}-{above[0].pid}-{above[0].started}.port"
    return Path(tempfile.gettempdir()) / name


def _wait_for(file: Path, timeout: timedelta) -> int:
    """The port in the file, which is written once."""
    ends = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < ends:
        with suppress(FileNotFoundError):
            if file.lstat().st_uid == os.getuid():
                return int(file.read_text(encoding="utf-8"))
        time.sleep(0.05)
    raise RuntimeError(f"rank 0 did not open its port within {timeout.total_seconds():.0f} s ({file})")


def listen(port: int) -> socket.socket:
    """A server at a port of every interface, IPv6 and IPv4 if the machine has both; 0: a free port."""
    if socket.has_dualstack_ipv6():
        with suppress(OSError):
            return socket.create_server(("::", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024)
    return socket.create_server(("", port), backlog=1024)


def _another_port() -> str:
    """Human-readable advice on making this process's launcher use a free port."""
    environment, free = os.environ, free_port()
    if not (environment.get("MANTISSA_START") or "SLURM_JOB_ID" in environment):
        if any(name.startswith("ACCELERATE_") for name in environment):
            return f"give accelerate launch --main_process_port {free}"
        if "TORCHELASTIC_RUN_ID" in environment:
            return f"give torchrun --master-port {free}, or --rdzv-endpoint HOST:{free} with --rdzv-backend c10d"
        if "LOCAL_SIZE" in environment:
            return f"give deepspeed --master_port {free}"
    return f"set MASTER_PORT={free} for all of its ranks"
