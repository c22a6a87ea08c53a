"""The planner's memory against real engines' tensors, what autograd keeps, and DeepSpeed's own estimators."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
from transformers import AutoConfig, AutoModelForCausalLM

from config.schema import AdapterSection, ModelSection, OptimizerSection
from launch.plan.counted import count_activations
from launch.plan.layout import Layout
from launch.plan.memory import model_states
from launch.plan.model import sizes_of
from modeling.build import empty_model
from modeling.linear_cross_entropy import label_loss_sum
from modeling.parameter_groups import parameter_groups
from tests.launch.plan.plan_cases import planned as plan_of

pytestmark = pytest.mark.slow

MODEL = "model.config={hidden_size: 256, intermediate_size: 704, num_hidden_layers: 4, num_attention_heads: 4, "
MODEL += "num_key_value_heads: 2, tie_word_embeddings: false, vocab_size: 512}"
PLAIN = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None, "hidden_size": 64, "vocab_size": 100}
GATED = {**PLAIN, "intermediate_size": 160, "num_attention_heads": 4}
NO_DROPOUT = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
FAMILIES = {
    "llama": GATED | {"num_key_value_heads": 4},
    "grouped": GATED | {"num_key_value_heads": 2},
    "qwen3": GATED | {"num_key_value_heads": 2},
    "gpt2": PLAIN | NO_DROPOUT | {"num_attention_heads": 4},
}


def hugging_face(family: str, layers: int):
    config = AutoConfig.for_model("llama" if family == "grouped" else family, **FAMILIES[family])
    config.num_hidden_layers, config.use_cache = layers, False
    return config


def kept_by_autograd(model: torch.nn.Module, ids: torch.Tensor) -> int:
    """Bytes of the distinct tensors, parameters aside, that a forward pass saves for its backward pass."""
    known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        label_loss_sum(model(input_ids=ids, use_cache=False).logits, ids)
    return sum(storage.nbytes() for storage in kept.values())


def layout(*overrides: str, world: int = 2, on_cpu: bool = False):
    """The layout of the demo recipe with these overrides, and its shape."""
    return plan_of(overrides, world=world, on_cpu=on_cpu)


def counted_block(family: str, layout: Layout) -> float:
    """Bytes of one token that are counted for two blocks and not for one."""
    models = (empty_model(ModelSection(attention="sdpa"), hugging_face(family, layers)) for layers in (1, 2))
    one, two = (count_activations(model, layout) for model in models)
    return 2 * two.block - one.block


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("compute", ["bf16", "fp32"])
def test_a_block_keeps_what_is_counted(family: str, compute: str) -> None:
    """The difference between two blocks and one, so that nothing outside of the blocks counts."""
    dtype = torch.bfloat16 if compute == "bf16" else torch.float32
    ids = torch.randint(100, (2, 64))
    how: dict[str, Any] = {"dtype": dtype, "attn_implementation": "sdpa"}
    models = (AutoModelForCausalLM.from_config(hugging_face(family, layers), **how) for layers in (1, 2))
    one, two = (kept_by_autograd(model.train(), ids) for model in models)
    _, demo = layout()
    assert counted_block(family, replace(demo, compute=compute)) == pytest.approx((two - one) / ids.numel(), rel=0.003)


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


def test_offload_moves_states_to_the_host_as_deepspeed_says() -> None:
    shape, demo = layout("deepspeed.config=ds_configs/zero3_bf16_offload.json", world=1)
    host, theirs, layer = estimate_zero3_model_states_mem_needs(
        shape.parameters, shape.largest_trained, num_gpus_per_node=8, additional_buffer_factor=1
    )
    device, on_host = model_states(shape, replace(demo, world=8))
    assert sum(device.values()) == pytest.approx(theirs - layer, abs=1)
    assert 8 * sum(on_host.values()) == pytest.approx(host, rel=1e-6)
