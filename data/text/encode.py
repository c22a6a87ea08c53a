"""Code of the worker processes of a preparation: text to token ids, and the training of a BPE.

Imports little on purpose: a worker is a fresh interpreter (`workers`), so that it inherits neither torch's threads nor
locks held in the parent, and it should start in a fraction of a second.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_DOCUMENT = "<|endoftext|>"
PIECE_CHARACTERS = 1 << 18
"""[characters] Longer documents are encoded in pieces cut after a line end: the tokenizer needs hundreds of bytes
of memory for each token, and one file may be a whole corpus."""

_worker: _Encoder | None = None


@dataclass(frozen=True)
class Encoded:
    """Token ids of the documents of one split in one batch, each document ended by the end-of-document token."""

    tokens: np.ndarray
    """(tokens,) uint16 or uint32"""
    documents: int
    text_bytes: int
    """[bytes] of UTF-8"""


class EncodedCodec:
    """Writes batches of documents and their encodings (`batch_results`)."""

    def pack(self, batch: list[str]) -> bytes:
        """JSON of the documents."""
        return json.dumps(batch).encode()

    def tensors(self, result: tuple[Encoded, Encoded]) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """The tokens of both splits, and what they are counted as."""
        train, validation = result
        facts = {"documents": [part.documents for part in result], "text_bytes": [part.text_bytes for part in result]}
        return {"train": train.tokens, "validation": validation.tokens}, facts

    def result(self, tensors: Mapping[str, np.ndarray], facts: Mapping[str, Any]) -> tuple[Encoded, Encoded]:
        """(training, validation)"""
        counts = zip(facts["documents"], facts["text_bytes"], strict=True)
        train, validation = (
            Encoded(tensors[split], *of_split) for split, of_split in zip(("train", "validation"), counts, strict=True)
        )
        return train, validation


@dataclass(frozen=True)
class _Encoder:
    tokenizer: Tokenizer
    end_of_document: int
    dtype: str
    validation_fraction: float
    byte_ids: np.ndarray | None
    """(256,) token of each byte for the tokenizer `bytes`, which is applied by this table alone; else None."""


def is_validation(text: str, fraction: float) -> bool:
    """Whether a document is held out: its hash as a number in [0, 1) is below `fraction`. Same text, same answer."""
    return is_drawn(text.encode(), fraction)


def is_drawn(content: bytes, fraction: float) -> bool:
    """`is_validation` of a document that is these bytes."""
    digest = hashlib.blake2b(content, digest_size=8, person=b"split").digest()
    return int.from_bytes(digest, "little") < fraction * 2.0**64


def start_worker(
    tokenizer_json: str, end_of_document: int, dtype: str, validation_fraction: float, bytewise: bool = False
) -> None:
    """Initialise a worker process for `encode_batch`. bytewise: the tokenizer is that of `bytes`."""
    global _worker
    # Parallelism comes from the processes; threads in each of them would only compete for the cores.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    tokenizer = Tokenizer.from_str(tokenizer_json)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    # Text that spells a special token stays text: only the end of a document becomes an end-of-document token.
    tokenizer.encode_special_tokens = True
    _worker = _Encoder(
        tokenizer, end_of_document, dtype, validation_fraction, byte_ids().astype(dtype) if bytewise else None
    )


def encode_batch(documents: list[str]) -> tuple[Encoded, Encoded]:
    """Token ids of a batch of documents, in order: (training, validation)."""
    assert _worker is not None, "start_worker was not called in this process"
    parts: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    documents_of, bytes_of = [0, 0], [0, 0]
    end = np.array([_worker.end_of_document], dtype=_worker.dtype)
    for text in documents:
        split = int(is_validation(text, _worker.validation_fraction))
        raw = text.encode()
        if _worker.byte_ids is not None:
            parts[split].append(_worker.byte_ids[np.frombuffer(raw, dtype=np.uint8)])
        else:
            parts[split].extend(_tokens(piece, _worker) for piece in pieces(text))
        parts[split].append(end)
        documents_of[split] += 1
        bytes_of[split] += len(raw)
    empty = np.empty(0, dtype=_worker.dtype)
    train, validation = (
        Encoded(np.concatenate([empty, *parts[i]]), documents_of[i], bytes_of[i]) for i in range(len(parts))
    )
    return train, validation


def _tokens(piece: str, worker: _Encoder) -> np.ndarray:
    # The batch call is the only one that leaves out the character offsets, which cost a third of the time.
    encoding = worker.tokenizer.encode_batch_fast([piece], add_special_tokens=False)[0]
    return np.array(encoding.ids, dtype=worker.dtype)


def byte_ids() -> np.ndarray:
    """(256,) int64: the token of each byte under the tokenizer `bytes`, whose vocabulary is GPT-2's alphabet of bytes
    in the order of code points: printable Latin-1 as it is, the other bytes behind it.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = sorted(set(range(256)) - set(printable))
    return np.argsort(printable + others)


def pieces(text: str) -> Iterator[str]:
    """Cut a long text after line ends into pieces of at most PIECE_CHARACTERS; joined they are the text again."""
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        line_end = text.rfind("\n", start, start + PIECE_CHARACTERS)
        stop = line_end + 1 if line_end >= start else start + PIECE_CHARACTERS
        yield text[start:stop]
        start = stop
    yield text[start:]


def train_bpe(sample: list[str], vocabulary: int) -> str:
    """Train a byte-level BPE (Sennrich et al. 2016) on the sample alone and return its tokenizer.json."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((piece for text in sample for piece in pieces(text)), trainer=trainer)
    return tokenizer.to_str()
