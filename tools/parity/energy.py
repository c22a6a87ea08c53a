"""Energy used by this machine's devices: GPUs from NVML, else processors from Linux's powercap (RAPL)."""

from __future__ import annotations

from pathlib import Path

POWERCAP = Path("/sys/class/powercap")


def joules() -> float | None:
    """[J] A counter of which only differences are meaningful; None if no device reports one."""
    counted = _of_gpus()
    return counted if counted is not None else of_processors(POWERCAP)


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


def _of_gpus() -> float | None:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return None
    try:
        devices = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return sum(pynvml.nvmlDeviceGetTotalEnergyConsumption(device) for device in devices) / 1e3
    except pynvml.NVMLError:  # older than Volta
        return None
    finally:
        pynvml.nvmlShutdown()
