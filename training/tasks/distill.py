"""Distillation: a student learns a teacher's distribution at every label of task sft or pretrain."""

from transformers import PreTrainedModel

from config.schema import Config, DataSection
from data.batches.loader import MakeBatch
from data.corpora.corpus import Corpus
from data.rows.prepare_rows import prepare_rows
from data.text.prepare import prepare as prepare_documents
from modeling.objectives.divergence import Distillation
from training.tasks.cached_teacher import with_targets


def prepare(data: DataSection, *, progress: bool) -> Corpus:
    """Rows as for task sft, or packed documents as for pretrain. Raises UserError."""
    return (prepare_documents if data.format == "auto" else prepare_rows)(data, progress=progress)


def objective(config: Config, model: PreTrainedModel) -> Distillation:
    """The divergence from the teacher, which `objective_of` sets unless its distributions are cached."""
    section = config.distill
    return Distillation(
        kind=section.loss, beta=section.beta, temperature=section.temperature, ce_weight=section.ce_weight
    )


def make_batch(config: Config, corpus: Corpus) -> MakeBatch | None:
    """Next-token batches, with the teacher's distributions if they are cached."""
    return None if corpus.targets is None else with_targets(config, corpus)
