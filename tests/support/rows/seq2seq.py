"""Small rows of sources and targets, and encoder-decoders of random weights with a tokenizer, as a user's files."""

import random
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import processors
from transformers import AutoConfig, AutoModelForSeq2SeqLM, PreTrainedTokenizerFast

from tests.support.rows.chats import WORDS, byte_level
from tests.support.rows.jsonl import write_jsonl

VOCABULARY = 320
SOURCE, TARGET = 24, 40
"""[tokens] Of the longest source and the longest target."""
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 2}
_T5 |= {"dropout_rate": 0.0, "decoder_start_token_id": 0, "relative_attention_num_buckets": 8}
FAMILIES: dict[str, dict[str, Any]] = {
    "t5": _T5,
    "t5-v1.1": _T5 | {"feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "bart": {
        "d_model": 32,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "max_position_embeddings": 64,
        **{f"{side}_layers": 2 for side in ("encoder", "decoder")},
        **{f"{side}_attention_heads": 2 for side in ("encoder", "decoder")},
        "dropout": 0.0,
        "decoder_start_token_id": 1,
        "bos_token_id": 3,
        "forced_eos_token_id": 1,
    },
}
"""Without dropout. t5-v1.1 has a head of its own in its files, as Flan-T5 and mT5."""


def tokenizer(family: str = "t5") -> PreTrainedTokenizerFast:
    """T5's kind puts </s> behind a text, BART's also <s> before it."""
    made = byte_level(VOCABULARY, ["<pad>", "</s>", "<unk>", "<s>"], " ".join(WORDS))
    single = "<s> $A </s>" if family == "bart" else "$A </s>"
    special = [("<s>", 3), ("</s>", 1)]
    made.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="</s>", pad_token="<pad>", clean_up_tokenization_spaces=False
    )


def write_model(folder: Path, family: str = "t5", *, seed: int = 0, **config: Any) -> Path:
    """A model of a few thousand random weights with its tokenizer, as `save_pretrained` does."""
    tokenizer(family).save_pretrained(folder)
    torch.manual_seed(seed)
    given = {"vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": 1} | FAMILIES[family] | config
    shape = AutoConfig.for_model(family.removesuffix("-v1.1"), **given)
    AutoModelForSeq2SeqLM.from_config(shape).save_pretrained(folder)
    if family == "t5-v1.1":
        weights = load_file(folder / "model.safetensors")
        weights["lm_head.weight"] = torch.randn_like(weights["shared.weight"]) * shape.d_model**-0.5
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def rows(count: int, *, seed: int = 0) -> list[dict[str, str]]:
    """The target has the words of the source in their order backwards, so that it can be learned."""
    draw, found = random.Random(seed), []
    for _ in range(count):
        some = draw.choices(WORDS, k=draw.randint(1, 12))
        found.append({"prompt": " ".join(some), "completion": " ".join(reversed(some[: draw.randint(1, 12)]))})
    return found


def write_rows(path: Path, count: int, *, seed: int = 0) -> Path:
    """The same as a JSONL file."""
    return write_jsonl(path, rows(count, seed=seed))
