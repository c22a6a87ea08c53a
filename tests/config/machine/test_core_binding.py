"""Cores that each rank is bound to, by what the ranks of a machine report of themselves."""

import json
import os
import subprocess
import sys

import pytest

from config.machine.binding import Binding
from config.machine.cores import UNKNOWN, RankCpus, choose_binding, cpus_text, parse_cpus
from tests.config.machine.test_cores import machine, two_sockets

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
