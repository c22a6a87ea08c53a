"""Models and their parts as they are built: weights, parameter groups, the loss, text samples, mistakes."""

import hashlib
import json
import logging
import re
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    GenerationConfig,
)
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from config.errors import UserError
from config.schema import AdapterSection, ModelSection, OptimizerSection, ParameterGroupSection
from config.task import CAUSAL_LM, MASKED_LM, SEQ2SEQ_LM, SEQUENCE_CLASSIFICATION, TOKEN_CLASSIFICATION
from modeling.adapter import add_adapter, is_adaptable, layers_with_factors
from modeling.build import (
    attention_of,
    attention_sizes,
    build_model,
    count_parameters,
    drawn_notes,
    empty_model,
    model_config,
    weights_identity,
)
from modeling.generate import sample_text
from modeling.linear_cross_entropy import label_loss_sum
from modeling.parameter_groups import group_of_each, parameter_groups, unreached, unreached_notes
from tests.modeling import model_cases
from tests.support.jobs.process_group import ProcessGroup
from tests.support.models.architectures import CASES, Case
from tests.support.models.mixtures import mixture, with_experts
from tools.parity.oracle.optimizers import optimizer_of
from training.corruption.settings import decay_and_factor

LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
DEEPSEEK = {"num_key_value_heads": 4, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2}
DEEPSEEK |= {"n_group": 2, "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 24}
DEEPSEEK |= {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}
FAMILIES = {
    "llama": LLAMA,
    "qwen3": {**LLAMA, "num_key_value_heads": 2, "head_dim": 16},
    "gpt2": {"n_embd": 32, "n_layer": 2, "n_head": 2},
    "gpt_neox": LLAMA,
    "openai-gpt": {"n_embd": 32, "n_layer": 2, "n_head": 2},
}

KINDS = with_experts()


def build(section: ModelSection, seed: int = 0) -> torch.nn.Module:
    """The model of a section for 64 tokens and sequences of 16, without ZeRO."""
    config = model_config(section, vocab_size=64, sequence_length=16)
    return build_model(section, config, seed=seed, gather=lambda parameters: nullcontext(True))


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_follow_the_seed_and_the_architectures_own_initialisation(family):
    section = ModelSection(architecture=family, config=FAMILIES[family])
    first, again, other = build(section), build(section), build(section, seed=1)
    config = model_config(section, vocab_size=64, sequence_length=16)
    torch.manual_seed(0)
    upstream = dict(AutoModelForCausalLM.from_config(config).named_parameters())
    differs = False
    models = zip(first.named_parameters(), again.parameters(), other.parameters(), strict=True)
    for (name, value), repeated, changed in models:
        assert torch.equal(value, repeated), name
        differs |= not torch.equal(value, changed)
        assert value.dtype == torch.float32
        assert float(value.detach().mean()) == pytest.approx(float(upstream[name].detach().mean()), abs=6e-3), name
        assert float(value.detach().std()) == pytest.approx(float(upstream[name].detach().std()), rel=0.2), name
    assert differs


def test_weights_that_a_checkpoint_will_replace_are_0_and_what_is_not_trained_is_as_in_a_new_model():
    """Rotary tables, and AFMoE's router biases, which take no gradient."""
    given = {**LLAMA, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "num_dense_layers": 1}
    for section in (ModelSection(architecture="llama", config=LLAMA), ModelSection(architecture="afmoe", config=given)):
        config = model_config(section, vocab_size=64, sequence_length=16)
        new, empty = build(section), build_model(section, config, seed=0, drawn=False)
        frozen = {name for name, parameter in new.named_parameters() if not parameter.requires_grad}
        assert bool(frozen) is (section.architecture == "afmoe")
        state = new.state_dict() | dict(new.named_buffers())
        for name, value in (empty.state_dict() | dict(empty.named_buffers())).items():
            trained = name in dict(new.named_parameters()) and name not in frozen
            assert not value.any() if trained else torch.equal(value, state[name]), name


@pytest.mark.parametrize("drawn", [True, False])
@pytest.mark.parametrize("is_main", [True, False])
def test_every_rank_has_the_same_rotary_table_whatever_device_made_its_model(monkeypatch, is_main, drawn):
    """At ZeRO-3 a GPU makes it, which rounds other than the CPU, by which it is initialised."""
    section = ModelSection(architecture="llama", config=LLAMA)
    config, right = model_config(section, vocab_size=64, sequence_length=16), build(section).model.rotary_emb.inv_freq
    made = LlamaRotaryEmbedding.__init__

    def on_gpu(module: torch.nn.Module, *args: object, **kwargs: object) -> None:
        made(module, *args, **kwargs)
        module.inv_freq.copy_(torch.nextafter(module.inv_freq, torch.tensor(9.0)))

    monkeypatch.setattr(LlamaRotaryEmbedding, "__init__", on_gpu)
    model = build_model(section, config, seed=0, gather=lambda parameters: nullcontext(is_main), drawn=drawn)
    assert torch.equal(model.model.rotary_emb.inv_freq, right)


def test_a_new_model_starts_alike_in_whole_and_in_parts(solo: ProcessGroup) -> None:
    """A layer of Switch Transformers draws the weights of its experts, two modules below it. `zero.Init` casts what is
    made in another dtype, as a buffer of Recurrent Gemma is."""
    switch = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
    switch |= {"num_sparse_encoder_layers": 2, "num_sparse_decoder_layers": 2, "num_experts": 4}
    gemma = {**LLAMA, "lru_width": 32, "num_hidden_layers": 3}
    shapes = [(SEQ2SEQ_LM, "switch_transformers", switch), (CAUSAL_LM, "recurrent_gemma", gemma)]
    assert solo.run(model_cases.apart_at_zero3, shapes=shapes) == [{}]
    of = {"kind": "recurrent_gemma", "keys": gemma}
    [whole], [parts] = (solo.run(model_cases.buffers_of, stage=stage, **of) for stage in (0, 3))
    assert whole["model.normalizer"].dtype == parts["model.normalizer"].dtype == torch.bfloat16
    assert float(whole["model.normalizer"]) == float(parts["model.normalizer"]) != 32**0.5


def test_a_key_that_only_the_architectures_code_reads_is_taken():
    """Published configs of Qwen3 MoE, Granite and others have head_dim, and their config classes do not."""
    given = {**LLAMA, "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16, "head_dim": 24}
    model = build(ModelSection(architecture="qwen3_moe", config=given))
    assert model.model.layers[0].self_attn.q_proj.out_features == 2 * 24
    with pytest.raises(UserError, match="model.config.head_dims: a qwen3_moe config has no such key"):
        build(ModelSection(architecture="qwen3_moe", config={**given, "head_dims": 24}))


def test_a_size_that_differs_between_layers_is_checked_as_any_other():
    given = {"num_hidden_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64}
    section = ModelSection(architecture="gemma4_text", config=LLAMA | given | {"head_dim": 16})
    shape = model_config(section, vocab_size=64, sequence_length=16)
    assert [heads for *_, heads in attention_sizes(shape)] == [16, 512]
    with pytest.raises(UserError, match="model.config.head_dim = 0: is not a valid size; give 1 or more"):
        build(ModelSection(architecture="gemma4_text", config=LLAMA | given | {"head_dim": 0}))


def test_drawing_weights_leaves_torchs_generator_alone():
    section = ModelSection(architecture="llama", config=LLAMA)
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    build(section)
    assert torch.equal(torch.rand(3), expected)


def test_saved_weights_are_loaded_from_a_folder(tmp_path):
    model = build(ModelSection(architecture="llama", config=LLAMA), seed=3)
    model.save_pretrained(tmp_path)
    loaded = build(ModelSection(name_or_path=str(tmp_path)))
    for (name, value), saved in zip(loaded.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(value, saved), name


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_files_that_are_not_whole_are_refused(tmp_path, family):
    """Cut short, or without a shard: what a download that broke off leaves. Nothing is drawn in their place."""
    build(ModelSection(architecture=family, config=FAMILIES[family])).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    whole = path.read_bytes()
    tensors = load_file(path)
    lacking = sorted(name for name in tensors if ".1.mlp." in name)[0]
    save_file({name: value for name, value in tensors.items() if name != lacking}, path, metadata={"format": "pt"})
    with pytest.raises(UserError, match=rf"model.name_or_path = {tmp_path}.*its files lack .*{lacking}, which must"):
        build(ModelSection(name_or_path=str(tmp_path)))
    for content in (whole[:-500], whole[:20], b""):
        path.write_bytes(content)
        with pytest.raises(UserError, match=rf"^model cannot be built \(model.name_or_path = {tmp_path}") as caught:
            build(ModelSection(name_or_path=str(tmp_path)))
        assert "\n" not in str(caught.value)


def test_what_files_lack_and_what_is_not_read_of_them_is_a_note_and_no_table(tmp_path, caplog, monkeypatch):
    for name in ("transformers", "transformers.modeling_utils"):
        monkeypatch.setattr(logging.getLogger(name), "propagate", True)  # to caplog
        caplog.set_level(logging.WARNING, name)
    build(ModelSection(architecture="llama", config={**LLAMA, "tie_word_embeddings": False})).save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    head = tensors.pop("lm_head.weight")
    more = {f"vision.{number}": head.clone() for number in range(7)}
    save_file(tensors | more, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert drawn_notes(build(ModelSection(name_or_path=str(tmp_path)))) == [
        "model.name_or_path has no lm_head.weight: initialised with run.seed",
        "model.name_or_path has unused tensors: vision.0, vision.1, vision.2, vision.3, vision.4 and 2 more",
    ]
    assert "LOAD REPORT" not in caplog.text
    AutoModelForCausalLM.from_pretrained(tmp_path)
    assert "LOAD REPORT" in caplog.text, "elsewhere it is printed as ever"


@pytest.mark.parametrize(
    ("family", "config", "expected"),
    [
        ("llama", LLAMA, "sdpa"),
        ("gpt2", FAMILIES["gpt2"], "sdpa"),
        ("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 2}, "eager"),
        ("gpt_oss", {**LLAMA, "head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1}, "eager"),
    ],
)
def test_attention_auto_is_sdpa_where_the_model_has_it_and_else_eager(family, config, expected):
    section = ModelSection(architecture=family, config=config)
    assert section.attention == "auto"
    model = build(section)
    assert attention_of(model) == expected
    if expected == "sdpa":  # as before there was a choice
        same = build(replace(section, attention="sdpa"))
        ids = torch.arange(16).unsqueeze(0)
        assert torch.equal(model.eval()(ids).logits, same.eval()(ids).logits)
    else:
        with pytest.raises(UserError, match="model.attention = sdpa.*does not support"):
            build(replace(section, attention="sdpa"))


@pytest.mark.parametrize("tied", [True, False])
def test_shared_parameters_count_once(tied):
    model = build(ModelSection(architecture="llama", config={**LLAMA, "tie_word_embeddings": tied}))
    whole = sum(value.numel() for value in model.state_dict().values())
    assert count_parameters(model) == whole - 64 * 32 * tied
    assert count_parameters(model, trained=True) == count_parameters(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad = "norm" in name
    assert count_parameters(model, trained=True) == 5 * 32 < count_parameters(model)
    assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) is tied


@pytest.mark.parametrize(("family", "chosen"), [("qwen3_moe", "num_experts_per_tok"), ("gemma4_text", "top_k_experts")])
def test_of_experts_those_are_active_that_a_token_uses(family, chosen):
    given = {**LLAMA, "num_experts": 4, chosen: 1, "moe_intermediate_size": 16}
    if family == "gemma4_text":
        given |= {"enable_moe_block": True, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64}
    model = build(ModelSection(architecture=family, config=given))
    experts = [parameter for name, parameter in model.named_parameters() if ".experts." in name]
    assert len(experts) == 2 * 2 and {parameter.shape[0] for parameter in experts} == {4}
    unused = 3 * sum(map(torch.numel, experts)) // 4
    assert count_parameters(model, active=True) == count_parameters(model) - unused
    model.get_input_embeddings().weight.requires_grad = False
    trained = count_parameters(model, trained=True)
    assert count_parameters(model, trained=True, active=True) == trained - unused < count_parameters(model) - unused


def test_an_encoder_that_would_see_what_it_predicts_is_refused():
    """transformers makes a language model of BERT, and warns; its loss goes to 0 on whatever text."""
    small = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    section = ModelSection(architecture="bert", config=small)
    with pytest.raises(UserError, match="model bert: a bert attends to tokens it should predict; set task=mlm"):
        build(section)
    model = build(replace(section, config=small | {"is_decoder": True})).eval()
    ids = torch.arange(8)[None]
    changed = torch.cat([ids[:, :-1], ids[:, -1:] + 1], 1)
    assert torch.equal(model(input_ids=ids).logits[:, :-1], model(input_ids=changed).logits[:, :-1])
    assert not model_config(section, vocab_size=64, sequence_length=16, model_class=MASKED_LM).is_decoder


def test_positions_of_robertas_kind_begin_after_the_padding_token():
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    given = {"vocab_size": 64, "sequence_length": 16, "model_class": MASKED_LM}
    config = model_config(ModelSection(architecture="roberta", config=shape), given={"pad_token_id": 40}, **given)
    AutoModelForMaskedLM.from_config(config)(input_ids=torch.zeros(1, 16, dtype=torch.long))
    section = ModelSection(architecture="roberta", config={**shape, "max_position_embeddings": 17})
    with pytest.raises(UserError, match="max_position_embeddings = 17, 2 of which stand before the text; shorten"):
        model_config(section, given={"pad_token_id": 1}, **given)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        (ModelSection(architecture="lama"), "model.architecture = lama: .* did you mean llama?"),
        (ModelSection(architecture="llama", config={"hiden_size": 8}), "model.config.hiden_size: .* hidden_size?"),
        (ModelSection(architecture="llama", config={"vocab_size": 10}), "vocab_size = 10: smaller than .* 64 tokens"),
        (
            ModelSection(architecture="llama", config={"max_position_embeddings": 8}),
            "data.sequence_length = 16: longer than the model's max_position_embeddings = 8",
        ),
        (ModelSection(name_or_path="/no/such/folder"), "model.name_or_path = /no/such/folder: "),
        (ModelSection(architecture="llama", config=LLAMA, attention="flash_attention_2"), "model.attention = flash"),
        pytest.param(
            ModelSection(architecture="llama", config=LLAMA, attention="flex_attention"),
            "model.attention = flex_attention: there is no GPU here, .* does not support backward on CPU.* to sdpa",
            marks=pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a GPU here"),
        ),
    ],
)
def test_a_mistake_is_one_line(section, message):
    with pytest.raises(UserError, match=message) as caught:
        build(section)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "given",
    [
        {"load_in_4bit": True, "quant_method": "bitsandbytes"},
        {"quant_method": "fp8", "weight_block_size": [128, 128]},  # transformers makes BF16 of it on a CPU, unasked
    ],
)
def test_a_quantised_base_is_refused(tmp_path, given):
    build(ModelSection(architecture="llama", config=LLAMA)).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**saved, "quantization_config": given}), encoding="utf-8")
    with pytest.raises(UserError) as caught:
        build(ModelSection(name_or_path=str(tmp_path)))
    assert str(caught.value) == (
        f"model.name_or_path = {tmp_path}: its weights are quantised (quantization_config in config.json: "
        f"{given['quant_method']}); give the model in BF16, FP16 or FP32, and set adapter.base = nf4 or int8 (with "
        "adapter.kind = lora) to hold it in 4 or 8 bits"
    )


SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 2}


def llama(*, tied: bool = True) -> torch.nn.Module:
    """A four-block Llama for 64 tokens."""
    section = ModelSection(architecture="llama", config={**SMALL, "tie_word_embeddings": tied})
    config = model_config(section, vocab_size=64, sequence_length=32)
    return build_model(section, config, seed=0, gather=lambda parameters: nullcontext(True)).train()


def test_muon_leaves_heads_and_tables_alone_that_an_adapter_trains_as_copies():
    section = AdapterSection(kind="lora", r=2, modules_to_save=("lm_head", "embed_tokens"))
    model = add_adapter(llama(tied=False), section, seed=0)
    matrices, head, rest = parameter_groups(model, OptimizerSection(name="muon", weight_decay=0.3))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert all(".lora_" in names[id(p)] for p in matrices["params"])
    assert [names[id(p)] for p in head["params"]] == ["lm_head.modules_to_save.default.weight"]
    assert [names[id(p)] for p in rest["params"]] == ["model.embed_tokens.modules_to_save.default.weight"]
    assert (matrices["matrix"], head["matrix"], head["weight_decay"]) == (True, False, 0.3)
    assert (rest["matrix"], rest["weight_decay"]) == (False, 0.0)


@pytest.mark.parametrize(("family", "last"), [("bert", "classifier"), ("roberta", "classifier.out_proj")])
def test_muon_leaves_the_last_layer_of_a_classifier_alone(family, last):
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = AutoConfig.for_model(family, vocab_size=50, num_labels=3, **sizes)
    model = AutoModelForSequenceClassification.from_config(config)
    _, head, _ = parameter_groups(model, OptimizerSection(name="muon", weight_decay=0.3))
    assert [id(p) for p in head["params"]] == [id(model.get_submodule(last).weight)]


def test_an_adapter_takes_the_names_that_the_hub_has_for_fused_experts():
    shape = AutoConfig.for_model("mixtral", **LLAMA, num_key_value_heads=2, num_local_experts=4, vocab_size=64)

    def adapted(*names: str) -> set[str]:
        model = AutoModelForCausalLM.from_config(shape)
        add_adapter(model, AdapterSection(kind="lora", r=2, target_modules=names), seed=0)
        return {name.partition("layers.0.")[2] for name in layers_with_factors(model) if "layers.0." in name}

    experts = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    assert adapted("w1", "w2", "w3", "q_proj") == {*experts, "self_attn.q_proj.weight"}
    for names, problem in ((("w1", "q_proj"), "w1 without also targeting w3"), (("w1", "w3", "v"), "has no module v")):
        with pytest.raises(UserError, match=f"^adapter.target_modules = {', '.join(names)}: .*{problem}"):
            adapted(*names)


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_an_adapter_of_all_linear_layers_trains_every_mixture(kind):
    """Llama 4's and Phi-3.5-MoE's routers are linear layers by class, and return more than a product; the grouped
    projection of DeepSeek V4 has another shape than its weight."""
    model = mixture(kind, KINDS[kind])
    unfit = {name.rpartition(".")[2] for name, module in model.named_modules() if not is_adaptable(module)}
    assert unfit == {"llama4_text": {"router"}, "phimoe": {"router"}, "deepseek_v4": {"o_a_proj"}}.get(kind, set())
    for name in unfit:
        with pytest.raises(UserError, match=f"^adapter.target_modules = v_proj, {name}: .*leave out {name}$"):
            add_adapter(model, AdapterSection(kind="lora", r=2, target_modules=("v_proj", name)), seed=0)
    if kind == "nemotron_h":
        with pytest.raises(UserError, match="'out_proj' is incompatible.*; name some of down_proj, in_proj, k_proj"):
            add_adapter(model, AdapterSection(kind="lora", r=2), seed=0)
        return
    named = {"mistral4": SEQUENCE_CLASSIFICATION, "openai_privacy_filter": TOKEN_CLASSIFICATION}.get(kind, CAUSAL_LM)
    model = add_adapter(model, AdapterSection(kind="lora", r=2), seed=0, model_class=named)
    ids = torch.arange(10).unsqueeze(0)
    further = {"decoder_input_ids": ids} if model.config.is_encoder_decoder else {}
    model(input_ids=ids, **further).logits.float().square().mean().backward()
    assert any(p.grad is not None and p.grad.any() for p in model.parameters() if p.requires_grad)


def test_what_no_text_reaches_keeps_its_values_unless_a_group_says_otherwise():
    """ZeRO gives the optimizer zeros in place of the gradients that these do not get."""
    text = {**LLAMA, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 64}
    seen = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes = {"text_config": text, "vision_config": {**seen, "image_size": 16, "patch_size": 4}}
    shape = AutoConfig.for_model("gemma3", **sizes, mm_tokens_per_image=4, image_token_index=62)
    model = AutoModelForCausalLM.from_config(shape)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model(input_ids=torch.arange(20)[None]).logits.square().mean().backward()
    without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch.optim.AdamW(parameter_groups(model, OptimizerSection(weight_decay=0.5)), lr=0.1).step()
    same = {name for name, parameter in model.named_parameters() if torch.equal(parameter, before[name])}
    assert without and without <= same and "model.language_model.layers.0.mlp.up_proj.weight" not in same
    [note] = unreached_notes(model)
    assert note.startswith("no text reaches model.vision_tower, model.multi_modal_projector: ")
    assert unreached_notes(llama()) == []
    decays = ParameterGroupSection(match="model.vision_tower.*", weight_decay=0.3)
    for section in (OptimizerSection(weight_decay=0.5), OptimizerSection(weight_decay=0.5, groups=(decays,))):
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        decay = {names[key]: group["weight_decay"] for key, group in group_of_each(model, section).items()}
        assert decay == {name: own for name, (own, _) in decay_and_factor(model, section).items()}
        assert any(decay[name] for name in without) == bool(section.groups)
    assert without == unreached(model).keys()


@pytest.mark.parametrize(("auto", "kind"), [("AutoModelForMaskedLM", "ultravbert"), ("AutoModelForCausalLM", "gemma3")])
def test_a_head_over_the_text_decays(auto, kind):
    """UltraVBERT's projection is beside the text model and its encoder of images."""
    with torch.device("meta"):
        model = getattr(transformers, auto).from_config(AutoConfig.for_model(kind))
    section = OptimizerSection(weight_decay=0.5)
    decay = {name: own for name, (own, _) in decay_and_factor(model, section).items()}
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert decay == {names[key]: group["weight_decay"] for key, group in group_of_each(model, section).items()}
    idle = unreached(model)
    assert idle and not any(decay[name] for name in idle)
    assert all(name.startswith("model.") for name in idle)


def test_a_group_of_the_config_has_its_own_rate_and_decay_and_the_last_match_counts():
    groups = (
        ParameterGroupSection(match="model.layers.*", learning_rate=0.002),
        ParameterGroupSection(match="model.layers.1.*norm*", weight_decay=0.5),
    )
    model = llama()
    section = OptimizerSection(learning_rate=0.008, weight_decay=0.3, groups=groups)
    found = {id(p): group for group in parameter_groups(model, section) for p in group["params"]}
    assert len(found) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        last = "layers.1." in name and "norm" in name
        factor = 0.25 if ".layers." in name and not last else 1.0
        decay = 0.5 if last else 0.3 if name.endswith("proj.weight") else 0.0
        assert (found[id(parameter)]["lr_factor"], found[id(parameter)]["weight_decay"]) == (factor, decay), name


def test_a_group_of_the_config_that_matches_nothing_is_refused():
    groups = (ParameterGroupSection(match="model.layer.*"),)
    with pytest.raises(UserError, match=r"'model.layer.\*' is the last match of no trained.*model.embed_tokens"):
        parameter_groups(llama(), OptimizerSection(groups=groups))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_loss_is_the_fp64_sum_over_the_labels_that_count(dtype):
    generator = torch.Generator().manual_seed(0)
    logits = (torch.randn(3, 5, 11, generator=generator) * 20).to(dtype)
    labels = torch.randint(11, (3, 5), generator=generator)
    labels[0, :3] = -100
    rows = torch.log_softmax(logits.double(), dim=-1)
    expected = -sum(rows[b, t, labels[b, t]] for b in range(3) for t in range(5) if labels[b, t] != -100)
    assert label_loss_sum(logits, labels).item() == pytest.approx(expected.item(), rel=1e-6)


def test_a_fully_masked_batch_has_a_zero_loss_with_zero_gradients():
    logits = torch.randn(2, 3, 7, requires_grad=True)
    loss = label_loss_sum(logits, torch.full((2, 3), -100))
    loss.backward()
    assert loss.item() == 0.0
    assert torch.equal(logits.grad, torch.zeros_like(logits))


class Letters:
    """The little of a tokenizer that sampling needs."""

    eos_token_id = 0

    def __call__(self, text, **options):
        return type("Encoded", (), {"input_ids": [ord(c) % 64 for c in text]})

    def decode(self, ids, **options):
        return "".join(chr(48 + int(i)) for i in ids)


def test_a_sample_is_as_long_as_asked_repeatable_and_leaves_no_trace():
    model = llama()
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    options = {"prompt": "abc", "tokens": 9, "temperature": 0.8, "device": torch.device("cpu")}
    first = sample_text(model, Letters(), seed=1, **options)
    assert torch.equal(torch.rand(2), expected)
    assert len(first) == 12
    assert first == sample_text(model, Letters(), seed=1, **options)
    assert first != sample_text(model, Letters(), seed=2, **options)
    assert sample_text(model, Letters(), seed=1, begin=[7], **options).startswith(chr(48 + 7) + first[:3])
    own = model.generation_config = GenerationConfig(repetition_penalty=9.0, num_beams=2, top_p=0.1)  # of a base
    assert first == sample_text(model, Letters(), seed=1, **options) and model.generation_config is own
    assert model.training


def test_a_sample_ends_with_the_positions_that_a_model_has_a_table_of():
    """Beyond them GPT-2 fails, on a GPU for good; a rotation has no end."""
    options = {"temperature": 0.8, "seed": 1, "device": torch.device("cpu")}
    section = ModelSection(architecture="gpt2", config={"n_embd": 32, "n_layer": 1, "n_head": 2})
    model = build_model(section, model_config(section, vocab_size=64, sequence_length=16), seed=0).train()
    assert len(sample_text(model, Letters(), prompt="abc", tokens=40, **options)) == 16
    with pytest.raises(ValueError, match="^its prompt of 16 tokens leaves none of the model's 16 positions$"):
        sample_text(model, Letters(), prompt="a" * 16, tokens=40, **options)
    assert model.training
    assert len(sample_text(llama(), Letters(), prompt="abc", tokens=40, **options)) == 43


_GROUPED = Case("", "").config
_WIDTH = {"hidden_size": 32, "num_hidden_layers": 2}
OTHERS = (
    Case("cohere", "norms of two dimensions", {**_GROUPED, "use_qk_norm": True}),
    Case("falcon_mamba", "Falcon Mamba", _WIDTH),
    Case("mamba2", "Mamba 2", {**_WIDTH, "num_heads": 4, "head_dim": 16, "n_groups": 1, "state_size": 8}),
    Case("jamba", "Jamba", {**_GROUPED, "num_experts": 4, "attn_layer_period": 2, "attn_layer_offset": 1}),
    Case("zamba", "Zamba", {**_GROUPED, "num_hidden_layers": 6, "attn_layer_period": 3, "attn_layer_offset": 2}),
    Case(
        "dbrx",
        "DBRX, all experts of a layer in one tensor of two dimensions",
        {"d_model": 32, "n_heads": 4, "n_layers": 2, "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4}}
        | {"ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "hidden_size": 32}},
    ),
    Case("deepseek_v4", "hyper-connections", _GROUPED),
    Case("kimi_linear", "Kimi Linear, whose A_log has four dimensions", _GROUPED),
    Case("recurrent_gemma", "block-diagonal gates", {**_GROUPED, "lru_width": 32, "num_hidden_layers": 3}),
    Case("rwkv", "RWKV", _WIDTH),
    Case("jetmoe", "experts called input_linear", {**_GROUPED, "num_local_experts": 4, "kv_channels": 8}),
)
_LLAMA = "down_proj gate_proj k_proj o_proj q_proj up_proj v_proj"
_MOE = "experts.down_proj experts.gate_up_proj gate k_proj o_proj q_proj v_proj"
_NEOX = "dense dense_4h_to_h dense_h_to_4h query_key_value"
_MAMBA = "dt_proj in_proj out_proj x_proj"
_MLA = "down_proj experts.down_proj experts.gate_up_proj gate gate_proj"
CLASSES = {
    "gpt2": ("c_attn c_fc c_proj", ""),
    "gpt_neox": (_NEOX, "lm_head"),
    "opt": ("fc1 fc2 k_proj out_proj q_proj v_proj", ""),
    "bloom": (_NEOX, ""),
    "falcon": (_NEOX, ""),
    "starcoder2": ("c_fc c_proj k_proj o_proj q_proj v_proj", ""),
    "llama": (_LLAMA, "lm_head"),
    "mistral": (_LLAMA, "lm_head"),
    "mixtral": (_MOE, "lm_head"),
    "gemma": (_LLAMA, ""),
    "gemma2": (_LLAMA, ""),
    "gemma3_text": (_LLAMA, ""),
    "phi3": ("down_proj gate_up_proj o_proj qkv_proj", "lm_head"),
    "qwen2": (_LLAMA, "lm_head"),
    "qwen3": (_LLAMA, "lm_head"),
    "qwen3_moe": (_MOE, "lm_head"),
    "qwen3_next": (
        f"{_MOE} down_proj gate_proj up_proj in_proj_ba in_proj_qkvz out_proj shared_expert_gate",
        "conv1d lm_head",
    ),
    "olmo2": (_LLAMA, "lm_head"),
    "granite": (_LLAMA, "lm_head"),
    "cohere": (_LLAMA, ""),
    "smollm3": (_LLAMA, ""),
    "deepseek_v3": (f"{_MLA} kv_a_proj_with_mqa kv_b_proj o_proj q_a_proj q_b_proj up_proj", "lm_head"),
    "gpt_oss": ("experts.down_proj experts.gate_up_proj k_proj o_proj q_proj router v_proj", "lm_head"),
    "mamba": (_MAMBA, "conv1d"),
    "falcon_mamba": (_MAMBA, "conv1d"),
    "mamba2": ("in_proj out_proj", "conv1d lm_head"),
    "jamba": (f"{_LLAMA} {_MAMBA} experts.down_proj experts.gate_up_proj router", "conv1d lm_head"),
    "zamba": (f"{_LLAMA} in_proj linear out_proj", "conv1d mamba.dt_proj_weight mamba.x_proj_weight"),
    "dbrx": ("Wqkv layer out_proj", "lm_head mlp.v1 mlp.w1 mlp.w2"),
    "deepseek_v4": (f"{_MLA} kv_proj o_a_proj o_b_proj q_a_proj q_b_proj up_proj", "lm_head"),
    "kimi_linear": (f"{_MOE} down_proj gate_proj up_proj b_proj f_a_proj f_b_proj g_a_proj g_b_proj", "conv1d lm_head"),
    "recurrent_gemma": (
        f"{_LLAMA} linear_out linear_x linear_y",
        "conv_1d rg_lru.input_gate_weight rg_lru.recurrent_gate_weight",
    ),
    "rwkv": ("key output receptance value", "head"),
    "jetmoe": ("input_linear kv_proj layer output_linear", ""),
}
"""Architecture to what Muon takes, and to what only decays: the last two parts of names, without `weight`.

All else does neither, embeddings and the head that shares their weight among them.
"""
_NEVER = re.compile(r"norm|ln_|_ln|ln\d|emb|wte|wpe|bias|A_log|\.D$|dt_bias|sinks|scale|time_|recurrent_param|_hc|hc_")


@pytest.mark.parametrize("case", [*CASES, *OTHERS], ids=lambda case: f"{case.architecture} {case.name}")
def test_what_decays_and_what_muon_takes_is_what_layers_multiply_their_inputs_by(case):
    section = ModelSection(architecture=case.architecture, config=case.config)
    model = empty_model(section, model_config(section, vocab_size=64, sequence_length=32))
    optimizer = OptimizerSection(name="muon", weight_decay=0.3)
    groups, by_oracle = group_of_each(model, optimizer), optimizer_of(model, optimizer).param_groups
    oracle = {id(p): (group["matrix"], group["weight_decay"]) for group in by_oracle for p in group["params"]}
    found: dict[tuple[bool, float], set[str]] = {}
    for name, parameter in model.named_parameters():
        group = groups[id(parameter)]["matrix"], groups[id(parameter)]["weight_decay"]
        assert group == oracle[id(parameter)], f"{name}: the parity check has another"
        parts = [part for part in name.removesuffix(".weight").split(".") if not part.isdigit()]
        raw = not name.endswith(".weight")
        found.setdefault(group, set()).add(".".join(parts[-2:] if raw else parts[-1:]))
    assert found.keys() <= {(True, 0.3), (False, 0.3), (False, 0.0)}
    matrices, decayed = (set(names.split()) for names in CLASSES[case.architecture])
    assert found[True, 0.3] == matrices
    assert found.get((False, 0.3), set()) == decayed
    assert [name for name in matrices | decayed if _NEVER.search(name)] == []
    assert [name for name in found[False, 0.0] if not _NEVER.search(name)] == []


@pytest.mark.parametrize("sharded", [False, True])
def test_weights_from_a_hub_are_identified_by_what_they_are(tmp_path, monkeypatch, sharded):
    """Another commit with the same weights is the same base, and so is a copy in a folder; other weights are not."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    repository = tmp_path / "models--me--base"

    def snapshot(commit: str, weights: str) -> Path:
        folder = repository / "snapshots" / (commit * 40)
        names = ["part-1.safetensors", "part-2.safetensors"] if sharded else ["model.safetensors"]
        texts = {"README.md": commit} | {name: f"{weights} of {name}" for name in names}
        if sharded:
            index = {"metadata": {}, "weight_map": dict(zip("ab", names, strict=True))}
            texts["model.safetensors.index.json"] = json.dumps(index)
        for name, text in texts.items():
            blob = repository / "blobs" / hashlib.sha256(text.encode()).hexdigest()
            for path in (blob, folder / name, repository / "refs" / "main"):
                path.parent.mkdir(parents=True, exist_ok=True)
            blob.write_text(text)
            (folder / name).symlink_to(f"../../blobs/{blob.name}")
        (repository / "refs" / "main").write_text(folder.name)
        return folder

    found = []
    for commit, weights in (("a", "first"), ("b", "first"), ("c", "second")):
        copied = snapshot(commit, weights)
        found.append(weights_identity("me/base"))
        assert weights_identity(str(copied)) == found[-1]
    assert found[0] == found[1] != found[2] and found[0].startswith("sha256:")
    with pytest.raises(OSError, match="couldn't find them"):
        weights_identity("me/none")
