"""The interface of a rollout engine: a second program, or a second model in this one, that samples with given weights.

Token ids go in and come out, never text. Every rank has its own sampler and calls it with its own requests.
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import torch

from data.corpora.sampler import splitmix

Weights = Iterable[tuple[str, torch.Tensor]]
"""Name and whole tensor of every parameter, in the dtype that the trainer computes with; a tied one under each name."""


class Request(NamedTuple):
    """One answer to be sampled."""

    prompt: np.ndarray
    """(n,) int64"""
    key: str
    """Seed of this answer and no other: whatever else is sampled beside it, it draws the same random numbers."""


class Answer(NamedTuple):
    """A sampled answer."""

    ids: np.ndarray
    """(n,) int64, an end token included where it has ended; 1 <= n <= grpo.max_new_tokens."""
    log_probs: np.ndarray
    """(n,) float32: of each under softmax(logits / temperature), as sampled from."""
    ended: bool
    """False where it was cut off at its length. Only this says so: an end token is a token like any other."""


class Sampler(Protocol):
    """A rollout engine."""

    identity: str
    """Name and version, for the record."""

    def receive(self, weights: Weights) -> None:
        """Take new weights, and forget whatever was computed with others (prefix caches). Every rank iterates over all
        of `weights`, since making them may be a collective."""

    def digests(self) -> dict[str, str]:
        """`sync.digest` of every tensor that it computes with now, by the trainer's name: not of what it received."""

    def sample(self, requests: Sequence[Request], *, version: str) -> list[Answer]:
        """Answers in the order of the requests, each by the weights of that version (`Synced.version`)."""

    def close(self) -> None:
        """Release what it holds."""


def uniforms(key: str, count: int) -> np.ndarray:
    """(count,) float64 in [0, 1): the random numbers of the answer with that key."""
    return (splitmix(key, count, person=b"mantissa-answer") >> np.uint64(11)).astype(np.float64) * 2.0**-53
