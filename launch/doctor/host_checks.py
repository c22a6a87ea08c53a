"""Checks of one machine. Pure functions of the facts that `launch.doctor.facts` collects."""

import math
from collections.abc import Iterator

from config.optimizers import OptimizerSpec
from launch.doctor.report import AMBER, RED, Facts, Finding, amber, format_bytes, green, judged, red

MIN_OPEN_FILES, GOOD_OPEN_FILES = 256, 4096
MIN_PROCESSES = 1024
MIN_FREE, GOOD_FREE = 2**30, 10 * 2**30
"""[bytes] Free space in the run folder: enough for one small checkpoint, and for a few."""
GOOD_SPEED = 50e6
"""[bytes/s] Speed below which saves take long."""
SMALL_SHM, GOOD_SHM = 64 * 2**20, 512 * 2**20
"""[bytes] Size of /dev/shm: the default of containers, and the size below which DeepSpeed's own report warns."""


def check_host(host: str, facts: Facts) -> Iterator[Finding]:
    for check in (_compilers, _ninjas, _nvcc, _locks, _limits, _memory, _threads):
        yield from check(host, facts)
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
    broken = (first["version"] is None, RED, "does not run", "repair or replace it, or set CXX")
    yield judged("c++ compiler", f"{first['path']} {first['version'] or ''}", host, broken)


def _ninjas(host: str, facts: Facts) -> Iterator[Finding]:
    ninjas = [item for item in facts["programs"]["ninja"] if item["version"]]
    if not ninjas:
        fix = "pip install ninja into this environment, and put its bin folder on the PATH"
        if facts["builds"]:
            yield red("ninja", "none runs, and DeepSpeed builds its op for offload with it", fix, host)
        else:
            yield amber("ninja", "none runs; offload from a GPU needs one", fix, host)
        return
    first, own = ninjas[0], ninjas[-1]
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
    version, major = found[0]["version"], cuda.split(".")[0]
    what = f"{found[0]['path']} {version}, torch is built for CUDA {cuda}"
    other, problem = version.split(".")[0] != major, ": DeepSpeed refuses to build ops with another major version"
    yield judged("nvcc", what, host, (other, RED, problem, f"point CUDA_HOME to a CUDA {major} toolkit"))


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
    what, few = f"ulimit -n is {files or 'unlimited'}", ": sockets, shards and workers need more"
    fix = "ulimit -n 65536, or LimitNOFILE= of the service, or /etc/security/limits.conf"
    most = math.inf if files is None else files
    yield judged(
        "open files", what, host, (most < MIN_OPEN_FILES, RED, few, fix), (most < GOOD_OPEN_FILES, AMBER, few, fix)
    )
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
    small = (min(shm["bytes"] - 1, shm["free"]) < SMALL_SHM, RED, ": NCCL and data workers die with a bus error", fix)
    yield judged("/dev/shm", what, host, small, (min(shm["bytes"], shm["free"]) < GOOD_SHM, AMBER, "", fix))


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
    free, room = folder["free"], f"make room on {folder['mount']}, or name another folder"
    built, of_run, slow = role == "op builds", role == "run", folder["write"] and folder["write"] < GOOD_SPEED
    noexec, lost = "; mounted noexec, so no op can be loaded", "; gone after a reboot, and taken from memory"
    yield judged(
        name,
        what,
        host,
        (folder["noexec"] and built, RED, noexec, "set TORCH_EXTENSIONS_DIR elsewhere"),
        (folder["free_files"] == 0, RED, "; no inode is free", room),
        (free < MIN_FREE, RED, f"; less than {format_bytes(MIN_FREE)}", room),
        (free < GOOD_FREE and of_run, AMBER, "; a few checkpoints fill it", "make room, or lower checkpoint.keep"),
        (slow, AMBER, "; saves are long", "use a faster folder, or checkpoint.background=always"),
        (folder["filesystem"] == "tmpfs" and of_run, AMBER, lost, "name a folder on a disk"),
    )


def _gpus(host: str, gpus: Facts, processes: int) -> Iterator[Finding]:
    count = len(gpus["list"])
    if count and processes > count:
        yield red("slots", f"{processes} processes and {count} GPUs", f"slots={count} in the hostfile", host)
    if gpus["error"]:
        yield red("gpu", f"nvidia-smi: {gpus['error']}", "load the driver, or give the container the GPUs", host)
    elif not gpus["list"]:
        yield green("gpu", "none here; training runs on the CPU", host)
    if gpus["warning"]:
        yield amber("gpu", f"nvidia-smi: {gpus['warning']}", "have that GPU checked, or replaced", host)
    for index, gpu in enumerate(gpus["list"]):
        errors, slowed = gpu["ecc.errors.uncorrected.volatile.total"], gpu.get("clocks_event_reasons.hw_slowdown")
        heat, used, total = (_number(gpu[key]) for key in ("temperature.gpu", "memory.used", "memory.total"))
        what = f"{index} {gpu['name']}, driver {gpu['driver_version']}, {used:.0f} of {total:.0f} MiB, {heat:.0f} C"
        yield judged(
            "gpu",
            what,
            host,
            (_number(errors), RED, f": {errors} uncorrected memory errors", "drain the node and reset the GPU"),
            (slowed == "Active", RED, ": the hardware slows it down", "check power and cooling"),
            (used > 0.1 * total, AMBER, ": another process has memory there", "nvidia-smi shows which"),
        )


def _number(text: str) -> float:
    """A number from nvidia-smi; 0 for "[N/A]"."""
    return float(text) if text.replace(".", "", 1).isdigit() else 0.0


def check_offload(
    host: str, facts: Facts, offload: str, optimizer: OptimizerSpec, parameters: int | None, hosts: int
) -> Iterator[Finding]:
    """Check that host memory can hold what ZeRO offloads: FP32 masters, gradients and state; 16-bit parameters.
    offload: as returned by `config.deepspeed.document.offload`."""
    if offload == "none" or parameters is None:
        return
    each = sum({"optimizer": 8 + optimizer.state_bytes(matrix=False), "param": 2}[part] for part in offload.split("+"))
    needed, memory = each * parameters / hosts, facts["memory"]
    room = min(memory["available"], memory["cgroup_limit"] or memory["available"])
    total = f"{parameters:,} parameters x {each} bytes / {hosts} = {format_bytes(needed)}"
    what = f"{offload}: {total}; {format_bytes(room)} there"
    little = (needed > room, RED, "", "more hosts, less offload, or a larger memory limit")
    tight = (needed > 0.8 * room, AMBER, "", "leave room for the data and for saves in the background")
    yield judged("offload memory", what, host, little, tight)
