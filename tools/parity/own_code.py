"""Calls the run's own module again in FP32 on its inputs: is its code right, whatever 16 bits hide?

A wrong constant below 16-bit rounding cannot be told from it, nor can an error without a direction, such as a rotation
by a slightly wrong angle. In FP32 roundings are 2^13 to 2^16 times smaller, while any other error stays. The weights
are the reference's, so that only the code is the run's: its kernels, replaced parts of its modules, its buffers. The
loss is one more module (`tools.parity.backward`), whose gradient is checked too.

Left out, and judged in the run's dtype alone: the manifest path, whose modules have their own dtypes; modules that
ranks share; experts; FlashAttention, whose kernels support 16 bits only, and FlexAttention (see `plain_flex`); at
ZeRO-3 modules whose own weights are not gathered; compiled modules; 4-bit and 8-bit layers, whose code dequantises the
weights in its compute dtype.
"""

from __future__ import annotations

from typing import Any

import torch

from modeling.quantised_base import quantised_parameters
from tools.parity.recompute import Call, Leaves, Plan, again

_OF_16_BITS = ("flash", "flex")


def own_code(
    plan: Plan, candidate: dict[str, torch.nn.Module], call: Call, leaves: Leaves | None = None
) -> dict[str, Any] | None:
    """Results of the run's module in FP32, by part; None if it cannot compute there. leaves: filled as by `again`."""
    module = candidate[call.name]
    if not plan.in_16_bits or plan.kind(call.name) == "functional":
        return None
    if any(item._compiled_call_impl is not None for item in module.modules()):
        return None
    attention = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if plan.kind(call.name) == "attention" and str(attention).startswith(_OF_16_BITS):
        return None
    inside = tuple(f"{inner.name.removeprefix(f'{call.name}.')}." for inner in call.inside)
    named = module.named_parameters(remove_duplicate=False)
    own = [parameter for name, parameter in named if not name.startswith(inside)]
    codes = quantised_parameters(module)
    status = [getattr(parameter, "ds_status", None) for parameter in own]  # of ZeRO-3's partitions
    elsewhere = any(known is not None and known.name != "AVAILABLE" for known in status)
    if elsewhere or not codes.keys().isdisjoint(map(id, own)):
        return None
    try:
        return again(plan, call, torch.float32, leaves, code=candidate)
    except Exception:  # kernels for 16 bits only, whatever they raise
        return None
