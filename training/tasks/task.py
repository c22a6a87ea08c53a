"""The interface of a task, and the task that a config names.

Loop, engine, guard and checkpoints do not depend on the task: they see batches of inputs and labels, and a loss that is
the mean over whatever the task counts in the global batch (labels, answers or pairs).
"""

from functools import partial
from importlib import import_module
from typing import Any, Literal, Protocol

from transformers import PreTrainedModel

from config.schema import Config, DataSection
from data.batches.loader import MakeBatch
from data.corpora.corpus import Corpus
from data.corpora.mix import corpus_of
from modeling.objectives.divergence import Distillation
from modeling.objectives.objective import Forward, Objective


class Task(Protocol):
    """The interface of a module in training/tasks/."""

    def prepare(self, data: DataSection, *, progress: bool) -> Corpus:
        """The corpus, tokenized first if it is not cached. progress: show a progress bar. Raises UserError."""

    def objective(self, config: Config, model: PreTrainedModel) -> Objective:
        """The loss and its metrics. model: the trained one, whole or partitioned."""

    def make_batch(self, config: Config, corpus: Corpus) -> MakeBatch | None:
        """A function that collates samples into inputs and labels; None for next-token prediction."""


def task_of(config: Config) -> Task:
    """The module of the config's task; those of other tasks are not imported."""
    module: Any = import_module(f"training.tasks.{config.task}")
    return module


def answers(kind: Literal["references", "teacher", "rollouts.batches"]) -> Any:
    """A module of training/ that adds model outputs to the data, imported only by runs that need it."""
    return import_module(f"training.{kind}")


def objective_of(config: Config, model: PreTrainedModel, teacher: Forward | None = None) -> Objective:
    """The loss of a config's task. model: the trained one. teacher: queried during training by a distillation."""
    objective = task_of(config).objective(config, model)
    if isinstance(objective, Distillation):
        objective.teacher = teacher
    return objective


def prepare(config: Config, *, progress: bool) -> Corpus:
    """The corpus of a config: its sources, mixed if there are several, and its validation sets. Raises UserError."""
    return corpus_of(config.data, partial(task_of(config).prepare, progress=progress))
