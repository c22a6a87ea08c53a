"""Every causal and masked model of transformers that a few keys build, trained for three steps: the self-check says
nothing of a sound one."""

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM
from transformers.models.auto import modeling_auto

from config.task import KINDS
from data.text.prepare import prepare
from tests.modeling import model_cases
from tests.support.jobs.process_group import ProcessGroup
from tests.support.models.mixtures import keys_of
from tests.training import observer_cases
from tests.training.observer_cases import cast
from tracking.compare.surviving import read_events

CAUSAL = sorted(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
MASKED = sorted(modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES)
GENERIC: dict[str, Any] = dict.fromkeys(("n_layer", "num_layers", "n_layers", "decoder_layers", "encoder_layers"), 2)
GENERIC |= dict.fromkeys(("d_model", "n_embd", "word_embed_proj_dim"), 32)
GENERIC |= dict.fromkeys(("decoder_ffn_dim", "encoder_ffn_dim", "ffn_dim", "d_ff"), 48)
GENERIC |= dict.fromkeys(("n_head", "n_heads", "decoder_attention_heads", "encoder_attention_heads"), 4)
GENERIC |= dict.fromkeys(("mamba_n_heads", "mamba_d_head", "state_size"), 8)
_SPECIAL = {"bos_token_id": 0, "eos_token_id": 0}
OWN: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_groups": 1},
    "codegen": {"rotary_dim": 8},
    "cwm": _SPECIAL,
    "esmc": {"num_key_value_heads": 4},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {"num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"]}
    | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 300, "laurel_rank": 8}
    | {"activation_sparsity_pattern": [0.0, 0.0]},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "gptj": {"rotary_dim": 8},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "minimax": {"layer_types": ["full_attention"] * 2},
    "modernbert-decoder": _SPECIAL,
    "mpnet": {"pad_token_id": 1},
    "recurrent_gemma": {"lru_width": 32, "num_hidden_layers": 3},
    "zamba": {"num_hidden_layers": 6, "attn_layer_period": 3, "attn_layer_offset": 2},
}
AHEAD = ("cpmant", "doge")
"""Causal models by name that attend to later tokens, which the check says."""
MIXED = "its own code mixes dtypes in BF16"
NO_KEYS = "these keys do not build it"
SKIPPED = {
    **dict.fromkeys(("ctrl", "openai-gpt", "xglm", "fnet", "mra"), MIXED),
    **dict.fromkeys(("musicgen", "musicgen_melody", "xmod"), "it needs more than text"),
    **dict.fromkeys(("cohere_compass_text", "mobilebert", "neomme", "prophetnet", "reformer", "squeezebert"), NO_KEYS),
    **dict.fromkeys(("xlnet", "zamba2"), NO_KEYS),
    "bert-generation": "it is refused, since it attends to later tokens",
    "ibert": "its ranks have ranges of their own, which the check says",
}
LARGEST = 8e6
"""[parameters] Of models that the keys make small."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("every")
    observer_cases.heavy_tailed(folder, "base", observer_cases.NARROW)
    observer_cases.write_text(folder)
    prepare(observer_cases.resolve(str(folder), "prepared", cast("fp32", 2)).config.data, progress=False)
    return folder


def keys_for(kind: str) -> dict[str, Any]:
    """The keys above that the config of an architecture has."""
    made = CONFIG_MAPPING[kind]
    defaults, other = made().to_dict(), made.attribute_map
    given = {key: value for key, value in (GENERIC | keys_of(kind)).items() if key in defaults or key in other}
    found = {other.get(key, key): value for key, value in (given | OWN.get(kind, {})).items()}
    return {key: value for key, value in found.items() if key != "vocab_size"}


def shape_of(kind: str, classes: Any) -> dict[str, Any]:
    """Keys of `model.config` for a small model; skips the test where there are none."""
    if kind in SKIPPED or "text_config" in CONFIG_MAPPING[kind].sub_configs:
        pytest.skip(SKIPPED.get(kind, "it needs more than text"))
    found = keys_for(kind)
    with torch.device("meta"):
        model = classes.from_config(AutoConfig.for_model(kind, **found, vocab_size=300))
    if (size := sum(parameter.numel() for parameter in model.parameters())) > LARGEST:
        pytest.skip(f"{size:,} parameters")
    return found


def events_of(pair: ProcessGroup, folder: Path, kind: str, shape: dict[str, Any], *overrides: str) -> list[Any]:
    name = f"{kind}-{len(overrides)}"
    given = ["model.name_or_path=null", f"model.architecture={kind}", f"model.config={json.dumps(shape)}"]
    given += [*cast("bf16", 2), "model.loss=auto", "model.loss_chunk_tokens=0", *overrides]
    pair.run(observer_cases.planted_job, seconds=300.0, folder=str(folder), name=name, overrides=given)
    return list(read_events(folder / "runs" / name / "events.jsonl"))


def small(model_class: str, kind: str) -> dict[str, Any] | None:
    """The keys of a small model; None where they do not build one."""
    with suppress(Exception), torch.device("meta"):
        keys = keys_for(kind) | {"vocab_size": 300}
        model = getattr(transformers, model_class).from_config(AutoConfig.for_model(kind, **keys))
        return keys if sum(parameter.numel() for parameter in model.parameters()) <= LARGEST else None
    return None


@pytest.mark.slow
@pytest.mark.parametrize("model_class", KINDS)
def test_a_new_model_starts_alike_in_whole_and_in_parts(solo: ProcessGroup, model_class: str) -> None:
    kinds = getattr(transformers, model_class)._model_mapping._model_mapping
    shapes = [(model_class, kind, keys) for kind in kinds if (keys := small(model_class, kind)) is not None]
    assert len(shapes) > 10
    assert solo.run(model_cases.apart_at_zero3, shapes=shapes, seconds=600.0) == [{}]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in CAUSAL if kind not in MASKED or kind in ("bart", "mbart", "mvp")])
def test_nothing_is_said_of_a_sound_causal_model(pair: ProcessGroup, folder: Path, kind: str) -> None:
    events = events_of(pair, folder, kind, shape_of(kind, AutoModelForCausalLM))
    warnings = [event["reason"] for event in events if event["event"] == "warning"]
    assert sum(event["event"] == "self_check" for event in events) == observer_cases.STEPS
    assert all("causal mask" in reason for reason in warnings) and bool(warnings) == (kind in AHEAD)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MASKED)
def test_nothing_is_said_of_a_sound_masked_model(pair: ProcessGroup, folder: Path, kind: str) -> None:
    events = events_of(pair, folder, kind, shape_of(kind, AutoModelForMaskedLM), "task=mlm")
    assert sum(event["event"] == "self_check" for event in events) == observer_cases.STEPS
    assert not [event["reason"] for event in events if event["event"] == "warning"]
