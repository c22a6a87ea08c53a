"""Names and values that users know from other trainers: the key that stands for one here, or why there is none."""

from __future__ import annotations

import re
from pathlib import Path

from config import yaml_text

_OPTIMIZERS = (
    (
        r"8.?bit|fp8|4.?bit",
        "8-bit states are wrong under ZeRO: torchao's are FP32 there without a word unless a shard is a multiple of "
        "its block, and else their blocks cross parameters, so that they depend on the number of ranks. Rows of an "
        "embedding run away from AdamW's even without ZeRO (measured: 11.3 times as far in 10 steps, with FP8 states "
        "69.3 times); use adamw, with deepspeed.offload=cpu for memory",
    ),
    (
        r"ada.?factor",
        "its factored moments are of whole matrices, and a ZeRO shard has none (measured: updates 14% to 18% off); use "
        "stable_adamw, or lion for one state less",
    ),
    (r"1.?bit|one.?bit|zero.?one|zoadam", "it sends compressed updates, which are no longer AdamW's; use adamw"),
    (r"soap|shampoo", "its preconditioners are of whole matrices, and there is no rule for shards yet; use muon"),
    (
        r"schedule.?free",
        "it trains at one point and is evaluated, exported and sampled at the average of its points: two sets of "
        "weights, where a run has one set of masters; use adamw with schedule.name = wsd, which can be "
        "prolonged from before its decay",
    ),
    (
        r"zenflow",
        "by design it delays part of each update, so it is not AdamW, and nothing of it was measured; use adamw with "
        "deepspeed.offload=cpu",
    ),
)

_INITS = (
    (
        r"pissa|olora|corda|eva|loftq|lora.?ga",
        "it trains on another base: peft writes the base's weights anew, less what the factors start with, so the "
        "base's files and their hash no longer say what a checkpoint's or an export's factors belong to, and "
        "preference.reference = adapter_off would not be the base; use default or gaussian",
    ),
)
_FP8_SCALINGS = (
    (
        r"delay",
        "a scale of earlier steps hides inf, which torch's cast to E4M3 makes 448 (measured: 0 values of a product "
        "show it, 32 in BF16), and it is a state to save, replay and undo on skipped steps; use row",
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



def known_elsewhere(name: str) -> str | None:
    """The key, perhaps with its value, that a setting of another trainer is here; None for a name that is unknown."""
    text = Path(__file__).with_name("names_elsewhere.yaml").read_text(encoding="utf-8")
    plain = name.lower().replace("-", "_")
    return next((key for key, names in yaml_text.parse(text).items() if plain in names), None)
