"""Masked language modelling: hidden tokens of documents that are packed end to end, predicted by an encoder."""

from transformers import PreTrainedModel

from config.schema import Config, DataSection
from data.corpus import Corpus
from data.loader import MakeBatch
from data.masking import Masking, masked_batches
from data.prepare import prepare as prepare_text
from data.tokenizer import load_tokenizer
from modeling.objectives.label_prediction import LabelPrediction


def prepare(data: DataSection, *, progress: bool) -> Corpus:
    """Documents as for pre-training, with an encoder's tokenizer."""
    return prepare_text(data, progress=progress, for_encoder=True)


def objective(config: Config, model: PreTrainedModel) -> LabelPrediction:
    """Every hidden token is a label, and so is each that was chosen and stayed."""
    return LabelPrediction(by_sample=bool(config.data.sources), judged=True)


def make_batch(config: Config, corpus: Corpus) -> MakeBatch:
    """Windows between the tokens that a text begins and ends with, if the tokenizer has them."""
    tokenizer = load_tokenizer(corpus.tokenizer_folder)
    first, last = tokenizer.cls_token_id, tokenizer.sep_token_id
    return masked_batches(
        Masking.of(tokenizer, probability=config.mlm.probability, whole_word=config.mlm.whole_word),
        sequence_length=config.data.sequence_length,
        seed=config.run.seed,
        train=corpus.train,
        edges=None if first is None or last is None else (first, last),
    )
