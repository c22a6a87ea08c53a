"""Supervised fine-tuning: the answers in rows of chats, instructions or texts. Only their tokens have labels."""

from transformers import PreTrainedModel

from config.schema import Config
from data.corpus import Corpus
from data.prepare_rows import prepare_rows as prepare
from modeling.objectives.label_prediction import LabelPrediction

__all__ = ["make_batch", "objective", "prepare"]


def objective(config: Config, model: PreTrainedModel) -> LabelPrediction:
    """Every token of an answer is a label."""
    return LabelPrediction()


def make_batch(config: Config, corpus: Corpus) -> None:
    """The loader's own batches of next tokens."""
