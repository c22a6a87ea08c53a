"""Next-token prediction on packed documents."""

from transformers import PreTrainedModel

from config.schema import Config
from data.corpora.corpus import Corpus
from data.text.prepare import prepare
from modeling.objectives.label_prediction import LabelPrediction

__all__ = ["make_batch", "objective", "prepare"]


def objective(config: Config, model: PreTrainedModel) -> LabelPrediction:
    """Cross-entropy at every token."""
    return LabelPrediction(by_sample=bool(config.data.sources))


def make_batch(config: Config, corpus: Corpus) -> None:
    """The loader's default: next-token batches."""
