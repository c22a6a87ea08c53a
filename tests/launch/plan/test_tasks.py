"""The planner on fine-tuning: adapters, pairs, teachers and encoders, against models and engines as they are."""

import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
import yaml
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

from config import cli
from config.command_line import read_command_line
from config.errors import UserError
from config.launcher import as_launched
from config.schema import AdapterSection, Config, DistillSection, ModelSection, OptimizerSection
from config.task import MASKED_LM, SEQUENCE_CLASSIFICATION, TOKEN_CLASSIFICATION
from launch.plan import command
from launch.plan.counted import count_activations
from launch.plan.loss import loss_bytes, sampler_bytes
from launch.plan.memory import model_states, peak_memory
from launch.plan.model import Shape, codes_of, sizes_of
from launch.plan.speed import computed_flops
from launch.plan.text import _advice
from launch.plan.timed import levers
from modeling.adapter import add_adapter
from modeling.build import build_model, empty_model
from modeling.objectives.divergence import IDS, LOG_PROBS, Distillation
from modeling.parameter_groups import parameter_groups
from modeling.quantised_base import quantised_layers, stored_tensors
from tests.launch.plan import plan_cases
from tests.launch.plan.plan_cases import DEMO, DTYPES, FAMILIES, hugging_face, kept_by, planned
from tests.support.models.small_run import changed_json
from tests.support.rows.chats import write_base

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
    copy = empty_model(ModelSection(attention="sdpa"), hugging_face(family, 2))
    sizes_of(copy, section, OptimizerSection())
    _, demo = planned(["data.sequence_length=64", "batch.micro_size=2"])
    found = count_activations(copy, replace(demo, compute=compute, masked=masked))
    assert (2 * found.block + found.outside) * ids.numel() == pytest.approx(real, rel=0.003)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("adapter", ["none", "all", "dora", "whole"])
def test_parameters_of_an_adapter_are_those_of_the_real_model(family: str, adapter: str) -> None:
    section = AdapterSection() if adapter == "none" else section_of(adapter, family)
    config, optimizer = hugging_face(family, 2), OptimizerSection(name="muon")
    config.tie_word_embeddings = False
    model = AutoModelForCausalLM.from_config(config)
    model = model if adapter == "none" else add_adapter(model, section, seed=0)
    shape = sizes_of(empty_model(ModelSection(), config), section, optimizer)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert shape.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert shape.trained_parameters == sum(map(torch.numel, trained))
    assert (shape.trained_parameters < shape.parameters) == (adapter != "none")
    assert shape.largest_trained == max(map(torch.numel, trained))
    assert shape.plain_head == (adapter != "whole")
    assert sizes(shape) == real_sizes(model, optimizer)


def sizes(shape: Shape) -> list[tuple[bool, int]]:
    """Whether a group has hidden matrices, and its parameters."""
    return [(group.matrix, group.parameters) for group in shape.groups]


def real_sizes(model: torch.nn.Module, optimizer: OptimizerSection) -> list[tuple[bool, int]]:
    return [(group["matrix"], sum(map(torch.numel, group["params"]))) for group in parameter_groups(model, optimizer)]


@pytest.mark.parametrize("kind", ["sequence", "token", "mlm"])
def test_an_encoder_with_an_adapter_has_the_parameters_of_the_real_one(kind: str) -> None:
    """The head of a classifier is trained as a copy, which Muon does not take for a hidden matrix."""
    name = {"sequence": SEQUENCE_CLASSIFICATION, "token": TOKEN_CLASSIFICATION, "mlm": MASKED_LM}[kind]
    section, optimizer = section_of("all"), OptimizerSection(name="muon")
    config = AutoConfig.for_model("bert", hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_labels=3)
    config.num_attention_heads = 2
    model = add_adapter(getattr(transformers, name).from_config(config), section, seed=0, model_class=name)
    shape = sizes_of(empty_model(ModelSection(), config, model_class=name), section, optimizer, model_class=name)
    assert shape.trained_parameters == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sizes(shape) == real_sizes(model, optimizer)
    head = sum(group.parameters for group in shape.groups if not group.matrix)
    assert head == (0 if kind == "mlm" else 3 * 32 + 3)


def test_a_frozen_base_saves_a_third_of_the_flops(base: Path) -> None:
    """Matmuls for the gradients of its weights are left out; a reference is a forward pass more."""
    whole, layout = planned(on_base(base))
    shape, _ = planned(on_base(base, LORA))
    attention = 12 * shape.layers * shape.widths()[0] * 128
    adapter = shape.matmul_parameters - whole.matmul_parameters
    assert adapter == shape.trained_parameters == shape.trained_matmul
    assert whole.flops_per_token(128) == 6 * whole.matmul_parameters + attention
    assert shape.flops_per_token(128) == 4 * whole.matmul_parameters + 6 * adapter + attention
    more = computed_flops(shape, replace(layout, reference_pass=True)) - computed_flops(shape, layout)
    assert more == 2 * shape.matmul_parameters + attention / 3


def test_layers_that_differ_count_with_their_own_heads() -> None:
    """Gemma 4's layers with full attention have larger heads than those with a window, and may have fewer keys."""

    def gemma(keys: int) -> list[str]:
        sizes = "hidden_size: 64, num_hidden_layers: 3, num_attention_heads: 4, num_key_value_heads: 2, head_dim: 16"
        own = f"per_layer_config: {{2: {{head_dim: 32, num_key_value_heads: {keys}}}}}"
        tables = "hidden_size_per_layer_input: 8, vocab_size_per_layer_input: 300, intermediate_size: 96"
        return ["model.architecture=gemma4_text", f"model.config={{{sizes}, {own}, {tables}, vocab_size: 300}}"]

    shape, _ = planned(gemma(keys=1))
    assert shape.attention_flops(10) == pytest.approx(4 * 10 * (64 + 64 + 128))
    assert shape.widths() == pytest.approx((256 / 3, 32))
    assert shape.widths(sharing=2) == pytest.approx((256 / 3, 128 / 3))
    with pytest.raises(UserError, match="num_key_value_heads = 3: does not divide"):
        planned(gemma(keys=3))


CODED = "adapter={{kind: lora, r: 8, base: {}}}"
SMALL = "data.sequence_length=16", "batch.micro_size=1", "batch.global_size=2"
"""Hardly any activations, so that the optimizer's step is the peak."""
STEPS = [(0, "lamb"), (1, "stable_adamw"), (2, "lamb"), (2, "stable_adamw"), (2, "muon"), (3, "muon"), (3, "lamb")]
ON_BASE = [
    (2, [LORA], 0.1),
    (2, [LORA, "model.activation_checkpointing=full"], 0.1),
    (2, ["adapter={kind: dora, r: 8}", "model.activation_checkpointing=ops"], 0.1),
    (2, [LORA, "task=sft"], 0.1),
    (3, [LORA], 0.1),
    (3, [LORA, "model.activation_checkpointing=full"], 0.1),
    (3, [LORA, "task=sft"], 0.1),
    (3, [LORA, "task=dpo"], 0.1),
    (3, ["task=sft"], 0.1),
    (2, [LORA, "task=dpo"], 0.1),
    (2, ["task=distill", "distill.teacher=BASE"], 0.1),
    (2, ["task=distill", "distill.teacher=BASE", "distill.sharded=true"], 0.2),
    *((stage, [f"optimizer.name={name}", *SMALL], 0.1 if stage == 3 else 0.02) for stage, name in STEPS),
    *((stage, [CODED.format(kind)], 0.1) for stage, kind in ((2, "nf4"), (2, "int8"), (3, "nf4"))),
]


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "overrides", "within"), ON_BASE)
def test_the_peak_on_a_base_is_what_tensors_take(pair, base, tmp_path, stage, overrides, within) -> None:
    """Two ranks. A sharded teacher is planned as if all that it may gather were gathered at once."""
    if "base:" in overrides[0]:
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    more = [text.replace("BASE", str(base)) for text in overrides]
    assert_peak(
        pair, on_base(base, "batch.micro_size=4", "batch.global_size=8", *rounded(tmp_path, stage), *more), 512, within
    )


SIZES = "hidden_size: 256, num_hidden_layers: 4, num_attention_heads: 4"
ENCODERS = [
    ("mlm", f"model.architecture=bert model.config={{{SIZES}, intermediate_size: 1024}}"),
    ("classify", f"model.architecture=modernbert model.config={{{SIZES}, intermediate_size: 512}}"),
    ("classify", f"model.architecture=deberta-v2 model.config={{{SIZES}, intermediate_size: 1024}}"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("task", "model"), ENCODERS)
def test_the_peak_of_an_encoder_is_what_tensors_take(pair, tmp_path, task: str, model: str) -> None:
    if task == "mlm" and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        pytest.skip("this CPU multiplies BF16 logits' gradients in FP32, and the planner counts no copies for that")
    architecture, config = model.split(" ", 1)
    overrides = [architecture, config, f"task={task}", "data.tokenizer=bpe:4096", "data.sequence_length=128"]
    overrides += ["batch.micro_size=8", "batch.global_size=16", "model.activation_checkpointing=none"]
    overrides += ["classify.labels=[a, b]"] if task == "classify" else []
    assert_peak(pair, [*overrides, *rounded(tmp_path, 2)], 4100, 0.1)


T5 = "d_model: 128, d_kv: 32, d_ff: 320, num_heads: 4, num_layers: 3, num_decoder_layers: 2, feed_forward_proj: {}"
BART = "d_model: 128, encoder_ffn_dim: 320, decoder_ffn_dim: 320, encoder_layers: 2, decoder_layers: 3"
LABELS = "data.target_length={}"
BOTH_SIDES = {
    "t5": (T5.format("relu"), [LABELS.format(96)]),
    "t5-v1.1, no dropout": (
        T5.format("gated-gelu") + ", dropout_rate: 0.0",
        [LABELS.format(32), "model.loss=chunked", "model.loss_chunk_tokens=64"],
    ),
    "bart": (BART + ", dropout: 0.1", [LABELS.format(64)]),
    "t5, recomputed": (T5.format("relu"), [LABELS.format(96), "model.activation_checkpointing=full"]),
}


@pytest.mark.one_in(4)
@pytest.mark.parametrize("what", BOTH_SIDES)
def test_the_peak_of_an_encoder_decoder_is_what_tensors_take(pair, tmp_path, what: str) -> None:
    """Its two sides differ in length and number of blocks."""
    config, more = BOTH_SIDES[what]
    given = [f"model.architecture={'bart' if what == 'bart' else 't5'}", f"model.config={{{config}}}", "task=seq2seq"]
    given += ["data.tokenizer=bytes", "data.sequence_length=128", "batch.micro_size=8", "batch.global_size=16"]
    assert_peak(pair, [*given, "model.activation_checkpointing=none", *more, *rounded(tmp_path, 2)], 258, 0.1)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_the_peak_of_an_adapted_encoder_decoder_is_what_tensors_take(pair, tmp_path, stage: int) -> None:
    given = yaml.safe_load("{" + T5.format("gated-gelu") + ", vocab_size: 512, decoder_start_token_id: 0}")
    AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model("t5", **given)).save_pretrained(tmp_path / "t5")
    overrides = on_base(tmp_path / "t5", LORA, "task=seq2seq", "data.target_length=96", "batch.micro_size=8")
    assert_peak(pair, [*overrides, "batch.global_size=16", *rounded(tmp_path, stage)], 512, 0.1)


def rounded(folder: Path, stage: int) -> list[str]:
    """Overrides of a BF16 run without saves whose buckets hold a part of the gradients; of an FP32 run without ZeRO."""
    if stage == 0:
        return ["deepspeed.stage=0", "precision.compute=fp32", "checkpoint.every_steps=0"]
    changed = changed_json(folder, f"zero{stage}_bf16", reduce_bucket_size=1_000_000)
    return [changed, "precision.compute=bf16", "checkpoint.every_steps=0"]


def assert_peak(pair, overrides: list[str], vocabulary: int, within: float) -> None:
    results = pair.run(plan_cases.peak_of, overrides=overrides, vocabulary=vocabulary)
    shape, layout = planned(overrides)
    if layout.stage == 3:  # its bucket is there from the start; an adapter's gradients write to little of it
        layout = replace(layout, on_cpu=False)
    planned_bytes = peak_memory(shape, layout).total
    assert planned_bytes == pytest.approx(max(result["peak"] for result in results), rel=within)


@pytest.mark.one_in(5)
@pytest.mark.parametrize("compute", ["bf16", "fp32"])
@pytest.mark.parametrize(("kind", "top_k"), [("forward_kl", 0), ("reverse_kl", 0), ("jsd", 0), ("jsd", 32)])
def test_a_divergence_takes_what_the_planner_says(kind: Any, top_k: int, compute: str) -> None:
    """One chunk and three; a teacher in FP32."""
    dtype, vocabulary = DTYPES[compute], 2**14
    for tokens in (256, 768):
        measured = divergence_peak(kind, top_k, dtype, tokens, vocabulary)
        teacher = None if top_k else SimpleNamespace(width=4)
        shape: Any = SimpleNamespace(vocabulary=vocabulary, teacher=teacher)
        config = Config(task="distill", distill=DistillSection(loss=kind, top_k=top_k))
        layout: Any = SimpleNamespace(config=config, tokens=tokens, label_tokens=tokens, width=dtype.itemsize)
        assert loss_bytes(shape, layout) == pytest.approx(measured, rel=0.02)


def divergence_peak(kind: Any, top_k: int, dtype: torch.dtype, tokens: int, vocabulary: int) -> float:
    """Bytes of forward and backward through logits that two linear layers make of next to nothing."""
    hidden, labels = torch.randn(1, tokens, 1), torch.randint(vocabulary, (1, tokens))
    weight = torch.randn(vocabulary, 1, dtype=dtype, requires_grad=True)
    objective = Distillation(kind=kind, beta=0.5, temperature=2.0, ce_weight=0.5)
    inputs = {"input_ids": labels}
    if top_k:
        inputs[IDS] = torch.randint(vocabulary, (1, tokens, top_k), dtype=torch.int32)
        inputs[LOG_PROBS] = torch.randn(1, tokens, top_k + 1).log_softmax(-1)
    else:
        objective.teacher = lambda **_: SimpleNamespace(logits=hidden @ weight.detach().float().T)
    states = hidden.to(dtype)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as record:
        loss = objective.score(lambda **_: SimpleNamespace(logits=states @ weight.T), inputs, labels).loss
        loss.backward()
    return plan_cases.max_allocated(record)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ([LORA[:-1] + ", target_modules: [q_proj, nope]}"], "adapter.target_modules = q_proj, nope: the model has no"),
        ([LORA[:-1] + ", modules_to_save: [nope]}"], "adapter.modules_to_save = nope: the model has no module nope"),
        ([LORA[:-1] + ", target_modules: [act_fn]}"], "adapter.target_modules = act_fn: Target module"),
        (["task=distill", "distill.teacher=BASE", "model.config.vocab_size=600"], "has a vocabulary of 512 tokens"),
        (["optimizer.groups=[{match: nope, learning_rate: 1}]"], "match 'nope' is the last match of no trained"),
    ],
)
def test_a_mistake_is_one_line(refusal, base: Path, overrides: list[str], problem: str) -> None:
    given = on_base(base, *(text.replace("BASE", str(base)) for text in overrides))
    assert problem in refusal(command.main, [*DEMO, *given])


@pytest.mark.parametrize("base_of", ["nf4", "nf4, double_quant: true", "int8"])
def test_codes_and_scales_are_those_of_the_real_layers(base: Path, base_of: str) -> None:
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    overrides = on_base(base, CODED.format(base_of), "precision.compute=bf16")
    shape, layout = planned(overrides)
    config = read_command_line([*DEMO, *overrides], as_launched(2)).config
    how: Any = {"seed": 0, "gather": lambda _: nullcontext(True), "adapter": config.adapter}
    model = build_model(config.model, AutoConfig.from_pretrained(base), **how)
    codes = shape.codes
    assert codes is not None
    held = sum(tensor.nbytes for tensor in stored_tensors(model))
    assert codes.codes + codes.scales == pytest.approx(held, rel=0.001)  # double_quant keeps an offset of each layer
    assert codes.parameters == sum(layer.whole_shape.numel() for layer in quantised_layers(model).values())
    floats = sum(p.numel() for p in model.parameters() if p.is_floating_point())
    items, _ = model_states(shape, layout)
    assert items["parameters"] == pytest.approx(held + 2 * (floats + shape.trained_parameters), rel=0.001)
    thirds, _ = model_states(shape, replace(layout, stage=3))
    assert thirds["parameters"] == pytest.approx((items["parameters"] + codes.scales) / 2)


@pytest.mark.parametrize("base_of", ["nf4", "int8"])
def test_codes_of_layers_that_hold_inputs_first_are_those_of_the_real_ones(tmp_path: Path, base_of: str) -> None:
    """GPT-2's, whose rows of codes are the columns of its weights."""
    pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    write_base(tmp_path, "gpt2")
    section = AdapterSection(kind="lora", base=base_of)
    config = AutoConfig.from_pretrained(tmp_path)
    codes = codes_of(empty_model(ModelSection(), config), section)
    model = build_model(
        ModelSection(name_or_path=str(tmp_path)), config, seed=0, gather=lambda _: nullcontext(True), adapter=section
    )
    assert codes is not None
    assert codes.codes + codes.scales == sum(tensor.nbytes for tensor in stored_tensors(model))


def test_answers_that_are_sampled_at_once_need_a_cache() -> None:
    """Two copies of the weights on each rank, and a KV cache of 512 answers of 4,096 tokens at the peak."""
    recipe = str(cli.REPOSITORY / "config/recipes/grpo.yaml")
    batch = ("batch.global_size=1024", "batch.micro_size=16", "data.sequence_length=4096", "precision.compute=bf16")

    def peak(*overrides: str) -> Any:
        shape, layout = planned(["--config", recipe, *batch, *overrides])
        frozen = replace(shape, trained_parameters=7)  # the sampler has the trainer's own, which ZeRO-3 has not whole
        assert sampler_bytes(frozen, layout) == (2 if layout.config.grpo.beta else 1) * 2 * 7
        assert sampler_bytes(frozen, replace(layout, stage=3)) == sampler_bytes(shape, layout)
        return shape, peak_memory(shape, layout)

    shape, memory = peak("grpo.at_once=512", "grpo.beta=0.1")
    assert memory.moment == "the sampling of answers"
    assert memory.device["KV cache"] == 512 * 4096 * 2 * 2 * 2 * 128  # both of keys and values, layers, bytes, width
    assert memory.device["sampler"] == 2 * 2 * shape.parameters
    assert "KV cache" not in peak("grpo.at_once=16")[1].device
    served = peak("grpo.at_once=512", "grpo.engine=vllm", "grpo.urls=[http://127.0.0.1:8105]")[1]
    assert served.moment != "the sampling of answers" and served.device["sampler"] == 2 * shape.parameters


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("stage", "given"),
    [
        (1, []),
        (3, []),
        (2, ["task=sft", "data.source=stdlib"]),
        (2, ["task=dpo"]),
        (2, ["task=distill", "distill.teacher=TEACHER", "data.tokenizer=bpe:512"]),
        (2, ["task=mlm", "model={architecture: bert, config: {}}"]),
    ],
)
def test_what_is_advised_is_not_refused(base: Path, stage: int, given: list[str]) -> None:
    given = [*(item.replace("TEACHER", str(base)) for item in given), f"deepspeed.stage={stage}"]
    shape, layout = planned([*given, "model.kernels=torch"])
    advice = _advice("logits", layout)
    names = [lever.name for lever in levers(shape, layout) if lever.name.startswith("model.")]
    assert names and (stage < 3 or "model.compile=true" not in names)
    for name in [*names, *re.findall(r"model\.loss=\w+", advice)]:
        planned([*given, "model.kernels=torch", name])
    assert ("model.loss" in advice) == any(name.startswith("model.loss") for name in names)
