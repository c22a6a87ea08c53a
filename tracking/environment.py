"""Versions, machine, code commit and command line of a run, for `environment.json` and wandb; and redaction of secrets.

This file is shared more freely than the machine it came from: environment variables pass an allow-list, and values that
look like a secret are blanked.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from config.machine.binding import binding_outcome, usable_cpus
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
HIDDEN = "***"
SHORTEST_SECRET = 12
"""Characters that a variable's value needs to be searched for: a shorter one may be an ordinary word."""

_CODE_FOLDER = Path(__file__).resolve().parent.parent
_GIT_TIMEOUT_S = 10
_SECRET_WORD = (
    r"(?:[\w.-]*[_.-])?(?:token|secret|password|passwd|pwd|passphrase|credentials?|connection[_-]?string"
    r"|(?:api|access|private|account|shared)[_-]?key)"
)
_SECRET_OPTION = re.compile(rf"(?i)^(-{{0,2}}{_SECRET_WORD})=.*$", re.DOTALL)
_SECRET_FLAG = re.compile(rf"(?i)^-{{1,2}}{_SECRET_WORD}$")
_SECRET_KEY = re.compile(rf"(?i)^{_SECRET_WORD}$")
_URL_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")
_KNOWN_KEYS = re.compile(r"\b(?:hf_[A-Za-z0-9]{20,}|wandb_v\d_\w{20,}|gh[pousr]_[A-Za-z0-9]{20,}|AKIA[A-Z0-9]{16})\b")


def environment(extra: dict[str, Any]) -> dict[str, Any]:
    """A JSON-ready dict of the environment of this process, with `extra` (devices, world size, launcher, ...) on top.

    A package that is not installed and an unknown git commit are None. Memory is in bytes.
    """
    return {
        "start_time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command_line": [sys.argv[0], *redact_arguments(sys.argv[1:])],
        "working_folder": str(Path.cwd()),
        "hostname": platform.node(),
        "platform": platform.platform(),
        "cpu": {
            "model": _cpu_model(),
            "cores": os.cpu_count(),
            "usable_cores": len(usable_cpus()),
            "binding": binding_outcome(),
        },
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "git": _git_state(_CODE_FOLDER),
        "versions": {
            "mantissa": VERSION,
            "python": platform.python_version(),
            **{name: _version(name) for name in PACKAGES},
        },
        "variables": safe_variables(dict(os.environ)),
        **extra,
    }


def safe_variables(variables: dict[str, str]) -> dict[str, str]:
    """The variables on the allow-list, sorted. Values are redacted too: those of network plug-ins may hold a login."""
    chosen = {k: v for k, v in variables.items() if any(fnmatchcase(k, pattern) for pattern in SAFE_VARIABLES)}
    return {name: redact(name, chosen[name]) for name in sorted(chosen)}


def redact(key: str, value: Any) -> Any:
    """`value` without what looks like a secret, at any depth: by the name of its key, a URL's login, a known prefix."""
    if isinstance(value, str):
        if _SECRET_KEY.match(key):
            return HIDDEN
        return _KNOWN_KEYS.sub(HIDDEN, _URL_LOGIN.sub(f"{HIDDEN}@", value))
    if isinstance(value, dict):
        return {name: redact(str(name), item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [redact(key, item) for item in value]
    return value


def redact_arguments(arguments: list[str]) -> list[str]:
    """Command-line arguments with the value of `--api-key X`, `hf_token=X` and the like blanked."""
    hidden = []
    after_flag = False
    for argument in arguments:
        hidden.append(HIDDEN if after_flag else redact("", _SECRET_OPTION.sub(rf"\1={HIDDEN}", argument)))
        after_flag = bool(_SECRET_FLAG.match(argument))
    return hidden


def known_secrets(variables: Mapping[str, str]) -> list[bytes]:
    """The values of variables with a name like WANDB_API_KEY, as JSON writes them; longest first."""
    found = {value for name, value in variables.items() if redact(name, value) == HIDDEN}
    values = [value for value in found if len(value) >= SHORTEST_SECRET]
    return [json.dumps(value)[1:-1].encode() for value in sorted(values, key=len, reverse=True)]


def hide(text: bytes, secrets: list[bytes]) -> bytes:
    """A line of JSON without `secrets`."""
    for secret in secrets:
        text = text.replace(secret, HIDDEN.encode())
    return text


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(errors="replace", encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def _git_state(folder: Path) -> dict[str, Any] | None:
    """Commit of the code and whether tracked files differ from it; None without git or outside a repository."""
    commit = _git(folder, "rev-parse", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return None if commit is None else {"commit": commit, "dirty": None if changes is None else bool(changes)}


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_GIT_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
