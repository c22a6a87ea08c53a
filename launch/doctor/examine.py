"""Collect the facts of every machine of a job, and check them."""

import argparse
import os
import secrets
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from config.launcher import as_launched
from config.optimizers import OPTIMIZERS, OptimizerSpec
from config.schema import OptimizerSection
from launch.doctor import cluster_checks as cluster
from launch.doctor.host_checks import check_host, check_offload
from launch.doctor.hosts import Host, Unreachable, on_all
from launch.doctor.programs import ALL_REDUCE, DEVICE, RUN
from launch.doctor.report import Facts, Finding, amber, green, red
from launch.job import default_processes, refusal, visible_gpus

_CORRECT = "correct it, or give the run's number of processes with --processes"
_FACTS_SECONDS, _PROGRAM_SECONDS = 120.0, 240.0


@dataclass(frozen=True)
class Scope:
    """The machines to check, and what to check them for."""

    hosts: list[Host]
    folders: dict[str, str]
    """Role (`run` or `data cache`) to path."""
    options: argparse.Namespace
    compute: str | None = None
    """Dtype of the run; None without a config."""
    offload: str = "none"
    optimizer: OptimizerSpec = OPTIMIZERS[OptimizerSection.name]
    wandb: str | None = None
    """Value of tracking.wandb; None without a config."""
    run: dict[str, Any] = field(default_factory=dict)
    """Input of `programs.RUN`; empty without a config."""


def examine(scope: Scope) -> list[Finding]:
    """All findings, in check order. Leaves no process or file behind on the machines."""
    try:
        return list(_examine(scope))
    finally:
        on_all(scope.hosts, lambda host: host.close())


def _examine(scope: Scope) -> Iterator[Finding]:
    connected = on_all(scope.hosts, lambda host: host.connect(scope.options.ssh))
    hosts = [host for host in scope.hosts if not isinstance(connected[host.name], Unreachable)]
    for host in scope.hosts:
        yield from _connection(host, connected[host.name], scope.options.ssh)
    if len(scope.hosts) > 1:
        yield from cluster.check_pdsh(shutil.which("pdsh"), str(Path.cwd()), sys.executable)
    if not hosts:
        return
    facts, lost = _facts(scope, hosts)
    yield from lost
    hosts = [host for host in hosts if host.name in facts]
    if not hosts:
        return
    for host in hosts:
        one = facts[host.name]
        one["builds"] = bool(_ops(scope) and one["gpus"]["list"])
        one["processes"] = scope.options.processes or host.slots or default_processes()
        yield from check_host(host.name, one)
    if scope.run and scope.options.quick and (why := refusal(scope.run["config"], as_launched(_processes(facts)))):
        yield red("run config", why, _CORRECT)
    yield from cluster.check_cluster(facts, port=scope.options.port)
    yield from _wandb(scope, facts)
    if len(scope.hosts) > 1:
        for name, answer in on_all(hosts, lambda host: host.clock()).items():
            if not isinstance(answer, Unreachable):
                yield from cluster.check_clock(name, *answer)
        yield from _reach(hosts)
    if not scope.options.quick:
        yield from _with_torch(scope, hosts, facts)


def _processes(facts: Mapping[str, Facts]) -> int:
    return sum(one["processes"] for one in facts.values())


def _connection(host: Host, answer: Any, ssh: Sequence[str]) -> Iterator[Finding]:
    if host.local and isinstance(answer, Unreachable):
        fix = f"let `{sys.executable} -c pass` finish here; `ulimit -u` or a container may limit processes and memory"
        yield red("agent", str(answer), fix, host.name)
    elif isinstance(answer, Unreachable):
        fix = f"let `{' '.join(ssh)} {host.name} true` work without a password, for this user and from this machine"
        if "it has no" in str(answer):
            fix = "the launchers start the same path on every host: the environment on a shared folder, or in an image"
        yield red("ssh", str(answer), fix, host.name)
    elif not host.local:
        yield green("ssh", "answers without a password", host.name)


def _facts(scope: Scope, hosts: list[Host]) -> tuple[dict[str, Facts], list[Finding]]:
    marks = {host.name: f".doctor-mark-{secrets.token_hex(4)}@{host.name}" for host in hosts}
    folder, several = scope.folders["run"], len(hosts) > 1
    if several:
        on_all(hosts, lambda host: host.ask("mark", 30.0, folder=folder, name=marks[host.name]))
    given: dict[str, Any] = {"folders": scope.folders, "hosts": [one.name for one in scope.hosts if not one.local]}
    given |= {"port": scope.options.port, "cwd": str(Path.cwd()), "marks": list(marks.values()) if several else []}
    chosen = hosts[0].slots is None and "CUDA_VISIBLE_DEVICES" in os.environ  # a hostfile counts all GPUs
    given["gpus"] = visible_gpus() if chosen else None
    answers = on_all(hosts, lambda host: host.ask("facts", _FACTS_SECONDS, **given))
    if several:
        on_all(hosts, lambda host: host.ask("unmark", 30.0, folder=folder, name=marks[host.name]))
    lost = [_lost(name, item) for name, item in answers.items() if isinstance(item, Unreachable)]
    return {name: item for name, item in answers.items() if not isinstance(item, Unreachable)}, lost


def _lost(host: str, why: Unreachable) -> Finding:
    hangs = ": a disk or a network folder that hangs does this" if "no answer within" in str(why) else ""
    return red("facts", str(why), f"look at that machine by hand{hangs}", host)


def _wandb(scope: Scope, facts: Mapping[str, Facts]) -> Iterator[Finding]:
    first = next(iter(facts))  # only rank 0 writes
    one = facts[first]
    if scope.wandb == "disabled":
        return
    if "wandb" not in one["packages"]:
        yield amber("wandb", "it is not installed", "pip install wandb, or tracking.wandb=disabled", first)
    elif scope.wandb == "online" and not one["wandb_login"]:
        fix = "wandb login there, or set WANDB_API_KEY, or tracking.wandb=offline"
        yield amber("wandb", "tracking.wandb is online and there is no login: nothing will be uploaded", fix, first)
    else:
        yield green("wandb", f"{scope.wandb or 'offline'}, {'a' if one['wandb_login'] else 'no'} login", first)


def _reach(hosts: list[Host]) -> Iterator[Finding]:
    ports = on_all(hosts, lambda host: host.ask("listen", 10.0))
    ports = {name: port for name, port in ports.items() if isinstance(port, int)}

    def tried(host: Host) -> Any:
        around = hosts[hosts.index(host) + 1 :] + hosts  # try only the next eight in a ring
        chosen = [hosts[0].name, *(one.name for one in around[:8])]
        others = {name: port for name, port in ports.items() if name in chosen and name != host.name}
        return host.ask("reach", 10.0 + 5.0 * len(others), ports=others)

    for name, answer in on_all(hosts, tried).items():
        if not isinstance(answer, Unreachable):
            yield from cluster.check_reach(name, answer)


def _ops(scope: Scope) -> list[str]:
    """DeepSpeed ops that the run would build on GPUs."""
    return [op for op in [scope.optimizer.offload_op] if op and scope.offload != "none"]


def _with_torch(scope: Scope, hosts: list[Host], facts: Mapping[str, Facts]) -> Iterator[Finding]:
    for name, answer in _programs(hosts, DEVICE, {"ops": _ops(scope)}).items():
        if isinstance(answer, str):
            fix = "run `python -m deepspeed.env_report` there"
            yield red("device", f"torch or deepspeed does not work: {answer}", fix, name)
        else:
            yield from cluster.check_device(name, answer, scope.compute, len(facts[name]["gpus"]["list"]))
    if scope.run:
        yield from _run(scope, hosts, facts)
    yield from _all_reduce(scope, hosts, facts)


def _run(scope: Scope, hosts: list[Host], facts: Mapping[str, Facts]) -> Iterator[Finding]:
    for name, answer in _programs(hosts, RUN, scope.run | {"processes": _processes(facts)}).items():
        if isinstance(answer, str):
            yield red("run config", f"the checks of the config failed: {answer}", "see the line", name)
            continue
        for check, key, fix in (
            ("run config", "config", f"{_CORRECT}; the same file at the same path on every host"),
            ("encryption key", "key", "give every host the key that is meant"),
            ("object store", "store", "give every host the store's credentials, and the way to it"),
        ):
            if answer[key]:
                yield red(check, answer[key], fix, name)
            elif scope.run[key]:
                yield green(check, "usable", name)
        yield from check_offload(name, facts[name], scope.offload, scope.optimizer, answer["parameters"], len(hosts))


def _programs(hosts: list[Host], program: str, given: dict[str, Any]) -> dict[str, Any]:
    """Host name to the program's answer, or to text saying why there is none."""

    def ask(host: Host) -> Any:
        done = host.run(program, given, seconds=_PROGRAM_SECONDS)
        return done["answer"] if done["answer"] is not None else _failure(done, _PROGRAM_SECONDS)

    return {name: str(item) if isinstance(item, Unreachable) else item for name, item in on_all(hosts, ask).items()}


def _failure(done: Facts, seconds: float) -> str:
    """The most informative line of the output: the first exception, rather than torchrun's report about it."""
    errors = [line for line in done["output"] if "Error: " in line and "ChildFailedError" not in line]
    last = (errors[:1] or done["output"][-1:] or ["it printed nothing"])[0].strip()[:300]
    return f"no end within {seconds:.0f} s; last line: {last}" if done["late"] else last


def _all_reduce(scope: Scope, hosts: list[Host], facts: Mapping[str, Facts]) -> Iterator[Finding]:
    """Run an all-reduce over all hosts, started on each with torchrun's static rendezvous."""
    counts = {host.name: facts[host.name]["processes"] for host in hosts}
    if sum(counts.values()) < 2:
        yield green("all-reduce", "not measured: there is one process")
        return
    if len(set(counts.values())) > 1:
        yield amber("slots", "hosts have different numbers of processes", "torchrun and --elastic want them equal")
    several, began = len(hosts) > 1, time.monotonic()

    def start(host: Host) -> Any:
        rendezvous = ["--standalone"]
        if several:
            rendezvous = ["--nnodes", str(len(hosts)), "--node_rank", str(hosts.index(host))]
            rendezvous += ["--master_addr", hosts[0].name, "--master_port", str(scope.options.port)]
        launcher = ["-m", "torch.distributed.run", *rendezvous, "--nproc_per_node", str(min(counts.values()))]
        seconds = _PROGRAM_SECONDS / 2
        given = {"bytes": int(scope.options.all_reduce * 2**20), "seconds": seconds / 2}
        return host.run(ALL_REDUCE, given, seconds=seconds, launcher=launcher)

    done = on_all(hosts, start)
    answer = next((item["answer"] for item in done.values() if isinstance(item, dict) and item["answer"]), None)
    failures = [
        f"{name}: {item if isinstance(item, Unreachable) else _failure(item, time.monotonic() - began)}"
        for name, item in done.items()
        if isinstance(item, Unreachable) or item["code"]
    ]
    failure = "; ".join(failures[:3]) or "no rank answered"
    yield from cluster.check_all_reduce(answer, failure, 1e9 * scope.options.expect)
