"""Values that users know from elsewhere and that are left out on purpose: the reason, and the nearest right setting."""

from __future__ import annotations

import re

_OPTIMIZERS = (
    (
        r"8.?bit|fp8|4.?bit",
        "8-bit states are wrong under ZeRO, and rows of an embedding run away from AdamW's even without it "
        "(docs/optimizers.md); use adamw, with deepspeed.offload=cpu for memory",
    ),
    (
        r"ada.?factor",
        "its factored moments are of whole matrices, and a ZeRO shard has none; use stable_adamw, or lion for one "
        "state less",
    ),
    (r"1.?bit|one.?bit|zero.?one|zoadam", "it sends compressed updates, which are no longer AdamW's; use adamw"),
    (r"soap|shampoo", "its preconditioners are of whole matrices, and there is no rule for shards yet; use muon"),
    (
        r"schedule.?free",
        "it trains at one point and is evaluated at the average of its points: two sets of weights; use adamw with "
        "schedule.name = wsd, which can be prolonged from before its decay",
    ),
    (r"zenflow", "by design it delays part of each update, so it is not AdamW; use adamw with deepspeed.offload=cpu"),
)

_INITS = (
    (
        r"pissa|olora|corda|eva|loftq|lora.?ga",
        "it trains on another base: peft writes the base's weights anew, less what the factors start with, so its "
        "files and their hash no longer say what the factors belong to; use default or gaussian",
    ),
)
_FP8_SCALINGS = (
    (
        r"delay",
        "a scale of earlier steps hides inf, which torch's cast to E4M3 makes 448, and is a state to save; use row",
    ),
)
_MASTERS = (
    (
        r"16|half",
        "small updates round away (measured: 200 steps move a BF16 master of 1 by 0.0000, an FP32 one by 0.0195); use "
        "split, which is FP32 bit for bit in 1.9 bytes less a value, or fp32",
    ),
)
_REASONS = {
    "optimizer.name": _OPTIMIZERS,
    "adapter.init": _INITS,
    "precision.fp8.scaling": _FP8_SCALINGS,
    "precision.masters": _MASTERS,
}


def why_not(key: str, value: str) -> str | None:
    """Why a key does not take a value that others offer; None where there is no such reason."""
    return next((why for pattern, why in _REASONS.get(key, ()) if re.search(pattern, value, re.IGNORECASE)), None)
