"""Energy used by this machine's devices: GPUs from NVML, on a CPU from Linux's powercap (RAPL)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

POWERCAP = Path("/sys/class/powercap")


def joules(gpus: Sequence[str]) -> float | None:
    """[J] A counter of which only differences are meaningful; None if no device reports one. gpus: index or UUID of
    each that is used; none on a CPU."""
    return _of_gpus(gpus) if gpus else of_processors(POWERCAP)


def used(before: float | None, after: float | None) -> float | None:
    """[J] Between two readings; None if one is missing or the counter has wrapped around between them."""
    return after - before if before is not None and after is not None and after >= before else None


def of_processors(folder: Path) -> float | None:
    """[J] Sum over the packages in `folder`; None if there is none or it cannot be read."""
    packages = [path for path in folder.glob("intel-rapl:*") if path.name.count(":") == 1]
    try:
        counters = [int((path / "energy_uj").read_text(encoding="utf-8")) for path in packages]
        return sum(counters) / 1e6 if counters else None
    except (OSError, ValueError):
        return None


def _of_gpus(names: Sequence[str]) -> float | None:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        by_index, by_uuid = pynvml.nvmlDeviceGetHandleByIndex, pynvml.nvmlDeviceGetHandleByUUID
        devices = [by_index(int(name)) if name.isdigit() else by_uuid(name) for name in names]
        return sum(pynvml.nvmlDeviceGetTotalEnergyConsumption(device) for device in devices) / 1e3
    except pynvml.NVMLError:  # older than Volta, or a part of a GPU
        return None
    finally:
        pynvml.nvmlShutdown()
