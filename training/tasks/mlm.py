"""Masked language modelling by an encoder, on packed documents."""

from functools import partial

from transformers import PreTrainedModel

from config.schema import Config
from data.batches.masking import masking_of as make_batch
from data.text.prepare import prepare as prepare_text
from modeling.objectives.label_prediction import LabelPrediction

__all__ = ["make_batch", "objective", "prepare"]


prepare = partial(prepare_text, for_encoder=True)
"""Packed documents as for pretrain, with an encoder's tokenizer."""


def objective(config: Config, model: PreTrainedModel) -> LabelPrediction:
    """Cross-entropy at every selected token, whether it was masked, replaced or left as it is."""
    return LabelPrediction(by_sample=bool(config.data.sources), judged=True)
