"""Values that users know from elsewhere and that are left out on purpose: the reason, and the nearest right setting."""

from __future__ import annotations

import re

_OPTIMIZERS = (
    (
        r"8.?bit|fp8|4.?bit",
        "8-bit states are wrong under ZeRO: torchao's are FP32 there without a word unless a shard is a multiple of "
        "its block, and else their blocks cross parameters, so that they depend on the number of ranks; use adamw, "
        "with deepspeed.offload=cpu for memory",
    ),
    (
        r"ada.?factor",
        "its factored moments are of whole matrices, and a ZeRO shard has none; use "
        "stable_adamw, or lion for one state less",
    ),
    (r"1.?bit|one.?bit|zero.?one|zoadam", "it sends compressed updates, which are no longer AdamW's; use adamw"),
    (
        r"soap|shampoo",
        "its preconditioners are of whole matrices, and there is no rule for shards yet; use muon",
    ),
    (
        r"schedule.?free",
        "it trains at one point and is evaluated, exported and sampled at the average of its points: two sets of "
        "weights, where a run has one set of masters; use adamw with schedule.name = wsd, which can be "
        "prolonged from before its decay",
    ),
    (r"zenflow", "it delays part of each update, so it is not AdamW; use adamw with deepspeed.offload=cpu"),
)

_INITS = (
    (
        r"pissa|olora|corda|eva|loftq|lora.?ga",
        "it trains on another base: peft writes the base's weights anew, less what the factors start with, so the "
        "base's files and their hash no longer say what a checkpoint's or an export's factors belong to, and "
        "preference.reference = adapter_off would not be the base; use default or gaussian",
    ),
)
_REASONS = {"optimizer.name": _OPTIMIZERS, "adapter.init": _INITS}


def why_not(key: str, value: str) -> str | None:
    """Why a key does not take a value that others offer; None where there is no such reason."""
    return next((why for pattern, why in _REASONS.get(key, ()) if re.search(pattern, value, re.IGNORECASE)), None)
