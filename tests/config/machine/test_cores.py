"""The division of cores of recorded machines, and of random ones."""

import random
from pathlib import Path
from typing import Any

import pytest

from config.machine.cores import cpus_text, divide_cores, gpu_node, near_gpus, parse_cpus, read_cores


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
