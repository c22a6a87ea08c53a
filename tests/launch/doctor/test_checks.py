"""The doctor's verdicts on facts that this machine cannot produce: GPUs, InfiniBand, many hosts, wrong sums."""

import copy
import json
import os
import random
import re
import threading

import pytest

from config.cli import REPOSITORY
from config.errors import UserError
from config.optimizers import OPTIMIZERS
from launch.doctor import facts as doctor_facts
from launch.doctor import hosts as doctor_hosts
from launch.doctor.cluster_checks import check_all_reduce, check_clock, check_cluster, check_device, check_pdsh
from launch.doctor.command import main
from launch.doctor.host_checks import check_host, check_offload
from launch.hosts import read_hostfile
from launch.job import visible_gpus

GIB = 2**30
ADAMW = OPTIMIZERS["adamw"]


@pytest.fixture(scope="module")
def collected(tmp_path_factory):
    """Facts of this machine."""
    folder = tmp_path_factory.mktemp("facts")
    root = str(REPOSITORY)
    request = {"folders": {"run": str(folder)}, "hosts": [], "port": 0, "cwd": root, "marks": [], "gpus": None}
    return {**doctor_facts.collect(request), "processes": 2, "builds": False}


@pytest.fixture
def facts(collected):
    return copy.deepcopy(collected)


def levels(findings, check):
    """The levels that a check comes to, in order."""
    return [item.level for item in findings if item.check == check]


def no_thread(self) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize(
    ("place", "name", "value", "words"),
    [
        (doctor_hosts, "bootstrap", lambda python: "/nowhere/python -c pass", "it has no "),
        (doctor_hosts, "bootstrap", lambda python: "false", "exit code 1"),
        (threading.Thread, "start", no_thread, "can't start new thread"),
    ],
)
def test_an_agent_that_does_not_start_here_is_red(monkeypatch, capsys, place, name, value, words):
    monkeypatch.setattr(place, name, value)
    assert main(["--quick"]) == 1
    finding, fix, summary = capsys.readouterr().out.splitlines()
    assert finding.startswith("red    agent: ") and words in finding and "ssh" not in fix
    assert summary.startswith("1 red, 0 amber, 0 green")


@pytest.mark.parametrize(("why", "late"), [("no answer within 120 s", True), ("MemoryError: none left", False)])
def test_facts_that_are_late_suggest_a_folder_that_hangs(monkeypatch, capsys, why, late):
    def ask(self, do, seconds, **given):
        if do == "facts":
            raise doctor_hosts.Unreachable(why)

    monkeypatch.setattr(doctor_hosts.Host, "ask", ask)
    assert main(["--quick"]) == 1
    finding, fix, _ = capsys.readouterr().out.splitlines()
    assert finding == f"red    facts: {why}" and ("hangs" in fix) == late


def test_the_odd_one_out_of_many_hosts_is_named(facts):
    hosts = {f"node-{index}": copy.deepcopy(facts) for index in range(5)}
    for one in hosts.values():
        one["names"] = {}
    hosts["node-0"]["packages"]["torch"] = "2.11.0"
    hosts["node-3"]["gpus"]["list"] = [{"driver_version": "570.1"}]
    hosts["node-4"]["code"] = None
    found = [item for item in check_cluster(hosts, port=1) if item.check == "versions" and item.level != "green"]
    assert {(item.host, item.level, item.what.split(",")[0]) for item in found} == {
        ("node-0", "red", "torch is 2.11.0"),
        ("node-3", "amber", "driver is 570.1"),
        ("node-4", "red", "Mantissa's code is none"),
    }


@pytest.mark.parametrize(
    ("program", "folder", "said"),
    [
        ("/usr/bin/pdsh", "/home/me", []),
        (None, "/home/me", ["it is not on the PATH here"]),
        ("/usr/bin/pdsh", "/home/my files", ["/home/my files has a space in it"]),
    ],
)
def test_the_deepspeed_launcher_needs_pdsh_and_paths_without_spaces(program, folder, said):
    found = list(check_pdsh(program, folder, "/usr/bin/python"))
    assert [item.level for item in found] == ["amber"] * len(said)
    assert [item.what.split(",")[0] for item in found] == said


def test_a_compiler_is_missed_by_a_run_that_builds_with_it(facts):
    facts["programs"] |= {"c++": [], "ninja": []}
    facts["built"] = []
    for check in ("c++ compiler", "ninja"):
        assert levels(check_host("a", facts), check) == ["amber"]
        assert levels(check_host("a", {**facts, "builds": True}), check) == ["red"]
    assert levels(check_host("a", {**facts, "builds": True, "built": ["cpu_adam"]}), "c++ compiler") == ["amber"]


@pytest.mark.parametrize(
    ("changes", "check", "level"),
    [
        ({"torch_cuda": "12.8", "programs": {"nvcc": [{"path": "/c/nvcc", "version": "13.0"}]}}, "nvcc", "red"),
        ({"torch_cuda": "12.8", "programs": {"nvcc": [{"path": "/c/nvcc", "version": "12.4"}]}}, "nvcc", "green"),
        ({"torch_cuda": "12.8", "programs": {"nvcc": []}}, "nvcc", "amber"),
        ({"infiniband": True, "limits": {"memlock": 64 * 1024}}, "locked memory", "red"),
        ({"infiniband": True, "limits": {"memlock": None}}, "locked memory", None),
    ],
)
def test_cuda_toolkits_and_infiniband(facts, changes, check, level):
    """Another major version than torch's is refused as DeepSpeed refuses it."""
    for key, value in changes.items():
        facts[key] = facts[key] | value if isinstance(value, dict) else value
    assert levels(check_host("a", facts), check) == ([level] if level else [])


NOISE = "ld.so: object '/opt/7.1/a, b, c, d, e, f.so' cannot be preloaded: ignored."
INFOROM = "WARNING: infoROM is corrupted at gpu 0000:02:00.0"
ROW = "NVIDIA H200, 575.1, 143771, 4, 34, 0, Not Active"


@pytest.mark.parametrize(
    ("code", "warned", "told", "error", "warning"),
    [
        (0, "", "", None, None),
        (0, NOISE, "", None, None),
        (0, INFOROM, INFOROM, None, None),
        (14, INFOROM, "", None, INFOROM),
        (14, NOISE, INFOROM, None, INFOROM),
        (9, NOISE, "it has failed", "it has failed", None),
        (9, "it has failed", "", "it has failed", None),
    ],
)
def test_programs_are_read_whatever_they_warn_of(tmp_path, monkeypatch, code, warned, told, error, warning):
    """Only lines with a value for each field are GPUs, and nothing on stderr is."""
    listed = [] if code == 9 else [ROW, ROW]
    lines = "\n".join([*listed, told])
    smi = f'[ $1 = -L ] && echo "GPU 0: H200" || echo "{lines}"; exit {code}'
    outputs = {"nvidia-smi": smi, "c++": "echo c++ 12.3", "ninja": "echo 1.11", "bin/nvcc": "echo release 12.4"}
    (tmp_path / "bin").mkdir()
    for name, commands in outputs.items():
        (tmp_path / name).write_text(f'#!/bin/sh\necho "{warned}" >&2\n{commands}\n')
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    for name in ("CXX", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    found, programs = doctor_facts.gpus(), doctor_facts._programs()
    assert (found["error"], found["warning"]) == (error, warning)
    assert found["list"] == [dict(zip(doctor_facts._GPU_FIELDS, ROW.split(", "), strict=True))] * len(listed)
    assert [programs[name][0]["version"] for name in ("c++", "ninja", "nvcc")] == ["12.3", "1.11", "12.4"]
    assert visible_gpus() == ["0"]


@pytest.mark.parametrize(
    ("visible", "gpus", "processes"),
    [(None, 2, 2), ("0", 1, 1), ("", 0, 2), (f"GPU-{'1a2b-' * 7}9", 1, 1), ("GPU-1a", 2, 1), ("MIG-1", 2, 1)],
)
def test_a_job_here_runs_on_the_visible_gpus(tmp_path, monkeypatch, capsys, visible, gpus, processes):
    """A batch of one sequence is refused on two processes. nvidia-smi takes no start of a UUID and no MIG device."""
    all_of_them = f"case $* in *--id=*) ;; *) echo {ROW};; esac"
    listing = f"#!/bin/sh\n[ $1 = -L ] && printf 'GPU 0: a\\nGPU 1: b\\n' && exit\necho {ROW}\n{all_of_them}\n"
    (tmp_path / "nvidia-smi").write_text(listing)
    (tmp_path / "nvidia-smi").chmod(0o755)
    (tmp_path / "run.yaml").write_text("model: {architecture: llama}\nbatch: {global_size: 1, micro_size: 1}\n")
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    main(["--quick", "--json", "--config", f"{tmp_path}/run.yaml", f"run.dir={tmp_path}"])
    found = json.loads(capsys.readouterr().out)["findings"]
    assert sum(item["check"] == "gpu" and "H200" in item["what"] for item in found) == gpus
    refused = [item for item in found if item["check"] in ("run config", "slots")]
    assert [item["check"] for item in refused] == ["run config"] * (processes - 1)


def test_gpus(facts):
    values = ["NVIDIA H200", "575.1", "143771", "4", "34", "[N/A]", "Not Active"]
    gpu = dict(zip(doctor_facts._GPU_FIELDS, values, strict=True))
    facts["gpus"] = {"devices": 2, "error": None, "warning": None, "list": [gpu, dict(gpu)]}
    assert levels(check_host("a", facts), "gpu") == ["green", "green"]
    facts["gpus"]["list"][1]["memory.used"] = "90000"
    assert levels(check_host("a", facts), "gpu") == ["green", "amber"]
    facts["gpus"]["list"][0]["clocks_event_reasons.hw_slowdown"] = "Active"
    assert levels(check_host("a", facts), "gpu") == ["red", "amber"]
    facts["processes"] = 4
    assert levels(check_host("a", facts), "slots") == ["red"]
    facts["gpus"] |= {"warning": INFOROM, "list": [gpu]}
    assert levels(check_host("a", facts), "gpu") == ["amber", "red"]


@pytest.mark.parametrize(("parameters", "level"), [(10**9, "green"), (32 * 10**8, "amber"), (4 * 10**9, "red")])
def test_offload_must_fit_into_memory(facts, parameters, level):
    """16 bytes a parameter for the optimizer's, over two hosts: 28 GiB hold 3.75e9 parameters."""
    facts["memory"] = {"total": 64 * GIB, "available": 60 * GIB, "cgroup_limit": 28 * GIB}
    assert levels(check_offload("a", facts, "optimizer", ADAMW, parameters, 2), "offload memory") == [level]
    assert levels(check_offload("a", facts, "none", ADAMW, parameters, 2), "offload memory") == []


def device(**changes):
    made = {"error": None, "off": "0.003", "seconds": 0.001}
    told = {"torch": "2.13.0", "device": "cuda", "devices": 1, "supported": {"bf16": True, "fp16": True}}
    return {**told, "matmul": {"bf16": dict(made), "fp16": dict(made)}, "ops": {"cpu_adam": True}, **changes}


def test_a_device():
    assert {item.level for item in check_device("a", device(), "bf16", 1)} == {"green"}
    old = device(supported={"bf16": False, "fp16": True})
    assert levels(check_device("a", old, "bf16", 1), "bf16") == ["amber"]
    assert levels(check_device("a", old, "fp16", 1), "bf16") == ["green"]
    broken = device()
    broken["matmul"]["fp16"]["off"] = "inf"
    assert levels(check_device("a", broken, None, 1), "fp16") == ["red"]
    refused = device()
    refused["matmul"]["fp16"] = {"error": "RuntimeError: not implemented", "off": "0.0", "seconds": None}
    assert levels(check_device("a", refused, "bf16", 1), "fp16") == ["amber"]
    assert levels(check_device("a", refused, "fp16", 1), "fp16") == ["red"]
    assert levels(check_device("a", device(devices=0), None, 8), "device") == ["red"]
    assert levels(check_device("a", device(ops={"cpu_adam": False}), None, 1), "op compatibility") == ["red"]


def test_bus_bandwidth_is_that_of_nccl_tests():
    """nccl-tests: 64 MiB over 8 ranks in 1 ms is 67.11 GB/s, times 14/8 117.44 GB/s of bus."""
    told = {"bytes": 64 * 2**20, "world": 8, "seconds": 1e-3, "backend": "nccl", "wrong": 0}
    (found,) = check_all_reduce(told, "", 0.0)
    assert found.level == "green" and "67.11 GB/s, 117.44 GB/s of bus" in found.what
    assert levels(check_all_reduce(told, "", 118e9), "all-reduce") == ["amber"]
    assert levels(check_all_reduce({**told, "wrong": 3}, "", 0.0), "all-reduce") == ["red"]


@pytest.mark.parametrize(
    ("ahead", "error", "level"),
    [(0.4, 0.01, "green"), (-2.0, 0.01, "amber"), (40.0, 0.01, "red"), (-40.0, 0.01, "red"), (40.0, 45.0, "green")],
)
def test_a_clock_is_judged_by_what_is_certain(ahead, error, level):
    assert levels(check_clock("a", ahead, error), "clock") == [level]


def test_a_hostfile_is_read_as_deepspeed_reads_it(tmp_path):
    from deepspeed.launcher.runner import fetch_hostfile

    generator, path, read = random.Random(0), tmp_path / "hostfile", 0
    pieces = ["worker-0", "10.0.0.1", "slots=8", " slots=2 # a comment", "#", "", "\t", "slots=", "worker-0 slots=1"]
    for _ in range(300):
        lines = ["".join(generator.choices(pieces, k=generator.randint(0, 3))) for _ in range(generator.randint(0, 4))]
        path.write_text("\n".join(lines))
        try:
            expected = dict(fetch_hostfile(str(path)))
        except ValueError:
            with pytest.raises(UserError, match=re.escape(str(path))):
                read_hostfile(path)
        else:
            read += 1
            assert read_hostfile(path) == expected
    assert read > 20
