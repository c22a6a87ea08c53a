"""The panels of a heat map: contents, scale, and how values in one cell are merged."""

from dataclasses import dataclass
from typing import Literal

RANGES = {"fp16": 65504.0, "bf16": 3.3895313892515355e38, "fp32": 3.4028234663852886e38}
"""Largest finite value of each format (IEEE 754-2019 table 3.5 for binary16 and binary32; bfloat16 is binary32 with 7
stored significand bits)."""
DTYPES = ("", "fp32", "bf16", "fp16", "fp8")
"""Dtypes by their code in the `dtype` panel; 0 means unknown."""
DTYPE_COLOURS = ("#7f7f7f", "#1f77b4", "#2ca02c", "#d62728", "#9467bd")


@dataclass(frozen=True)
class Panel:
    """One heat map. merge: how several measurements or modules in a cell are reduced: maximum, sum, geometric mean
    ("mean") or arithmetic mean ("average")."""

    title: str
    log: bool
    merge: Literal["largest", "sum", "mean", "average"]
    low: float | None = None
    """Lower limit of the colour scale; None uses the smallest value."""
    high: float | None = None
    percent: bool = False


PANELS = {
    "activation": Panel("Largest activation, as a share of FP16's range", True, "largest", 1e-5, 1.0, percent=True),
    "gradient": Panel("Gradient RMS", True, "mean"),
    "underflow": Panel("Gradient values below their dtype's smallest normal number", False, "largest", 0.0, 1.0, True),
    "drift": Panel("Distance of 16-bit weights from their rounded masters, relative", True, "largest"),
    "update": Panel("Update over weights, ratio of norms", True, "mean"),
    "lost": Panel("Updates lost to 16-bit rounding", False, "average", 0.0, 1.0, percent=True),
    "nonfinite": Panel("Values that were inf or nan", True, "sum"),
    # The largest code wins when cells are merged: FP16 and FP8, which can overflow, come last.
    "dtype": Panel("Dtype in force", False, "largest", 0.0, len(DTYPES) - 1.0),
}
"""Panels by key, in display order."""
