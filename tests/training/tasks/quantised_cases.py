"""Jobs on a base in 4 or 8 bits, and plain `peft` on plain `bitsandbytes`, which they are compared with."""

import zlib
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from modeling.quantised_base import quantised_layers
from tests.training.tasks import sft_cases
from training.distributed import World
from training.session import Session, session


def loaded(folder: Path, base: str, *, double: bool = False, dtype: torch.dtype = torch.float32) -> Any:
    """The base as `transformers` loads it for anybody."""
    chosen = BitsAndBytesConfig(
        load_in_4bit=base == "nf4",
        load_in_8bit=base == "int8",
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=double,
        bnb_4bit_compute_dtype=dtype,
    )
    return AutoModelForCausalLM.from_pretrained(folder / "base", dtype=dtype, quantization_config=chosen)


def steps(world: World, *, folder: Path, **options: Any) -> dict[str, Any]:
    """The results of `sft_cases.steps`, and what the base holds at the start and after an evaluation at the end."""
    with session(sft_cases.resolve(folder, **options), world=world) as opened:
        before, held = sft_cases.masters(opened), codes(opened)
        found = [sft_cases._step(opened) for _ in range(sft_cases.STEPS)]
        after = sft_cases.masters(opened)
        opened.engine.evaluate([opened.batches.next_step()])
        return {"steps": found, "before": before, "after": after, "codes": [held, codes(opened)]}


def codes(opened: Session) -> dict[str, int]:
    """A sum over each quantised weight's bytes and scales as this rank holds them."""
    found = {}
    for name, layer in quantised_layers(opened.engine.model).items():
        held = [getattr(layer.weight, "ds_tensor", layer.weight).data, *layer.scales()]
        found[name] = zlib.crc32(b"".join(item.detach().cpu().numpy().tobytes() for item in held))
    return found
