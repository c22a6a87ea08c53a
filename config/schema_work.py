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
    activation_checkpointing: Literal["none", "full", "selective", "attention", "ops", "budget"] = "none"
    """[choice] What the backward pass computes again instead of keeping it: full every transformer block, selective
    every model.checkpointing_every-th, attention the attention of every block, ops all but the results of matmuls and
    fused attention, budget as few blocks as model.activation_memory_gib allows."""
    checkpointing_every: int = limit(2, at_least=1)
    """[blocks] Of so many, selective recomputes one: 2 is every second block, for about half the saving of full at half
    its recomputation."""
    activation_memory_gib: float | None = limit(None, above=0.0)
    """[GiB per rank] For budget: what the activations of one micro-batch may take, logits included. Counted in forward
    passes at the start."""
    checkpointing_reentrant: bool = False
    """[true or false] Use torch's reentrant checkpointing (the older of its two implementations)."""
    compile: bool = False
    """[true or false] Compile the transformer blocks with torch.compile, at ZeRO 0 to 2 (docs/compile.md)."""
    kernels: Literal["auto", "torch", "liger"] = "auto"
    """[choice] What computes norms, rotary embeddings and gated activations: torch, or the Triton kernels of
    liger-kernel, which must be installed, on a GPU; auto is liger where it can be had (docs/kernels.md)."""
    loss: Literal["auto", "full", "chunked"] = "auto"
    """[choice] full computes all logits of a micro-batch at once; chunked computes them and their gradients for some
    tokens at a time, so that they are never all in memory; auto is chunked where a micro-batch has many logits and the
    model allows it (docs/loss.md)."""
    loss_chunk_tokens: int = limit(0, at_least=0)
    """[tokens] Of one chunk; 0: by the size of the vocabulary."""


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
    document_masking: bool = False
    """[true or false] Keep packed documents apart: attention stops where a document ends, positions start at 0 again,
    and its end does not predict the next one. false: a sequence is attended to as a whole, as GPT-3's were."""
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
