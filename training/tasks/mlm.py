"""Masked language modelling: hidden tokens of documents that are packed end to end, predicted by an encoder."""

from transformers import PreTrainedModel

from config.schema import Config, DataSection
from data.batches.masking import masking_of as make_batch
from data.corpora.corpus import Corpus
from data.text.prepare import prepare as prepare_text
from modeling.objectives.label_prediction import LabelPrediction

__all__ = ["make_batch", "objective", "prepare"]


def prepare(data: DataSection, *, progress: bool) -> Corpus:
    """Documents as for pre-training, with an encoder's tokenizer."""
    return prepare_text(data, progress=progress, for_encoder=True)


def objective(config: Config, model: PreTrainedModel) -> LabelPrediction:
    """Every hidden token is a label, and so is each that was chosen and stayed."""
    return LabelPrediction(by_sample=bool(config.data.sources), judged=True)
