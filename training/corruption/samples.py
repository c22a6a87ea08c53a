"""Comparison of a batch with its samples, which are read again without the loader."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from config.resolved import Resolved
from data.batches.loader import IGNORED_LABEL, NO_SAMPLE, Batch
from data.corpora.corpus import Corpus
from data.corpora.row_shards import RowShards
from data.corpora.sampler import sample_ids, split_for_rank
from data.corpora.sequences import sequences


def wrong_samples(batch: Batch, resolved: Resolved, corpus: Corpus, *, held_out: bool = False) -> list[str]:
    """Differences between this rank's batch of next tokens and its samples. held_out: those of the validation set."""
    config, plan, found = resolved.config, resolved.batch, list[str]()
    shards: Any = corpus.validation if held_out else corpus.train
    length, end = config.data.sequence_length, corpus.end_of_document if config.keeps_documents_apart else None
    found += ["the count of labels"] if batch.label_tokens != batch.counted.sum() else []
    where = {"rank": resolved.rank // plan.sharing, "world_size": plan.data_ranks}
    mine = split_for_rank(batch.sample_ids, micro_size=plan.micro_size, **where).reshape(-1).tolist()
    window = lambda sample: np.asarray(shards.read(np.array([sample]), length)[0])  # noqa: E731
    width = batch.input_ids.shape[-1]
    places = batch.position_ids if batch.position_ids is not None else torch.arange(width).expand(batch.labels.shape)
    rows = (values.reshape(-1, width).numpy() for values in (batch.input_ids, batch.labels, places))
    for sample, inputs, labels, positions in zip(mine, *rows, strict=True):
        parts = [] if sample == NO_SAMPLE else sequences(shards, sample, window, end=end)
        columns: list[Any] = [np.zeros((3, 0), np.int64)]
        columns += [(given, own, np.arange(len(given))) for given, own in parts]
        expected: np.ndarray = np.concatenate(columns, axis=1)
        n = expected.shape[1]
        alike = (expected == (inputs[:n], labels[:n], positions[:n])).all(axis=1).tolist()
        alike[1] = alike[1] and bool((labels[n:] == IGNORED_LABEL).all())
        kinds = (name for name, good in zip(("inputs", "labels", "positions"), alike, strict=True) if not good)
        found += [f"{kind} of sample {sample}" for kind in kinds]
    return found


def are_evaluated(ids: Sequence[int], resolved: Resolved, corpus: Corpus) -> bool:
    """Whether the samples of an evaluation are as many as `evaluate.batches` says, evenly spaced over the held-out."""
    config, held_out = resolved.config, corpus.validation.sequences(resolved.config.data.sequence_length)
    most = config.evaluate.most_batches
    count = held_out if most is None else min(held_out, most * resolved.batch.global_size)
    return sorted(ids) == [number * held_out // count for number in range(count)]


def is_in_order(batch: Batch, position: int, resolved: Resolved, corpus: Corpus) -> bool:
    """Whether a batch has the samples due after `position` global batches; always true for mixtures and for rows sorted
    by length."""
    config, size = resolved.config, resolved.batch.global_size
    if corpus.mixture is not None or (isinstance(corpus.train, RowShards) and not config.keeps_documents_apart):
        return True
    samples = corpus.train.sequences(config.data.sequence_length)
    right = sample_ids(position, samples=samples, seed=config.run.seed, global_size=size)
    return np.array_equal(batch.sample_ids, right)
