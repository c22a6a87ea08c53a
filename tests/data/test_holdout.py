"""A text without a document to spare is cut at its end: no token in both splits, the same cut every time."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import data.text.prepare
from config.errors import UserError
from config.schema import DataSection
from data.corpora.corpus import Corpus
from data.text.encode import is_validation
from data.text.holdout import TAIL
from data.text.prepare import prepare

LENGTH = 64


def text_of(size: int, seed: int, *, held_out: bool = False, fraction: float = 0.02) -> str:
    """A document of that size that the hash draws for validation, or does not."""
    generator = random.Random(seed)
    while True:
        text = "".join(generator.choice("abcdefgh \n") for _ in range(size))
        if is_validation(text, fraction) is held_out:
            return text


@pytest.fixture
def section(tmp_path: Path) -> Any:
    """section(texts) is a DataSection of them, one file each."""

    def section(*texts: str, **changes: Any) -> DataSection:
        folder = tmp_path / "texts"
        folder.mkdir()
        for number, text in enumerate(texts):
            (folder / f"{number}.txt").write_text(text)
        given = {"source": "text", "path": str(folder), "cache_dir": str(tmp_path / "cache"), "workers": 1}
        given |= {"tokenizer": "bytes", "validation_fraction": 0.02, "sequence_length": LENGTH}
        return DataSection(**{**given, **changes})

    return section


def tokens(corpus: Corpus, split: str) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype=np.uint16), *[shard.array for shard in getattr(corpus, split).shards]])


def test_the_end_of_a_single_text_is_held_out(section):
    data = section(text_of(20_000, 0))
    corpus = prepare(data, progress=False)
    whole = prepare(replace(data, hold_out="documents"), progress=False)
    assert whole.validation.tokens == 0 and whole.fingerprint + TAIL == corpus.fingerprint
    assert whole.folder == corpus.folder  # nothing is prepared again
    train, validation = tokens(corpus, "train"), tokens(corpus, "validation")
    assert np.array_equal(np.concatenate([train, validation]), tokens(whole, "train"))
    # 2% of 20,001 tokens are 6 sequences; training ends on the border of one
    assert corpus.validation.sequences(LENGTH) == 6 and corpus.tail_tokens == len(validation) < 7 * LENGTH + 2
    assert (len(train) - 1) % LENGTH == 0
    assert corpus.train.sequences(LENGTH) == (len(train) - 1) // LENGTH
    again = prepare(data, progress=False)
    assert np.array_equal(tokens(again, "validation"), validation) and again.fingerprint == corpus.fingerprint


def test_of_several_texts_the_longest_is_cut_also_where_it_is_in_two_shards(section, monkeypatch):
    monkeypatch.setattr(data.text.prepare, "SHARD_TOKENS", 9_000)
    texts = [text_of(size, seed) for seed, size in enumerate((1000, 8_100, 2000))]
    corpus = prepare(section(*texts, validation_fraction=0.02, sequence_length=16), progress=False)
    end = sum(len(text) + 1 for text in texts[:2])
    whole = section_of(corpus, validation_fraction=0.02, hold_out="documents")
    everything = np.concatenate([tokens(prepare(whole, progress=False), "train")])
    cut = end - corpus.tail_tokens
    assert len(corpus.train.shards) == 2 and len(corpus.validation.shards) == 2  # 9,000 is inside the tail
    assert cut < 9_000 < end
    assert np.array_equal(tokens(corpus, "validation"), everything[cut:end])
    assert np.array_equal(tokens(corpus, "train"), np.concatenate([everything[:cut], everything[end:]]))
    windows = corpus.train.read(np.arange(corpus.train.sequences(16)), 16)
    held = {bytes(window) for window in corpus.validation.read(np.arange(corpus.validation.sequences(16)), 16)}
    assert not held & {bytes(window) for window in windows}


def section_of(corpus: Corpus, **changes: Any) -> DataSection:
    """The texts of a corpus, prepared otherwise."""
    folders = {"path": str(corpus.folder.parent.parent / "texts"), "cache_dir": str(corpus.folder.parent)}
    return DataSection(source="text", **{**folders, "tokenizer": "bytes", **changes})


def test_a_single_text_that_was_drawn_for_validation_is_trained_on(section):
    data = section(text_of(20_000, 0, held_out=True))
    corpus = prepare(data, progress=False)
    assert corpus.train.sequences(LENGTH) > 100 and corpus.validation.sequences(LENGTH) == 6
    with pytest.raises(UserError, match="all 1 documents of .* were drawn for validation"):
        prepare(replace(data, hold_out="documents", cache_dir=f"{data.cache_dir}/other"), progress=False)


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
def test_where_a_document_is_held_out_nothing_changes(section, tokenizer):
    texts = [text_of(5_000, seed) for seed in range(3)] + [text_of(300, 9, held_out=True)]
    corpus = prepare(section(*texts, tokenizer=tokenizer), progress=False)
    assert corpus.validation_documents == 1 and corpus.tail_tokens == 0
    assert corpus.fingerprint == corpus.folder.name
    without = section_of(corpus, tokenizer=tokenizer, validation_fraction=0.0)
    assert prepare(without, progress=False).tail_tokens == 0


def test_a_text_too_short_to_cut_is_left_whole(section):
    corpus = prepare(section(text_of(2 * LENGTH, 0)), progress=False)
    assert corpus.validation.tokens == 0 and corpus.tail_tokens == 0 and corpus.train.sequences(LENGTH) == 2


def test_a_fraction_never_takes_more_than_half(section):
    corpus = prepare(section(text_of(10_000, 3, fraction=0.9), validation_fraction=0.9), progress=False)
    assert corpus.validation.tokens <= 5_000 + LENGTH < corpus.train.tokens + 2 * LENGTH
