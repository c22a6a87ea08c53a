"""Supervised fine-tuning: the answers in rows of chats, instructions or texts. Only their tokens have labels."""

from transformers import PreTrainedModel

from config.schema import Config
from data.corpus import Corpus
from data.loader import MakeBatch, counting_rows, next_tokens
from data.prepare_rows import prepare_rows as prepare
from modeling.objectives.label_prediction import LabelPrediction, RowPrediction
from training.tasks.targets import documents_of

__all__ = ["make_batch", "objective", "prepare"]


def objective(config: Config, model: PreTrainedModel) -> LabelPrediction:
    """Every token of an answer is a label."""
    return RowPrediction() if config.sft.loss == "row" else LabelPrediction()


def make_batch(config: Config, corpus: Corpus) -> MakeBatch | None:
    """The loader's own batches of next tokens, which may count rows."""
    if config.sft.loss == "token":
        return None
    return counting_rows(next_tokens(config.data.sequence_length, documents_of(config, corpus)))
