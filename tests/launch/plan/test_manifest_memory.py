"""The planner's memory under a manifest, BF16 and FP8, against what autograd keeps and what engines allocate."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from config.cli import REPOSITORY
from config.schema import ModelSection
from launch.plan.counted import count_activations
from launch.plan.memory import peak_memory
from modeling.build import empty_model
from modeling.linear_cross_entropy import label_loss_sum
from precision.manifest import load_manifest
from precision.regions import Regions
from tests.launch.plan import plan_cases
from tests.launch.plan.test_memory import MODEL, counted_block, hugging_face, layout

TOKENS = 2 * 64


def kept(family: str, layers: int, manifest: str) -> int:
    """Bytes of the distinct tensors, parameters aside, that a forward pass saves for its backward pass."""
    model = AutoModelForCausalLM.from_config(hugging_face(family, layers), attn_implementation="sdpa").float().train()
    Regions(model, load_manifest(REPOSITORY / f"config/manifests/{manifest}.json"))
    known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    found: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage
        return tensor

    ids = torch.randint(100, (2, TOKENS // 2), generator=torch.Generator().manual_seed(0))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        label_loss_sum(model(input_ids=ids, use_cache=False).logits, ids)
    return sum(storage.nbytes() for storage in found.values())


@pytest.mark.parametrize("manifest", ["bf16", "fp8"])
@pytest.mark.parametrize("family", ["llama", "grouped", "qwen3"])
def test_a_block_keeps_what_is_counted(family: str, manifest: str) -> None:
    """FP8 keeps no copies of weights."""
    found = kept(family, 2, manifest) - kept(family, 1, manifest)
    _, plan = layout(f"precision.manifest=config/manifests/{manifest}.json")
    said = count_activations(empty_model(ModelSection(attention="sdpa"), hugging_face(family, 1)), plan)
    assert (said.weights == 0) == (manifest == "fp8")
    assert counted_block(family, plan) * TOKENS + said.weights == pytest.approx(found, rel=0.003)


@pytest.mark.slow
@pytest.mark.parametrize("manifest", ["bf16", "fp8"])
@pytest.mark.parametrize(("checkpointing", "micro"), [("none", 4), ("full", 2)])
def test_the_peak_is_what_tensors_take(pair, tmp_path: Path, checkpointing: str, micro: int, manifest: str) -> None:
    """Of two ranks at ZeRO-2, a model of 3 M parameters, and buckets that hold a third of it."""
    document = json.loads((REPOSITORY / "ds_configs/zero2_fp32.json").read_text())
    document["zero_optimization"]["reduce_bucket_size"] = 1_000_000
    (tmp_path / "ds.json").write_text(json.dumps(document))
    overrides = [MODEL, f"model.activation_checkpointing={checkpointing}", "data.sequence_length=128"]
    overrides += [f"batch.micro_size={micro}", "batch.global_size=8", f"deepspeed.config={tmp_path}/ds.json"]
    overrides += [f"precision.manifest=config/manifests/{manifest}.json", "precision.compute=auto"]
    measured = max(result["peak"] for result in pair.run(plan_cases.peak_of, overrides=overrides, vocabulary=512))
    assert peak_memory(*layout(*overrides)).total == pytest.approx(measured, rel=0.12)
