"""The answers of one step, of all ranks, and their file in the run folder: `rollouts/step-000001.safetensors`, in which
tokens and their log-probabilities follow each other without padding, of 4 bytes each.

The file is published before the update that uses it, so that a run that was killed repeats the step with the same
answers, provided its weights have the hash that they were sampled with.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from data.array_file import read_arrays, write_arrays

KEPT_AT_START = 10
"""[steps] `tools.parity --oracle` recomputes the first ones."""
_OF_TOKENS = {"prompts": "prompt_lengths", "answers": "lengths", "sampler": "lengths", "old": "lengths"}
"""Arrays with a number for each token, to those of how many tokens there are."""
_ARRAYS = ("samples", "prompts", "prompt_lengths", "answers", "lengths", "ended", "sampler", "old", "rewards")


@dataclass(frozen=True)
class Rollouts:
    """Answers to some prompts: arrays with a row for each prompt, tokens padded with zeros."""

    samples: np.ndarray  # (prompts,) int64: numbers of the prompts in the corpus
    prompts: np.ndarray  # (prompts, tokens) int64
    prompt_lengths: np.ndarray  # (prompts,) int64
    answers: np.ndarray  # (prompts, group, tokens) int64
    lengths: np.ndarray  # (prompts, group) int64
    ended: np.ndarray  # (prompts, group) bool
    sampler: np.ndarray  # (prompts, group, tokens) float32: the sampler's log-probabilities
    old: np.ndarray  # (prompts, group, tokens) float32: the trainer's
    rewards: np.ndarray  # (prompts, group, functions) float64, NaN for none
    version: str = ""  # `synchronise`'s, of the weights that they were sampled with, and `Remedies.head`
    facts: dict[str, float] = field(default_factory=dict)  # metrics of the step
    sources: dict[str, str] = field(default_factory=dict)  # `Rewards.sources`, and a hash of prompts and sampling

    @property
    def places(self) -> np.ndarray:
        """(prompts, group) int64: the number of inputs for each answer: its prompt, and all its tokens but the last."""
        return np.asarray(self.prompt_lengths[:, None] + self.lengths - 1)

    @property
    def mask(self) -> np.ndarray:
        """(prompts, group, tokens) bool: where an answer has a token."""
        return _mask(self.lengths, self.answers.shape[-1])

    def of(self, numbers: Sequence[int] | np.ndarray) -> "Rollouts":
        """The answers to the prompts at these places."""
        chosen: Any = np.asarray(numbers, dtype=np.int64)
        return replace(self, **{name: getattr(self, name)[chosen] for name in _ARRAYS})

    def put(self, numbers: Sequence[int], others: "Rollouts") -> None:
        """Replace the answers to the prompts at these places. Both are padded alike."""
        for name in _ARRAYS:
            getattr(self, name)[list(numbers)] = getattr(others, name)


def padded(rows: Sequence[np.ndarray], width: int, dtype: Any = np.int64) -> np.ndarray:
    """(rows, width): rows of uneven lengths, padded with zeros."""
    return np.array([np.pad(row, (0, width - len(row))) for row in rows], dtype=dtype).reshape(len(rows), width)


def interleaved(parts: Sequence[Rollouts]) -> Rollouts:
    """The answers of all ranks in the order of the global batch, of whose prompts rank r has r, r + ranks, ..."""
    joined: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _ARRAYS}
    for name, lengths in _OF_TOKENS.items():
        joined[name] = joined[name][..., : joined[lengths].max()]
    places = [np.arange(len(part.samples)) * len(parts) + rank for rank, part in enumerate(parts)]
    return replace(parts[0], **joined).of(np.argsort(np.concatenate(places)))


def path_of(folder: Path, step: int) -> Path:
    """The file of a step, from 1 in the order of the data."""
    return folder / f"step-{step:06d}.safetensors"


def write(path: Path, rollouts: Rollouts, *, sampler: str) -> None:
    """Publish the file. sampler: its name and version. Raises OSError."""
    path.parent.mkdir(exist_ok=True)
    said = {"version": rollouts.version, "sampler": sampler}
    said |= {"facts": json.dumps(rollouts.facts), "rewards": json.dumps(rollouts.sources)}
    arrays = {name: getattr(rollouts, name) for name in _ARRAYS}
    for name, lengths in _OF_TOKENS.items():
        flat = arrays[name][_mask(arrays[lengths], arrays[name].shape[-1])]
        arrays[name] = flat.astype(np.int32) if flat.dtype == np.int64 else flat
    write_arrays(path, arrays, said)


def read(path: Path) -> Rollouts | None:
    """The file's answers; None if it is missing or damaged."""
    if (found := read_arrays(path)) is None:
        return None
    arrays, said = found
    for name, lengths in _OF_TOKENS.items():
        if arrays[name].ndim == 1:  # older files have padding
            mask = _mask(arrays[lengths], arrays[lengths].max())
            whole = np.zeros(mask.shape, dtype=np.int64 if arrays[name].dtype == np.int32 else arrays[name].dtype)
            whole[mask] = arrays[name]
            arrays[name] = whole
    facts, sources = json.loads(said["facts"]), json.loads(said["rewards"])
    return Rollouts(**arrays, version=said["version"], facts=facts, sources=sources)


def prune(folder: Path, *, before: int) -> None:
    """Delete the files of steps before this one, except the first. Raises OSError."""
    for path in folder.glob("step-*.safetensors"):
        if KEPT_AT_START < int(path.stem.removeprefix("step-")) < before:
            path.unlink(missing_ok=True)


def _mask(lengths: np.ndarray, width: int) -> np.ndarray:
    """(..., width) bool: where there is a token."""
    return np.asarray(np.arange(width) < lengths[..., None])
