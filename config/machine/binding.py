"""Bind a rank to its share of the machine's cores, or report why it is not bound. The standard library only.

DeepSpeed's launcher (`--bind_cores_to_rank`) and torchrun (`--numa-binding`) can do it with numactl; here the ranks do
it themselves, under every launcher, once each knows which CPUs the others may use.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from config.machine.cores import Core, cpus_text, divide_cores, gpu_node, near_gpus, read_cores

OPENMP_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Variables that make OpenMP bind its threads itself, the main one included."""
LEAST_CORES, LEAST_CORES_WITH_GPU = 2, 4
"""With auto a rank whose own share is smaller is bound to its NUMA node or its GPU's socket, shared with the ranks
there: threads beside its step (autograd, gloo or NCCL, reading and saving) must not wait for the step's own core."""

_before: frozenset[int] | None = None
_outcome: str | None = None


@dataclass(frozen=True)
class RankCpus:
    """What each rank sends to the others."""

    machine: str
    """Equal for processes under one kernel, in whatever containers."""
    cpus: frozenset[int]
    """Those it may use, as it was started."""
    gpu_node: int | None
    """NUMA node of its GPU, or UNKNOWN; None: it computes on the CPU."""

    @classmethod
    def here(cls, gpu: str | None = None) -> RankCpus:
        """Those of this process. gpu: PCI address of its GPU, as in `0000:dc:00.0`."""
        try:
            machine = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        except OSError:
            machine = socket.gethostname()
        return cls(machine, usable_cpus(), None if gpu is None else gpu_node(gpu))


@dataclass(frozen=True)
class Binding:
    """The decision for one rank."""

    threads: int
    """To compute with on the CPU: one per core of its share."""
    cpus: frozenset[int] | None
    """To bind it to; None: it is not bound."""
    reason: str
    """Why it is not bound, or what it is bound to."""
    logged: bool
    """Whether to log it."""


def usable_cpus() -> frozenset[int]:
    """The CPUs that this process may use, or might use before `apply_binding`."""
    if _before is not None:
        return _before
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def choose_binding(
    mode: str,
    claims: Sequence[RankCpus],
    rank: int,
    *,
    environment: Mapping[str, str] = os.environ,
    root: Path = Path("/sys"),
) -> Binding:
    """The CPUs that a rank is bound to, and its number of threads.

    mode: auto, always or never, as `run.bind_cores`. claims: every rank's, in rank order. The threads are the same in
    every mode, except where GPUs decide which cores are near. Nothing is bound where the ranks of a machine may use
    different CPUs, because a launcher has bound them, nor where OpenMP is set to bind its threads.
    """
    mine = claims[rank]
    here = [other for other, claim in enumerate(claims) if claim.machine == mine.machine]
    alike = [other for other in here if claims[other].cpus == mine.cpus]
    nodes = read_cores(mine.cpus, root)
    by_openmp = [name for name in OPENMP_VARIABLES if environment.get(name, "false").lower() != "false"]
    near = None if len(alike) < len(here) else _near([claims[other].gpu_node for other in alike], nodes, root)
    share = divide_cores(nodes, len(alike), near if mode != "never" else None)[alike.index(rank)]
    threads, with_gpu = max(1, len(share.own)), mine.gpu_node is not None

    def not_bound(reason: str, logged: bool = True) -> Binding:
        return Binding(threads, None, reason, logged)

    if mode == "never":
        return not_bound("run.bind_cores = never", logged=False)
    if by_openmp:
        return not_bound(f"OpenMP binds its threads by {' and '.join(by_openmp)}")
    if len(alike) < len(here):
        return not_bound("the ranks were given cores of their own when they were started")
    if mode == "auto" and len(nodes) == 1:
        return not_bound("one NUMA node", logged=False)
    if mode == "auto" and with_gpu and near is None:
        return not_bound("the kernel does not report which NUMA nodes the GPUs are at, or their cores may not be used")
    least = 1 if mode == "always" else LEAST_CORES_WITH_GPU if with_gpu else LEAST_CORES
    shared = len(share.own) < least
    cpus = share.around if shared else share.cpus
    if cpus == mine.cpus:
        return not_bound("these are all the cores that the ranks may use", logged=mode == "always")
    return Binding(threads, cpus, _describe_cpus(cpus, nodes, near is not None, shared), True)


def apply_binding(binding: Binding) -> str | None:
    """Bind all threads of this process and return one line to log; None where there is nothing worth logging.

    A thread with cores of its own keeps them. Never raises: a refusal of the system is in the line.
    """
    global _before, _outcome
    _outcome, logged, before = f"not bound, {binding.reason}", binding.logged, usable_cpus()
    if binding.cpus is not None:
        logged = True
        try:
            now = os.sched_getaffinity(0)
            os.sched_setaffinity(0, binding.cpus)
        except (OSError, AttributeError) as error:  # in a sandbox, or not on Linux
            _outcome = f"not bound, the system refuses: {getattr(error, 'strerror', None) or error}"
        else:
            _outcome, _before = f"bound to {binding.reason}", before
            for task in Path("/proc/self/task").glob("*"):
                with suppress(OSError):  # it has ended
                    if os.sched_getaffinity(int(task.name)) == now:
                        os.sched_setaffinity(int(task.name), binding.cpus)
    return f"cores: {_outcome}" if logged else None


def binding_outcome() -> str | None:
    """What `apply_binding` did, and why; None before it was called."""
    return _outcome


def unbind(pid: int) -> None:
    """Let a child process use all CPUs that this one might use before `apply_binding`."""
    if _before is not None:
        with suppress(OSError):
            os.sched_setaffinity(pid, _before)


def _near(gpu_nodes: Sequence[int | None], nodes: Mapping[int, object], root: Path) -> list[tuple[int, ...]] | None:
    """Nodes near each rank's GPU; None without GPUs, or when one is at a node whose cores may not be used."""
    found = [node for node in gpu_nodes if node is not None and node in nodes]
    return near_gpus(found, nodes, root) if len(found) == len(gpu_nodes) else None


def _describe_cpus(cpus: frozenset[int], nodes: Mapping[int, Sequence[Core]], near_gpu: bool, shared: bool) -> str:
    at = [str(node) for node, cores in nodes.items() if any(core & cpus for core in cores)]
    where = f"CPU{'s' * (len(cpus) > 1)} {cpus_text(cpus)} of NUMA node{'s' * (len(at) > 1)} {', '.join(at)}"
    return where + (", near its GPU" if near_gpu else "") + (", with other ranks" if shared else "")
