"""The loss of 16 bits on whole gradients, value by value in FP64: the reference of telemetry's fast statistics."""

import torch

from precision.statistics import Named


def underflow_share(values: torch.Tensor, dtype: torch.dtype) -> tuple[float, float]:
    """Shares of the finite non-zero values below the smallest normal number of `dtype`, and that round to zero."""
    info = torch.finfo(dtype)
    # In FP64, where neither limit is subnormal: a device may flush those.
    magnitude = values.detach().double().abs()
    nonzero = (magnitude > 0) & magnitude.isfinite()
    total = nonzero.sum().clamp(min=1)
    below = nonzero & (magnitude < info.smallest_normal)
    flushed = nonzero & (magnitude <= info.smallest_normal * info.eps / 2)
    return float(below.sum() / total), float(flushed.sum() / total)


def gradient_statistics(gradients: Named, dtype: torch.dtype, *, scale: float = 1.0) -> dict[str, dict[str, float]]:
    """By module: norm, largest value and underflow in `dtype` of its own parameters' gradients.

    gradients: (full parameter name, gradient in gradient units), FP32 or wider than `dtype`. scale: the loss scale that
    the backward pass in `dtype` would multiply them by.
    """
    grouped: dict[str, list[torch.Tensor]] = {}
    for name, gradient in gradients:
        grouped.setdefault(name.rpartition(".")[0], []).append(gradient.detach().reshape(-1))
    result = {}
    for module, parts in grouped.items():
        values = torch.cat([part.double() for part in parts])
        below, flushed = underflow_share(values * scale, dtype)
        maximum = float(values.abs().amax()) if values.numel() else 0.0
        result[module] = {"norm": float(values.norm()), "maximum": maximum, "below_normal": below, "flushed": flushed}
    return result
