"""Division of a machine's cores among its ranks, and the cores a rank is bound to (binding.py).

Linux lists in /sys/devices/system which hardware threads make up a core and which NUMA node a core or a GPU is at
(Documentation/ABI/stable/sysfs-devices-node, sysfs-devices-system-cpu). Cores are never split. A CPU is a hardware
thread, as in the kernel. The ranks bind themselves, under every launcher, once each knows the others' CPUs.
"""

import os
from collections.abc import Iterable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self, TypeVar

from config.machine.binding import Binding, usable_cpus
from config.machine.processes import machine, read

Core = frozenset[int]
"""The CPUs of one core: its hardware threads."""
UNKNOWN = -1
"""The kernel's value for a device of unknown NUMA node, as in most virtual machines."""
_SYS = Path("/sys")
T = TypeVar("T")
OPENMP_VARIABLES = ("OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY")
"""Variables that make OpenMP bind its threads itself, the main one included."""
LEAST_CORES, LEAST_CORES_WITH_GPU = 2, 4
"""With `auto`, a rank whose own share is smaller is bound to its NUMA node or its GPU's socket, shared with the ranks
there: threads besides its step's (autograd, gloo or NCCL, reading and saving) must not wait for the step's core."""


@dataclass(frozen=True)
class RankCpus:
    """The CPUs that a rank may use, as sent to the other ranks."""

    machine: str
    """Equal for processes under one kernel, whatever their containers."""
    cpus: frozenset[int]
    """CPUs it may use, as it was started."""
    gpu_node: int | None
    """NUMA node of its GPU, or UNKNOWN; None: it computes on the CPU."""

    @classmethod
    def here(cls, gpu: str | None = None) -> Self:
        """This process's claim. gpu: PCI address of its GPU, as in `0000:dc:00.0`."""
        return cls(machine(), usable_cpus(), None if gpu is None else gpu_node(gpu))


@dataclass(frozen=True)
class Share:
    own: tuple[Core, ...]
    """Cores of this rank alone; empty if there are fewer cores than ranks."""
    around: frozenset[int]
    """All usable CPUs of the NUMA nodes from which its cores were chosen."""

    @property
    def cpus(self) -> frozenset[int]:
        return frozenset[int]().union(*self.own)


def parse_cpus(text: str) -> frozenset[int]:
    """Parse the kernel's notation for a set of CPUs, such as `0-3,8-11`. Raises ValueError for anything else."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def cpus_text(cpus: Iterable[int]) -> str:
    """The inverse of `parse_cpus`."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and parts[-1][1] == cpu - 1:
            parts[-1][1] = cpu
        else:
            parts.append([cpu, cpu])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in parts)


def read_cores(allowed: Set[int], root: Path = _SYS) -> dict[int, list[Core]]:
    """NUMA node -> its cores among the `allowed` CPUs; nodes without any, such as memory-only ones, are left out. A
    core consists of its allowed hardware threads. If /sys cannot be read there is one node, 0, and one core per CPU."""
    nodes: dict[int, frozenset[int]] = {}
    for folder in (root / "devices/system/node").glob("node[0-9]*"):
        with suppress(ValueError):
            nodes[int(folder.name.removeprefix("node"))] = parse_cpus(read(folder / "cpulist"))
    if not allowed <= frozenset[int]().union(*nodes.values()):
        nodes = {0: frozenset(allowed)}
    cores: dict[int, list[Core]] = {}
    left = frozenset(allowed)
    for node, cpus in sorted(nodes.items()):
        found = {_threads_of_core(cpu, root) & cpus & left for cpu in cpus & left}
        if found:
            cores[node] = sorted(found, key=min)
        left -= cpus  # the nodes of an emulated NUMA machine (numa=fake) may share their CPUs
    return cores


def gpu_node(address: str, root: Path = _SYS) -> int:
    """The NUMA node of the device at a PCI address such as `0000:dc:00.0`, or UNKNOWN."""
    with suppress(ValueError):
        return int(read(root / "bus/pci/devices" / address / "numa_node"))
    return UNKNOWN


def divide_cores(nodes: dict[int, list[Core]], ranks: int, near: Sequence[Sequence[int]] | None = None) -> list[Share]:
    """`nodes`' cores divided among `ranks` ranks: disjoint, contiguous, equal up to one core on the same nodes.

    near: the result of `near_gpus`. Without it nodes get ranks in proportion to their cores; a rank stays within a
    node, or gets several whole ones where there are more nodes than ranks.
    """
    homes = _homes(nodes, ranks) if near is None else near
    shares: dict[int, Share] = {}
    for home in {frozenset(home) for home in homes}:
        # Sorted by GPU node, so that each contiguous part is at its GPU's node or next to it.
        here = sorted((rank for rank in range(ranks) if home == set(homes[rank])), key=lambda rank: homes[rank][0])
        cores = [core for node in sorted(home) for core in nodes[node]]
        around = frozenset[int]().union(*cores)
        parts = _split(cores, len(here)) if len(cores) >= len(here) else [()] * len(here)
        shares |= {rank: Share(tuple(part), around) for rank, part in zip(here, parts, strict=True)}
    return [shares[rank] for rank in range(ranks)]


def near_gpus(gpu_nodes: Sequence[int], nodes: Iterable[int], root: Path = _SYS) -> list[tuple[int, ...]]:
    """The `nodes` in the socket of each rank's GPU, the GPU's own first. gpu_nodes: the node of each rank's GPU.

    Not only the GPU's node: if sockets are divided into more nodes than have GPUs (AMD's NPS4, as in a DGX A100), the
    cores of the other nodes would stay unused.
    """
    sockets = {node: _socket(node, root) for node in nodes}
    return [
        (own, *sorted(node for node in sockets if node != own and sockets[node] == sockets[own])) for own in gpu_nodes
    ]


def choose_binding(
    mode: str,
    claims: Sequence[RankCpus],
    rank: int,
    *,
    environment: Mapping[str, str] = os.environ,
    root: Path = Path("/sys"),
) -> Binding:
    """The CPUs that a rank is bound to, and its number of threads. mode: as `run.bind_cores`. claims: by rank.

    Nothing is bound if the ranks of a machine may use different CPUs, since a launcher has bound them, or if OpenMP is
    set to bind its threads.
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


def _near(gpu_nodes: Sequence[int | None], nodes: Mapping[int, object], root: Path) -> list[tuple[int, ...]] | None:
    """Nodes near each rank's GPU; None without GPUs, or if one is at a node whose cores may not be used."""
    found = [node for node in gpu_nodes if node is not None and node in nodes]
    return near_gpus(found, nodes, root) if len(found) == len(gpu_nodes) else None


def _describe_cpus(cpus: frozenset[int], nodes: Mapping[int, Sequence[Core]], near_gpu: bool, shared: bool) -> str:
    at = [str(node) for node, cores in nodes.items() if any(core & cpus for core in cores)]
    where = f"CPU{'s' * (len(cpus) > 1)} {cpus_text(cpus)} of NUMA node{'s' * (len(at) > 1)} {', '.join(at)}"
    return where + (", near its GPU" if near_gpu else "") + (", with other ranks" if shared else "")


def _homes(nodes: dict[int, list[Core]], ranks: int) -> list[tuple[int, ...]]:
    if ranks < len(nodes):
        return [tuple(part) for part in _split(sorted(nodes), ranks)]
    given = dict.fromkeys(sorted(nodes), 0)
    for _ in range(ranks):  # the D'Hondt method (highest averages) maximises the smallest share
        best = max(given, key=lambda node: len(nodes[node]) / (given[node] + 1))
        given[best] += 1
    return [(node,) for node, count in given.items() for _ in range(count)]


def _socket(node: int, root: Path) -> str:
    """Id of a node's socket; the node itself where that is unknown."""
    socket = ""
    with suppress(ValueError):
        first = min(parse_cpus(read(root / f"devices/system/node/node{node}/cpulist")))
        socket = read(root / f"devices/system/cpu/cpu{first}/topology/physical_package_id").strip()
    return socket or f"node {node}"


def _split(items: Sequence[T], parts: int) -> list[Sequence[T]]:
    """Contiguous parts whose lengths differ by at most one, longer ones first."""
    size, more = divmod(len(items), parts)
    starts = [part * size + min(part, more) for part in range(parts + 1)]
    return [items[start:end] for start, end in zip(starts, starts[1:], strict=False)]


def _threads_of_core(cpu: int, root: Path) -> frozenset[int]:
    for name in ("core_cpus_list", "thread_siblings_list"):  # the second name is that before Linux 5.3
        with suppress(ValueError):
            found = parse_cpus(read(root / f"devices/system/cpu/cpu{cpu}/topology/{name}"))
            if cpu in found:
                return found
    return frozenset((cpu,))
