"""Rank, world size, device and process group, and the collectives on plain values. Accelerate's own state is not used:
under `accelerate launch` on a machine without a GPU it is process 0 on every rank."""

import ctypes
import importlib
import logging
import os
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from socket import gethostname
from typing import Any, Self, TypeVar, cast

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import logger
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors

from config.errors import UserError, one_line
from config.machine.binding import apply_binding
from config.machine.cores import RankCpus, choose_binding
from config.resolved import Resolved
from precision.half_on_cpu import multiply_through_fp32
from training.start.rendezvous import forget_port, open_store

T = TypeVar("T")
ALLOCATORS = "expandable_segments:True,pinned_max_round_threshold_mb:64"
"""Read by torch when CUDA starts: less fragmentation of device memory, and pinned copies for saves that are not rounded
up to a power of two (4.96 GB would take 8.6)."""
_TOGETHER = 1 << 24  # [bytes] of tensors that are summed in one collective
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # parameters of `mallopt`, from malloc.h


@dataclass(frozen=True)
class SliceGroup:
    """Consecutive ranks, on one node if they fit, that each hold a slice of the same things."""

    rank: int
    """Number of this rank's slice, from 0."""
    size: int
    group: dist.ProcessGroup

    def gather(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Each rank's `values`, in the order of their slices; the same shape on all. A collective of the group."""
        rows = [torch.empty_like(values, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(rows, values.contiguous(), group=self.group)
        return rows

    def exchange(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """rows: (n, ...), first the `sent[0]` for rank 0, ... -> (m, ...), first the `received[0]` from rank 0, ... A
        collective of the group."""
        result = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(result, rows.contiguous(), received, sent, group=self.group)
        return result


@dataclass(frozen=True)
class ExpertGroup(SliceGroup):
    """The ranks that share the experts of each layer, each with its own sequences."""

    same: dist.ProcessGroup
    """The ranks that have the same experts as this one, one of each group."""


@dataclass(frozen=True)
class TensorGroup(SliceGroup):
    """The ranks that share matrices. They compute the same sequences."""

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        """In-place sum over the group."""
        dist.all_reduce(values, group=self.group)
        return values

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        """In-place maximum over the group."""
        dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        return values


@dataclass(frozen=True)
class World:
    """One process of the run. sequence, tensor, experts: the ranks that it shares sequences, matrices or experts with;
    None if none are shared."""

    rank: int
    world_size: int
    local_rank: int
    device: torch.device
    group: dist.ProcessGroup | None = None
    """Process group of the collectives; None is training's."""
    sequence: SliceGroup | None = None
    tensor: TensorGroup | None = None
    experts: ExpertGroup | None = None

    @property
    def zero_rank(self) -> int:
        """Number of this rank's partition in ZeRO: ranks that share matrices have the same, of different slices."""
        return self.rank // self.tensor.size if self.tensor else self.rank

    @property
    def zero_ranks(self) -> int:
        """The number of ranks over which ZeRO partitions, and averages gradients."""
        return self.world_size // self.tensor.size if self.tensor else self.world_size

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, the main process, which writes whatever only one rank may write."""
        return self.rank == 0

    def from_main(self, value: Any) -> Any:
        """The main process's value, on every rank. A collective; plain Python objects only."""
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    def on_main(self, act: Callable[[], T], catch: tuple[type[Exception], ...] = (UserError,)) -> T:
        """The result of `act` on the main process, on every rank. catch: exceptions of `act`, which every rank raises
        as a UserError with their text. A collective."""
        value, problem = None, None
        if self.is_main:
            try:
                value = act()
            except catch as error:
                problem = str(error)
        value, problem = self.from_main((value, problem))
        if problem is not None:
            raise UserError(problem)
        return cast(T, value)

    def wait_for_all(self) -> None:
        dist.barrier(group=self.group)

    def numbers(self, values: Sequence[float]) -> torch.Tensor:
        """(n,) float64 on this rank's device, without the sync of torch.tensor(..., device="cuda")."""
        on_host = torch.tensor(values, dtype=torch.float64, pin_memory=self.device.type == "cuda")
        return on_host.to(self.device, non_blocking=True)

    def gather(self, values: torch.Tensor) -> torch.Tensor:
        """values: (n,) on this rank's device -> (world_size, n), row r being rank r's values."""
        rows = values.new_empty(self.world_size * values.numel())
        dist.all_gather_into_tensor(rows, values, group=self.group)
        return rows.view(self.world_size, -1)

    def to_main(self, value: Any) -> list[Any]:
        """Every rank's plain Python value, in rank order, on the main process; elsewhere empty. A collective."""
        values: list[Any] = [None] * (self.world_size if self.is_main else 0)
        dist.gather_object(value, values or None, dst=0, group=self.group)
        return values

    def main_receives(self, value: T, rank: int) -> T:
        """The plain Python value of another rank, on the main process; elsewhere `value`. Involves these two only."""
        box = [value]
        if self.is_main:
            dist.recv_object_list(box, src=rank, group=self.group)
        elif self.rank == rank:
            dist.send_object_list(box, dst=0, group=self.group)
        return box[0]

    def gather_objects(self, value: Any) -> list[Any]:
        """Every rank's plain Python value, in rank order, on every rank. Not for every step: it pickles."""
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

    def sum_all(self, tensors: Sequence[torch.Tensor]) -> None:
        """In-place sums over ranks of many tensors together: a collective on CPUs takes 1.8 ms however small it is."""
        for some in _take_tensors(tensors, _TOGETHER):
            flat = _flatten_dense_tensors(some)
            for tensor, total in zip(some, _unflatten_dense_tensors(self.sum(flat), some), strict=True):
                tensor.copy_(total)

    def maximum(self, values: torch.Tensor) -> torch.Tensor:
        """Maximum over ranks; nan where any rank has one, unlike in some backends. values: float64."""
        bits = values.masked_fill(values.isnan(), torch.nan).view(torch.int64)  # one nan, above infinity in this order
        ordered = bits ^ (bits >> 63 & torch.iinfo(torch.int64).max)
        dist.all_reduce(ordered, op=dist.ReduceOp.MAX, group=self.group)
        return (ordered ^ (ordered >> 63 & torch.iinfo(torch.int64).max)).view(torch.float64)

    def copy_from(self, values: torch.Tensor, rank: int) -> None:
        """Overwrite `values`, contiguous and of the same size on all ranks, with those of `rank`."""
        dist.broadcast(values, src=rank, group=self.group)

    def exchange(self, values: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """values: (n,), those for rank 0 first -> (m,), those from rank 0 first. sent, received: numbers by rank."""
        result = values.new_empty(sum(received))
        dist.all_to_all_single(result, values, received, sent, group=self.group)
        return result

    def sharing(self, *, sequence: int = 1, tensor: int = 1, expert: int = 1, timeout_minutes: float) -> Self:
        """This world with groups of so many consecutive ranks that share each sequence, each matrix and the experts of
        each layer. A collective: every rank creates all groups, in the same order."""
        rank, ranks, world = self.rank, range(self.world_size), self

        def own_of(groups: Iterable[range]) -> dist.ProcessGroup:
            timeout = timedelta(minutes=timeout_minutes)
            created = {members: dist.new_group(list(members), timeout=timeout) for members in groups}
            return next(group for members, group in created.items() if rank in members)

        def consecutive(size: int) -> tuple[int, int, dist.ProcessGroup]:
            return rank % size, size, own_of(ranks[first : first + size] for first in ranks[::size])

        if sequence > 1:
            world = replace(world, sequence=SliceGroup(*consecutive(sequence)))
        if tensor > 1:
            world = replace(world, tensor=TensorGroup(*consecutive(tensor)))
        if expert > 1:
            shared = consecutive(expert)
            same = own_of(ranks[slot::expert] for slot in range(expert))
            world = replace(world, experts=ExpertGroup(*shared, same))
        return world

    def on_own_group(self, *, timeout_minutes: float = 30.0) -> Self:
        """This world on a new gloo group, whose collectives may run in a thread beside training's, and wait for a day:
        a rank with more to write may reach one hours after the others. A collective. timeout_minutes: of connecting.
        Raises UserError on a rank that cannot connect."""
        try:
            group = dist.new_group(backend="gloo", timeout=timedelta(minutes=timeout_minutes))
        except RuntimeError as error:
            fix = "give this machine a name that the others resolve to its address, or set GLOO_SOCKET_IFNAME"
            raise UserError(
                f"rank {self.rank} on {gethostname()} cannot reach the others by gloo, which saves need: {fix} "
                f"(python -m launch.doctor checks names); {one_line(error, 160)}"
            ) from error
        dist.distributed_c10d._set_pg_timeout(timedelta(days=1), group)
        return replace(self, device=torch.device("cpu"), group=group)


def build_no_shared_memory_op() -> None:
    """Keep DeepSpeed from building its all-reduce on a CPU, which only tensor-parallel inference uses: a minute with
    g++ at a machine's first start, which fails if the path to torch has a space, and 66 MiB in /dev/shm for each rank.
    Call this before the process group starts."""
    communication: Any = importlib.import_module("deepspeed.comm.torch")
    communication.build_shm_op = lambda: None


def join(resolved: Resolved) -> World:
    """Join a run's process group as its config and the launcher's environment say. Raises like `start`."""
    run = resolved.config.run
    world = start(
        rank=resolved.rank,
        world_size=resolved.world_size,
        local_rank=resolved.local_rank,
        timeout_minutes=run.timeout_minutes,
        bind_cores=run.bind_cores,
        deterministic=run.deterministic,
        job=f"{run.dir}/{run.name} on {resolved.world_size} processes",
    )
    if world.device.type == "cpu":
        _keep_freed_memory()
    return world


def start(
    *,
    rank: int,
    world_size: int,
    local_rank: int,
    timeout_minutes: float = 30.0,
    bind_cores: str = "never",
    deterministic: bool = False,
    job: str = "",
) -> World:
    """Join the process group, select this rank's device, and use its share of the machine's cores. bind_cores,
    deterministic: as in `run`. job: names this job and no other. Raises UserError like `open_store`."""
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    if world_size > 1 and "MASTER_PORT" not in os.environ:
        raise RuntimeError("MASTER_PORT is not set: start several processes with a launcher")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(local_rank))
    # DeepSpeed's start-up notes would hide ours, and it reports every discarded step as an overflow.
    logger.setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message=".*deprecated.*", module="torch.distributed.c10d_logger")
    accelerator = get_accelerator()
    if deterministic or accelerator.device_name() == "cpu":
        _use_one_order(strictly=deterministic)
    build_no_shared_memory_op()
    if accelerator.device_name() == "cuda" and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        os.environ.setdefault("PYTORCH_ALLOC_CONF", ALLOCATORS)
    accelerator.set_device(local_rank)
    # FP32 is what 16 bits are compared with: TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, which NVIDIA's images set, turns its
    # matmuls into TF32, and cuDNN's convolutions are TF32 by default.
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    # By default cuBLAS may split a long sum into parts and add these in 16 bits.
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    timeout = timedelta(minutes=timeout_minutes)
    # DeepSpeed, too, binds the group to a GPU unless this is the only rank.
    device = torch.device(f"cuda:{local_rank}") if accelerator.device_name() == "cuda" else torch.device("cpu")
    dist.init_process_group(
        accelerator.communication_backend_name(),
        store=open_store(rank=rank, world_size=world_size, timeout=timeout, job=job),
        rank=rank,
        world_size=world_size,
        timeout=timeout,
        device_id=device if device.type == "cuda" and world_size > 1 else None,
    )
    deepspeed.init_distributed(auto_mpi_discovery=False, verbose=False, timeout=timeout)
    world = World(rank, world_size, local_rank, device)
    if device.type == "cpu":
        multiply_through_fp32()
    _use_own_cores(world, bind_cores)
    if world.is_main:
        forget_port()
    return world


def _keep_freed_memory() -> None:
    """Let glibc keep the memory that a step frees for the next one, unless the user has tuned it: by default it maps
    and unmaps large tensors each time, and the kernel zeroes their pages again."""
    if not any(name.startswith("MALLOC_") for name in os.environ):
        tune = ctypes.CDLL(None).mallopt
        tune(_M_MMAP_MAX, 0)
        tune(_M_TRIM_THRESHOLD, -1)


def _use_one_order(*, strictly: bool) -> None:
    """Make kernels sum in the same order each time, as the backward pass of x[index] does not by default. strictly:
    collectives too, and an operator without a fixed order raises a RuntimeError that names it."""
    torch.set_deterministic_debug_mode("warn")
    if strictly:  # CUDA, NCCL and transformers read their variables when they start
        os.environ.update(CUBLAS_WORKSPACE_CONFIG=":4096:8", NCCL_ALGO="Ring", FLASH_ATTENTION_DETERMINISTIC="1")
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    debugging: Any = torch.utils.deterministic
    debugging.fill_uninitialized_memory = False  # it would write to all new memory


def allow_fp16_on_cpu() -> None:
    """Let DeepSpeed run FP16 on a CPU without FP16 instructions, which it refuses."""
    accelerator = get_accelerator()
    if accelerator.device_name() == "cpu":
        accelerator.is_fp16_supported = lambda: True


def stop() -> None:
    """Leave the process group; `start` may follow."""
    if dist.is_initialized():
        deepspeed.comm.destroy_process_group()


def _use_own_cores(world: World, bind_cores: str) -> None:
    """Use this rank's share of its machine's cores, bound to it if configured. A collective."""
    gpu = None
    if world.device.type == "cuda":
        found: Any = torch.cuda.get_device_properties(world.device)  # torch does not declare these
        gpu = f"{found.pci_domain_id:04x}:{found.pci_bus_id:02x}:{found.pci_device_id:02x}.0"
    claims = world.gather_objects(RankCpus.here(gpu))
    binding = choose_binding(bind_cores, claims, world.rank)
    wished = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    from_environment = ", as OMP_NUM_THREADS says" if wished.isdecimal() and int(wished) else ""
    if not from_environment:
        torch.set_num_threads(binding.threads)
    threads = torch.get_num_threads()
    line = apply_binding(binding)
    if line is not None and world.is_main:
        print(f"{line}; {threads} thread{'s' * (threads > 1)}{from_environment}", flush=True)
