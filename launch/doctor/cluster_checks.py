"""Checks that compare machines: versions, names, clocks, folders and network. Pure functions of the facts."""

import ipaddress
from collections import Counter
from collections.abc import Iterator, Mapping

from launch.doctor.report import AMBER, RED, Facts, Finding, amber, green, judged, red

RED_SKEW, AMBER_SKEW = 30.0, 1.0
"""[seconds] Clock skew: TLS and signed requests to object stores fail at minutes; records and locks mislead earlier."""
_CODE = "Mantissa's code"
_MUST_AGREE = {"python", "torch", "CUDA of torch", "deepspeed", "transformers", "accelerate", "numpy", _CODE}


def check_cluster(facts: Mapping[str, Facts], *, port: int) -> Iterator[Finding]:
    """Compare the facts of all machines. facts: host to its facts; rank 0 runs on the first."""
    yield from _versions(facts)
    yield from _names(facts)
    first = next(iter(facts))
    problem = facts[first]["port"]
    fix = f"give the launcher another one (--master_port), or end what listens there: ss -ltnp 'sport = :{port}'"
    what = f"{port} cannot be listened on: {problem}" if problem else f"{port} is free"
    yield judged("port", what, first, (problem, RED, "", fix))
    if len(facts) > 1:
        yield from _shared(facts)


def _versions(facts: Mapping[str, Facts]) -> Iterator[Finding]:
    versions = {name: dict.fromkeys(facts, "none") for name in ("python", "torch", "deepspeed", _CODE)}
    for host, one in facts.items():
        drivers = ", ".join(sorted({gpu["driver_version"] for gpu in one["gpus"]["list"]}))
        mine = {"python": one["python"], _CODE: one["code"], "CUDA of torch": one["torch_cuda"], "driver": drivers}
        for name, version in (mine | one["packages"]).items():
            versions.setdefault(name, dict.fromkeys(facts, "none"))[host] = version or "none"
    equal = []
    for name, by_host in versions.items():
        usual, count = Counter(by_host.values()).most_common(1)[0]
        if usual != "none":
            equal.append(f"{name} {usual}")
        elif name in ("torch", "deepspeed", _CODE):
            fix = "start in Mantissa's folder" if name == _CODE else "pip install -r requirements.txt"
            yield red("versions", f"there is no {name}", fix)
        for host, version in by_host.items():
            if version != usual:
                what = f"{name} is {version}, {usual} on {count} other host{'s' * (count > 1)}"
                fix = f"bring it to {usual}: one environment for all hosts, on a shared folder or in an image"
                fix = "the same commit in the same folder on every host" if name == _CODE else fix
                yield (red if name in _MUST_AGREE or "nccl" in name else amber)("versions", what, fix, host)
    yield green("versions", ", ".join(equal))


def _names(facts: Mapping[str, Facts]) -> Iterator[Finding]:
    several = len(facts) > 1
    for host, one in facts.items():
        good = []
        for name, found in one["names"].items():
            own = name == one["hostname"]
            fix = f"add {name} to DNS or /etc/hosts on every host"
            if found["error"]:
                what = f"{name}{' (its own name)' if own else ''} does not resolve: {found['error']}"
                yield (red if several or not own else amber)("names", what, fix, host)
            elif several and all(ipaddress.ip_address(item.split("%")[0]).is_loopback for item in found["addresses"]):
                what = f"{name} resolves to {', '.join(found['addresses'])}, which no other host reaches"
                if own and "GLOO_SOCKET_IFNAME" in one["environment"]:
                    continue
                yield red("names", what, f"{fix}, with the address others reach; or set GLOO_SOCKET_IFNAME", host)
            elif several and not own and not _same_name(name, found):
                back = ", ".join(found["back"]) if found["back"] else "no name"
                what = f"{name} is {found['addresses'][0]}, which resolves back to {back}"
                yield amber("names", what, "correct the PTR record or /etc/hosts; logs name hosts by it", host)
            else:
                good.append(f"{name} {found['addresses'][0]}")
        if good:
            yield green("names", ", ".join(good[:4]) + (f" and {len(good) - 4} more" if len(good) > 4 else ""), host)


def _same_name(name: str, found: Facts) -> bool:
    labels = {item.split(".")[0] for item in found["back"] or []}
    return name in found["addresses"] or name in (found["back"] or []) or name.split(".")[0] in labels


def check_pdsh(program: str | None, *paths: str) -> Iterator[Finding]:
    """Check what `deepspeed --hostfile` needs. paths: folder and interpreter, which it passes to a shell unquoted."""
    if program is None:
        fix = "apt-get install pdsh, or start with torchrun or Slurm"
        yield amber("pdsh", "it is not on the PATH here, and the deepspeed launcher uses it", fix)
    spaced = [path for path in paths if len(path.split()) > 1]
    if spaced:
        what = f"{spaced[0]} has a space in it, which the deepspeed launcher does not quote for the other hosts"
        yield amber("pdsh", what, "a folder without spaces, or start with torchrun or accelerate launch on each host")


def check_reach(host: str, tried: Mapping[str, str | None]) -> Iterator[Finding]:
    """Check connections between machines. tried: other host to why connecting to it failed, None if it succeeded."""
    failed = {name: why for name, why in tried.items() if why}
    for name, why in failed.items():
        fix = "let the hosts' firewalls pass TCP on all ports between them, and the routes be there both ways"
        yield red("network", f"no TCP connection to {name}: {why}", fix, host)
    if tried and not failed:
        yield green("network", f"reaches {len(tried)} other hosts by TCP", host)


def check_clock(host: str, ahead: float, error: float) -> Iterator[Finding]:
    """Check a machine's clock. ahead: seconds it is ahead of ours, within `error`."""
    what = f"{abs(ahead):.3f} s {'ahead of' if ahead > 0 else 'behind'} this machine (within {error:.3f} s)"
    skew, fix = abs(ahead) - error, "run chrony or systemd-timesyncd there: timedatectl set-ntp true"
    yield judged("clock", what, host, (skew > RED_SKEW, RED, "", fix), (skew > AMBER_SKEW, AMBER, "", fix))


def _shared(facts: Mapping[str, Facts]) -> Iterator[Finding]:
    for host, one in facts.items():
        path = one["folders"]["run"]["path"]
        missing = [name for name in facts if not any(mark.endswith(f"@{name}") for mark in one["shared"])]
        what = f"what {', '.join(missing[:4])} wrote is not seen here"
        fix = "put run.dir on a folder that all hosts mount (NFS, Lustre, FSx), at the same path"
        what = f"{path}: {what if missing else f'sees what all {len(facts)} hosts wrote'}"
        yield judged("shared folder", what, host, (missing, RED, "", fix))


def check_device(host: str, answer: Facts, compute: str | None, gpus: int) -> Iterator[Finding]:
    """Check devices. answer: from `programs.DEVICE`. compute: the run's dtype, if any. gpus: number per the driver."""
    if answer["devices"] != gpus:
        what = f"the driver has {gpus} GPUs, torch {answer['torch']} sees {answer['devices']}"
        fix = "install torch for the driver's CUDA or older; check CUDA_VISIBLE_DEVICES"
        yield (amber if answer["devices"] else red)("device", what, fix, host)
    where = f"{answer['devices']} x cuda" if answer["devices"] else answer["device"]
    for kind in ("bf16", "fp16"):
        made, wanted = answer["matmul"][kind], compute == kind
        times = f"{1e3 * made['seconds']:.2f} ms" if made["seconds"] else "not timed"
        what = f"{where}: a 512 x 512 product takes {times}, off by {float(made['off']):.1e}"
        if made["error"] or not float(made["off"]) < 0.05:
            what = f"{where}: {made['error'] or 'wrong product, off by ' + made['off']}"
            fix = "use another dtype" if made["error"] else "take this machine out: its arithmetic is broken"
            yield (red if wanted or not made["error"] else amber)(kind, what, fix, host)
        elif not answer["supported"][kind]:
            slow = "DeepSpeed does not support it on this device"
            fix = "use bf16" if kind == "fp16" else "use fp16 or fp32"
            yield amber(kind, f"{what}; {slow}", fix, host) if wanted else green(kind, f"{what}; {slow}", host)
        else:
            yield green(kind, what, host)
    for op, fine in answer["ops"].items():
        problem = f" cannot be built{': ' + fine if isinstance(fine, str) else ''}"
        broken = (fine is not True, RED, problem, "ds_report shows what is missing")
        yield judged("op compatibility", op, host, broken)


def check_all_reduce(answer: Facts | None, failure: str, expected: float) -> Iterator[Finding]:
    """Check an all-reduce. answer: from `programs.ALL_REDUCE`, None if it failed. expected: bus bandwidth in bytes/s.
    Bus bandwidth is 2 (n - 1) / n x bytes / seconds, as in NVIDIA/nccl-tests, doc/PERFORMANCE.md."""
    if answer is None:
        fix = "NCCL_DEBUG=INFO, and NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME when a wrong interface is taken"
        yield red("all-reduce", failure, fix)
        return
    world, speed = answer["world"], answer["bytes"] / answer["seconds"]
    bus = 2 * (world - 1) / world * speed
    what = (
        f"{answer['bytes'] / 2**20:.0f} MiB over {world} processes by {answer['backend']} "
        f"in {1e3 * answer['seconds']:.1f} ms: {speed / 1e9:.2f} GB/s, {bus / 1e9:.2f} GB/s of bus"
    )
    wrong = (answer["wrong"], RED, f"; {answer['wrong']} sums are wrong", "take hosts out until the sums are right")
    fix = "NCCL_DEBUG=INFO shows whether it went over InfiniBand, NVLink or plain sockets"
    slow = (bus < expected, AMBER, f"; {expected / 1e9:g} GB/s of bus were expected", fix)
    yield judged("all-reduce", what, "", wrong, slow)
