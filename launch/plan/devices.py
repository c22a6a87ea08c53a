"""Memory, matmul speed and bandwidths of accelerators from their data sheets, and the shares that kernels reach.

Only the h100 row has been checked against its source; check the others against the sheets they name before using them.
"""

import os
from dataclasses import dataclass

from config.errors import UserError

GIB = 2**30
DEFAULT_MFU = 0.4
"""Share of the peak FLOP/s reached by computed FLOPs, without waiting for the network."""
LATENCY_SECONDS = 5e-6
"""[s] Latency of one hop of a collective."""


@dataclass(frozen=True)
class Reached:
    """Assumed shares of the data sheet's figures that kernels reach, and fixed costs of a kernel."""

    matmul: float = 680 / 989
    """[fraction] Share of the peak in matmuls of a block's size."""
    attention: float = 0.3
    """[fraction] Share of the peak in fused causal attention with head size 64; larger heads reach more."""
    bandwidth: float = 2.8 / 3.35
    """[fraction] Share of the memory bandwidth."""
    kernel: float = 2e-6
    """[s] Minimum time of a kernel."""
    launch: float = 6e-6
    """[s] Host time per operator, including autograd."""


@dataclass(frozen=True)
class Device:
    """One accelerator and its usual node."""

    name: str
    memory: float
    """[bytes] Device memory as reported by the driver, close to the data sheet."""
    peak: float
    """[FLOP/s] Peak of dense (not sparse) BF16 matmuls with FP32 accumulation."""
    peak_fp32: float
    """[FLOP/s] Peak of FP32 matmuls without TF32, which torch disables by default."""
    bandwidth: float
    """[bytes/s] Memory bandwidth."""
    link: float
    """[bytes/s] Unidirectional bandwidth between an accelerator and the others in its node."""
    network: float
    """[bytes/s] Unidirectional bandwidth out of one node, over all adapters together."""
    per_node: int
    source: str
    reached: Reached = Reached()

    @property
    def is_cpu(self) -> bool:
        """Whether ranks run on this machine's CPU and share its memory."""
        return self.name == "cpu"


_80 = 80 * GIB
_NIC = 1e9 / 8  # bytes/s of 1 Gbit/s
_DGX = 8 * 400 * _NIC, 8  # network and accelerators of a Hopper or Blackwell node
_DGX_A100 = 8 * 200 * _NIC, 8

_SHEETS = (
    Device("b200", 180e9, 2250e12, 75e12, 8e12, 900e9, *_DGX, "DGX B200 data sheet: 1,440 GB for eight GPUs"),
    Device("h200", 141e9, 989.4e12, 66.9e12, 4.8e12, 450e9, *_DGX, "H200 SXM data sheet; DGX H200, 8 x 400 Gb/s"),
    Device("h100", _80, 989.4e12, 66.9e12, 3.35e12, 450e9, *_DGX, "H100 SXM5, NVIDIA H100 whitepaper; DGX H100"),
    Device("h100-pcie", _80, 756e12, 51.2e12, 2e12, 64e9, 400 * _NIC, 8, "H100 PCIe, H100 whitepaper; PCIe 5.0 x16"),
    Device("a100", _80, 312e12, 19.5e12, 2.039e12, 300e9, *_DGX_A100, "A100 80 GB SXM data sheet; DGX A100"),
    Device("a100-40", 40 * GIB, 312e12, 19.5e12, 1.555e12, 300e9, *_DGX_A100, "A100 40 GB SXM data sheet; DGX A100"),
    Device("l40s", 48e9, 362e12, 91.6e12, 864e9, 32e9, 200 * _NIC, 8, "L40S data sheet; PCIe 4.0 x16, no NVLink"),
    Device("a10g", 24e9, 70e12, 35e12, 600e9, 32e9, 100 * _NIC, 4, "AWS g5.24xlarge, A10G data sheet; PCIe 4.0 x16"),
)
DEVICES = {device.name: device for device in _SHEETS}
"""Accelerators by name. The network is that of the vendor's own node; set --network if a cloud's is slower."""


def find_device(name: str) -> Device:
    """The device of that name, in any case; `cpu` is one of two ranks on this machine. Raises UserError."""
    if name.lower() == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        # Not from a data sheet: roughly one core's matmul speed on the machine used for docs/plan.md.
        return Device("cpu", memory / 2, 1e11, 1e11, 2e10, 2e9, 1e9, 2, "this machine's memory; speeds are guesses")
    if name.lower() not in DEVICES:
        raise UserError(f"command line: --device {name}: not in the table; it has {', '.join(DEVICES)} and cpu")
    return DEVICES[name.lower()]
