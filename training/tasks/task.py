"""The interface of a task, and the task that a config names."""

from typing import Protocol

from transformers import PreTrainedModel

from config.schema import Config, DataSection
from data.batches.loader import MakeBatch
from data.corpora.corpus import Corpus
from data.corpora.mix import corpus_of
from modeling.objectives.divergence import Distillation
from modeling.objectives.objective import Forward, Objective
from training.tasks import classify, distill, dpo, mlm, pretrain, seq2seq, sft


class Task(Protocol):
    """The interface of a module in training/tasks/."""

    def prepare(self, data: DataSection, *, progress: bool) -> Corpus:
        """The data as sequences with labels, prepared first if need be. progress: show it. Raises UserError."""

    def objective(self, config: Config, model: PreTrainedModel) -> Objective:
        """The loss and its metrics. model: the one that is trained, whole or partitioned."""

    def make_batch(self, config: Config, corpus: Corpus) -> MakeBatch | None:
        """How samples become inputs and labels; None: each token is a label of those before it."""


TASKS: dict[str, Task] = {
    "pretrain": pretrain,
    "sft": sft,
    "seq2seq": seq2seq,
    "dpo": dpo,
    "distill": distill,
    "classify": classify,
    "mlm": mlm,
}


def task_of(config: Config) -> Task:
    """The module of the task that a config names."""
    return TASKS[config.task]


def objective_of(config: Config, model: PreTrainedModel, teacher: Forward | None = None) -> Objective:
    """The loss of a config's task. model: the one that is trained. teacher: answers live in a distillation."""
    objective = task_of(config).objective(config, model)
    if isinstance(objective, Distillation):
        objective.teacher = teacher
    return objective


def prepare(config: Config, *, progress: bool) -> Corpus:
    """The data of a config, of all its sources, and validation sets beside them. Raises UserError."""
    task = task_of(config)
    return corpus_of(config.data, lambda data: task.prepare(data, progress=progress))
