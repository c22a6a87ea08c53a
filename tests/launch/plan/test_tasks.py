"""The planner on fine-tuning: adapters, pairs, teachers and encoders, against models and engines as they are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakSet

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from config.cli import REPOSITORY
from config.command_line import read_command_line
from config.launcher import as_launched
from config.schema import AdapterSection, OptimizerSection
from launch.plan import command
from launch.plan.build import adapted, new_model
from launch.plan.counted import count_activations
from launch.plan.layout import Layout, layout_of
from launch.plan.memory import block_bytes, checkpoint_bytes, model_states, peak_memory
from launch.plan.model import Shape, _blocks, _measured, read_shape
from launch.plan.speed import computed_flops
from modeling.adapter import add_adapter
from modeling.parameter_groups import parameter_groups
from tests.launch.plan import plan_cases
from tests.launch.plan.test_memory import FAMILIES, hugging_face

DEMO = ["--config", str(REPOSITORY / "config/recipes/demo.yaml")]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
LORA = "adapter={kind: lora, r: 8}"
ADAPTERS = {
    "all": {"kind": "lora"},
    "two": {"kind": "lora", "target_modules": ("q_proj", "v_proj")},
    "dropout": {"kind": "lora", "dropout": 0.1},
    "dora": {"kind": "dora"},
    "whole": {"kind": "lora", "modules_to_save": ("lm_head",)},
}


def section_of(adapter: str, family: str = "llama") -> AdapterSection:
    given: dict[str, Any] = {"r": 8, **ADAPTERS[adapter]}
    if family == "gpt2" and "target_modules" in given:
        given["target_modules"] = ("c_attn",)
    return AdapterSection(**given)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a Llama of 3 M parameters and 512 tokens."""
    folder = tmp_path_factory.mktemp("base")
    sizes = {"hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = AutoConfig.for_model("llama", **sizes, num_key_value_heads=2, vocab_size=512)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


def on_base(base: Path, *overrides: str) -> list[str]:
    """Overrides of the demo that train the model in that folder."""
    chosen = ["model.architecture=null", "model.config={}", f"model.name_or_path={base}", "data.tokenizer=bytes"]
    return [*chosen, "model.activation_checkpointing=none", "data.sequence_length=128", *overrides]


def planned(overrides: Sequence[str], *, world: int = 2) -> tuple[Shape, Layout]:
    resolved = read_command_line([*DEMO, *overrides], as_launched(world))
    layout = layout_of(resolved, world=world, on_cpu=True)
    return read_shape(resolved.config, layout), layout


def kept_by(model: torch.nn.Module, dtype: torch.dtype, **inputs: torch.Tensor) -> int:
    """Bytes of the distinct storages, parameters aside, that are kept for the backward pass once forward is done."""
    model = model.to(dtype).train()
    known = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    alive: WeakSet[Any] = WeakSet()

    class Held:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor
            alive.add(self)

    with torch.autograd.graph.saved_tensors_hooks(Held, lambda held: held.tensor):
        output = model(**inputs)
    storages = {held.tensor.untyped_storage().data_ptr(): held.tensor.untyped_storage() for held in alive}
    del output
    return sum(storage.nbytes() for address, storage in storages.items() if address not in known)


KEPT = [
    *(("all", family, "bf16", False) for family in FAMILIES),
    *(("two", family, "bf16", True) for family in FAMILIES),
    ("dropout", "llama", "fp32", False),
    ("dora", "qwen3", "bf16", False),
]


@pytest.mark.parametrize(("adapter", "family", "compute", "masked"), KEPT)
def test_activations_under_an_adapter_are_what_autograd_keeps(adapter, family, compute, masked) -> None:
    ids = torch.randint(100, (2, 64))
    positions = {"position_ids": torch.arange(32).repeat(2).expand(2, 64)} if masked else {}
    section = section_of(adapter, family)
    model = AutoModelForCausalLM.from_config(hugging_face(family, 2), attn_implementation="sdpa")
    real = kept_by(add_adapter(model, section, seed=0), DTYPES[compute], input_ids=ids, **positions)
    copy = adapted(new_model(hugging_face(family, 2)), section)
    _, demo = planned(["data.sequence_length=64", "batch.micro_size=2"])
    found = count_activations(copy, _blocks(copy, 2), replace(demo, compute=compute, masked=masked), encoder=False)
    assert found is not None
    assert (2 * found.block + found.outside) * ids.numel() == pytest.approx(real, rel=0.003)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("adapter", ["all", "dora", "whole"])
def test_parameters_of_an_adapter_are_those_of_the_real_model(family: str, adapter: str) -> None:
    section, optimizer = section_of(adapter, family), OptimizerSection(name="muon")
    config = hugging_face(family, 2)
    config.tie_word_embeddings = False
    model = add_adapter(AutoModelForCausalLM.from_config(config), section, seed=0)
    shape = _measured(new_model(config), section, optimizer)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.trained_parameters == sum(map(torch.numel, trained)) < shape.parameters
    assert shape.largest_trained == max(map(torch.numel, trained))
    assert shape.plain_head == (adapter != "whole")
    groups = parameter_groups(model, optimizer)
    assert [(group.matrix, group.parameters) for group in shape.groups] == [
        (group["matrix"], sum(parameter.numel() for parameter in group["params"])) for group in groups
    ]


def test_a_mask_between_rows_costs_every_layer_its_own(base: Path) -> None:
    """Rows that share a sequence: the formula of a model whose weights are all trained."""
    shape, layout = planned(on_base(base))
    section = AdapterSection()
    ids = torch.randint(100, (2, 128))
    positions = torch.arange(64).repeat(2).expand(2, 128)
    one, two = (
        kept_by(AutoModelForCausalLM.from_config(config), torch.bfloat16, input_ids=ids, position_ids=positions)
        for config in (hugging_face("grouped", layers) for layers in (1, 2))
    )
    measured = _measured(new_model(hugging_face("grouped", 1)), section, OptimizerSection())
    assert block_bytes(measured, replace(layout, masked=True)) == pytest.approx((two - one) / ids.numel(), rel=0.003)
    assert block_bytes(shape, replace(layout, masked=True)) > block_bytes(shape, layout)


def test_a_frozen_base_has_weights_only(base: Path) -> None:
    """The base once on each rank, at ZeRO-3 divided; masters, moments, gradients and checkpoints are the adapter's."""
    shape, layout = planned(on_base(base, LORA, "precision.compute=bf16"))
    trained = shape.trained_parameters
    for stage, held in ((1, shape.parameters), (2, shape.parameters), (3, shape.parameters / 2)):
        items, _ = model_states(shape, replace(layout, stage=stage))
        assert items["parameters"] == 2 * held
        assert items["masters"] == items["moments"] / 2 == 4 * trained / 2
    assert checkpoint_bytes(shape, layout) == (4 + 8 + 2) * trained


def test_a_frozen_base_saves_a_third_of_the_flops(base: Path) -> None:
    """Matmuls for the gradients of its weights are left out; a reference is a forward pass more."""
    whole, layout = planned(on_base(base))
    shape, _ = planned(on_base(base, LORA))
    attention = 12 * shape.layers * shape.heads * shape.head_dim * 128
    adapter = shape.matmul_parameters - whole.matmul_parameters
    assert adapter == shape.trained_parameters == shape.trained_matmul
    assert whole.flops_per_token(128) == 6 * whole.matmul_parameters + attention
    assert shape.flops_per_token(128) == 4 * whole.matmul_parameters + 6 * adapter + attention
    more = computed_flops(shape, replace(layout, reference_pass=True)) - computed_flops(shape, layout)
    assert more == 2 * shape.matmul_parameters + attention / 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "overrides", "within"),
    [
        (2, [LORA], 0.1),
        (2, [LORA, "model.activation_checkpointing=full"], 0.1),
        (2, ["adapter={kind: dora, r: 8}", "model.activation_checkpointing=ops"], 0.1),
        (3, [LORA], 0.2),
    ],
)
def test_the_peak_of_a_task_is_what_tensors_take(pair, base, tmp_path, stage, overrides, within) -> None:
    """Of two ranks. The threads of gloo hold what ZeRO-3 gathers for a while."""
    document = json.loads((REPOSITORY / f"ds_configs/zero{stage}_bf16.json").read_text())
    document["zero_optimization"]["reduce_bucket_size"] = 1_000_000
    (tmp_path / "ds.json").write_text(json.dumps(document))
    more = [
        "batch.micro_size=4",
        "batch.global_size=8",
        f"deepspeed.config={tmp_path}/ds.json",
        "checkpoint.every_steps=0",
    ]
    overrides = on_base(base, *more, "precision.compute=bf16", *overrides)
    measured = max(result["peak"] for result in pair.run(plan_cases.peak_of, overrides=overrides, vocabulary=512))
    assert peak_memory(*planned(overrides)).total == pytest.approx(measured, rel=within)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ([LORA[:-1] + ", target_modules: [q_proj, nope]}"], "adapter.target_modules = q_proj, nope: the model has no"),
        ([LORA[:-1] + ", modules_to_save: [nope]}"], "adapter.modules_to_save = nope: the model has no module nope"),
        ([LORA[:-1] + ", target_modules: [act_fn]}"], "adapter.target_modules = act_fn: Target module"),
        (["optimizer.groups=[{match: nope, learning_rate: 1}]"], "match 'nope' is the last match of no parameter"),
    ],
)
def test_a_mistake_is_one_line(capsys, base: Path, overrides: list[str], problem: str) -> None:
    assert command.main([*DEMO, *on_base(base, *overrides)]) == 2
    error = capsys.readouterr().err
    assert problem in error and error.count("\n") == 1
