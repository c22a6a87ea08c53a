"""Bind a rank to its share of the machine's cores, or say why it is left to the kernel. The standard library only.

DeepSpeed's launcher (`--bind_cores_to_rank`) and torchrun (`--numa-binding`) do it with numactl, when they are asked;
here it is done by the ranks themselves, under every launcher, once each knows what the others may use.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from config.machine.cores import Core, cpus_text, gpu_node, near_gpus, plan, read_cores

OF_OPENMP = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Variables by which OpenMP binds its threads itself, the main one included."""
LEAST_CORES, LEAST_CORES_WITH_GPU = 2, 4
"""auto binds a rank that would have fewer to itself to its NUMA node or its GPU's socket, with the others there: what
runs beside its step (the gradients' thread, gloo or NCCL, reading and saving) must not wait for the step's own core."""

_before: frozenset[int] | None = None
_outcome: str | None = None


@dataclass(frozen=True)
class Claim:
    """What a rank tells the others."""

    machine: str
    """The same for two processes under one kernel, in whatever containers."""
    cpus: frozenset[int]
    """It may use these, as it was started."""
    gpu_node: int | None
    """NUMA node of its GPU, or UNKNOWN; None: it computes on the CPU."""

    @classmethod
    def here(cls, gpu: str | None = None) -> Claim:
        """This process's. gpu: PCI address of its GPU, as in `0000:dc:00.0`."""
        try:
            machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        except OSError:
            machine = socket.gethostname()
        return cls(machine, usable_cpus(), None if gpu is None else gpu_node(gpu))


@dataclass(frozen=True)
class Binding:
    """What was decided for one rank."""

    threads: int
    """For it to compute with on the CPU: one a core of its share."""
    cpus: frozenset[int] | None
    """To bind it to; None: it is left as it is."""
    reason: str
    """Why it is left as it is, or what it is bound to."""
    told: bool
    """Whether a user would want to know."""


def usable_cpus() -> frozenset[int]:
    """The CPUs that this process may use, or might before `bind`."""
    if _before is not None:
        return _before
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def decide(
    mode: str,
    claims: Sequence[Claim],
    rank: int,
    *,
    environment: Mapping[str, str] = os.environ,
    root: Path = Path("/sys"),
) -> Binding:
    """What the rank is bound to, and its threads.

    mode: auto, always or never, as `run.bind_cores`. claims: every rank's, in rank order. The threads are the same in
    every mode but where GPUs say which cores are near. Where the ranks of a machine may not all use the same CPUs, some
    launcher has told them apart, and where OpenMP is told to bind, it does: then nothing is bound.
    """
    mine = claims[rank]
    here = [other for other, claim in enumerate(claims) if claim.machine == mine.machine]
    alike = [other for other in here if claims[other].cpus == mine.cpus]
    nodes = read_cores(mine.cpus, root)
    by_openmp = [name for name in OF_OPENMP if environment.get(name, "false").lower() != "false"]
    near = None if len(alike) < len(here) else _near([claims[other].gpu_node for other in alike], nodes, root)
    share = plan(nodes, len(alike), near if mode != "never" else None)[alike.index(rank)]
    threads, with_gpu = max(1, len(share.own)), mine.gpu_node is not None

    def left(reason: str, told: bool = True) -> Binding:
        return Binding(threads, None, reason, told)

    if mode == "never":
        return left("run.bind_cores = never", told=False)
    if by_openmp:
        return left(f"OpenMP is told to by {' and '.join(by_openmp)}")
    if len(alike) < len(here):
        return left("the ranks were given cores of their own when they were started")
    if mode == "auto" and len(nodes) == 1:
        return left("one NUMA node", told=False)
    if mode == "auto" and with_gpu and near is None:
        return left("the kernel does not tell which NUMA nodes the GPUs are at, or their cores may not be used")
    least = 1 if mode == "always" else LEAST_CORES_WITH_GPU if with_gpu else LEAST_CORES
    shared = len(share.own) < least
    cpus = share.around if shared else share.cpus
    if cpus == mine.cpus:
        return left("these are all the cores that the ranks may use", told=mode == "always")
    return Binding(threads, cpus, _place(cpus, nodes, near is not None, shared), True)


def bind(binding: Binding) -> str | None:
    """Bind all threads of this process and say in one line what was done; None where that is of no interest.

    A thread that was given cores of its own before keeps them. Never raises: what the system refuses is said.
    """
    global _before, _outcome
    _outcome, told, before = f"not bound, {binding.reason}", binding.told, usable_cpus()
    if binding.cpus is not None:
        told = True
        try:
            now = os.sched_getaffinity(0)
            os.sched_setaffinity(0, binding.cpus)
        except (OSError, AttributeError) as error:  # a sandbox; a system that cannot
            _outcome = f"not bound, the system refuses: {getattr(error, 'strerror', None) or error}"
        else:
            _outcome, _before = f"bound to {binding.reason}", before
            for task in Path("/proc/self/task").glob("*"):
                with suppress(OSError):  # it has ended
                    if os.sched_getaffinity(int(task.name)) == now:
                        os.sched_setaffinity(int(task.name), binding.cpus)
    return f"cores: {_outcome}" if told else None


def outcome() -> str | None:
    """What `bind` did or did not do, and why, in words; None before."""
    return _outcome


def release(pid: int) -> None:
    """Let a process that this one has just started use what this one might before `bind`."""
    if _before is not None:
        with suppress(OSError):
            os.sched_setaffinity(pid, _before)


def _near(gpu_nodes: Sequence[int | None], nodes: Mapping[int, object], root: Path) -> list[tuple[int, ...]] | None:
    """Nodes near each rank's GPU; None where there are no GPUs, or one of them is at no node that has cores for us."""
    found = [node for node in gpu_nodes if node is not None and node in nodes]
    return near_gpus(found, nodes, root) if len(found) == len(gpu_nodes) else None


def _place(cpus: frozenset[int], nodes: Mapping[int, Sequence[Core]], near_gpu: bool, shared: bool) -> str:
    at = [str(node) for node, cores in nodes.items() if any(core & cpus for core in cores)]
    where = f"CPU{'s' * (len(cpus) > 1)} {cpus_text(cpus)} of NUMA node{'s' * (len(at) > 1)} {', '.join(at)}"
    return where + (", near its GPU" if near_gpu else "") + (", with other ranks" if shared else "")
