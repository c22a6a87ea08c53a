"""Learning from rewards of the model's own answers (docs/rl.md), which training/rollouts/ samples to these prompts."""

import numpy as np
from transformers import PreTrainedModel

from config.schema import Config
from data.batches.loader import Batch, MakeBatch, batch_of
from data.corpora.corpus import Corpus
from data.rows.prepare_prompts import prepare_prompts as prepare
from modeling.objectives.policy import PolicyGradient

__all__ = ["make_batch", "objective", "prepare"]


def objective(config: Config, model: PreTrainedModel) -> PolicyGradient:
    """The loss of sampled answers."""
    return PolicyGradient(config.grpo)


def make_batch(config: Config, corpus: Corpus) -> MakeBatch:
    """Batches of prompts by their numbers: input_ids is (prompts of this rank, 1, 1)."""

    def make(shards: object, position: int, ids: np.ndarray, mine: np.ndarray) -> Batch:
        numbers = mine.reshape(-1, 1)
        return batch_of(position, ids, mine, numbers, np.zeros_like(numbers))

    return make
