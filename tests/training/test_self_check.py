"""A run compares its own steps with plain torch: what is wrong is named, and nothing is said of a sound one."""

import copy
import hashlib
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from deepspeed.runtime.zero.linear import zero3_linear_wrap
from transformers import AutoConfig, AutoModelForCausalLM

from config.cli import REPOSITORY
from config.optimizers import OPTIMIZERS
from config.schema import AdapterSection, Config
from data.text.prepare import prepare
from lab.detection.plants.site import ATTENTION, LAYER, LINEAR, NORM
from modeling.adapter import add_adapter, layers_with_factors
from modeling.objectives.label_prediction import LabelPrediction
from precision.tolerance import unit_roundoff
from tests.support.jobs.process_group import ProcessGroup
from tests.support.marks import slow
from tests.support.models.mixtures import mixture
from tests.training import observer_cases
from tests.training.observer_cases import cast, manifest
from tools.parity.alternatives import _halves
from tracking.compare.surviving import read_events
from training.corruption.between import Between
from training.corruption.gradient_sums import GradientSums
from training.corruption.passes import Passes, Row, _Call
from training.corruption.plain import is_random
from training.corruption.self_check import SelfCheck, _differing

EVALUATED = ("data.validation_fraction=0.3", "evaluate.every_steps=2", "evaluate.batches=3")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model with heavy-tailed weights, and a text."""
    folder = tmp_path_factory.mktemp("self_check")
    observer_cases.heavy_tailed(folder, "base", observer_cases.NARROW)
    observer_cases.write_text(folder)
    for further in ((), EVALUATED):
        config = observer_cases.resolve(str(folder), "prepared", [*cast("fp32", 2), *further]).config
        prepare(config.data, progress=False)
    return folder


def events_of(
    pair: ProcessGroup, folder: Path, overrides: Sequence[str], defect: str | None = None
) -> list[dict[str, Any]]:
    name = "".join(letter if letter.isalnum() else "-" for letter in f"{defect} {' '.join(overrides)}")[:120]
    given: dict[str, Any] = {"folder": str(folder), "name": name, "overrides": overrides, "defect": defect}
    pair.run(observer_cases.planted_job, seconds=600.0, **given)
    return list(read_events(folder / "runs" / name / "events.jsonl"))


def of(events: list[dict[str, Any]], name: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == name]


SOUND = [
    *(cast("fp32", 0), cast("bf16", 2), cast("fp16", 3)),
    *(slow(cast(dtype, stage)) for dtype in ("fp32", "bf16", "fp16") for stage in (1, 2, 3)),
    *(slow([*cast("bf16", 1), f"optimizer.name={name}"]) for name in OPTIMIZERS),
    slow([*cast("bf16", 2), "model.activation_checkpointing=full"]),
    slow([*cast("bf16", 2), "model.loss=full", "model.loss_chunk_tokens=0", "model.attention=eager"]),
]


@pytest.mark.parametrize("overrides", SOUND, ids=" ".join)
def test_a_sound_run_is_checked_and_nothing_is_said(pair: ProcessGroup, folder: Path, overrides: list[str]) -> None:
    events = events_of(pair, folder, overrides)
    checks = of(events, "self_check")
    assert [event["step"] for event in checks] == [1, 2, 3]
    for event in checks:
        compared = {name: check["compared"] for name, check in event["checks"].items()}
        passes = {"modules", "backward", "between", "gradients", "loss", "norm", "samples", "constants"}
        in_16_bits = set() if "precision.compute=fp32" in overrides else {"code"}
        first = {"prepared"} if event["step"] == 1 else set()
        assert set(compared) == passes | first | in_16_bits | {"updates", "copies", "schedule"} | (
            {"scale"} if "precision.compute=fp16" in overrides else set()
        )
        assert compared["modules"] > 20 and compared["gradients"] > 20 and compared["updates"] > 5
        assert not event["skipped"] or "optimizer.name=" in str(overrides)
        assert all(check["breaches"] == 0 and check["error"] <= check["bound"] for check in event["checks"].values())
    assert not of(events, "warning")


def under_a_manifest(folder: Path, head: str, default: str = "bf16", stage: int = 2) -> list[str]:
    """Overrides. head: what the output embedding computes in."""
    rule = {"match": "lm_head", "compute": head, "reason": "to be as asked"}
    (folder / f"{default}-{head}.json").write_text(json.dumps({"default": default, "rules": [rule]}))
    return [setting.replace("{folder}", str(folder)) for setting in manifest(f"{default}-{head}", stage)]


@pytest.mark.parametrize(
    ("head", "default", "stage", "further"),
    [
        ("bf16", "bf16", 1, []),
        ("fp32", "bf16", 3, []),
        slow("fp16", "bf16", 2, ["model.loss=full", "model.loss_chunk_tokens=0"]),
        slow("fp16", "fp16", 3, []),
        slow("bf16", "fp32", 1, ["model.loss=full", "model.loss_chunk_tokens=0"]),
        slow("fp32", "fp32", 2, []),
    ],
)
def test_the_loss_is_compared_under_a_manifest_too(pair, folder, head, default, stage, further) -> None:
    events = events_of(pair, folder, [*under_a_manifest(folder, head, default, stage), *further])
    for event in of(events, "self_check"):
        assert event["checks"]["loss"]["compared"] == 4 and not event["skipped"].keys() & {"loss", "between"}
    assert not of(events, "warning")


@pytest.mark.parametrize(
    ("defect", "says"),
    [("last micro-batch dropped", "mean cross-entropy"), ("1% lost between two blocks", "hands to it")],
)
def test_what_is_wrong_with_the_loss_or_between_blocks_is_found_under_a_manifest(pair, folder, defect, says) -> None:
    events = events_of(pair, folder, under_a_manifest(folder, "bf16"), defect)
    assert any(says in event["reason"] for event in of(events, "warning"))


def test_a_layer_whose_weight_is_used_without_a_call_is_left_out(pair: ProcessGroup, folder: Path) -> None:
    """Mamba's dt_proj is one: its gradient would not be that of any call."""
    mamba = ["model.name_or_path=null", "model.architecture=mamba"]
    mamba.append("model.config={hidden_size: 32, state_size: 8, num_hidden_layers: 2}")
    events = events_of(pair, folder, [*cast("bf16", 2), *mamba])
    assert not of(events, "warning")
    skipped = of(events, "self_check")[0]["skipped"]
    assert skipped["backbone.layers.0.mixer.dt_proj"] == "its weight is used without a call of the layer"


def test_a_block_whose_input_other_modules_use_too_is_sound(pair: ProcessGroup, folder: Path) -> None:
    """Gemma 4 projects the first block's input for all layers, which adds to its gradient."""
    shape = "{hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4, head_dim: 16,"
    shape += " num_key_value_heads: 2, hidden_size_per_layer_input: 16, vocab_size_per_layer_input: 4096}"
    gemma = ["model.name_or_path=null", "model.architecture=gemma4_text", f"model.config={shape}"]
    events = events_of(pair, folder, [*cast("bf16", 2), *gemma])
    assert not of(events, "warning")
    assert of(events, "self_check")[0]["checks"]["backward"]["compared"] == 2, "both blocks"


_DECODER = "d_model: 32, decoder_layers: 2, encoder_layers: 1, decoder_ffn_dim: 48, decoder_attention_heads: 4"
_TWICE = "hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 4, head_dim: 8"
_LONG = (
    f"{_TWICE}, pad_token_id: 0, original_max_position_embeddings: 8, rope_parameters: {{rope_type: longrope, "
    "rope_theta: 10000.0, short_factor: [1.0, 1.0, 1.0, 1.0], long_factor: [1.0, 2.0, 3.0, 4.0]}"
)


@pytest.mark.parametrize(
    ("family", "shape"),
    [
        *(("bart", _DECODER), slow("blenderbot-small", _DECODER), slow("pegasus", _DECODER)),
        *(("hrm_text", _TWICE), ("phi3", _LONG)),
    ],
)
def test_nothing_is_said_of_sound_models_of_other_kinds(pair, folder, family: str, shape: str) -> None:
    """Values dropped between embedding and first block; a decoder that scales its embedding itself; a class that
    changes its config; blocks that are called several times; a rotary table that depends on the length."""
    given = ["model.name_or_path=null", f"model.architecture={family}", f"model.config={{{shape}}}"]
    events = events_of(pair, folder, [*cast("bf16", 2), *given])
    assert len(of(events, "self_check")) == 3 and not of(events, "warning")


@pytest.mark.parametrize(
    ("defect", "overrides", "named", "says"),
    [
        ("one norm times 1.01", cast("bf16", 2), NORM, "its output"),
        ("gradient of one matrix dropped on one rank", cast("fp16", 1), f"{LINEAR}.weight", "reduced gradient"),
        slow("decay on norms and embeddings", cast("bf16", 3), NORM, "optimizer's rule"),
        ("16-bit copy stale on one rank", cast("bf16", 2), f"{LINEAR}.weight", "rounded"),
        ("last micro-batch dropped", cast("fp32", 0), "loss", "mean cross-entropy"),
        slow("gradient of one norm 20% too large", cast("bf16", 3), f"{NORM}.weight", "reduced gradient"),
        ("both: first token of rows lost", cast("fp16", 2), "inputs of sample", "its samples"),
        slow("scale of one attention 1% too large", cast("fp32", 0), f"{ATTENTION}.scaling", "the config makes"),
        ("1% lost between two blocks", cast("bf16", 1), LAYER, "hands to it"),
        ("both: decay on norms and embeddings", cast("bf16", 3), NORM, "the config makes"),
        ("rotary base of one layer 1% too large", cast("bf16", 2), ATTENTION, "computes something else"),
        slow("attention of one layer times 1.01", cast("fp16", 3), ATTENTION, ""),
        slow("gradient of one matrix summed over ranks", cast("bf16", 3), LINEAR, ""),
        slow("learning rate times 1.05", cast("fp32", 2), "", "optimizer's rule"),
        slow("no bias correction", cast("bf16", 1), "", "optimizer's rule"),
    ],
)
def test_a_defect_is_found_in_the_first_step_and_named(pair, folder, defect, overrides, named, says) -> None:
    found = [event for event in of(events_of(pair, folder, overrides, defect), "warning") if event["step"] == 1]
    assert {event["signal"] for event in found} == {"self_check"}
    warning, *others = (event for event in found if says in event["reason"])
    assert any(named in name for name in warning["modules"]) and warning["value"] > warning["bound"]
    assert not (others and says)
    who = "all ranks together" if defect.startswith("gradient") or "config" in says else "rank "
    assert f", {who}" in warning["reason"] and ", step 1: " in warning["reason"]


def test_the_first_evaluation_is_made_again(pair: ProcessGroup, folder: Path) -> None:
    """Twice in three steps, of which the second is not."""
    events = events_of(pair, folder, [*cast("bf16", 2), *EVALUATED], "both: evaluation with its last batch twice")
    (warning,) = of(events, "warning")
    assert "all ranks together, step 2: it is not the mean over the labels" in warning["reason"]
    (check,) = (event for event in of(events, "self_check") if "evaluation" in event["checks"])
    assert {"modules", "between", "samples"} < set(check["checks"]) and not check["skipped"]


def test_an_evaluation_of_other_samples_or_of_fewer_labels_is_found(pair: ProcessGroup, folder: Path) -> None:
    for lost in ("its last batch", "half of its labels"):
        pair.run(observer_cases.evaluating_less, seconds=600.0, folder=str(folder), name=f"less {lost}", lost=lost)
        warnings = of(list(read_events(folder / "runs" / f"less {lost}" / "events.jsonl")), "warning")
        named = {name for event in warnings for name in event["modules"]}
        assert named & {"which samples are evaluated", "labels"}, (lost, named)


def test_an_evaluation_is_compared_where_weights_were_fetched_ahead(pair: ProcessGroup, folder: Path) -> None:
    """ZeRO-3 fetches weights for the backward pass, which an evaluation has not."""
    document = json.loads((REPOSITORY / "ds_configs/zero3_bf16.json").read_text(encoding="utf-8"))
    document["zero_optimization"] |= {"stage3_param_persistence_threshold": 0, "stage3_prefetch_bucket_size": 20_000}
    (folder / "ahead.json").write_text(json.dumps(document), encoding="utf-8")
    events = events_of(
        pair, folder, ["precision.compute=bf16", f"deepspeed.config={folder / 'ahead.json'}", *EVALUATED]
    )
    assert not of(events, "warning") and "evaluation" in str(of(events, "self_check"))


def test_an_evaluation_that_is_compared_keeps_nothing_for_a_backward_pass(pair: ProcessGroup, folder: Path) -> None:
    """It recomputes nothing, so it would keep all activations of a model that trains only with checkpointing."""
    overrides = [*cast("bf16", 2), *EVALUATED, "model.activation_checkpointing=full"]
    kept = pair.run(observer_cases.kept_of_an_evaluation, folder=str(folder), name="kept", overrides=overrides)
    assert kept == [[0, 0]] * 2, "one activation function in each block"
    checks = of(list(read_events(folder / "runs/kept/events.jsonl")), "self_check")
    (check,) = (event for event in checks if "evaluation" in event["checks"])
    assert check["checks"]["modules"]["compared"] > 20 and not check["checks"]["modules"]["breaches"]


def test_the_guard_answers_what_is_found_before_the_update_where_it_is_asked_to(pair, folder) -> None:
    events = events_of(pair, folder, [*cast("bf16", 2), "guard.warnings=[self_check]"], "one norm times 1.01")
    incident = of(events, "incident")[0]
    assert (incident["step"], incident["verdict"]) == (1, "SKIP") and NORM in incident["reason"]
    assert not of(events, "step")[0]["applied"] and "updates" not in of(events, "self_check")[0]["checks"]


TIED = (
    "{hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4, tie_word_embeddings: true}"
)


@pytest.mark.parametrize(
    "model",
    [
        [],
        [
            "model.name_or_path=null",
            "model.architecture=llama",
            f"model.config={TIED}",
            "model.loss=full",
            "model.loss_chunk_tokens=0",
        ],
    ],
    ids=["whole", "tied"],
)
def test_products_of_the_check_are_not_taken_for_the_models_own(pair, folder, model: list[str]) -> None:
    """The first step is both checked and observed, on the manifest path with sums in FP64. A tied embedding's gradient
    is rounded as its head's is."""
    manifest = f"precision.manifest={REPOSITORY}/config/manifests/bf16.json"
    settings = ["deepspeed.stage=2", "precision.compute=auto", "precision.path=manifest", manifest]
    events = events_of(pair, folder, [*settings, *model])
    assert not of(events, "warning") and of(events, "self_check")[0]["checks"]["gradients"]["compared"] > 13
    assert of(events, "precision")[0]["flop_share"] == {"bf16": 1.0}


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("falcon_h1", {"lm_head_multiplier": 0.5}),
        ("recurrent_gemma", {"logits_soft_cap": 30.0}),
        ("granite", {"logits_scaling": 8.0}),
        ("marian", {"final_logits_bias": torch.tensor([[0.0, 1.0]])}),
        ("esm", {}),
    ],
)
def test_the_loss_of_a_model_that_changes_its_logits_is_left_out(family: str, changes: dict[str, Any]) -> None:
    bias = changes.pop("final_logits_bias", torch.zeros(1, 2))
    model: Any = torch.nn.Module()
    model.config, model.final_logits_bias = AutoConfig.for_model(family, **changes), bias
    model.lm_head, decoder = torch.nn.Module(), torch.nn.Linear(2, 2)
    model.lm_head.decoder = decoder
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(2)) if family == "esm" else decoder.bias
    passes: Any = object.__new__(Passes)
    passes.skipped, passes._head, passes._head_name = {}, decoder, "lm_head.decoder"
    passes._engine = SimpleNamespace(model=model, objective=LabelPrediction(), regions=None, compute="bf16")
    passes._resolved = SimpleNamespace(batch=SimpleNamespace(sequence=1))
    assert passes._can_judge_loss() == (family == "llama")
    assert passes.skipped == ({} if family == "llama" else {"loss": "the model changes its logits"})


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_that_the_model_caps_in_16_bits_are_capped_so(dtype: torch.dtype) -> None:
    """Capped in FP32, BF16's loss would be 2.6e-4 off."""
    torch.manual_seed(0)
    head, cap = torch.nn.Linear(16, 64, bias=False).to(dtype), 5.0
    hidden, labels = (8 * torch.randn(32, 16)).to(dtype), torch.randint(64, (32,))
    logits = head(hidden).detach().requires_grad_()
    loss = torch.nn.functional.cross_entropy((cap * torch.tanh(logits / cap)).float(), labels, reduction="sum")
    (own,) = torch.autograd.grad(loss, logits)
    came = list[torch.Tensor]()
    passes: Any = object.__new__(Passes)
    passes._cap, passes._total, passes._factor = cap, torch.zeros(2, dtype=torch.float64), torch.ones(())
    compute = {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    passes._engine = SimpleNamespace(loss_path=SimpleNamespace(chunked=False), regions=None, compute=compute)
    passes._sums = SimpleNamespace(
        wide=torch.float32, operand=lambda head, given: given, add=lambda head, given, back: came.append(back)
    )
    passes._add_loss(hidden, labels, head)
    assert abs(float(passes._total[0]) / float(loss) - 1) < 1e-6
    assert float((came[0] - own.float()).norm() / own.float().norm()) < 4 * torch.finfo(dtype).eps


def test_a_module_that_drops_values_is_random_whatever_its_rate_is_called() -> None:
    """OPT's layers and Bloom's MLP call a function with a rate of their own; only torch's modules call it p."""
    for name, rates in (("opt", {"dropout": 0.1}), ("bloom", {"hidden_dropout": 0.1}), ("gpt2", {"resid_pdrop": 0.1})):
        quiet = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop", "dropout", "attention_dropout"), 0.0)
        found = []
        for given in (quiet, quiet | rates):
            config = AutoConfig.for_model(name, num_hidden_layers=1, hidden_size=32, num_attention_heads=2, **given)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
            (block,) = (item for item in model.modules() if type(item).__name__.endswith(("Block", "DecoderLayer")))
            found.append(is_random(block))
        assert found == [False, True], name


def test_blocks_that_get_their_hidden_states_by_keyword_are_left_out() -> None:
    """As DBRX's do: the run goes on."""

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = torch.nn.Linear(4, 4)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.block(input=hidden)
            return out

    model = Model()
    between = Between(SimpleNamespace(model=model), {"block": model.block}, "sdpa")  # type: ignore[arg-type]
    with between.watching():
        model(torch.ones(2, 3, 4))
    with pytest.raises(TypeError, match="exchange more than hidden states"):
        between.compared()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_layers_with_a_bias_may_round_both_halves_of_their_sums(dtype) -> None:
    """Kernels of some processors do, alone and inside of an MLP."""
    torch.manual_seed(0)
    engine = SimpleNamespace(regions=None, compute={torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype])
    engine.world = SimpleNamespace(device=torch.device("cpu"))
    passes: Any = Passes.__new__(Passes)
    passes._engine, passes._back = engine, {}
    passes._resolved = SimpleNamespace(config=SimpleNamespace(model=SimpleNamespace(attention="sdpa", compile=False)))
    layers = [torch.nn.Linear(32, 96), torch.nn.GELU(), torch.nn.Linear(96, 32)]
    for module in (torch.nn.Linear(32, 32), torch.nn.Sequential(*layers)):
        for parameter in module.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        module = module.to(dtype).requires_grad_(False)
        given = torch.randn(64, 32).to(dtype)
        with _halves():
            output = module(given)
        weights = dict(module.named_parameters())
        for factor, sound in ((1.0, True), (1 + 2 * unit_roundoff(dtype), False)):
            call = _Call((given,), {}, [(output.float() * factor).to(dtype)], [])
            (_, row), _ = passes._compare("", module, weights, call)
            error, bound = row.tolist()
            assert (error <= bound) == sound, factor


def test_a_bias_that_cancels_a_rounded_product_is_sound_at_zero_3(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed's linear layer rounds its product before it adds the bias, unless its input is a matrix."""
    torch.manual_seed(0)
    monkeypatch.setattr(torch.nn.functional, "linear", zero3_linear_wrap)
    passes: Any = Passes.__new__(Passes)
    passes._back = {}
    passes._engine = SimpleNamespace(regions=None, compute="bf16", world=SimpleNamespace(device=torch.device("cpu")))
    passes._resolved = SimpleNamespace(config=SimpleNamespace(model=SimpleNamespace(attention="sdpa", compile=False)))
    module = torch.nn.Linear(32, 32).to(torch.bfloat16).requires_grad_(False)
    given = (torch.ones(1, 64, 32) + 0.01 * torch.randn(1, 64, 32)).to(torch.bfloat16)
    module.bias.copy_(-(given @ module.weight.t()).mean((0, 1)))
    call = _Call((given[0],), {}, [module(given)[0]], [])
    (_, row), _ = passes._compare("", module, dict(module.named_parameters()), call)
    error, bound = row.tolist()
    assert error <= bound


def test_a_gradient_that_is_wrong_in_one_step_is_found_where_gradients_are_compared_in_every_step(pair, folder) -> None:
    """One bit of one of 24,576 values, by which it grows; no other step is blamed, and only samples are compared in it
    besides.

    At ZeRO-3, where a hook that asked for a partitioned weight would break the next step's gathers.
    """
    flip = f"faults=[{{kind: flipped_bit, place: gradient, module: {LINEAR}, bit: 10, step: 2}}]"
    each = ["guard.self_check_every=500", "guard.gradient_checks=1"]
    events = events_of(pair, folder, [*cast("bf16", 3), *each, flip])
    small = {"gradients", "norm", "samples"}
    assert [set(event["checks"]) == small for event in of(events, "self_check")] == [False, True, False]
    assert [(event["step"], event["modules"]) for event in of(events, "warning")] == [(2, [f"{LINEAR}.weight"])]


def unlike(change: Callable[[Any], None]) -> list[str]:
    """Differences between a changed model and what its config makes."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape = AutoConfig.for_model("gemma3_text", **sizes, head_dim=16, num_key_value_heads=1, attention_dropout=0.1)
    mine, fresh = (AutoModelForCausalLM.from_config(copy.deepcopy(shape)).train() for _ in range(2))
    check = SelfCheck.__new__(SelfCheck)
    check._engine = SimpleNamespace(model=mine, group_of={}, trainable=[], stage=0)  # type: ignore[assignment]
    check._resolved = SimpleNamespace(config=Config())  # type: ignore[assignment]
    check._fresh = fresh.requires_grad_(False)  # type: ignore[misc]
    mine.requires_grad_(False)
    change(mine)
    return [*check._unlike()]


def test_modules_of_another_class_and_settings_in_words_are_unlike() -> None:
    """A fused norm without the epsilon's attribute, another activation, a window, a model left in evaluation mode."""

    class FusedNorm(torch.nn.Module):
        def __init__(self, weight: torch.nn.Parameter) -> None:
            super().__init__()
            self.weight = weight

    def fuse(model: Any) -> None:
        model.model.layers[1].input_layernorm = FusedNorm(model.model.layers[1].input_layernorm.weight)

    def exchange(model: Any) -> None:
        model.model.layers[0].mlp.act_fn = torch.nn.GELU()

    def widen(model: Any) -> None:
        model.config.layer_types = ["full_attention", *model.config.layer_types[1:]]

    assert unlike(lambda model: None) == []
    assert unlike(fuse) == ["model.layers.1.input_layernorm"]
    assert unlike(exchange) == ["model.layers.0.mlp.act_fn"]
    assert unlike(widen) == ["config.layer_types"]
    assert ".training" in unlike(lambda model: model.eval())


def test_how_the_base_of_an_adapter_was_loaded_is_no_constant() -> None:
    """`peft` gives it to layers of routers and fused experts, which bitsandbytes leaves as they are."""
    models = [mixture("qwen3_moe", AutoModelForCausalLM._model_mapping) for _ in range(2)]
    models[0].is_loaded_in_4bit = True  # as bitsandbytes does
    for model in models:
        add_adapter(model, AdapterSection(kind="lora", r=2), seed=0)
    layers = [[vars(layer) for layer in layers_with_factors(model).values()] for model in models]
    assert any(own["kwargs"] != other["kwargs"] for own, other in zip(*layers, strict=True))
    assert not [key for own, other in zip(*layers, strict=True) for key in _differing(own, other)]
    layers[0][0]["lora_alpha"] = {"default": 3}
    assert [*_differing(layers[0][0], layers[1][0])] == ["lora_alpha.default"]


def test_equal_random_numbers_of_ranks_or_steps_are_found() -> None:
    """A model that drops values; of one that draws nothing, nothing is said."""
    check, model = SelfCheck.__new__(SelfCheck), torch.nn.Dropout(0.1)
    check._whole, check._drawn, theirs = True, set(), list[str]()
    world = SimpleNamespace(device=torch.device("cpu"), gather_objects=lambda mine: [mine, *theirs])
    check._engine = SimpleNamespace(model=model, world=world)  # type: ignore[assignment]

    def draws(*, draw: bool = True) -> list[str]:
        outcome: Any = SimpleNamespace(generators={"cpu": torch.get_rng_state()})
        if draw:
            model(torch.ones(4))
        return [row.where for row in check._draws(outcome)]

    before = torch.get_rng_state()
    assert draws() == draws() == ["all"] and draws(draw=False) == []
    torch.set_rng_state(before)
    assert draws() == ["random numbers of two steps"]
    theirs[:] = [hashlib.sha256(torch.get_rng_state().numpy().tobytes()).hexdigest()]
    assert "random numbers of two ranks" in draws()


def test_a_loss_that_is_not_the_mean_of_the_ranks_is_found() -> None:
    check, step = SelfCheck.__new__(SelfCheck), 64.0
    check._whole, check._engine = True, SimpleNamespace(world=SimpleNamespace(sum=lambda mine: mine + 20.0))  # type: ignore
    outcome: Any = SimpleNamespace(loss_sum=torch.tensor(12.0).double(), label_tokens=torch.tensor(step).double())
    rows = [check._reported(outcome, SimpleNamespace(loss=loss))[0] for loss in (0.5, 12.0 / 32)]  # type: ignore
    assert [row.error > row.bound for row in rows] == [False, True]


def test_settings_that_change_between_steps_are_counted(pair: ProcessGroup, folder: Path) -> None:
    """A group's weight decay in the second step; masters and moments between the first and the second."""
    for change, where in (("decay", "learning rate"), ("moments", "masters or moments between two steps")):
        given = {"folder": str(folder), "name": f"changed-{change}", "change": change}
        pair.run(observer_cases.changed_job, seconds=600.0, **given)
        events = list(read_events(folder / "runs" / f"changed-{change}" / "events.jsonl"))
        assert any(where in event["modules"] for event in of(events, "warning")), change


def test_the_step_after_something_new_is_compared() -> None:
    check = SelfCheck.__new__(SelfCheck)
    check._policy, check._every, check._gradients, check._turn, check._drawn = None, 10**6, 0, 1, set()
    check._happened, check._after, check._updates, check._history = set(), False, None, {}
    check._engine = SimpleNamespace(scaler_state=lambda: None)  # type: ignore[assignment]
    check._resolved = SimpleNamespace(config=Config())  # type: ignore[assignment]
    due = []
    for step in range(101, 113):
        due += [step] if check.due(step, 1) else []
        if step in (103, 106):
            check.happened("evaluation")
        if step == 108:
            check.forget()
    assert due == [104, 109]


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_a_factor_below_the_rounding_of_one_step_is_found_over_steps(factor: float) -> None:
    torch.manual_seed(0)
    sums, u, found = GradientSums.__new__(GradientSums), unit_roundoff(torch.bfloat16), list[torch.Tensor]()
    sums._history = {}
    for _ in range(6):
        total, exact = torch.zeros(128, 64), torch.zeros(128, 64, dtype=torch.float64)
        for _ in range(4):
            came, given = (torch.randn(128, width).bfloat16() for width in (128, 64))
            total += (came.t() @ given).float()
            exact += came.double().t() @ given.double()
        v, w = (torch.randint(2, (size, 8)).double() * 2 - 1 for size in (128, 64))
        mine, right = (torch.einsum("ik,ij,jk->k", v, matrix, w) for matrix in (factor * total.double(), exact))
        least, zero = exact.norm(), torch.zeros((), dtype=torch.float64)
        assert (mine - right).norm() / 8**0.5 / least < 4 * u
        found += [row for _, row in sums._over_steps("a", (mine - right) / least, right / least, u, zero)]
    assert len(found) == 3 and all(bool(error > bound) == (factor > 1) for error, bound in found)


def test_an_error_that_is_no_number_is_a_breach() -> None:
    engine = SimpleNamespace(world=SimpleNamespace(gather_objects=lambda mine: [mine]))
    settings = SimpleNamespace(guard=SimpleNamespace(self_check_every=8, gradient_checks=0))
    given: dict[str, Any] = {"engine": engine, "resolved": SimpleNamespace(config=settings), "shape": None}
    check = SelfCheck(**given, corpus=None)  # type: ignore[arg-type]
    rows = [
        Row("gradients", "a", math.nan, math.nan),
        Row("norm", "gradient", math.nan, 1e-4),
        Row("loss", "b", 0.0, 1),
    ]
    assert [warning.module for warning in check._judge(rows, 1)] == ["a", "gradient"]
    checks = check.finish()["checks"]
    assert {name: found["breaches"] for name, found in checks.items()} == {"gradients": 1, "norm": 1, "loss": 0}


def test_the_step_that_is_compared_whole_is_drawn_from_each_so_many() -> None:
    settings = SimpleNamespace(
        guard=SimpleNamespace(self_check_every=8, gradient_checks=0), run=SimpleNamespace(seed=3)
    )
    given: dict[str, Any] = {"engine": SimpleNamespace(scaler_state=lambda: None), "shape": None, "corpus": None}
    check = SelfCheck(resolved=SimpleNamespace(config=settings), **given)  # type: ignore[arg-type]
    drawn = [step for step in range(9, 809) if check.due(step, first=1)]
    assert [(step - 1) // 8 for step in drawn] == list(range(1, 101))
    assert {(step - 1) % 8 for step in drawn} == set(range(8))
    assert check.due(1, first=1) and check.due(101, first=101) and check.due(103, first=101)


def test_an_early_step_is_compared_without_what_is_recomputed(pair: ProcessGroup, folder: Path) -> None:
    """Steps 1 and 3 are compared whole, step 24 is not."""
    given = ["guard.self_check_every=500", "run.steps=24", "schedule.warmup_steps=1"]
    checks = of(events_of(pair, folder, [*cast("bf16", 2), *given]), "self_check")
    assert [event["step"] for event in checks] == [1, 3, 24]
    counts = ({name: check["compared"] for name, check in event["checks"].items()} for event in checks)
    first, third, last = counts
    assert first.keys() - {"prepared"} == third.keys() == last.keys() | {"modules", "code", "backward", "between"}
    assert last["gradients"] > 10 and (third["loss"], last["loss"]) == (4, 1)
    assert not {"modules", "code", "backward", "between"} & last.keys()
