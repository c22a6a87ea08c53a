"""Preference optimisation (DPO and its relatives) on pairs of a chosen and a rejected answer to a prompt."""

from functools import partial

from transformers import PreTrainedModel

from config.schema import Config
from data.batches.loader import MakeBatch
from data.batches.preference_batches import batches_of_pairs, lengths_of_corpus
from data.corpora.corpus import Corpus
from data.rows.prepare_rows import prepare_rows as prepare
from modeling.adapter import adapter_off
from modeling.objectives.preference import Preference

__all__ = ["make_batch", "objective", "prepare"]


def objective(config: Config, model: PreTrainedModel) -> Preference:
    """A loss of the chosen answer's margin over the rejected one, relative to the reference model."""
    live = config.preference.reference == "adapter_off"
    return Preference(config.preference, partial(adapter_off, model) if live else None)


def make_batch(config: Config, corpus: Corpus) -> MakeBatch:
    return batches_of_pairs(lengths_of_corpus(corpus))
