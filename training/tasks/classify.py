"""Classification, regression and token classification by an encoder, on rows of text."""

from transformers import PreTrainedModel

from config.schema import Config
from data.batches.loader import MakeBatch
from data.corpora.corpus import Corpus
from data.corpora.labelled_shards import encoder_batches
from data.rows.prepare_labelled import prepare_labelled as prepare
from data.text.tokenizer import load_tokenizer
from modeling.objectives.classification import Classification, Regression
from modeling.objectives.objective import Objective
from training.tasks.shape import shape_of_model

__all__ = ["make_batch", "objective", "prepare"]


def objective(config: Config, model: PreTrainedModel) -> Objective:
    """Cross-entropy over classify.labels, or squared error."""
    if config.classify.kind == "regression":
        return Regression()
    return Classification(len(config.classify.labels), by_sample=bool(config.data.sources))


def make_batch(config: Config, corpus: Corpus) -> MakeBatch:
    """Batches of padded rows with an attention mask."""
    names, kind = config.classify.labels, config.classify.kind
    return encoder_batches(
        None if kind == "regression" else [names.index(name) for name in corpus.labels],
        sequence_length=config.data.sequence_length,
        pad=int(load_tokenizer(corpus.tokenizer_folder).pad_token_id),
        takes_types=getattr(shape_of_model(config, corpus), "type_vocab_size", 0) > 1,
        by_token=kind == "token",
    )
