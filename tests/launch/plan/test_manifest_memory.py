"""The planner's memory under a manifest, BF16 and FP8, against what autograd keeps and what engines allocate."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from config.cli import REPOSITORY
from config.schema import ModelSection
from launch.plan.counted import count_activations
from launch.plan.memory import peak_memory
from modeling.build import empty_model
from precision.manifest import load_manifest
from precision.regions import Regions
from tests.launch.plan import plan_cases
from tests.launch.plan.test_memory import MODEL, counted_block, hugging_face, kept_by_autograd, layout
from tests.support.models.small_run import changed_json

TOKENS = 2 * 64


def kept(family: str, layers: int, manifest: str) -> int:
    """Bytes of the distinct tensors, parameters aside, that a forward pass saves for its backward pass."""
    model = AutoModelForCausalLM.from_config(hugging_face(family, layers), attn_implementation="sdpa").float().train()
    Regions(model, load_manifest(REPOSITORY / f"config/manifests/{manifest}.json"))
    ids = torch.randint(100, (2, TOKENS // 2), generator=torch.Generator().manual_seed(0))
    return kept_by_autograd(model, ids)


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
    """Two ranks at ZeRO-2, a model of 3 M parameters, and buckets that hold a third of it."""
    changed = changed_json(tmp_path, "zero2_fp32", reduce_bucket_size=1_000_000)
    overrides = [MODEL, f"model.activation_checkpointing={checkpointing}", "data.sequence_length=128"]
    overrides += [f"batch.micro_size={micro}", "batch.global_size=8", changed]
    overrides += [f"precision.manifest=config/manifests/{manifest}.json", "precision.compute=auto"]
    measured = max(result["peak"] for result in pair.run(plan_cases.peak_of, overrides=overrides, vocabulary=512))
    assert peak_memory(*layout(*overrides)).total == pytest.approx(measured, rel=0.12)
