"""The names that configs, manifests and events use for torch's floating-point dtypes."""

import torch

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""The dtypes that a model can compute in."""
NAMES = {dtype: name for name, dtype in DTYPES.items()} | {
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
}
