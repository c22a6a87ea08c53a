"""The planner's memory against real engines' tensors, what autograd keeps, and DeepSpeed's own estimators."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs
from transformers import AutoConfig, AutoModelForCausalLM

from config.schema import AdapterSection, ModelSection, OptimizerSection
from launch.plan.counted import count_activations
from launch.plan.layout import Layout
from launch.plan.memory import activations, model_states, peak_memory
from launch.plan.model import Shape, sizes_of
from modeling.build import count_parameters, empty_model
from modeling.linear_cross_entropy import label_loss_sum
from modeling.parameter_groups import parameter_groups
from tests.launch.plan import plan_cases
from tests.launch.plan.plan_cases import planned as plan_of
from tests.support.models.small_run import changed_json

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


def sizes_without_adapter(config, section: OptimizerSection | None = None) -> Shape:
    """The sizes of a causal language model that is trained whole."""
    return sizes_of(empty_model(ModelSection(), config), AdapterSection(), section or OptimizerSection())


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


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_are_those_of_the_real_model(family: str) -> None:
    config = hugging_face(family, 3)
    model = AutoModelForCausalLM.from_config(config)
    section = OptimizerSection(name="muon")
    shape = sizes_without_adapter(config, section)
    assert shape.parameters == count_parameters(model)
    groups = parameter_groups(model, section)
    assert [(group.matrix, group.parameters) for group in shape.groups] == [
        (group["matrix"], sum(parameter.numel() for parameter in group["params"])) for group in groups
    ]
    assert shape.hidden_matrix_parameters > 0


def test_a_tensor_of_fused_experts_is_planned_as_its_matrices() -> None:
    sizes = GATED | {"num_key_value_heads": 4, "num_local_experts": 3, "num_hidden_layers": 2}
    config, section = AutoConfig.for_model("mixtral", **sizes), OptimizerSection(name="muon")
    found, *_ = sizes_without_adapter(config, section).groups
    model = AutoModelForCausalLM.from_config(config)
    matrices, *_ = parameter_groups(model, section)
    largest = max(matrices["params"], key=torch.numel)
    assert largest.dim() == 3 and found.matrix
    assert (found.parameters, found.largest) == (sum(map(torch.numel, matrices["params"])), largest.numel())
    assert found.sides == tuple(sorted(largest.shape[1:]))


def test_muon_keeps_one_state_of_a_hidden_matrix_and_two_of_the_rest() -> None:
    shape, demo = layout("optimizer.name=muon")
    kept = {name: model_states(shape, replace(demo, optimizer=name))[0] for name in ("adamw", "muon")}
    saved = 4 * shape.hidden_matrix_parameters / (demo.world if demo.stage else 1)
    assert kept["adamw"]["moments"] - kept["muon"]["moments"] == saved


PEAKS = [(1, "none", 4), (2, "none", 4), (2, "full", 2), (3, "none", 4)]
SHARED = "data.sequence_length=512", "parallel.sequence=2"
CUT = "data.sequence_length=256", "parallel.tensor=2"
TIED, UNTIED = (f"model.config.tie_word_embeddings={value}" for value in ("true", "false"))
PEAKS = [(*peak, ("data.sequence_length=128",)) for peak in PEAKS] + [
    (2, "none", 2, SHARED),
    (3, "full", 4, SHARED),
    (2, "none", 1, (*SHARED, "data.document_masking=true")),
    *((stage, kind, 4, (*CUT, tied)) for stage, kind, tied in ((2, "none", TIED), (2, "none", UNTIED))),
    *((stage, kind, 4, (*CUT, UNTIED)) for stage, kind in ((1, "none"), (3, "none"), (2, "full"))),
    (2, "none", 4, (*CUT, UNTIED, "model.loss=chunked", "model.loss_chunk_tokens=256")),
]


@pytest.mark.parametrize(("stage", "checkpointing", "micro", "more"), PEAKS)
def test_the_peak_is_what_tensors_take(pair, tmp_path, stage: int, checkpointing: str, micro: int, more) -> None:
    """Two ranks, a model of 3 M parameters, and buckets that hold a third of it."""
    changed = changed_json(tmp_path, f"zero{stage}_bf16", reduce_bucket_size=1_000_000)
    overrides = [MODEL, f"model.activation_checkpointing={checkpointing}", *more]
    overrides += [f"batch.micro_size={micro}", "batch.global_size=8"]
    overrides += [changed, "precision.compute=bf16"]
    measured = max(result["peak"] for result in pair.run(plan_cases.peak_of, overrides=overrides, vocabulary=512))
    assert peak_memory(*layout(*overrides)).total == pytest.approx(measured, rel=0.2)


MIXTURE = (
    "model={architecture: mixtral, activation_checkpointing: none, config: {num_hidden_layers: 4, hidden_size: 192, "
    "intermediate_size: 256, num_attention_heads: 4, num_key_value_heads: 4, num_local_experts: 8, vocab_size: 512}}"
)


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [32, 128])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_peak_of_shared_experts_is_what_tensors_take(pair, tmp_path, stage: int, tokens: int) -> None:
    """Two micro-batches; one rank may get more than its share of the tokens."""
    changed = changed_json(tmp_path, f"zero{stage}_bf16", reduce_bucket_size=1_000_000)
    overrides = [MIXTURE, f"data.sequence_length={tokens}", "batch.micro_size=2", "batch.global_size=8"]
    overrides += ["parallel.expert=2", changed, "precision.compute=bf16"]
    measured = max(result["peak"] for result in pair.run(plan_cases.peak_of, overrides=overrides, vocabulary=512))
    shape, found = layout(*overrides)
    assert shape.own.parameters < 0.6 * shape.parameters
    assert model_states(shape.own, found)[0]["masters"] == 4 * shape.parameters / 2, "ZeRO divides all of them"
    assert peak_memory(shape, found).total == pytest.approx(measured, rel=0.1)


def test_bf16_optimizer_copies_gradients_of_several_groups_only() -> None:
    """A group's gradients are one tensor, reduced where it is; experts that ranks share are a group apart."""
    given = [MIXTURE, "deepspeed.config=ds_configs/zero1_bf16.json", "precision.compute=bf16"]
    given += ["data.sequence_length=32", "batch.micro_size=1", "batch.global_size=2"]
    shape, found = layout(*given)
    assert peak_memory(shape, found).device["buckets"] == 4 * shape.trained_parameters
    one = replace(shape, groups=(replace(shape.groups[0], parameters=shape.trained_parameters),))
    assert "buckets" not in peak_memory(one, found).device
    shape, found = layout(*given, "parallel.expert=2")
    others = shape.own.trained_parameters - shape.own.expert_parameters
    assert peak_memory(shape, found).device["buckets"] == 4 * others


HPZ = {"zero_hpz_partition_size": 2, "stage3_max_live_parameters": 0, "stage3_max_reuse_distance": 0}


def test_a_second_copy_of_the_weights_is_a_nodes() -> None:
    """hpZ on 16 ranks, 2 of them on a node. What is gathered has none yet, and with offload it is in host memory."""
    shape, demo = layout("deepspeed.config=ds_configs/zero3_bf16.json", "batch.global_size=64", world=16)
    zero = demo.zero | HPZ | {"stage3_param_persistence_threshold": 0}
    once, twice = (replace(demo, zero=zero | {"zero_hpz_partition_size": size}) for size in (1, 2))
    with_it = peak_memory(shape, twice)
    assert with_it.device["second copy"] == 2 * shape.parameters / 2
    assert with_it.total - peak_memory(shape, once).total == shape.parameters
    gathered = peak_memory(shape, replace(twice, zero=twice.zero | {"stage3_max_live_parameters": 1e9}))
    assert "second copy" not in gathered.device
    offloaded = peak_memory(shape, replace(twice, offload="param"))
    assert offloaded.host["second copy"] == shape.parameters
    assert "second copy" not in offloaded.device


def test_the_second_copy_takes_what_the_planner_says(pair, tmp_path) -> None:
    """Two ranks, and weights that are partitioned as soon as they are used."""
    measured, planned = [], []
    for size in (1, 2):
        zero = HPZ | {"stage3_param_persistence_threshold": 0, "zero_hpz_partition_size": size}
        changed = changed_json(tmp_path, "zero3_bf16", reduce_bucket_size=1_000_000, **zero)
        given = [MODEL, "model.activation_checkpointing=none", "data.sequence_length=32", "batch.micro_size=1"]
        given += ["batch.global_size=4", changed, "precision.compute=bf16"]
        measured.append(max(rank["peak"] for rank in pair.run(plan_cases.peak_of, overrides=given, vocabulary=512)))
        planned.append(peak_memory(*layout(*given)).total)
    assert measured[1] - measured[0] == pytest.approx(planned[1] - planned[0], rel=0.01)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_split_masters_free_what_the_planner_says(pair, tmp_path, stage: int) -> None:
    """Two ranks with hardly any activations, so that the peak has masters in it and little else that varies."""
    changed = changed_json(tmp_path, f"zero{stage}_bf16", reduce_bucket_size=1_000_000)
    overrides = [MODEL, "model.activation_checkpointing=none", "data.sequence_length=32", "batch.micro_size=1"]
    overrides += ["batch.global_size=4", changed, "precision.compute=bf16"]
    measured, planned = [], []
    for masters in ("fp32", "split"):
        given = [*overrides, f"precision.masters={masters}"]
        measured.append(max(rank["peak"] for rank in pair.run(plan_cases.peak_of, overrides=given, vocabulary=512)))
        planned.append(model_states(*layout(*given))[0]["masters"])
    shape, demo = layout(*overrides)
    assert planned[0] - planned[1] == 1.875 * shape.parameters / demo.world
    assert measured[0] - measured[1] == pytest.approx(planned[0] - planned[1], rel=0.001)


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 8), (4, 8)])
def test_states_agree_with_deepspeeds_estimators(nodes: int, gpus: int) -> None:
    """DeepSpeed's also count 16-bit gradients of a rank's part, which Mantissa sums in FP32 from the start."""
    shape, demo = layout("deepspeed.config=ds_configs/zero2_bf16.json", world=1)
    world = nodes * gpus
    part = shape.parameters / world
    hosts = {"num_gpus_per_node": gpus, "num_nodes": nodes, "cpu_offload": False}
    _, theirs = estimate_zero2_model_states_mem_needs(shape.parameters, **hosts)
    ours, _ = model_states(shape, replace(demo, world=world))
    assert sum(ours.values()) + 2 * part == pytest.approx(theirs, rel=1e-6)
    sizes = (shape.parameters, shape.largest_trained)
    _, theirs, layer = estimate_zero3_model_states_mem_needs(*sizes, **hosts, cpu_offload_params=False)
    ours, _ = model_states(shape, replace(demo, stage=3, world=world))
    assert sum(ours.values()) == pytest.approx(theirs - layer, rel=1e-6)


def test_offload_moves_states_to_the_host_as_deepspeed_says() -> None:
    shape, demo = layout("deepspeed.config=ds_configs/zero3_bf16_offload.json", world=1)
    host, theirs, layer = estimate_zero3_model_states_mem_needs(
        shape.parameters, shape.largest_trained, num_gpus_per_node=8, additional_buffer_factor=1
    )
    device, on_host = model_states(shape, replace(demo, world=8))
    assert sum(device.values()) == pytest.approx(theirs - layer, abs=1)
    assert 8 * sum(on_host.values()) == pytest.approx(host, rel=1e-6)


def test_checkpointing_keeps_less_and_recomputes_one_block() -> None:
    kept = {}
    for mode in ("none", "selective", "full"):
        kept[mode], recomputed, _ = activations(*layout(f"model.activation_checkpointing={mode}"))
        assert (recomputed > 0) == (mode != "none")
    assert kept["none"] > 1.5 * kept["selective"] > 1.5 * 1.5 * kept["full"]
