"""Versions, machine, code commit and command line of a run, for `environment.json` and wandb.

The file may be shared with people who have no access to the machine, so environment variables pass an allow-list and
secrets are hidden.
"""

import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from config.machine.binding import binding_outcome, usable_cpus
from config.redact import redact, redact_arguments
from config.version import VERSION

PACKAGES = (
    *("torch", "deepspeed", "transformers", "accelerate", "datasets", "tokenizers", "safetensors"),
    *("wandb", "numpy"),
)
SAFE_VARIABLES = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUBLAS_WORKSPACE_CONFIG"),
    *("NVIDIA_TF32_OVERRIDE", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
    *("TORCH_NCCL_*", "NCCL_*", "GLOO_*", "DS_ACCELERATOR", "MASTER_PORT", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
    *("SLURM_JOB_ID", "SLURM_JOB_NAME", "SLURM_JOB_NUM_NODES", "SLURM_JOB_PARTITION"),
)
_CODE_FOLDER = Path(__file__).resolve().parent.parent
_GIT_TIMEOUT_S = 10


def environment(extra: dict[str, Any]) -> dict[str, Any]:
    """The environment of this process as a JSON-ready dict, updated with `extra` (devices, world size, launcher, ...).

    Packages that are not installed and an unknown git commit are None. Memory is in bytes.
    """
    return {
        "start_time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command_line": [sys.argv[0], *redact_arguments(sys.argv[1:])],
        "working_folder": redact(str(Path.cwd())),
        "hostname": platform.node(),
        "platform": platform.platform(),
        "cpu": {
            "model": _cpu_model(),
            "cores": os.cpu_count(),
            "usable_cores": len(usable_cpus()),
            "binding": binding_outcome(),
        },
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "git": git_state(),
        "versions": {
            "mantissa": VERSION,
            "python": platform.python_version(),
            **{name: package_version(name) for name in PACKAGES},
        },
        "variables": safe_variables(dict(os.environ)),
        **extra,
    }


def safe_variables(variables: dict[str, str]) -> dict[str, str]:
    """The allow-listed variables, sorted. Variables of network plug-ins may hold a login, which is hidden."""
    chosen = {k: v for k, v in variables.items() if any(fnmatchcase(k, pattern) for pattern in SAFE_VARIABLES)}
    return {name: redact(chosen[name], name) for name in sorted(chosen)}


def package_version(package: str) -> str | None:
    """The installed version of a package; None if it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(errors="replace", encoding="utf-8").splitlines() if cpuinfo.is_file() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def git_state() -> dict[str, Any] | None:
    """Commit of the code and whether tracked files differ from it; None without git or outside a repository."""
    commit = _git("rev-parse", "HEAD")
    changes = _git("status", "--porcelain", "--untracked-files=no")
    return None if commit is None else {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _git(*arguments: str) -> str | None:
    try:
        command = ["git", "-C", str(_CODE_FOLDER), *arguments]
        done = subprocess.run(command, capture_output=True, timeout=_GIT_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.decode(errors="replace").strip() if done.returncode == 0 else None
