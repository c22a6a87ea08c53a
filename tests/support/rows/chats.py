"""Small chats, a tokenizer and a base model for them, as a user would have them in files."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.support.models.small_models import FAMILIES
from tests.support.rows import prompts
from tests.support.rows.chat_templates import SHAPES
from tests.support.rows.jsonl import write_jsonl

SHAPE = SHAPES["chatml"]
WORDS = [*prompts.WORDS, "gradient", "adam", "half", "precision", "run", "save", "load", "test"]
VOCABULARY = 320
LENGTH = 96
"""[tokens] Of a sequence; no row is longer."""


def write_chats(path: Path, rows: int, *, seed: int = 0) -> Path:
    """Write a JSONL file with this many conversations of one or two exchanges."""
    draw = random.Random(seed)

    def turn(role: str, longest: int) -> dict[str, str]:
        return {"role": role, "content": " ".join(draw.choices(WORDS, k=draw.randint(1, longest)))}

    def turns() -> list[dict[str, str]]:
        return [turn(role, longest) for _ in range(draw.choice([1, 1, 2])) for role, longest in ASKED]

    return write_jsonl(path, ({"messages": turns()} for _ in range(rows)))


def write_pairs(path: Path, pairs: int, *, seed: int = 0) -> Path:
    """Write a JSONL file with this many pairs of answers to a question, in lists of messages."""
    draw = random.Random(seed)

    def said(longest: int) -> str:
        return " ".join(draw.choices(WORDS, k=draw.randint(1, longest)))

    rows = []
    for _ in range(pairs):
        row = {"prompt": [{"role": "user", "content": said(12)}]}
        row |= {side: [{"role": "assistant", "content": f"{side[0]} {said(16)}"}] for side in ("chosen", "rejected")}
        rows.append(row)
    return write_jsonl(path, rows)


ASKED = (("user", 5), ("assistant", 8))


def byte_level(size: int, special: Sequence[str], text: str) -> Tokenizer:
    """A byte-level BPE tokenizer of so many tokens, trained on a text."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=[*special], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([text] * 2, trainer=trainer)
    return made


def unigram(special: Sequence[str]) -> Tokenizer:
    """T5's kind: a piece for each printable ASCII character, and one for each control token."""
    pieces = [*((token, 0.0) for token in special), *((piece, -5.0) for piece in ["\u2581", *map(chr, range(33, 127))])]
    made = Tokenizer(models.Unigram(pieces, unk_id=special.index("<unk>")))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Metaspace(prepend_scheme="first")
    made.add_special_tokens([*special])
    return made


def write_base(folder: Path, family: str = "llama", *, seed: int = 0, **config: Any) -> Path:
    """A model of a few thousand random weights with a tokenizer that has a chat template, as `save_pretrained` does.

    config: further settings of the model.
    """
    tokenizer = byte_level(VOCABULARY, ["</s>", *SHAPE.special], " ".join(WORDS))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", clean_up_tokenization_spaces=False)
    fast.chat_template = SHAPE.jinja
    fast.save_pretrained(folder)
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 1, "vocab_size": VOCABULARY, "max_position_embeddings": 128}
    if family == "gpt2":
        sizes |= {"n_positions": 128}
    given = {"bos_token_id": None, "eos_token_id": fast.eos_token_id, "tie_word_embeddings": False}
    extra = {key: value for key, value in FAMILIES.get(family, {}).items() if key != "n_positions"}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**sizes, **given, **extra, **config}))
    model.save_pretrained(folder)
    return folder


def write_folder(folder: Path, family: str = "llama", **config: Any) -> Path:
    """A base, 60 chats and 40 pairs."""
    write_base(folder / "base", family, **config)
    write_chats(folder / "chats.jsonl", 60)
    write_pairs(folder / "pairs.jsonl", 40)
    return folder


def write_teacher(folder: Path, **sizes: int) -> None:
    """A base of other weights that decides as a trained one does: small ones give nearly equal probabilities."""
    model = AutoModelForCausalLM.from_pretrained(write_base(folder, seed=1, **sizes))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5 if parameter.dim() == 2 else 1)
    model.save_pretrained(folder)


def with_own_code(base: Path) -> Path:
    """Give a Llama's folder classes of its own, in a file that transformers runs only if it is trusted."""
    code = "class {0}({1}):\n    model_type = 'own'\n"
    names = {"AutoConfig": ("OwnConfig", "LlamaConfig"), "AutoModelForCausalLM": ("OwnModel", "LlamaForCausalLM")}
    own, model = (code.format(*each) for each in names.values())
    imports = "from transformers import LlamaConfig, LlamaForCausalLM\n"
    (base / "own.py").write_text(f"{imports}{own}{model}    config_class = OwnConfig\n", encoding="utf-8")
    shape = json.loads((base / "config.json").read_text(encoding="utf-8"))
    shape |= {"model_type": "own", "auto_map": {auto: f"own.{mine}" for auto, (mine, _) in names.items()}}
    (base / "config.json").write_text(json.dumps(shape), encoding="utf-8")
    return base
