"""Peak speeds of accelerators, from their makers' data sheets."""

from __future__ import annotations

_PEAK_TFLOPS = (
    ("B200", 2250.0),
    ("H200", 989.4),
    ("GH200", 989.4),
    ("H100 NVL", 835.5),
    ("H100 PCIe", 756.5),
    ("H100", 989.4),
    ("A100", 312.0),
    ("L40S", 362.05),
    ("A10G", 70.0),
    ("V100 SXM2", 125.0),
    ("V100 PCIE", 112.0),
    ("T4", 65.0),
)
"""Words of the device's name as the driver tells it, and its dense (not sparse) FP16 tensor-core peak with FP32
accumulation in TFLOP/s, BF16's being the same where there is BF16; the first that fits counts."""


def peak_flops(device: str) -> float | None:
    """Dense 16-bit matmul FLOP/s of one `device`; None for one that is not in the table."""
    words = set(device.replace("-", " ").split())
    return next((tflops * 1e12 for name, tflops in _PEAK_TFLOPS if words.issuperset(name.split())), None)
