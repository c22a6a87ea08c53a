"""Exports of a job's checkpoint, and what plain `peft` and transformers make of those of an adapter."""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftModel

from tools.export_hf.export import export, find_source
from training.checkpoint.partitions import open_saved_model


def source_of(checkpoint: Path) -> Any:
    """The sources of an export of this checkpoint."""
    return find_source(checkpoint, run=None, tokenizer=None, parity=None)


def exported(checkpoint: Path, out: Path, dtype: Any = "fp32", **options: Any) -> tuple[dict[str, Any], list[str]]:
    """The facts of an export, and the lines that it said. options: of `export`."""
    said: list[str] = []
    given = {"shard_size": "5GB", "force": False, "log": said.append} | options
    return export(source_of(checkpoint), out, dtype=dtype, **given), said


def exported_adapter(
    checkpoint: Path, out: Path, base_of: Callable[[Any], Any], inputs: Mapping[str, torch.Tensor]
) -> tuple[dict[str, Any], Mapping[str, Any], Any, list[str]]:
    """Export to `out/adapter` and `out/merged`; plain `peft` has the masters, and both models the same logits.

    base_of: a class of transformers to the base that the run computed with. The facts of the adapter, the masters, the
    merged model, and what was said when it was merged.
    """
    facts, _ = exported(checkpoint, out / "adapter")
    _, said = exported(checkpoint, out / "merged", merged=True)
    auto = getattr(transformers, facts["model"]["auto_class"])
    targets = json.loads((out / "adapter" / "adapter_config.json").read_text())["target_modules"]
    assert isinstance(targets, list) and "all-linear" not in targets, "as `save_pretrained` of peft writes it"
    model: Any = PeftModel.from_pretrained(base_of(auto).float(), out / "adapter").eval()
    saved, loaded = open_saved_model(checkpoint / "deepspeed").tensors, dict(model.get_base_model().named_parameters())
    assert any("_B." in key and bool(tensor.read().any()) for key, tensor in saved.items())
    for key, tensor in saved.items():
        assert torch.equal(loaded[key], tensor.read()), key
    merged = auto.from_pretrained(out / "merged").eval()
    with torch.no_grad():
        mine, theirs = (net(**inputs).logits for net in (merged, model))
        with model.disable_adapter():
            before = model(**inputs).logits
    assert torch.allclose(mine, theirs, atol=2e-5)
    assert not torch.allclose(mine, before, atol=1e-3)
    return facts, saved, merged, said
