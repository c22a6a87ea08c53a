"""Small rows with labels, a WordPiece tokenizer and encoders of random weights for them, as a user's files."""

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import AutoConfig, BertTokenizerFast, PreTrainedTokenizerFast

from tests.support.rows.chats import WORDS
from tests.support.rows.jsonl import write_jsonl

LABELS = ("good", "bad", "odd")
LENGTH = 40
"""[tokens] Of a sequence; no row is longer."""
_SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_PIECES = ("##s", "##ing", "##ed", "##ly", "##ness", "un", "re")
FAMILIES: dict[str, dict[str, Any]] = {
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "deberta-v2": {
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
        "relative_attention": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_buckets": 8,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
    },
    "modernbert": {"local_attention": 8},
}
"""Without dropout."""


def tokenizer() -> PreTrainedTokenizerFast:
    """BERT's kind: words in pieces, between [CLS] and [SEP]."""
    pieces = [
        *_SPECIAL,
        *_PIECES,
        *WORDS,
        *"abcdefghijklmnopqrstuvwxyz",
        *(f"##{c}" for c in "abcdefghijklmnopqrstuvwxyz"),
    ]
    vocabulary = {piece: number for number, piece in enumerate(dict.fromkeys(pieces))}
    made = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return BertTokenizerFast(tokenizer_object=made)


def sizes(family: str) -> dict[str, Any]:
    """Arguments of the model's config: two blocks of width 32."""
    given = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    return given | FAMILIES[family]


def write_encoder(folder: Path, family: str = "bert", auto: str = "AutoModelForMaskedLM", *, seed: int = 0) -> Path:
    """A model of a few thousand random weights with its tokenizer, as `save_pretrained` does."""
    made = tokenizer()
    made.save_pretrained(folder)
    torch.manual_seed(seed)
    given = sizes(family) | {"vocab_size": len(made), "max_position_embeddings": 64, "pad_token_id": made.pad_token_id}
    given |= {"bos_token_id": None, "eos_token_id": None, "cls_token_id": 2, "sep_token_id": 3}
    getattr(transformers, auto).from_config(AutoConfig.for_model(family, **given)).save_pretrained(folder)
    return folder


def words(draw: random.Random, most: int) -> list[str]:
    """At most this many words, some of several pieces."""
    return [draw.choice(WORDS) + draw.choice(["", "", "s", "ing"]) for _ in range(draw.randint(1, most))]


def rows(kind: str, count: int, *, seed: int = 0, pair: bool = False, labels: Sequence[str] = LABELS) -> list[dict]:
    """Rows of a classify.kind. The label follows from the words, so that it can be learned."""
    draw, found = random.Random(seed), []
    for _ in range(count):
        some = words(draw, 12)
        named = [labels[len(word) % len(labels)] for word in some]
        row: dict[str, Any] = {"tokens": some, "tags": named} if kind == "token" else {"text": " ".join(some)}
        if pair:
            row["other"] = " ".join(words(draw, 6))
        if kind == "sequence":
            row["label"] = named[0]
        if kind == "regression":
            row["label"] = round(draw.gauss(300, 5), 3)  # BF16 has steps of 2 there
        found.append(row)
    return found


def write_rows(path: Path, kind: str, count: int, **options: Any) -> Path:
    """The same as a JSONL file."""
    return write_jsonl(path, rows(kind, count, **options))
