"""The run config's sections that say what work a step does: the model, the data, the batch.

As in `config.schema`, the string under a field is its documentation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from config.limits import limit


@dataclass(frozen=True)
class ModelSection:
    """Which Hugging Face causal language model is trained, and how its activations are kept."""

    name_or_path: str | None = None
    """[path or hub id] Model whose config and weights are loaded. Excludes model.architecture."""
    architecture: str | None = None
    """[model_type] Hugging Face model type trained from scratch, such as llama, qwen3 or gpt2."""
    config: dict[str, Any] = field(default_factory=dict)
    """[mapping] Arguments of that architecture's Hugging Face config, such as hidden_size. vocab_size defaults to the
    tokenizer's, max_position_embeddings to data.sequence_length. With name_or_path: values that override its config."""
    trust_remote_code: bool = False
    """[true or false] Run model code that comes with a hub repository. Never done unless set here."""
    attention: str = "sdpa"
    """[implementation] Hugging Face attention implementation: sdpa, eager, flash_attention_2, flex_attention."""
    activation_checkpointing: Literal["none", "full", "selective"] = "none"
    """[choice] none keeps every activation; full recomputes every transformer block in the backward pass; selective
    recomputes every second block, for about half the saving at half the recomputation."""
    checkpointing_reentrant: bool = False
    """[true or false] Use torch's reentrant checkpointing (the older of its two implementations)."""


@dataclass(frozen=True)
class DataSection:
    """Where the text comes from and how it becomes token sequences."""

    source: Literal["stdlib", "text", "jsonl", "parquet", "hub"] = "stdlib"
    """[choice] stdlib: the .py files of the running Python, on every machine. text, jsonl, parquet: files at data.path
    (text: one document a file). hub: the dataset data.path of the Hugging Face hub, or a local dataset folder."""
    path: str | None = None
    """[path, glob or hub id] File, folder or glob of text, jsonl and parquet; the dataset's id for hub."""
    name: str | None = None
    """[text] Configuration name of a hub dataset."""
    split: str = "train"
    """[text] Split of a hub dataset."""
    text_field: str = "text"
    """[text] Field that holds the document, for jsonl, parquet and hub."""
    tokenizer: str = "bpe:4096"
    """[bytes | bpe:<vocab> | path | hub id] bytes: 256 byte tokens and the end of a document. bpe:<vocab>: a
    byte-level BPE of that vocabulary size, trained on this data. Otherwise a Hugging Face tokenizer."""
    sequence_length: int = limit(512, at_least=2)
    """[tokens] Length of one training sequence; documents are packed end to end to fill it."""
    validation_fraction: float = limit(0.01, at_least=0.0, below=1.0)
    """[fraction] Share of documents held out for evaluation, drawn by a hash of their text."""
    cache_dir: str = "~/.cache/mantissa"
    """[path] Folder of prepared tokens; reused by fingerprint of source, tokenizer and split."""
    workers: int = limit(2, at_least=1)
    """[processes] Processes that tokenize. The tokens do not depend on their number."""
    wait_minutes: float = limit(60.0, above=0.0)
    """[minutes] How long a process waits for another one that is preparing the same data."""
    verify: bool = True
    """[true or false] Check the sha256 of prepared shards before training; sizes are always checked."""


@dataclass(frozen=True)
class BatchSection:
    """How many sequences an optimizer step sees, and how they are cut into micro-batches."""

    global_size: int = limit(8, at_least=1)
    """[sequences] Sequences in one optimizer step over all ranks; does not change with the number of processes."""
    micro_size: int = limit(1, at_least=1)
    """[sequences] Sequences in one forward pass on one rank. Accumulation is global_size / (micro_size x ranks)."""
