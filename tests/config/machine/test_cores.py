"""The division of cores of recorded and of random machines, and the cores that each rank is bound to."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from config.machine.binding import Binding
from config.machine.cores import (
    UNKNOWN,
    RankCpus,
    choose_binding,
    cpus_text,
    divide_cores,
    gpu_node,
    near_gpus,
    parse_cpus,
    read_cores,
)


def machine(
    root: Path, nodes: dict[int, str], cores: list[str], gpus: dict[str, int] | None = None, nodes_per_socket: int = 1
) -> Path:
    """The files of /sys that tell of a machine. nodes: node -> its CPUs; cores: the CPUs of each core."""
    files: dict[str, Any] = {f"devices/system/node/node{node}/cpulist": cpus for node, cpus in nodes.items()}
    for core in cores:
        for cpu in parse_cpus(core):
            folder = f"devices/system/cpu/cpu{cpu}/topology"
            files |= {f"{folder}/thread_siblings_list": core, f"{folder}/core_cpus_list": core}
            at = next((node for node, cpus in nodes.items() if cpu in parse_cpus(cpus)), 0)
            files[f"{folder}/physical_package_id"] = at // nodes_per_socket
    files |= {f"bus/pci/devices/{address}/numa_node": node for address, node in (gpus or {}).items()}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


def two_sockets(root: Path, gpus: dict[str, int] | None = None) -> Path:
    """2 sockets x 4 cores x 2 hardware threads, numbered as Linux does: CPU 8 is the second thread of CPU 0's core."""
    return machine(root, {0: "0-3,8-11", 1: "4-7,12-15"}, [f"{cpu},{cpu + 8}" for cpu in range(8)], gpus)


def shares(root: Path, allowed: str, ranks: int, gpu_nodes: list[int] | None = None) -> list[str]:
    nodes = read_cores(parse_cpus(allowed), root)
    near = None if gpu_nodes is None else near_gpus(gpu_nodes, nodes, root)
    return [cpus_text(share.cpus) for share in divide_cores(nodes, ranks, near)]


def test_sets_of_cpus_are_written_as_the_kernel_writes_them():
    for text, cpus in {"0-3,8-11": {0, 1, 2, 3, 8, 9, 10, 11}, "5": {5}, "": set(), "0,2,4-5": {0, 2, 4, 5}}.items():
        assert parse_cpus(f"{text}\n") == cpus
        assert cpus_text(cpus) == text


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        (1, ["0-15"]),
        (2, ["0-3,8-11", "4-7,12-15"]),
        (3, ["0-1,8-9", "2-3,10-11", "4-7,12-15"]),  # the third would have to cross to the other socket to help
        (4, ["0-1,8-9", "2-3,10-11", "4-5,12-13", "6-7,14-15"]),
        (6, ["0-1,8-9", "2,10", "3,11", "4-5,12-13", "6,14", "7,15"]),
        (9, ["", "", "", "", "", "4,12", "5,13", "6,14", "7,15"]),  # five ranks share the first node
    ],
)
def test_ranks_stay_within_a_socket_and_cores_stay_whole(tmp_path, ranks, expected):
    assert shares(two_sockets(tmp_path), "0-15", ranks) == expected


def test_nodes_without_cpus_and_cpus_that_are_offline_take_no_part(tmp_path):
    # Node 2 is memory alone (CXL, HBM). CPU 3 is offline: it is in no list and has no topology, nor may it be used.
    root = machine(tmp_path, {0: "0-2", 1: "4-7", 2: ""}, ["0-1", "2", "4-5", "6-7"])
    (root / "devices/system/cpu/cpu3").mkdir()
    assert sorted(read_cores(parse_cpus("0-2,4-7"), root)) == [0, 1]
    assert shares(root, "0-2,4-7", 2) == ["0-2", "4-7"]
    assert shares(root, "0-2,4-7", 4) == ["0-1", "2", "4-5", "6-7"]


def test_a_cpuset_with_parts_of_cores(tmp_path):
    """CPUs 1, 9 and 10 and all of node 1: one core is whole, one has a single thread left, ranks go where cores are."""
    root = two_sockets(tmp_path)
    assert read_cores(parse_cpus("1,9,10,4-7,12-15"), root) == {
        0: [{1, 9}, {10}],
        1: [{4, 12}, {5, 13}, {6, 14}, {7, 15}],
    }
    assert shares(root, "1,9,10,4-7,12-15", 2) == ["1,9-10", "4-7,12-15"]
    assert shares(root, "1,9,10,4-7,12-15", 3) == ["1,9-10", "4-5,12-13", "6-7,14-15"]
    assert shares(root, "1,4-7,12-15", 2) == ["4-5,12-13", "6-7,14-15"]  # one core would hold the other rank up


def test_what_cannot_be_read_is_one_node(tmp_path):
    assert read_cores({0, 1, 5}, tmp_path) == {0: [{0}, {1}, {5}]}
    assert read_cores({0, 1, 5}, machine(tmp_path, {0: "0-3"}, ["0-1", "2-3"])) == {0: [{0, 1}, {5}]}


def test_emulated_nodes_that_share_their_cpus_are_one(tmp_path):
    root = machine(tmp_path, {0: "0-3", 1: "0-3"}, [str(cpu) for cpu in range(4)])
    assert shares(root, "0-3", 2) == ["0-1", "2-3"]


def test_cores_of_a_node_are_divided_by_the_gpus_there(tmp_path):
    gpus = {f"0000:{bus:02x}:00.0": node for bus, node in enumerate([0, 0, 1, 1, 0, 0, 1, 1])}
    root = machine(tmp_path, {0: "0-7", 1: "8-15"}, [str(cpu) for cpu in range(16)], gpus)
    near = [gpu_node(address, root) for address in gpus]
    assert shares(root, "0-15", 8, near) == ["0-1", "2-3", "8-9", "10-11", "4-5", "6-7", "12-13", "14-15"]
    assert shares(root, "0-15", 1, near[2:3]) == ["8-15"]


def test_nodes_without_gpus_help_those_of_their_socket(tmp_path):
    """Four nodes a socket, GPUs at every second one, numbered as in a DGX A100."""
    nodes = [f"{2 * node}-{2 * node + 1}" for node in range(8)]
    root = machine(tmp_path, dict(enumerate(nodes)), [str(cpu) for cpu in range(16)], nodes_per_socket=4)
    in_order = [nodes[node] for node in (2, 3, 0, 1, 6, 7, 4, 5)]
    assert shares(root, "0-15", 8, [3, 3, 1, 1, 7, 7, 5, 5]) == in_order
    assert shares(root, "0-15", 2, [3, 1]) == ["4-7", "0-3"]
    assert shares(root, "0-15", 1, [3]) == ["0-7"]  # the other socket is far away
    everywhere = [3, 2, 1, 0, 7, 6, 5, 4]
    assert shares(root, "0-15", 8, everywhere) == [nodes[node] for node in everywhere]


@pytest.mark.parametrize("seed", range(20))
def test_any_machine_is_divided_fairly(tmp_path, seed):
    """Shares never overlap, are of whole cores and allowed CPUs, and within a node are equal but for one core."""
    draw = random.Random(seed)
    nodes, cores, cpu = {}, [], 0
    for node in range(draw.randint(1, 4)):
        first = cpu
        for _ in range(draw.randint(1, 9)):
            width = draw.choice((1, 2))
            cores.append(cpus_text(range(cpu, cpu + width)))
            cpu += width
        nodes[node] = f"{first}-{cpu - 1}"
    allowed = frozenset(draw.sample(range(cpu), draw.randint(1, cpu)))
    found = read_cores(allowed, machine(tmp_path, nodes, cores))
    assert frozenset().union(*(core for node in found.values() for core in node)) == allowed
    total = sum(map(len, found.values()))
    for ranks in range(1, total + 1):
        given = divide_cores(found, ranks)
        assert len(given) == ranks
        used = [core for share in given for core in share.own]
        assert len(used) == len(set(used)) and set(used) <= {core for node in found.values() for core in node}
        for share in given:
            beside = [len(other.own) for other in given if other.around == share.around]
            assert len(share.own) >= 1 and max(beside) - min(beside) <= 1
            at = [node for node, its in found.items() if set(its) & set(share.own)]
            assert len(at) == 1 or ranks < len(found)
            assert share.cpus <= share.around
        if ranks >= len(found):  # no other whole number of ranks per node leaves the smallest share larger
            least = min(len(share.own) for share in given)
            assert sum(len(node) // (least + 1) for node in found.values()) < ranks


MODES = ("auto", "always", "never")


def claims(cpus: str | list[str], gpu_nodes: list[int | None], host: str = "a") -> list[RankCpus]:
    """One claim per item of gpu_nodes; cpus: what each rank may use, or all of them."""
    each = [cpus] * len(gpu_nodes) if isinstance(cpus, str) else cpus
    return [RankCpus(host, parse_cpus(text), node) for text, node in zip(each, gpu_nodes, strict=True)]


def decisions(mode, told, root, **environment) -> list[Binding]:
    return [choose_binding(mode, told, rank, environment=environment, root=root) for rank in range(len(told))]


def bound(mode, told, root, **environment) -> list[str | None]:
    found = decisions(mode, told, root, **environment)
    return [None if one.cpus is None else cpus_text(one.cpus) for one in found]


def test_auto_binds_on_several_nodes_and_leaves_one_to_the_kernel(tmp_path):
    two, one = two_sockets(tmp_path / "two"), machine(tmp_path / "one", {0: "0-3"}, ["0-1", "2-3"])
    told = claims("0-15", [None, None])
    assert bound("auto", told, two) == bound("always", told, two) == ["0-3,8-11", "4-7,12-15"]
    assert bound("never", told, two) == [None, None]
    told = claims("0-3", [None, None])
    assert bound("auto", told, one) == [None, None]
    assert bound("always", told, one) == ["0-1", "2-3"]
    # nothing that a user would want to know
    assert not choose_binding("auto", told, 0, root=one, environment={}).logged
    # All the ranks' cores are on one node, whatever the machine has.
    assert bound("auto", claims("0-3,8-11", [None, None]), two) == [None, None]


def test_threads_are_cores_and_the_same_in_every_mode(tmp_path):
    """Sums of floats depend on them, so that a replay, which binds nothing, must have as many."""
    two, one = two_sockets(tmp_path / "two"), machine(tmp_path / "one", {0: "0-3"}, ["0-1", "2-3"])
    for mode in MODES:
        assert [one.threads for one in decisions(mode, claims("0-15", [None]), two)] == [8]
        assert [one.threads for one in decisions(mode, claims("0-15", [None] * 3), two)] == [2, 2, 4]
        assert [one.threads for one in decisions(mode, claims("0-3", [None] * 3), one)] == [1, 1, 1]
        assert [one.threads for one in decisions(mode, claims(["0-3,8-11", "4-7"], [None] * 2), two)] == [4, 4]


def test_only_the_ranks_of_a_machine_count(tmp_path):
    told = claims("0-15", [None, None], host="a") + claims("0-15", [None], host="b")
    assert bound("always", told, two_sockets(tmp_path)) == ["0-3,8-11", "4-7,12-15", None]
    # Ranks of a machine need not be neighbours.
    told = [told[0], told[2], told[1]]
    assert bound("always", told, two_sockets(tmp_path / "again")) == ["0-3,8-11", None, "4-7,12-15"]


@pytest.mark.parametrize("mode", ["auto", "always"])
def test_what_a_launcher_has_bound_stays_so(tmp_path, mode):
    root = two_sockets(tmp_path)
    for cpus in (["0-3", "4-7"], ["0-3,8-11", "0-15"]):
        found = decisions(mode, claims(cpus, [0, 1]), root)
        assert [one.cpus for one in found] == [None, None]
        assert all(one.logged and "when they were started" in one.reason for one in found)
    # torchrun --numa-binding=node: two ranks a socket. Their threads are their part of it, not of the machine.
    told = claims(["0-3,8-11"] * 2 + ["4-7,12-15"] * 2, [None] * 4)
    assert bound(mode, told, root) == [None] * 4
    assert [one.threads for one in decisions(mode, told, root)] == [2] * 4


@pytest.mark.parametrize("variable", ["OMP_PROC_BIND", "OMP_PLACES", "GOMP_CPU_AFFINITY", "KMP_AFFINITY"])
def test_what_openmp_binds_is_left_to_it(tmp_path, variable):
    root, told = two_sockets(tmp_path), claims("0-15", [None, None])
    assert bound("always", told, root, **{variable: "spread"}) == [None, None]
    assert variable in choose_binding("always", told, 0, root=root, environment={variable: "spread"}).reason
    assert bound("always", told, root, **{variable: "FALSE"}) != [None, None]


def test_ranks_go_to_the_cores_of_their_gpus(tmp_path):
    root = machine(tmp_path, {0: "0-15", 1: "16-31"}, [str(cpu) for cpu in range(32)])
    told = claims("0-31", [0, 0, 1, 1, 0, 0, 1, 1])
    expected = ["0-3", "4-7", "16-19", "20-23", "8-11", "12-15", "24-27", "28-31"]
    assert bound("auto", told, root) == expected
    assert choose_binding("auto", told, 2, root=root, environment={}) == Binding(
        4, parse_cpus("16-19"), "CPUs 16-19 of NUMA node 1, near its GPU", True
    )
    # The order in which GPUs are numbered, and one rank for the whole machine.
    assert bound("auto", claims("0-31", [1, 0]), root) == ["16-31", "0-15"]
    assert bound("auto", claims("0-31", [1]), root) == ["16-31"]
    # Left alone, GPUs do not concentrate the threads on their node.
    assert [one.threads for one in decisions("never", claims("0-31", [0, 0, 0, 0]), root)] == [8, 8, 8, 8]
    assert [one.threads for one in decisions("auto", claims("0-31", [0, 0, 0, 0]), root)] == [4, 4, 4, 4]


def test_a_rank_with_few_cores_shares_its_node(tmp_path):
    """auto leaves what runs beside a step somewhere to run; always does as it is told."""
    root = two_sockets(tmp_path)
    nodes = ["0-3,8-11", "4-7,12-15"]
    assert bound("auto", claims("0-15", [0, 0, 1, 1]), root) == [nodes[0], nodes[0], nodes[1], nodes[1]]
    assert bound("always", claims("0-15", [0, 0, 1, 1]), root) == ["0-1,8-9", "2-3,10-11", "4-5,12-13", "6-7,14-15"]
    assert bound("auto", claims("0-15", [None] * 8), root) == [nodes[0]] * 4 + [nodes[1]] * 4
    assert bound("always", claims("0-15", [None] * 8), root) == [f"{cpu},{cpu + 8}" for cpu in range(8)]
    assert bound("always", claims("0-15", [None] * 9), root)[:5] == [nodes[0]] * 5  # more ranks than cores there
    assert "with other ranks" in choose_binding("auto", claims("0-15", [None] * 8), 0, root=root, environment={}).reason


def test_gpus_of_which_nothing_is_known(tmp_path):
    root = two_sockets(tmp_path / "two")
    for told in (claims("0-15", [UNKNOWN] * 2), claims("0-15", [0, UNKNOWN]), claims("0-15", [0, 2])):
        assert bound("auto", told, root) == [None, None]
        assert "does not report" in choose_binding("auto", told, 1, root=root, environment={}).reason
        assert bound("always", told, root) == ["0-3,8-11", "4-7,12-15"]
        assert "GPU" not in choose_binding("always", told, 1, root=root, environment={}).reason
    # None of the node's cores may be used: the job was given those of the other.
    assert bound("auto", claims("0-3", [1]), root) == [None]
    one = machine(tmp_path / "one", {0: "0-7"}, [str(cpu) for cpu in range(8)])
    assert bound("auto", claims("0-7", [UNKNOWN] * 2), one) == [None, None]
    assert bound("always", claims("0-7", [UNKNOWN] * 2), one) == ["0-3", "4-7"]


PROGRAM = """
import json, os, subprocess, sys, threading
from pathlib import Path
from config.machine.binding import Binding, apply_binding, binding_outcome, unbind
from config.machine.cores import RankCpus

def masks():
    return [sorted(os.sched_getaffinity(int(task.name))) for task in Path("/proc/self/task").iterdir()]

allowed = sorted(os.sched_getaffinity(0))
end = threading.Event()
def wait(cpus):
    if cpus: os.sched_setaffinity(0, cpus)
    settled.wait()
    end.wait()
settled = threading.Barrier(3)
for cpus in ([], allowed[1:2]):
    threading.Thread(target=wait, args=(cpus,)).start()
settled.wait()
found = {"allowed": allowed, "refused": apply_binding(Binding(1, frozenset([100_000]), "CPU 100000", True))}
found["after refusal"] = masks()
found["left"] = apply_binding(Binding(1, None, "one NUMA node", False)), apply_binding(Binding(1, None, "so", True))
found["line"] = apply_binding(Binding(1, frozenset(allowed[:1]), "CPU 0 of NUMA node 0", True))
found["outcome"] = binding_outcome()
found["after"] = masks()
children = [subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) for _ in range(2)]
unbind(children[0].pid)
found["children"] = [sorted(os.sched_getaffinity(child.pid)) for child in children]
found["claim"] = sorted(RankCpus.here().cpus)
for child in children:
    child.communicate(b"\\n")
end.set()
print(json.dumps(found))
"""


def test_a_process_is_bound_with_its_threads_and_its_children_released():
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("one CPU: there is nothing to bind")
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60)
    found = json.loads(done.stdout)
    allowed = found["allowed"]
    first, second = allowed[:1], allowed[1:2]
    # A mask of no CPU that is there: the kernel says EINVAL, as it says EPERM in a sandbox.
    assert found["refused"] == "cores: not bound, the system refuses: Invalid argument"
    assert sorted(found["after refusal"]) == sorted([allowed, allowed, second])
    assert found["left"] == [None, "cores: not bound, so"]
    bound_to = "bound to CPU 0 of NUMA node 0"
    assert (found["line"], found["outcome"]) == (f"cores: {bound_to}", bound_to)
    assert sorted(found["after"]) == [first, first, second]  # the thread that had bound itself is left alone
    assert found["children"] == [allowed, first]
    assert found["claim"] == allowed  # a second start divides what there was before the first
