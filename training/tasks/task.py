"""What a task defines, and the one that a config names.

Loop, engine, guard and checkpoints do not know which task runs: they see batches of inputs and labels, and a loss that
is the mean over all labels of the global batch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Protocol, cast

from config.schema import Config, DataSection
from data.corpus import Corpus
from data.mix import mixed


class Task(Protocol):
    """What a module of training/tasks/ defines."""

    def prepare(self, data: DataSection, *, progress: bool) -> Corpus:
        """The data as sequences with labels, prepared first if need be. progress: show it. Raises UserError."""


def task_of(config: Config) -> Task:
    """The module of the task that a config names."""
    return cast(Task, import_module(f"training.tasks.{config.task}"))


def prepare(config: Config, *, progress: bool) -> Corpus:
    """The data of a config, as its task prepares it: of one source, or of several. Raises UserError."""
    task = task_of(config)
    if config.data.sources:
        return mixed(config.data, lambda data: task.prepare(data, progress=progress))
    return task.prepare(config.data, progress=progress)
