"""Sequence-to-sequence learning by an encoder-decoder, on rows with a source and a target."""

from transformers import PreTrainedModel

from config.schema import Config
from data.batches.loader import MakeBatch
from data.batches.seq2seq_batches import seq2seq_batches
from data.corpora.corpus import Corpus
from data.rows.prepare_rows import prepare_rows as prepare
from modeling.objectives.label_prediction import LabelPrediction
from training.tasks.shape import shape_of_model

__all__ = ["make_batch", "objective", "prepare"]


def objective(config: Config, model: PreTrainedModel) -> LabelPrediction:
    """Cross-entropy at every token of the target and at its end."""
    return LabelPrediction(by_sample=bool(config.data.sources), judged=True)


def make_batch(config: Config, corpus: Corpus) -> MakeBatch:
    """Batches of padded sources with their mask, and targets shifted right behind the decoder's start token."""
    shape = shape_of_model(config, corpus)
    pad = corpus.end_of_document if shape.pad_token_id is None else shape.pad_token_id
    return seq2seq_batches(config.data, start=shape.decoder_start_token_id, pad=pad)
