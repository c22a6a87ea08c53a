"""The interface of a task, and the task that a config names.

Loop, engine, guard and checkpoints do not know which task runs: they see batches of inputs and labels, and a loss that
is the mean over everything that counts in the global batch: labels, answers, pairs.
"""

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
        """The data as sequences with labels, prepared first if need be. progress: show it. Raises UserError."""

    def objective(self, config: Config, model: PreTrainedModel) -> Objective:
        """The loss and its metrics. model: the one that is trained, whole or partitioned."""

    def make_batch(self, config: Config, corpus: Corpus) -> MakeBatch | None:
        """Turns samples into inputs and labels; None: each token is a label of those before it."""


def task_of(config: Config) -> Task:
    """The module of the task that a config names, the only one of them that is loaded."""
    module: Any = import_module(f"training.tasks.{config.task}")
    return module


def answers(kind: Literal["references", "teacher", "rollouts.batches"]) -> Any:
    """The module of training/ that adds a model's answers to data, which runs without such answers do not load."""
    return import_module(f"training.{kind}")


def objective_of(config: Config, model: PreTrainedModel, teacher: Forward | None = None) -> Objective:
    """The loss of a config's task. model: the one that is trained. teacher: answers live in a distillation."""
    objective = task_of(config).objective(config, model)
    if isinstance(objective, Distillation):
        objective.teacher = teacher
    return objective


def prepare(config: Config, *, progress: bool) -> Corpus:
    """The data of a config, as its task prepares it: of one source or of several, and validation sets beside them.

    Raises UserError.
    """
    task = task_of(config)
    return corpus_of(config.data, lambda data: task.prepare(data, progress=progress))
