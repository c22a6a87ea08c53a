"""Supervised fine-tuning on rows of chats, instructions or texts; only tokens of answers are labels."""

from dataclasses import replace

import numpy as np
from transformers import PreTrainedModel

from config.schema import Config
from data.batches.loader import Batch, MakeBatch, counting_rows, next_tokens, on_host
from data.corpora.corpus import Corpus
from data.corpora.row_shards import RowShards
from data.corpora.sampler import splitmix
from data.corpora.shards import TokenShards
from data.rows.prepare_rows import prepare_rows as prepare
from modeling.embedding_noise import KEYS, LENGTHS, EmbeddingNoise
from modeling.objectives.label_prediction import LabelPrediction, RowPrediction
from training.tasks.shape import documents_of

__all__ = ["make_batch", "objective", "prepare"]


def objective(config: Config, model: PreTrainedModel) -> LabelPrediction:
    """Cross-entropy at every token of an answer, with NEFTune's noise if configured."""
    noise = EmbeddingNoise(model, config.sft.neftune_alpha) if config.sft.neftune_alpha else None
    if config.sft.loss == "row":
        return RowPrediction(noise, judged=True)
    return LabelPrediction(noise, by_sample=bool(config.data.sources), judged=True)


def make_batch(config: Config, corpus: Corpus) -> MakeBatch:
    """Next-token batches; with sft.loss = row they count rows, and with NEFTune they bring its inputs."""
    make = next_tokens(config.data.sequence_length, documents_of(config, corpus))
    if config.sft.loss == "row":
        make = counting_rows(make)
    return with_noise(make, seed=config.run.seed, train=corpus.train) if config.sft.neftune_alpha else make


def with_noise(make: MakeBatch, *, seed: int, train: TokenShards | RowShards) -> MakeBatch:
    """The same batches, those of `train` with the inputs of NEFTune's noise: for every token a random key, a function
    of (seed, sample, position of the batch, place), and the length of its row."""

    def made(shards: TokenShards | RowShards, position: int, ids: np.ndarray, mine: np.ndarray) -> Batch:
        batch = make(shards, position, ids, mine)
        if shards is not train:
            return batch
        assert isinstance(shards, RowShards)
        shape = batch.input_ids.shape
        keys, lengths = (np.zeros((mine.size, shape[-1]), dtype=np.int64) for _ in range(2))
        for row, sample in enumerate(mine.reshape(-1)):
            stream = splitmix(f"{seed}/{sample}/{position}", shape[-1], person=b"mantissa-noise")
            keys[row] = stream.view(np.int64)
            places = shards.row_places(int(sample))
            lengths[row, : sum(places)] = np.repeat(places, places)
        further = {name: on_host(values).view(shape) for name, values in ((KEYS, keys), (LENGTHS, lengths))}
        return replace(batch, further=batch.further | further)

    return made
