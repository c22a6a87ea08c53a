"""The inputs of the noise on embeddings, beside each batch: a key and the length of its row for every token."""

from dataclasses import replace

import numpy as np

from data.batches.loader import Batch, MakeBatch, on_host
from data.corpora.row_shards import RowShards
from data.corpora.sampler import splitmix
from data.corpora.shards import TokenShards
from modeling.embedding_noise import KEYS, LENGTHS


def with_noise(make: MakeBatch, *, seed: int, train: TokenShards | RowShards) -> MakeBatch:
    """The same batches; those of `train` with keys, a function of (seed, sample, position of the batch, place)."""

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
