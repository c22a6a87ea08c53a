"""Who this process is among the others.

Rank and world size come from the launcher's environment and are checked against the process group. Accelerate's own
state is never asked: under `accelerate launch` on a machine without a GPU it tells every rank that it is process 0.
"""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger

from config.child_jobs import free_port
from config.machine import op_builds
from config.machine.binding import RankCpus, apply_binding, choose_binding
from config.resolved import Resolved


@dataclass(frozen=True)
class Place:
    """One process of the run."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    """Whose collectives these are; None is the one that training uses."""

    @property
    def is_main(self) -> bool:
        """Whether this is the one process that writes."""
        return self.rank == 0

    def from_main(self, value: Any) -> Any:
        """The main process's value, on every rank. A collective; plain Python objects only."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def wait_for_all(self) -> None:
        """Return when every rank has come here."""
        dist.barrier(group=self.group)

    def numbers(self, values: Sequence[float]) -> torch.Tensor:
        """(n,) float64 on this rank's device, without waiting for it: torch.tensor(..., device=...) would, on a GPU."""
        on_host = torch.tensor(values, dtype=torch.float64, pin_memory=self.device.type == "cuda")
        return on_host.to(self.device, non_blocking=True)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """values: (n,) float64 on this rank's device -> (world_size, n), row r being rank r's values."""
        rows = values.new_empty(self.world_size * values.numel())
        dist.all_gather_into_tensor(rows, values, group=self.group)
        return rows.view(self.world_size, -1)

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's plain Python value, in rank order, on every rank. For rare things: it pickles."""
        values: list[Any] = [None] * self.world_size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def raise_first(self, problem: str | None, error: type[Exception]) -> None:
        """Raise the problem of the first rank that has one, on every rank. A collective."""
        for text in self.gather_objects(problem):
            if text is not None:
                raise error(text)

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """In-place sum over ranks."""
        dist.all_reduce(values, group=self.group)
        return values

    def beside(self) -> Place:
        """The same processes on a gloo group of its own, whose collectives may go on beside training's, from a thread.

        A rank may come to them hours after the others, when it has more to write. A collective.
        """
        return replace(
            self, device=torch.device("cpu"), group=dist.new_group(backend="gloo", timeout=timedelta(days=1))
        )


def join(resolved: Resolved) -> Place:
    """Join the process group of a run, as its config and the launcher's environment say. Raises as `start` does."""
    run = resolved.config.run
    return start(
        rank=resolved.rank,
        world_size=resolved.world_size,
        local_rank=resolved.local_rank,
        timeout_minutes=run.timeout_minutes,
        bind_cores=run.bind_cores,
    )


def start(
    *, rank: int, world_size: int, local_rank: int, timeout_minutes: float = 30.0, bind_cores: str = "never"
) -> Place:
    """Join the process group and take this rank's device, and its share of the machine's cores.

    The first three arguments are what the launcher's environment said. bind_cores: as `run.bind_cores`. Raises
    RuntimeError when the process group disagrees with the launcher: then two parts of the launch see different worlds,
    and training would be wrong without a word.
    """
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if "MASTER_PORT" not in os.environ:
        if world_size > 1:
            raise RuntimeError("MASTER_PORT is not set: start several processes with a launcher")
        os.environ["MASTER_PORT"] = str(free_port())
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(local_rank))
    # DeepSpeed's start-up notes would bury ours, and it calls every step that is discarded an overflow.
    logger.setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*deprecated.*", module="torch.distributed.c10d_logger")
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        _use_own_ninja()
        _load_shared_memory_op(rank)
    accelerator.set_device(local_rank)
    timeout = timedelta(minutes=timeout_minutes)
    if _restarted_by_torchrun():
        _join_apart_from_the_dead(rank, world_size, timeout)
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False, timeout=timeout)
    if (dist.get_rank(), dist.get_world_size()) != (rank, world_size):
        raise RuntimeError(
            f"the launcher said rank {rank} of {world_size}, the process group says rank {dist.get_rank()} of "
            f"{dist.get_world_size()}; check RANK and WORLD_SIZE in the launcher's environment"
        )
    if accelerator.device_name() == "cpu":
        _forget_the_name_of_shared_memory(rank)
    device = torch.device(accelerator.device_name() if accelerator.device_name() == "cpu" else f"cuda:{local_rank}")
    place = Place(rank, world_size, local_rank, device)
    _take_cores(place, bind_cores)
    return place


def allow_slow_fp16() -> bool:
    """Let DeepSpeed run FP16 on a CPU without FP16 instructions, and say whether that was needed.

    DeepSpeed refuses such a CPU, but torch has FP16 kernels for every one: right, and about fifty times slower than
    FP32 (a 512 x 512 matmul took 124 ms against 2.2 ms on an AMD EPYC without avx512_fp16). Good for trying out FP16's
    range and loss scaling on a small model, and nothing else.
    """
    accelerator = get_accelerator()
    if accelerator.is_fp16_supported() or accelerator.device_name() != "cpu":
        return False
    accelerator.is_fp16_supported = lambda: True
    return True


def stop() -> None:
    """Leave the process group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _restarted_by_torchrun() -> bool:
    """Whether torchrun --max-restarts started this process in place of one that died, on a single machine.

    Over several machines torchrun's count of restarts need not be the same everywhere.
    """
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0 and os.environ.get("GROUP_WORLD_SIZE") == "1"


def _join_apart_from_the_dead(rank: int, world_size: int, timeout: timedelta) -> None:
    """Make the process group under names of its own in the launcher's store.

    torch 2.13 keeps that store through a restart, with the addresses of the processes that died in it: gloo then fails
    with `connectFullMesh ... Connection refused`, unless all ranks happen to come at the same moment.
    """
    store, _, _ = next(dist.rendezvous("env://", rank, world_size, timeout=timeout))
    dist.init_process_group(
        get_accelerator().communication_backend_name(),
        store=dist.PrefixStore(f"restart-{os.environ['TORCHELASTIC_RESTART_COUNT']}", store),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
    )


def _take_cores(place: Place, bind_cores: str) -> None:
    """Compute with this rank's share of its machine's cores, and bind it to them where that is wanted. A collective.

    The deepspeed launcher leaves every rank all of them. Threads are set when OMP_NUM_THREADS is not.
    """
    gpu = None
    if place.device.type == "cuda":
        found: Any = torch.cuda.get_device_properties(place.device)  # torch does not declare these
        gpu = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    claims = place.gather_objects(RankCpus.here(gpu))
    binding = choose_binding(bind_cores, claims, place.rank)
    told = ", as OMP_NUM_THREADS says" if "OMP_NUM_THREADS" in os.environ else ""
    if not told:
        torch.set_num_threads(binding.threads)
    threads = torch.get_num_threads()
    line = apply_binding(binding)
    if line is not None and place.is_main:
        print(f"{line}; {threads} thread{'s' * (threads > 1)}{told}", flush=True)


def _use_own_ninja() -> None:
    """Put this environment's programs first: another ninja would find every op out of date and build it again."""
    programs = str(Path(sys.executable).parent)
    path = os.environ.get("PATH", "").split(os.pathsep)
    if path[0] != programs:
        os.environ["PATH"] = os.pathsep.join([programs, *path])


def _load_shared_memory_op(rank: int) -> None:
    """Build it or load it, before DeepSpeed does, which waits for ever for what a killed build left."""

    def say(line: str) -> None:
        print(line, flush=True)

    builder = get_accelerator().create_op_builder("ShareMemCommBuilder")
    if builder is None or not deepspeed.ops.__compatible_ops__.get(builder.NAME, False):
        return
    with op_builds.exclusive_build("deepspeed_shm_comm", say):
        if rank == 0 and not any(op_builds.extensions_folder().glob("**/deepspeed_shm_comm.so")):
            say("building DeepSpeed's shared-memory op, once on a machine, about a minute")
        builder.load()


def _forget_the_name_of_shared_memory(rank: int) -> None:
    """Leave this rank's 66 MiB of shared memory to those who have it: it then goes when they do, however they end.

    DeepSpeed 0.19.8 never removes it: every port that a run used would keep its own in memory until the machine is
    started again.
    """
    dist.barrier()  # all have it
    address, port = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
    Path(f"/dev/shm/deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{rank}").unlink(missing_ok=True)
