"""Checks of one machine. Pure functions of the facts that `launch.doctor.facts` collects."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from config.optimizers import OptimizerSpec
from launch.doctor.report import Finding, amber, format_bytes, green, red

Facts = dict[str, Any]
MIN_OPEN_FILES, GOOD_OPEN_FILES = 256, 4096
MIN_PROCESSES = 1024
MIN_FREE, GOOD_FREE = 2**30, 10 * 2**30
"""Bytes free in the run folder: one small checkpoint, and a few."""
GOOD_SPEED = 50e6
"""Bytes per second below which a save takes long."""
SMALL_SHM, GOOD_SHM = 64 * 2**20, 512 * 2**20
"""Bytes of /dev/shm: a container's default, and the size below which DeepSpeed's own report warns."""


def check_host(host: str, facts: Facts) -> Iterator[Finding]:
    """The checks that concern one machine alone."""
    yield from _compilers(host, facts)
    yield from _ninjas(host, facts)
    yield from _nvcc(host, facts)
    yield from _locks(host, facts)
    yield from _limits(host, facts)
    yield from _memory(host, facts)
    yield from _threads(host, facts)
    for role, folder in facts["folders"].items():
        yield from _folder(host, role, folder)
    yield from _gpus(host, facts["gpus"], facts["processes"])


def _compilers(host: str, facts: Facts) -> Iterator[Finding]:
    if not facts["programs"]["c++"]:
        what = "there is none on the PATH"
        fix = "apt-get install g++, or set CXX; over ssh set PATH in .deepspeed_env"
        if not facts["builds"]:
            yield amber("c++ compiler", f"{what}; offload from a GPU and model.compile need one", fix, host)
        elif facts["built"]:
            yield amber("c++ compiler", f"{what}; {', '.join(facts['built'])} are built already", fix, host)
        else:
            yield red("c++ compiler", f"{what}, and DeepSpeed builds its op for offload with it", fix, host)
        return
    first = facts["programs"]["c++"][0]
    if first["version"] is None:
        yield red("c++ compiler", f"{first['path']} does not run", "repair or replace it, or set CXX", host)
    else:
        yield green("c++ compiler", f"{first['path']} {first['version']}", host)


def _ninjas(host: str, facts: Facts) -> Iterator[Finding]:
    ninjas = [item for item in facts["programs"]["ninja"] if item["version"]]
    if not ninjas:
        fix = "pip install ninja into this environment, and put its bin folder on the PATH"
        if facts["builds"]:
            yield red("ninja", "none runs, and DeepSpeed builds its op for offload with it", fix, host)
        else:
            yield amber("ninja", "none runs; offload from a GPU needs one", fix, host)
        return
    first = ninjas[0]
    own = ninjas[-1]
    if first["version"] != own["version"]:
        what = f"{first['path']} {first['version']} comes before {own['path']} {own['version']} on the PATH: "
        fix = f"put {own['path'].rpartition('/')[0]} first on the PATH, over ssh in .deepspeed_env"
        yield amber("ninja", what + "each finds the other's builds out of date and builds every op again", fix, host)
    else:
        yield green("ninja", f"{own['path']} {own['version']}", host)


def _nvcc(host: str, facts: Facts) -> Iterator[Finding]:
    cuda, found = facts["torch_cuda"], facts["programs"]["nvcc"]
    if cuda is None:
        return
    if not found or found[0]["version"] is None:
        fix = f"install the CUDA {cuda} toolkit, or set CUDA_HOME; ops that are not needed need none"
        yield amber("nvcc", f"none runs, and torch is built for CUDA {cuda}: no CUDA op can be built", fix, host)
        return
    version = found[0]["version"]
    what = f"{found[0]['path']} {version}, torch is built for CUDA {cuda}"
    if version.split(".")[0] != cuda.split(".")[0]:
        fix = f"point CUDA_HOME to a CUDA {cuda.split('.')[0]} toolkit"
        yield red("nvcc", f"{what}: DeepSpeed refuses to build ops with another major version", fix, host)
    else:
        yield green("nvcc", what, host)


def _locks(host: str, facts: Facts) -> Iterator[Finding]:
    for lock in facts["locks"]:
        minutes = f"{lock['age'] / 60:.0f} min old"
        if lock["pid"] is not None:
            yield amber("op build", f"process {lock['pid']} builds at {lock['path']}", "wait for it", host)
        elif lock["unsure"]:
            what = f"{lock['path']}, {minutes}: no process that can be seen from here holds it"
            yield amber("op build", what, f"if no build is under way anywhere: rm {lock['path']}", host)
        else:
            what = f"{lock['path']}, {minutes}, was left by a build that was killed: every start waits for it for ever"
            yield red("op build", what, f"rm {lock['path']}", host)
    if not facts["locks"]:
        built = ", ".join(facts["built"]) or "none yet; the first run that offloads from a GPU builds one"
        yield green("op build", f"no lock; built: {built}", host)


def _limits(host: str, facts: Facts) -> Iterator[Finding]:
    limits = facts["limits"]
    files, processes, locked = limits["nofile"], limits["nproc"], limits["memlock"]
    if files is not None and files < GOOD_OPEN_FILES:
        what = f"ulimit -n is {files}: sockets, shards and workers need more"
        fix = "ulimit -n 65536, or LimitNOFILE= of the service, or /etc/security/limits.conf"
        yield (red if files < MIN_OPEN_FILES else amber)("open files", what, fix, host)
    else:
        yield green("open files", f"ulimit -n is {files or 'unlimited'}", host)
    if processes is not None and processes < MIN_PROCESSES:
        what = f"ulimit -u is {processes}: threads of torch and of the data workers count too"
        yield amber("processes", what, "ulimit -u unlimited", host)
    if facts["infiniband"] and locked is not None:
        what = f"there is InfiniBand and ulimit -l is {locked // 1024} KiB: NCCL cannot register its buffers"
        yield red("locked memory", what, "ulimit -l unlimited (docker: --ulimit memlock=-1)", host)


def _memory(host: str, facts: Facts) -> Iterator[Finding]:
    memory, shm = facts["memory"], facts["shm"]
    limit = memory["cgroup_limit"]
    what = f"{format_bytes(memory['available'])} available of {format_bytes(memory['total'])}"
    what += f"; this cgroup may use {format_bytes(limit)}" if limit else "; no cgroup limit"
    yield green("memory", what, host)
    if shm is None:
        yield red("/dev/shm", "there is none", "mount a tmpfs at /dev/shm", host)
        return
    what = f"{format_bytes(shm['bytes'])}, {format_bytes(shm['free'])} free"
    fix = "docker run --shm-size=16g; Kubernetes: an emptyDir with medium Memory at /dev/shm; remove what is left there"
    if min(shm["bytes"] - 1, shm["free"]) < SMALL_SHM:
        yield red("/dev/shm", f"{what}: NCCL and data workers die with a bus error", fix, host)
    elif min(shm["bytes"], shm["free"]) < GOOD_SHM:
        yield amber("/dev/shm", what, fix, host)
    else:
        yield green("/dev/shm", what, host)


def _threads(host: str, facts: Facts) -> Iterator[Finding]:
    text = facts["environment"].get("OMP_NUM_THREADS")
    processes, cores = facts["processes"], facts["cores"]
    fix = "unset it: training gives each process its share of the cores"
    if text is None:
        yield green("threads", f"OMP_NUM_THREADS is not set; {cores} cores for {processes} processes", host)
    elif not text.isdecimal() or int(text) < 1:
        yield red("threads", f"OMP_NUM_THREADS = {text!r} is not a positive number", fix, host)
    elif int(text) * processes > cores:
        what = f"OMP_NUM_THREADS = {text} times {processes} processes is more than {cores} cores"
        yield amber("threads", what, fix, host)
    else:
        yield green("threads", f"OMP_NUM_THREADS = {text}, {processes} processes, {cores} cores", host)


def _folder(host: str, role: str, folder: Facts) -> Iterator[Finding]:
    name, path = f"{role} folder", folder["path"]
    if folder["error"]:
        fix = "make it writable for this user, or name another one"
        full = "space" in folder["error"] or "quota" in folder["error"].lower()
        yield red(name, f"{path}: {folder['error']}", "make room there" if full else fix, host)
        return
    what = f"{path}: {format_bytes(folder['free'])} free on {folder['filesystem']}"
    if folder["write"]:
        what += f", writes {folder['write'] / 1e6:.0f} MB/s, reads {folder['read'] / 1e6:.0f} MB/s"
    if folder["noexec"] and role == "op builds":
        yield red(name, f"{what}; mounted noexec, so no op can be loaded", "set TORCH_EXTENSIONS_DIR elsewhere", host)
    elif folder["free"] < MIN_FREE or folder["free_files"] == 0:
        short = "no inode is free" if folder["free_files"] == 0 else f"less than {format_bytes(MIN_FREE)}"
        yield red(name, f"{what}; {short}", f"make room on {folder['mount']}, or name another folder", host)
    elif folder["free"] < GOOD_FREE and role == "run":
        yield amber(name, f"{what}; a few checkpoints fill it", "make room, or lower checkpoint.keep", host)
    elif folder["write"] and folder["write"] < GOOD_SPEED:
        yield amber(name, f"{what}; saves are long", "use a faster folder, or checkpoint.background=always", host)
    elif folder["filesystem"] == "tmpfs" and role == "run":
        yield amber(name, f"{what}; gone after a reboot, and taken from memory", "name a folder on a disk", host)
    else:
        yield green(name, what, host)


def _gpus(host: str, gpus: Facts, processes: int) -> Iterator[Finding]:
    count = len(gpus["list"])
    if count and processes > count:
        yield red("slots", f"{processes} processes and {count} GPUs", f"slots={count} in the hostfile", host)
    if gpus["error"]:
        yield red("gpu", f"nvidia-smi: {gpus['error']}", "load the driver, or give the container the GPUs", host)
    elif not gpus["list"]:
        yield green("gpu", "none here; training runs on the CPU", host)
    for index, gpu in enumerate(gpus["list"]):
        errors, slowed = gpu["ecc.errors.uncorrected.volatile.total"], gpu.get("clocks_event_reasons.hw_slowdown")
        heat, used, total = (_number(gpu[key]) for key in ("temperature.gpu", "memory.used", "memory.total"))
        what = f"{index} {gpu['name']}, driver {gpu['driver_version']}, {used:.0f} of {total:.0f} MiB, {heat:.0f} C"
        if _number(errors) > 0:
            yield red("gpu", f"{what}: {errors} uncorrected memory errors", "drain the node and reset the GPU", host)
        elif slowed == "Active":
            yield red("gpu", f"{what}: the hardware slows it down", "check power and cooling", host)
        elif used > 0.1 * total:
            yield amber("gpu", f"{what}: another process has memory there", "nvidia-smi shows which", host)
        else:
            yield green("gpu", what, host)


def _number(text: str) -> float:
    """A number from nvidia-smi; 0 for "[N/A]"."""
    return float(text) if text.replace(".", "", 1).isdigit() else 0.0


def check_offload(
    host: str, facts: Facts, offload: str, optimizer: OptimizerSpec, parameters: int | None, hosts: int
) -> Iterator[Finding]:
    """Whether host memory holds what ZeRO offloads: FP32 masters, gradients and state tensors; 16-bit parameters.

    offload: as `config.deepspeed.document.offload` returns it.
    """
    if offload == "none" or parameters is None:
        return
    each = sum({"optimizer": 8 + optimizer.state_bytes(matrix=False), "param": 2}[part] for part in offload.split("+"))
    needed, memory = each * parameters / hosts, facts["memory"]
    room = min(memory["available"], memory["cgroup_limit"] or memory["available"])
    total = f"{parameters:,} parameters x {each} bytes / {hosts} = {format_bytes(needed)}"
    what = f"{offload}: {total}; {format_bytes(room)} there"
    if needed > room:
        yield red("offload memory", what, "more hosts, less offload, or a larger memory limit", host)
    elif needed > 0.8 * room:
        yield amber("offload memory", what, "leave room for the data and for saves in the background", host)
    else:
        yield green("offload memory", what, host)
