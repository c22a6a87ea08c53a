"""Supervised fine-tuning: the answers in rows of chats, instructions or texts. Only their tokens have labels."""

from transformers import PreTrainedModel

from config.schema import Config
from data.batches.loader import MakeBatch, counting_rows, next_tokens
from data.corpora.corpus import Corpus
from data.rows.prepare_rows import prepare_rows as prepare
from modeling.embedding_noise import EmbeddingNoise
from modeling.objectives.label_prediction import LabelPrediction, RowPrediction
from training.tasks.noise import with_noise
from training.tasks.shape import documents_of

__all__ = ["make_batch", "objective", "prepare"]


def objective(config: Config, model: PreTrainedModel) -> LabelPrediction:
    """Every token of an answer is a label."""
    noise = EmbeddingNoise(model, config.sft.neftune_alpha) if config.sft.neftune_alpha else None
    if config.sft.loss == "row":
        return RowPrediction(noise, judged=True)
    return LabelPrediction(noise, by_sample=bool(config.data.sources), judged=True)


def make_batch(config: Config, corpus: Corpus) -> MakeBatch:
    """The loader's own batches of next tokens, which may count rows and bring noise."""
    make = next_tokens(config.data.sequence_length, documents_of(config, corpus))
    if config.sft.loss == "row":
        make = counting_rows(make)
    return with_noise(make, seed=config.run.seed, train=corpus.train) if config.sft.neftune_alpha else make
