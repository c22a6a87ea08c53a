"""A teacher's cached distributions: its k most probable tokens at every position of a corpus.

They are in a folder beside the corpus, published by one rename. Each split has `<split>-ids.npy`, (sequences,
positions, k) int32, most probable first, and `<split>-log-probs.npy`, (sequences, positions, k + 1) FP32 at the run's
temperature, with the log-probability of all other tokens together last. `index.json` has size and sha256 of each file.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from config.files import file_sha256, write_flushed
from config.schema import Config
from data.batches.loader import NO_SAMPLE, Batch, MakeBatch, next_tokens
from data.corpora.corpus import SPLITS, Corpus
from data.corpora.row_shards import RowShards
from data.corpora.shards import TokenShards, damaged
from modeling.objectives.divergence import IDS, LOG_PROBS
from training.tasks.shape import documents_of

_INDEX = "index.json"


def files_of(folder: Path, split: str) -> tuple[Path, Path]:
    """The files of ids and of log-probabilities of a split."""
    return folder / f"{split}-ids.npy", folder / f"{split}-log-probs.npy"


def splits_of(config: Config, corpus: Corpus) -> dict[str, TokenShards | RowShards]:
    """The splits that are not empty."""
    pairs = zip(SPLITS, (corpus.train, corpus.validation), strict=True)
    return {split: shards for split, shards in pairs if shards.sequences(config.data.sequence_length)}


def write_index(folder: Path) -> None:
    """Write the index of the arrays in `folder`."""
    content = {path.name: [path.stat().st_size, file_sha256(path)] for path in sorted(folder.glob("*.npy"))}
    write_flushed(folder / _INDEX, json.dumps(content, indent=1).encode())


def require_intact(folder: Path, *, verify: bool) -> None:
    """Compare sizes with the index. verify: the sha256, too. Raises UserError, naming the file."""
    try:
        content = json.loads((folder / _INDEX).read_bytes())
        for name, (size, sha256) in content.items():
            if (folder / name).stat().st_size != size:
                raise damaged(folder / name, f"it does not have its {size} bytes")
            if verify and file_sha256(folder / name) != sha256:
                raise damaged(folder / name, "it does not have the sha256 in index.json")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise damaged(folder / _INDEX, f"it cannot be read: {type(error).__name__}") from error


def with_targets(config: Config, corpus: Corpus) -> MakeBatch:
    """Next-token batches with the teacher's distributions as further inputs."""
    folder, length = corpus.targets, config.data.sequence_length
    make = next_tokens(length, documents_of(config, corpus))
    assert folder is not None
    splits = {
        id(shards): [np.load(path, mmap_mode="r") for path in files_of(folder, split)]
        for split, shards in splits_of(config, corpus).items()
    }
    first = 0
    for part in corpus.validation_by_source.values():  # the whole is their concatenation
        last = first + part.sequences(length)
        splits[id(part)] = [values[first:last] for values in splits[id(corpus.validation)]]
        first = last

    def made(shards: TokenShards | RowShards, position: int, ids: np.ndarray, mine: np.ndarray) -> Batch:
        batch = make(shards, position, ids, mine)
        places, samples = batch.input_ids.shape[-1], mine.reshape(-1)
        further = {}
        for name, values in zip((IDS, LOG_PROBS), splits[id(shards)], strict=True):
            taken = np.zeros((samples.size, places, values.shape[-1]), dtype=values.dtype)
            real = samples != NO_SAMPLE
            taken[real] = values[samples[real], :places]
            further[name] = torch.from_numpy(taken).reshape(*mine.shape, *taken.shape[1:])
        return replace(batch, further=further)

    return made
