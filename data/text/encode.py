"""Code of the worker processes of a preparation: text to token ids, and the training of a BPE.

Imports little on purpose: a worker is a fresh interpreter (`workers`), so that it inherits neither torch's threads nor
locks held in the parent, and it should start in a fraction of a second.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_DOCUMENT = "<|endoftext|>"
PIECE_CHARACTERS = 1 << 18
"""[characters] Longer documents are encoded in pieces cut after a line end: the tokenizer needs hundreds of bytes of
memory per token, and one file may be a whole corpus."""
_IN_NO_TEXT = "\uffff\uffff"
"""Beginning of names that no text spells: these code points are no characters."""


def is_validation(document: str | bytes, fraction: float) -> bool:
    """Whether a document is held out: its hash as a number in [0, 1) is below `fraction`. Same text, same answer."""
    content = document.encode() if isinstance(document, str) else document
    digest = hashlib.blake2b(content, digest_size=8, person=b"split").digest()
    return int.from_bytes(digest, "little") < fraction * 2.0**64


def encoder_of_text(tokenizer_json: str) -> Tokenizer:
    """The tokenizer, without truncation and padding, for which text that spells a control token stays text."""
    tokenizer = Tokenizer.from_str(tokenizer_json)
    if isinstance(tokenizer.model, models.Unigram):  # control tokens are pieces, too, and found whatever is set below
        document = json.loads(tokenizer_json)
        vocabulary = document["model"]["vocab"]
        for token in document["added_tokens"]:
            if token["special"]:
                token["content"] = f"{_IN_NO_TEXT}{token['id']}"
                if token["id"] < len(vocabulary):
                    vocabulary[token["id"]][0] = token["content"]
        tokenizer = Tokenizer.from_str(json.dumps(document))
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = True
    return tokenizer


class DocumentEncoder:
    """Turns batches of documents into token ids."""

    def __init__(
        self,
        tokenizer_json: str,
        end_of_document: int,
        dtype: str,
        validation_fraction: float,
        bytewise: bool = False,
        *begin: int,
    ) -> None:
        """bytewise: the tokenizer is that of `bytes`, a table of bytes. begin: [ids] put before every document."""
        # Parallelism comes from the processes; threads in each of them would only compete for the cores.
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        self._tokenizer = encoder_of_text(tokenizer_json)
        self._begin, self._end = np.array(begin, dtype=dtype), np.array([end_of_document], dtype=dtype)
        self._fraction = validation_fraction
        self._byte_ids = byte_ids().astype(dtype) if bytewise else None

    def __call__(self, documents: list[str]) -> dict[str, np.ndarray]:
        """Tokens of the documents in order, as in `joined_splits`."""
        parts: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
        counts = np.zeros((2, 2), dtype=np.int64)
        for text in documents:
            split = int(is_validation(text, self._fraction))
            raw = text.encode()
            parts[split].append(self._begin)
            if self._byte_ids is not None:
                parts[split].append(self._byte_ids[np.frombuffer(raw, dtype=np.uint8)])
            else:
                parts[split].extend(map(self._tokens, pieces(text)))
            parts[split].append(self._end)
            counts[split] += 1, len(raw)
        return joined_splits(parts, counts, self._end.dtype)

    def _tokens(self, piece: str) -> np.ndarray:
        # Only the batch call omits the character offsets, which take a third of the time.
        encoding = self._tokenizer.encode_batch_fast([piece], add_special_tokens=False)[0]
        return np.array(encoding.ids, dtype=self._end.dtype)


def joined_splits(
    parts: tuple[list[np.ndarray], list[np.ndarray]], counts: np.ndarray, dtype: np.dtype
) -> dict[str, np.ndarray]:
    """Tokens of the documents of one batch by split, each document with its end-of-document token. Besides `train` and
    `validation`, `counts`, int64: each split's documents, and bytes of UTF-8."""
    train, validation = (np.concatenate([np.empty(0, dtype), *tokens]) for tokens in parts)
    return {"train": train, "validation": validation, "counts": counts}


def byte_ids() -> np.ndarray:
    """(256,) int64: the token of each byte under the tokenizer `bytes`, whose vocabulary is GPT-2's alphabet of bytes
    in the order of code points: printable Latin-1 as it is, followed by the other bytes.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = sorted(set(range(256)) - set(printable))
    return np.argsort(printable + others)


def pieces(text: str) -> Iterator[str]:
    """Cut a long text after line ends into pieces of at most PIECE_CHARACTERS; joined they give the text again."""
    start = 0
    while len(text) - start > PIECE_CHARACTERS:
        line_end = text.rfind("\n", start, start + PIECE_CHARACTERS)
        stop = line_end + 1 if line_end >= start else start + PIECE_CHARACTERS
        yield text[start:stop]
        start = stop
    yield text[start:]


def train_bpe(vocabulary: int, sample: list[str]) -> str:
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
