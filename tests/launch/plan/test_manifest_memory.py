"""The planner's memory under a manifest, BF16 and FP8, against what autograd keeps and what engines allocate."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from config.cli import REPOSITORY
from config.schema import ModelSection
from launch.plan.counted import count_activations
from modeling.build import empty_model
from precision.manifest import load_manifest
from precision.regions import Regions
from tests.launch.plan.test_memory import counted_block, hugging_face, kept_by_autograd, layout

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
