"""A run's headline metric, and the grouping of task metrics into charts, for console, pages and verdict."""

import math
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple


class Figure(NamedTuple):
    """Metrics in one chart. names: glob patterns for names in the `metrics` of a step or an evaluation."""

    title: str
    names: tuple[str, ...]
    spread: str = ""
    """Metric with the standard deviation of the first one, drawn as a band around it."""
    log: bool = False

    def of(self, metrics: Iterable[str]) -> list[str]:
        """The given metrics that the chart shows, in the order of `names`."""
        return [name for pattern in self.names for name in metrics if fnmatchcase(name, pattern)]


FIGURES = (
    Figure("Reward", ("reward/mean",), spread="reward/spread"),
    Figure("Prompts without signal, answers without reward", ("reward/no_signal", "reward/none")),
    Figure("Length of answers (tokens)", ("length",)),
    Figure("Share of answers cut off at their longest", ("truncated",)),
    Figure("Entropy of answers (nats per token)", ("entropy",)),
    Figure("Share of tokens clipped, left out", ("clip_share", "left_out")),
    Figure("Gap and self-gap: k3 (nats per token)", ("gap/k3", "gap/self_k3"), log=True),
    Figure("Largest gap of a token (nats)", ("gap/largest",), log=True),
    Figure("Sync of the sampler and its proof (seconds)", ("sync/seconds",)),
    Figure("Accuracy and agreement", ("*accuracy", "*agreement*", "*f1", "matthews")),
    Figure("Correlation", ("pearson",)),
    Figure("Rewards (beta times nats)", ("rewards/chosen", "rewards/rejected", "rewards/margin")),
    Figure("KL (nats per token)", ("kl", "kl_*")),
)
HEADLINES = {"reward/mean": "reward"}
"""Metrics that replace the loss as a run's headline, where the loss is uninformative, and their display names."""


def headline_of(metrics: Iterable[str]) -> str:
    """The metric of HEADLINES that a step or evaluation has; empty if the loss is the headline."""
    return next((name for name in metrics if name in HEADLINES), "")


def followed(event: Mapping[str, Any]) -> tuple[str, float]:
    """Display name and value of a step's or evaluation's headline; nan if it was not recorded."""
    headline = headline_of(event.get("metrics") or ())
    value = event["metrics"][headline] if headline else event.get("loss")
    return HEADLINES.get(headline, "loss"), math.nan if value is None else float(value)
