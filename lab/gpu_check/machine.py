"""Describes the machine in a separate process, since initializing CUDA would hold device memory in the main one.

`python -m lab.gpu_check.machine FILE` also imports everything a training job imports, so that a missing package fails
the check early.
"""

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import training.finish  # noqa: F401 - imports the whole training loop
from launch.doctor.facts import gpus
from modeling.kernels import unavailable_reason, uncompilable_reason
from tracking.environment import environment, package_version

PACKAGES = ("triton", "liger-kernel", "flash-attn", "torchtitan", "peft")
"""Packages whose versions are recorded in addition to those in environment.json."""


def machine() -> dict[str, Any]:
    """Device, driver and package versions as JSON types."""
    found = environment({})
    cuda = torch.cuda.is_available()
    properties = torch.cuda.get_device_properties(0) if cuda else None
    return {
        "device": properties.name if properties else f"cpu: {found['cpu']['model']}",
        "devices": torch.cuda.device_count() if cuda else 0,
        "device_bytes": properties.total_memory if properties else None,
        "capability": ".".join(map(str, torch.cuda.get_device_capability(0))) if cuda else None,
        "driver": next((gpu["driver_version"] for gpu in gpus()["list"]), None),
        "cuda": torch.version.cuda,
        "tf32": torch.backends.cuda.matmul.allow_tf32,
        "cpu": found["cpu"]["model"],
        "cores": found["cpu"]["usable_cores"],
        "memory_bytes": found["memory_bytes"],
        "git": found["git"],
        "versions": found["versions"] | {name: package_version(name) for name in PACKAGES},
        "lacks": lacks(torch.device("cuda" if cuda else "cpu")),
    }


def lacks(device: torch.device) -> dict[str, str]:
    """Requirements of items (`Item.needs`) that this machine does not meet, each with the reason."""
    on_cpu = device.type == "cpu"
    flash = "flash-attn is not installed" if find_spec("flash_attn") is None else None
    reasons = {
        "liger": unavailable_reason(device),
        "flash": "FlashAttention 2 needs a GPU" if on_cpu else flash,
        "flex": "FlexAttention has no backward pass on a CPU" if on_cpu else uncompilable_reason(device),
        "compiler": uncompilable_reason(device),
    }
    return {need: reason for need, reason in reasons.items() if reason is not None}


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(machine()) + "\n", encoding="utf-8")
