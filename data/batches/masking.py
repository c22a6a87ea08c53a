"""Masking for masked language models: which tokens are hidden, and their replacements.

Tokens or whole words are chosen independently, special tokens never; 80% become the mask token, 10% a uniformly drawn
non-special token, and 10% stay (Devlin et al. 2019, section 3.1 and appendix A). Everything is a function of a key and
the tokens, by SplitMix64 (Steele, Lea and Flood 2014), which does not change with library versions.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from config.schema import Config
from data.batches.loader import IGNORED_LABEL, NO_SAMPLE, Batch, MakeBatch, batch_of
from data.corpora.corpus import Corpus
from data.corpora.row_shards import Split
from data.corpora.sampler import uniforms
from data.corpora.shards import TokenShards
from data.text.tokenizer import load_tokenizer, mask_token, vocabulary_size

MASKED, REPLACED = 0.8, 0.1
"""Shares of the chosen tokens replaced by the mask token, or by another one."""
LONGEST_WORD = 16
"""[tokens] Longer words are hidden token by token: text without spaces, such as Chinese, would be one word."""


@dataclass(frozen=True)
class Masking:
    """Masks one tokenizer's tokens."""

    mask: int
    """[id] The mask token."""
    special: np.ndarray
    """(vocabulary,) bool: tokens that are neither chosen nor used as replacements."""
    begins: np.ndarray
    """(vocabulary,) bool: tokens that can continue a word; see `_word_edges`."""
    ends: np.ndarray
    """(vocabulary,) bool: tokens after which a word can continue."""
    probability: float
    whole_word: bool

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast, *, probability: float, whole_word: bool) -> Masking:
        """Raises UserError where the tokenizer has no mask token."""
        mask, vocabulary = mask_token(tokenizer), tokenizer.get_vocab()
        size = vocabulary_size(tokenizer)
        special = np.ones(size, dtype=bool)  # ids without a token included
        special[list(vocabulary.values())] = False
        special[tokenizer.all_special_ids] = True
        special[[i for i, token in tokenizer.added_tokens_decoder.items() if token.special]] = True
        begins, ends = _word_edges(tokenizer, vocabulary, size)
        return cls(mask, special, begins, ends, probability, whole_word)

    def __call__(self, ids: np.ndarray, key: str) -> tuple[np.ndarray, np.ndarray]:
        """(n,) int64 ids -> the model's inputs, and labels, IGNORED_LABEL where nothing was chosen."""
        open_to_it = ~self.special[ids]
        words = self.words(ids) if self.whole_word else np.arange(len(ids))
        which, fate, other = (
            uniforms(f"{key}/{use}", len(ids), person=b"mantissa-mask") for use in ("chosen", "fate", "other")
        )
        chosen = open_to_it & (which[words] < self.probability)
        seen = np.where(chosen & (fate < MASKED), self.mask, ids)
        another = self._others[(other * len(self._others)).astype(np.int64)]
        seen = np.where(chosen & (fate >= MASKED) & (fate < MASKED + REPLACED), another, seen)
        return seen, np.where(chosen, ids, IGNORED_LABEL)

    def words(self, ids: np.ndarray) -> np.ndarray:
        """(n,) index of each token's word, from 0. Special tokens and those of overlong words are words."""
        first = np.ones(len(ids), dtype=bool)
        inside = ~self.special[ids]
        first[1:] = ~(self.begins[ids[1:]] & self.ends[ids[:-1]] & inside[1:] & inside[:-1])
        word = np.cumsum(first) - 1
        return np.cumsum(first | (np.bincount(word)[word] > LONGEST_WORD)) - 1

    @cached_property
    def _others(self) -> np.ndarray:
        return np.flatnonzero(~self.special)


def _word_edges(tokenizer: PreTrainedTokenizerFast, vocabulary: dict[str, int], size: int) -> tuple[Any, Any]:
    """Whether a token can continue the word before it, and whether a word can continue after it; both (size,) bool.

    WordPiece marks continuations by a prefix. Elsewhere a word is a run of letters, digits and underscores, however it
    is tokenized: a token continues it if it begins with one of these, and lets it continue if it ends with one. Bytes
    of multi-byte characters count as letters.
    """
    begins, ends = np.zeros(size, dtype=bool), np.zeros(size, dtype=bool)
    document = json.loads(tokenizer.backend_tokenizer.to_str())
    prefix = document["model"].get("continuing_subword_prefix")
    by_bytes = "ByteLevel" in json.dumps([document["pre_tokenizer"], document["decoder"]])
    of_byte = {letter: byte for byte, letter in bytes_to_unicode().items()}

    def in_word(letter: str) -> bool:
        if by_bytes and letter in of_byte:
            byte = of_byte[letter]
            return byte >= 0x80 or chr(byte).isalnum() or chr(byte) == "_"
        return letter.isalnum() or letter == "_"

    for piece, number in vocabulary.items():
        if document["model"]["type"] == "WordPiece" and prefix:
            begins[number], ends[number] = piece.startswith(prefix), True
        elif piece:
            begins[number], ends[number] = in_word(piece[0]), in_word(piece[-1])
    return begins, ends


def masking_of(config: Config, corpus: Corpus) -> MakeBatch:
    """Batches of windows of documents packed end to end, whose labels are the hidden tokens.

    A window begins and ends with the tokenizer's tokens for that, if it has both, instead of its last two tokens. The
    hidden tokens of a training window are a function of (seed, sample, position); of other windows of (seed, sample)
    only, so that validation is the same each time.
    """
    tokenizer, sequence_length = load_tokenizer(corpus.tokenizer_folder), config.data.sequence_length
    edges = tokenizer.cls_token_id, tokenizer.sep_token_id
    masking = Masking.of(tokenizer, probability=config.mlm.probability, whole_word=config.mlm.whole_word)

    def make(shards: Split, position: int, ids: np.ndarray, mine: np.ndarray) -> Batch:
        assert isinstance(shards, TokenShards)
        samples = mine.reshape(-1)
        real = samples != NO_SAMPLE
        windows = np.zeros((mine.size, sequence_length), dtype=np.int64)
        windows[real] = shards.read(samples[real], sequence_length)[:, :-1]
        if None not in edges:
            windows[:, 1:-1] = windows[:, :-2].copy()
            windows[:, 0], windows[:, -1] = edges
        labels = np.full_like(windows, IGNORED_LABEL)
        when = position if shards is corpus.train else "fixed"
        for row in np.flatnonzero(real):
            windows[row], labels[row] = masking(windows[row], f"{config.run.seed}/{samples[row]}/{when}")
        return batch_of(position, ids, mine, windows, labels, {"attention_mask": np.ones_like(windows)})

    return make
