"""The planner's bytes of the network and of memory: what real ranks send and hold, counted, and what papers say."""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
from transformers import AutoConfig, AutoModelForCausalLM

from config.cli import REPOSITORY
from config.schema import AdapterSection, ModelSection, OptimizerSection
from launch.plan.counted import count_activations
from launch.plan.memory import model_states, peak_memory
from launch.plan.model import sizes_of
from launch.plan.speed import traffic
from modeling.build import empty_model
from modeling.parameter_groups import parameter_groups
from precision.manifest import load_manifest
from precision.regions import Regions
from tests.launch.plan import plan_cases
from tests.launch.plan.plan_cases import DTYPES, FAMILIES, GATED, MODEL, hugging_face, kept_by, planned
from tests.support.jobs.process_group import ProcessGroup
from tests.support.models.small_run import changed_json

MIXTURE = (
    "model={architecture: mixtral, config: {num_hidden_layers: 2, hidden_size: 384, intermediate_size: 128, "
    "num_attention_heads: 4, num_key_value_heads: 4, num_local_experts: 8}}"
)
VOCABULARY = 1024
"""The vocabulary size of the demo's tokenizer."""


def given(
    folder: Path, *more: str, stage: int, compute: str = "bf16", accumulation: int = 2, ranks: int = 2, **zero: Any
) -> list[str]:
    """Overrides of the demo: 2 x 64 tokens of each rank and micro-batch. zero: of its section of the JSON."""
    changed = changed_json(folder, f"zero{stage}_{compute}", **zero)
    overrides = ["data.sequence_length=64", "batch.micro_size=2", f"batch.global_size={2 * accumulation * ranks}"]
    return [*overrides, changed, f"precision.compute={compute}", *more]


def sent_by(group: ProcessGroup, overrides: Sequence[str], **how: Any) -> list[dict[str, float]]:
    """Bytes sent by each rank, as `plan_cases.counted` gives them."""
    return group.run(plan_cases.traffic_of, overrides=overrides, vocabulary=VOCABULARY, **how)


def total(sent: dict[str, float]) -> float:
    return sum(size for name, size in sent.items() if name != "rows")


def tokens_of(sent: dict[str, float]) -> float:
    return sum(size for name, size in sent.items() if name.startswith("all_to_all"))


@pytest.mark.parametrize(("stage", "compute"), [(0, "fp32"), (1, "bf16"), (2, "bf16"), (3, "bf16")])
def test_it_is_what_deepspeed_sends(pair, tmp_path, stage: int, compute: str) -> None:
    overrides = given(tmp_path, "model.config.num_hidden_layers=1", stage=stage, compute=compute)
    said = traffic(*planned(overrides, world=2))
    for sent in sent_by(pair, overrides):
        reduced = "reduce_scatter_tensor of 2" if stage == 3 else "all_reduce of 2"
        assert sent[reduced] == pytest.approx(said.gradients, rel=0.01)
        assert total(sent) == pytest.approx(said.sent, rel=0.01)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_it_is_what_a_simulated_device_counts_on_many_ranks(stage: int) -> None:
    """docs/performance.md has the table, which tests/training/engine/test_fake_cuda.py holds to the steps."""
    recipe = ["--config", str(REPOSITORY / "config/recipes/benchmark_1b.yaml"), "model.config.num_hidden_layers=4"]
    recipe += ["model.config.vocab_size=32768", "data.sequence_length=64", "batch={global_size: 16, micro_size: 1}"]
    recipe += [f"deepspeed.stage={stage}", f"precision.compute={'bf16' if stage else 'fp32'}"]
    shape, layout = planned(recipe, world=8, on_cpu=False)
    page = (REPOSITORY / "docs/performance.md").read_text(encoding="utf-8")
    rows = re.findall(rf"\| ZeRO-{stage}, ([\d,]+) ranks \| (.+) \| (.+) \| (.+) \|", page)
    assert len(rows) == 3
    for ranks, *cells in rows:
        world = int(ranks.replace(",", ""))
        found = [re.fullmatch(r"(\d+), ([\d.,]+) MB", cell) for cell in cells]
        calls = sum(int(cell[1]) for cell in found if cell)
        sizes = [1e6 * float(cell[2].replace(",", "")) if cell else 0.0 for cell in found]
        said = traffic(shape, replace(layout, world=world))
        sent = (world - 1) / world * (2 * sizes[0] + sizes[1] + sizes[2])
        assert sent == pytest.approx(said.sent, rel=0.01)
        assert said.collectives == pytest.approx(calls, rel=0.2)  # buckets are not filled to the last element


@pytest.mark.slow
def test_a_forward_pass_before_the_first_step_has_parameters_gathered_twice(pair, tmp_path) -> None:
    overrides = given(tmp_path, MODEL, "evaluate.at_start=true", stage=3)
    said = traffic(*planned(overrides, world=2))
    assert said.parameters > 1.5 * traffic(*planned(overrides[:-1], world=2)).parameters
    for sent in sent_by(pair, overrides, before=True):
        assert total(sent) == pytest.approx(said.sent, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("kept", [0, 1_200_000])
def test_hpz_gathers_across_nodes_once_a_step(four, tmp_path, kept: int) -> None:
    """Two nodes of two ranks; parameters that are released as soon as they are used, or a part of them kept."""
    limits = {"stage3_max_live_parameters": kept, "stage3_prefetch_bucket_size": 100_000}
    limits |= {"stage3_max_reuse_distance": 0, "stage3_param_persistence_threshold": 1000}
    more = [MODEL, "model.activation_checkpointing=none"]
    overrides = given(tmp_path, *more, stage=3, ranks=4, zero_hpz_partition_size=2, **limits)
    said = traffic(*planned(overrides, world=4))
    for sent in sent_by(four, overrides):
        assert sent["all_gather_into_tensor of 2"] == pytest.approx(said.second_copy, rel=0.05)
        assert sent["all_gather_into_tensor of 4"] == pytest.approx(said.parameters, rel=0.05)
        assert total(sent) == pytest.approx(said.sent, rel=0.05)


STAGES = [(stage, how, size) for stage in (1, 2, 3) for how in ("bf16", "fp32") for size in (1, 2)]
FULL, NONE = "model.activation_checkpointing=full", "model.activation_checkpointing=none"
COUNTED = "model.balance_loss=0.01"  # each expert's tokens are counted ahead, by a pass more
SHARED = [
    *(
        pytest.param("pair", *one, 2, kept, marks=pytest.mark.one_in(12))
        for one in STAGES[::-1]
        for kept in (FULL, NONE)
    ),
    *(pytest.param("pair", stage, "bf16", 2, 2, COUNTED, marks=pytest.mark.slow) for stage in (2, 3)),
    *(pytest.param("four", *one, 2, kept, marks=pytest.mark.slow) for one in STAGES for kept in (FULL, NONE)),
    *(pytest.param("four", stage, "bf16", 2, 4, FULL, marks=pytest.mark.slow) for stage in (1, 2, 3)),
]


@pytest.mark.parametrize(("group", "stage", "compute", "accumulation", "shared", "more"), SHARED)
def test_what_ranks_that_share_experts_send(request, tmp_path, group, stage, compute, accumulation, shared, more):
    """Experts used alike: tokens to 0.1%, all of a step's bytes to 1% (5% with a pass more), on each rank."""
    ranks, within = 4 if group == "four" else 2, 0.05 if more == COUNTED else 0.01
    settings = [MIXTURE, more, f"parallel.expert={shared}"]
    overrides = given(tmp_path, *settings, stage=stage, compute=compute, accumulation=accumulation, ranks=ranks)
    said = traffic(*planned(overrides, world=ranks))
    for sent in sent_by(request.getfixturevalue(group), overrides, routed="alike"):
        assert tokens_of(sent) == pytest.approx(said.tokens, rel=0.001)
        assert total(sent) == pytest.approx(said.sent, rel=within)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_what_a_busy_rank_sends_and_what_routers_choose(pair, tmp_path, stage: int) -> None:
    """The most that routers can make of it, on the rank that has it; and as they choose: the ranks' rows together."""
    overrides = given(tmp_path, MIXTURE, "parallel.expert=2", stage=stage)
    said = traffic(*planned(overrides, world=2))
    busy, other = (tokens_of(sent) for sent in sent_by(pair, overrides, routed="rank 0"))
    assert busy == pytest.approx(said.tokens_at_most, rel=0.001)
    assert other <= busy
    found = sent_by(pair, overrides)
    assert sum(sent["rows"] for sent in found) == pytest.approx(2 * 2 * said.tokens, rel=0.001), "half of them stay"
    assert max(map(tokens_of, found)) < said.tokens_at_most
    for sent in found:
        assert total(sent) - tokens_of(sent) == pytest.approx(said.sent - said.tokens, rel=0.01)


def test_shared_experts_are_orthogonalized_without_being_sent() -> None:
    """Other matrices go to the rank that computes them and back, in FP32, among all ranks, but for its own half."""
    moved = {}
    for name in ("adamw", "muon"):
        overrides = [MIXTURE, "parallel.expert=2", f"optimizer.name={name}", "batch.global_size=8"]
        shape, layout = planned(overrides, world=2)
        moved[name] = traffic(shape, layout)
    others = shape.hidden_matrix_parameters - 2 * shape.own.expert_parameters
    assert 0 < others < shape.hidden_matrix_parameters
    assert moved["muon"].parameters - moved["adamw"].parameters == pytest.approx(8 * others / 2 / 2)
    assert moved["muon"].collectives == moved["adamw"].collectives + 1, "its matrices are a group of their own"
    assert replace(moved["muon"], parameters=0.0, collectives=0) == replace(
        moved["adamw"], parameters=0.0, collectives=0
    )


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
    shape = sizes_of(empty_model(ModelSection(), config), AdapterSection(), section)
    found, *_ = shape.groups
    model = AutoModelForCausalLM.from_config(config)
    matrices, *_ = parameter_groups(model, section)
    largest = max(matrices["params"], key=torch.numel)
    assert largest.dim() == 3 and found.matrix
    assert (found.parameters, found.largest) == (sum(map(torch.numel, matrices["params"])), largest.numel())
    assert found.sides == tuple(sorted(largest.shape[1:]))
    experts = sum(item.numel() for item in model.parameters() if item.dim() == 3)
    unused = model.get_input_embeddings().weight.numel() + experts // 3  # two of three experts compute a token
    assert shape.matmul_parameters == shape.trained_matmul == shape.parameters - unused


@pytest.mark.slow
def test_offload_moves_states_to_the_host_as_deepspeed_says() -> None:
    shape, demo = planned(["deepspeed.config=ds_configs/zero3_bf16_offload.json"], world=1, on_cpu=False)
    host, theirs, layer = estimate_zero3_model_states_mem_needs(
        shape.parameters, shape.largest_trained, num_gpus_per_node=8, additional_buffer_factor=1
    )
    device, on_host = model_states(shape, replace(demo, world=8))
    assert sum(device.values()) == pytest.approx(theirs - layer, abs=1)
    assert 8 * sum(on_host.values()) == pytest.approx(host, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_below_stage_3_offload_leaves_the_gradients_that_deepspeed_sums_on_the_device(pair, stage: int) -> None:
    """Two ranks. DeepSpeed sums FP32 gradients on the device at ZeRO-1, and sends a rank's part to host memory."""
    overrides = [MODEL, f"deepspeed.stage={stage}", "deepspeed.offload=cpu", "data.sequence_length=64"]
    overrides += ["batch.micro_size=2", "batch.global_size=8", "guard.update_checks=0"]
    found = pair.run(plan_cases.states_of, overrides=overrides, vocabulary=1024)
    device, host = model_states(*planned([*overrides, "model.config.vocab_size=1024"], on_cpu=False))
    names = ("gradients", "updated parameters")
    assert found == [{"device": device.get("gradients", 0.0), "host": [host[name] for name in names]}] * 2


EIGHT_EXPERTS = (
    "model={architecture: mixtral, config: {num_hidden_layers: 4, hidden_size: 192, intermediate_size: 256, "
    "num_attention_heads: 4, num_key_value_heads: 4, num_local_experts: 8}}"
)
SEQUENCES = "data.sequence_length=512", "parallel.sequence=2", "batch.global_size=8"
MATRICES = "data.sequence_length=256", "parallel.tensor=2", "batch.global_size=8"
MANIFEST = "precision.manifest=config/manifests/bf16.json", "precision.compute=auto"
RELEASED = ("stage3_max_live_parameters", "stage3_max_reuse_distance", "stage3_param_persistence_threshold")
CASES = [
    *(("adamw", stage, ()) for stage in (1, 2, 3)),
    ("adamw", 2, ("model.activation_checkpointing=full",)),
    ("manifest", 2, MANIFEST),
    *(("muon", stage, ("optimizer.name=muon",)) for stage in (1, 2, 3)),
    *(("lamb", stage, ("optimizer.name=lamb",)) for stage in (1, 2, 3)),
    *(("fp8", stage, ("precision.manifest=config/manifests/fp8.json", "precision.compute=auto")) for stage in (2, 3)),
    ("sequence", 2, (*SEQUENCES, "batch.micro_size=2", "batch.global_size=4")),
    ("sequence", 2, (*SEQUENCES, "batch.micro_size=1", "batch.global_size=4", "data.document_masking=true")),
    ("sequence", 3, (*SEQUENCES, "model.activation_checkpointing=full")),
    *(
        ("expert", stage, (EIGHT_EXPERTS, "parallel.expert=2", "batch.micro_size=2", "batch.global_size=8"))
        for stage in (1, 2, 3)
    ),
    ("hpz", 3, ()),
    *(("split masters", stage, ("precision.masters=split",)) for stage in (1, 2, 3)),
    *(("tensor", stage, MATRICES) for stage in (1, 2, 3)),
    ("tensor", 2, (*MATRICES, "model.activation_checkpointing=full")),
    ("tensor", 2, (*MATRICES, "model.loss=chunked", "model.loss_chunk_tokens=256")),
    *(("tensor, manifest", stage, (*MATRICES, *MANIFEST)) for stage in (1, 2, 3)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("what", "stage", "more"), CASES)
def test_memory_is_planned_to_a_tenth_and_bytes_to_a_twentieth(pair, tmp_path, what, stage, more) -> None:
    """Two ranks and micro-batches, BF16, buckets of 1 M values. What ranks send is compared as their mean."""
    compute = "fp32" if what in ("fp8", "manifest", "tensor, manifest") else "bf16"
    copies = dict.fromkeys(RELEASED, 0) | {"zero_hpz_partition_size": 2} if what == "hpz" else {}
    changed = changed_json(tmp_path, f"zero{stage}_{compute}", reduce_bucket_size=1_000_000, **copies)
    overrides = [MODEL, "model.activation_checkpointing=none", "data.sequence_length=128", "batch.micro_size=4"]
    overrides += ["batch.global_size=16", changed, f"precision.compute={compute}", *more]
    found = pair.run(plan_cases.peak_of, overrides=overrides, vocabulary=1024)
    shape, layout = plan_cases.planned(overrides, on_cpu=False)
    assert peak_memory(shape, layout).total == pytest.approx(max(rank["peak"] for rank in found), rel=0.1)
    sent = [sum(size for name, size in rank["sent"].items() if name != "rows") for rank in found]
    assert traffic(shape, layout).sent == pytest.approx(sum(sent) / 2, rel=0.05)
