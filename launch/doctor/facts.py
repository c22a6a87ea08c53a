"""Collect facts about one machine as plain JSON. Uses only the standard library: this file is sent to other machines.

host_checks.py and cluster_checks.py judge the facts.
"""

from __future__ import annotations

import hashlib
import netrc
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from config.machine import op_builds
from config.machine.processes import cgroup_files, mount_of, read

SPEED_BYTES = 64 * 2**20
"""Size of the file that is written and read back to measure the speed of a folder."""
PACKAGES = ("torch", "deepspeed", "transformers", "accelerate", "numpy", "wandb", "ninja")
_GPU_FIELDS = (
    *("name", "driver_version", "memory.total", "memory.used", "temperature.gpu"),
    *("ecc.errors.uncorrected.volatile.total", "clocks_event_reasons.hw_slowdown"),
)
_CODE = ("train.py", "config", "data", "launch", "modeling", "precision", "tracking", "training")
_INFOROM_CORRUPTED = 14
"""Exit code of nvidia-smi that warns and lists the GPUs nevertheless."""
AS_TEXT: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "encoding": "utf-8", "errors": "replace"}
"""Options of `subprocess` for a program whose output and errors are read together."""


def collect(request: dict[str, Any]) -> dict[str, Any]:
    """The facts about this machine. request: `folders` by role, names of `hosts`, `port`, `cwd`, names of `marks`, the
    `gpus` of the job or null for all."""
    extensions = op_builds.extensions_folder()
    readable = os.access(extensions, os.R_OK | os.X_OK)
    folders, measured = {**request["folders"], "op builds": str(extensions)}, set[str]()
    return {
        "hostname": socket.gethostname(),
        "python": platform.python_version(),
        "packages": _packages(),
        "torch_cuda": _torch_cuda(),
        "code": _code(Path(request["cwd"])),
        "cores": len(os.sched_getaffinity(0)),
        "environment": {key: os.environ[key] for key in ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME") if key in os.environ},
        "programs": _programs(),
        "limits": _limits(),
        "memory": memory(),
        "shm": _shared_memory(),
        "infiniband": Path("/dev/infiniband").exists(),
        "folders": {role: _folder(path, measured) for role, path in folders.items()},
        "shared": _seen(request["folders"]["run"], request["marks"]),
        "locks": op_builds.locks(extensions) if readable else [],
        "built": sorted({path.stem for path in extensions.glob("**/*.so")}) if readable else [],
        "gpus": gpus(request["gpus"]),
        "names": {name: _addresses(name) for name in {*request["hosts"], socket.gethostname()}},
        "port": _port(request["port"]),
        "wandb_login": _wandb_login(),
    }


def _packages() -> dict[str, str]:
    # Of two distributions with the same name, the first on the path is imported.
    found = {str(item.name): item.version for item in reversed([*metadata.distributions()])}
    return {name: found[name] for name in sorted(found) if name in PACKAGES or "nvidia-nccl" in name}


def _torch_cuda() -> str | None:
    """CUDA version that torch was built for, read from its files because importing torch takes seconds."""
    spec = find_spec("torch")
    folder = Path(spec.origin).parent if spec is not None and spec.origin else None
    if folder is None or not (folder / "version.py").is_file():
        return None
    match = re.search(r"^cuda[^=]*= *'([\d.]+)'", (folder / "version.py").read_text(encoding="utf-8"), re.MULTILINE)
    return match[1] if match else None


def _code(folder: Path) -> str | None:
    """Hash of Mantissa's source in `folder`; None if it is not there."""
    if not (folder / "train.py").is_file():
        return None
    paths = [path for name in _CODE for path in ([folder / name] if "." in name else (folder / name).rglob("*.py"))]
    total = hashlib.sha256()
    for path in sorted(path for path in paths if path.is_file()):
        total.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return total.hexdigest()[:12]


def run_program(command: list[str], seconds: float = 10.0) -> tuple[int, str, str]:
    """(exit code, output, errors) of a program; code -1 if it cannot be started or does not end in time."""
    try:
        done = subprocess.run(command, timeout=seconds, check=False, **AS_TEXT | {"stderr": subprocess.PIPE})
    except (OSError, subprocess.TimeoutExpired) as error:
        return -1, "", str(error)
    return done.returncode, done.stdout.strip(), done.stderr.strip()


def _programs() -> dict[str, list[dict[str, str | None]]]:
    """Path and version of the programs that build ops, the one that a shell would start first. There may be a second
    ninja, from this Python's environment, which training prefers."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    own = str(Path(sys.executable).parent)
    return {
        "c++": _versions(r"(\d+\.\d+[.\d]*)", shutil.which(os.environ.get("CXX", "c++"))),
        "ninja": _versions(r"([\d.]+\d)", shutil.which("ninja"), shutil.which("ninja", path=own)),
        "nvcc": _versions(r"release (\d+\.\d+)", shutil.which("nvcc", path=f"{home}/bin") or shutil.which("nvcc")),
    }


def _versions(pattern: str, *paths: str | None) -> list[dict[str, str | None]]:
    found: list[dict[str, str | None]] = []
    for path in filter(None, dict.fromkeys(paths)):
        code, text, _ = run_program([path, "--version"])
        match = re.search(pattern, text)
        found.append({"path": path, "version": match[1] if code == 0 and match else None})
    return found


def _limits() -> dict[str, int | None]:
    """Soft resource limits; None means unlimited."""
    numbers = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC, "memlock": resource.RLIMIT_MEMLOCK}
    soft = {name: resource.getrlimit(number)[0] for name, number in numbers.items()}
    return {name: None if value == resource.RLIM_INFINITY else value for name, value in soft.items()}


def memory() -> dict[str, int | None]:
    """[bytes] Total and available memory of the host, and the lowest limit of this process's cgroups, if any."""
    text = Path("/proc/meminfo").read_text(encoding="utf-8")
    of = {name: int(value) * 1024 for name, value in re.findall(r"^(\w+): +(\d+) kB", text, re.MULTILINE)}
    limits = (read(path).strip() for path in cgroup_files("memory.max", "memory.limit_in_bytes"))
    lower = [int(limit) for limit in limits if limit.isdigit() and int(limit) < of["MemTotal"]]
    return {"total": of["MemTotal"], "available": of["MemAvailable"], "cgroup_limit": min(lower, default=None)}


def _shared_memory() -> dict[str, int] | None:
    """[bytes] Size of /dev/shm and free space in it; None without /dev/shm."""
    try:
        found = shutil.disk_usage("/dev/shm")
    except OSError:
        return None
    return {"bytes": found.total, "free": found.free}


def gpus(only: Sequence[str] | None = None) -> dict[str, Any]:
    """GPUs of this machine as listed by the driver, number of device files, why the driver lists none, if so, and what
    it warns of. only: index or UUID of each to list; all are listed if one is something else, such as a MIG device."""
    program = shutil.which("nvidia-smi")
    devices = len(list(Path("/dev").glob("nvidia[0-9]*")))
    found: dict[str, Any] = {"devices": devices, "error": None, "warning": None, "list": []}
    if only is not None and not only:
        return found
    if program is None:
        return found | {"error": "there is no nvidia-smi" if devices else None}
    given = ",".join(only or ())
    chosen = [f"--id={given}"] if re.fullmatch(r"((\d+|GPU-[\da-f-]{36})(,|$))+", given) else []
    for fields in (_GPU_FIELDS, _GPU_FIELDS[:-1]):  # drivers before 535 lack the last field
        asked = [f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
        code, text, errors = run_program([program, *asked, *chosen], 30.0)
        if code in (0, _INFOROM_CORRUPTED):
            break
    lines = [[item.strip() for item in line.split(",")] for line in text.splitlines()]
    rows = [dict(zip(fields, line, strict=True)) for line in lines if len(line) == len(fields)]
    said = [f"exit code {code}", *errors.splitlines(), *(", ".join(line) for line in lines if len(line) != len(fields))]
    if not rows or code not in (0, _INFOROM_CORRUPTED):
        return found | {"error": said[-1][:200]}
    return found | {"warning": said[-1][:200] if code else None, "list": rows}


def _addresses(name: str) -> dict[str, Any]:
    """Addresses that a name resolves to on this machine, and the names that the first of them resolves back to."""
    facts: dict[str, Any] = {"addresses": [], "error": None, "back": None}
    try:
        found = sorted({str(item[4][0]) for item in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)})
    except OSError as error:
        return facts | {"error": error.strerror or str(error)}
    with suppress(OSError):
        back, aliases, _ = socket.gethostbyaddr(found[0])
        facts["back"] = [back, *aliases]
    return facts | {"addresses": found}


def _port(number: int) -> str | None:
    """Why the port cannot be listened on; None if it can."""
    try:
        socket.create_server(("", number)).close()
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)
    return None


def _wandb_login() -> bool:
    """Whether there is a wandb API key. The key itself is not returned."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = re.sub(r"^https?://|[:/].*$", "", os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai"))
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def _folder(name: str, measured: set[str]) -> dict[str, Any]:
    """Free space and file system of a folder, and its speed of writing (with flush) and reading back a file. measured:
    mount points already timed; extended by that of this folder."""
    facts: dict[str, Any] = {"path": name, "error": None}
    try:
        path = nearest_existing(name)
    except RuntimeError as error:  # there is no such ~user
        return facts | {"error": str(error)}
    probe = path / f".doctor-{os.getpid()}-{socket.gethostname()}"
    try:
        of = os.statvfs(path)
        free = of.f_frsize * of.f_bavail
        facts.update(free=free, free_files=of.f_favail if of.f_files else None, **mount_of(path))
        facts["noexec"] = bool(of.f_flag & os.ST_NOEXEC)
        facts.update(_speed(probe, 0 if facts["mount"] in measured else min(SPEED_BYTES, free // 4)))
        measured.add(facts["mount"])
    except OSError as error:
        facts["error"] = error.strerror or str(error)
    finally:
        with suppress(OSError):
            probe.unlink()
    return facts


def _speed(probe: Path, size: int) -> dict[str, float | None]:
    """[bytes/s] Speed of writing with fsync, and of reading after dropping the page cache."""
    block = os.urandom(2**20)
    with probe.open("wb", buffering=0) as file:
        began = time.perf_counter()
        for _ in range(size // len(block)):
            file.write(block)
        file.write(b"end")
        os.fsync(file.fileno())
        wrote = time.perf_counter() - began
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    began = time.perf_counter()
    probe.read_bytes()
    read = time.perf_counter() - began
    enough = size >= 8 * len(block)
    return {"write": size / wrote if enough else None, "read": size / read if enough else None}


def nearest_existing(path: str) -> Path:
    """The folder or its nearest existing ancestor, since examining must not create folders; the folder itself if it
    cannot be seen, so that its use fails."""
    folder = Path(path).expanduser().absolute()
    with suppress(PermissionError):
        while not folder.exists():
            folder = folder.parent
    return folder


def _seen(folder: str, names: Sequence[str]) -> list[str]:
    """The names of files that are in the folder or its nearest existing ancestor; none if that cannot be read."""
    with suppress(OSError, RuntimeError):
        return [name for name in names if (nearest_existing(folder) / name).exists()]
    return []
