"""The planner's memory against real engines' tensors, what autograd keeps, and DeepSpeed's own estimators."""

from dataclasses import replace

import pytest
import torch
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
from transformers import AutoConfig, AutoModelForCausalLM

from config.cli import REPOSITORY
from config.schema import AdapterSection, ModelSection, OptimizerSection
from launch.plan.counted import count_activations
from launch.plan.memory import model_states
from launch.plan.model import sizes_of
from modeling.build import empty_model
from modeling.parameter_groups import parameter_groups
from precision.manifest import load_manifest
from precision.regions import Regions
from tests.launch.plan.plan_cases import DTYPES, FAMILIES, GATED, hugging_face, kept_by, planned

BLOCKS = [
    *((family, "fp32", manifest) for manifest in ("bf16", "fp8") for family in ("llama", "grouped", "qwen3")),
    *(pytest.param(name, compute, "", marks=pytest.mark.slow) for name in FAMILIES for compute in ("bf16", "fp32")),
]


@pytest.mark.parametrize(("family", "compute", "manifest"), BLOCKS)
def test_a_block_keeps_what_is_counted(family: str, compute: str, manifest: str) -> None:
    """The difference between two blocks and one, so that nothing outside of the blocks counts."""
    kept, ids = [], torch.randint(100, (2, 64), generator=torch.Generator().manual_seed(0))
    for layers in (1, 2):
        model = AutoModelForCausalLM.from_config(hugging_face(family, layers), attn_implementation="sdpa")
        if manifest:
            Regions(model.float(), load_manifest(REPOSITORY / f"config/manifests/{manifest}.json"))
        kept.append(kept_by(model, DTYPES[compute], input_ids=ids))
    _, demo = planned([f"precision.manifest=config/manifests/{manifest}.json"] if manifest else [], on_cpu=False)
    models = (empty_model(ModelSection(attention="sdpa"), hugging_face(family, layers)) for layers in (1, 2))
    one, two = (count_activations(model, replace(demo, compute=compute)) for model in models)
    assert (one.weights == 0) == (manifest != "bf16"), "FP8 keeps no copies of weights"
    found = (2 * two.block - one.block) * ids.numel() + one.weights
    assert found == pytest.approx(kept[1] - kept[0], rel=0.003)


@pytest.mark.slow
def test_a_tensor_of_fused_experts_is_planned_as_its_matrices() -> None:
    sizes = GATED | {"num_key_value_heads": 4, "num_local_experts": 3, "num_hidden_layers": 2}
    config, section = AutoConfig.for_model("mixtral", **sizes), OptimizerSection(name="muon")
    found, *_ = sizes_of(empty_model(ModelSection(), config), AdapterSection(), section).groups
    model = AutoModelForCausalLM.from_config(config)
    matrices, *_ = parameter_groups(model, section)
    largest = max(matrices["params"], key=torch.numel)
    assert largest.dim() == 3 and found.matrix
    assert (found.parameters, found.largest) == (sum(map(torch.numel, matrices["params"])), largest.numel())
    assert found.sides == tuple(sorted(largest.shape[1:]))


@pytest.mark.slow
def test_offload_moves_states_to_the_host_as_deepspeed_says() -> None:
    shape, demo = planned(["deepspeed.config=ds_configs/zero3_bf16_offload.json"], world=1, on_cpu=False)
    host, theirs, layer = estimate_zero3_model_states_mem_needs(
        shape.parameters, shape.largest_trained, num_gpus_per_node=8, additional_buffer_factor=1
    )
    device, on_host = model_states(shape, replace(demo, world=8))
    assert sum(device.values()) == pytest.approx(theirs - layer, abs=1)
    assert 8 * sum(on_host.values()) == pytest.approx(host, rel=1e-6)
