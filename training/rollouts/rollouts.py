"""The answers of one step, of all ranks, and their file in the run folder: `rollouts/step-000001.safetensors`.

The file is published before the update that is made from it. So a run that was killed takes the same step again from
the same answers, as long as its weights have the hash that the answers were sampled with, whatever the sampler would
say now.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from config.files import write_atomically

_ARRAYS = ("samples", "prompts", "prompt_lengths", "answers", "lengths", "ended", "sampler", "old", "rewards")


@dataclass(frozen=True)
class Rollouts:
    """Answers to some prompts, group by group."""

    samples: np.ndarray
    """(prompts,) int64: numbers of the prompts in the corpus."""
    prompts: np.ndarray
    """(n,) int64: tokens of the prompts, end to end."""
    prompt_lengths: np.ndarray
    """(prompts,) int64"""
    answers: np.ndarray
    """(m,) int64: tokens of the answers, end to end."""
    lengths: np.ndarray
    """(prompts x group,) int64"""
    ended: np.ndarray
    """(prompts x group,) bool"""
    sampler: np.ndarray
    """(m,) float32: the sampler's log-probabilities."""
    old: np.ndarray
    """(m,) float32: the trainer's."""
    rewards: np.ndarray
    """(prompts x group, functions) float64, NaN for none."""
    version: str = ""
    """`Synced.version` of the weights that they were sampled with."""
    facts: str = "{}"
    """Metrics of the step as JSON."""

    @property
    def group(self) -> int:
        """Answers to a prompt."""
        return len(self.lengths) // max(len(self.samples), 1)

    def parts(self, name: str) -> list[np.ndarray]:
        """`prompts`, `answers`, `sampler` or `old` by prompt or answer."""
        lengths = self.prompt_lengths if name == "prompts" else self.lengths
        return np.split(getattr(self, name), np.cumsum(lengths)[:-1])

    def of(self, numbers: Sequence[int]) -> "Rollouts":
        """The answers to some of the prompts, by their place here."""
        chosen = np.array(numbers, dtype=np.int64)
        groups = (chosen[:, None] * self.group + np.arange(self.group)).reshape(-1)
        picked: dict[str, Any] = {name: getattr(self, name)[chosen] for name in ("samples", "prompt_lengths")}
        picked |= {name: getattr(self, name)[groups] for name in ("lengths", "ended", "rewards")}
        for name, own in (("prompts", chosen), ("answers", groups), ("sampler", groups), ("old", groups)):
            parts = self.parts(name)
            picked[name] = np.concatenate([getattr(self, name)[:0], *(parts[number] for number in own)])
        return replace(self, **picked)


def interleaved(parts: Sequence[Rollouts]) -> Rollouts:
    """The answers of all ranks in the order of the global batch, whose prompt n is the rank n modulo ranks's."""
    joined: dict[str, Any] = {name: np.concatenate([getattr(part, name) for part in parts]) for name in _ARRAYS}
    whole = replace(parts[0], **joined)
    counts = [len(part.samples) for part in parts]
    firsts = np.cumsum([0, *counts])
    order = [(number, rank) for rank, count in enumerate(counts) for number in range(count)]
    return whole.of([int(firsts[rank]) + number for number, rank in sorted(order)])


def path_of(folder: Path, step: int) -> Path:
    """The file of a step, from 1 in the order of the data."""
    return folder / f"step-{step:06d}.safetensors"


def write(path: Path, rollouts: Rollouts, **facts: str) -> None:
    """Publish the file. facts: further metadata. Raises OSError."""
    arrays = {name: np.ascontiguousarray(getattr(rollouts, name)) for name in _ARRAYS}
    path.parent.mkdir(exist_ok=True)
    said = {"version": rollouts.version, "facts": rollouts.facts, "sha256": _sha256(arrays, rollouts.facts), **facts}
    write_atomically(path, save(arrays, said))


def read(path: Path) -> Rollouts | None:
    """The file's answers; None where it is missing or damaged, and they are sampled again."""
    try:
        with safe_open(path, framework="numpy") as file:
            said, arrays = file.metadata(), {name: file.get_tensor(name) for name in _ARRAYS}
    except (OSError, SafetensorError):
        return None
    if said is None or said.get("sha256") != _sha256(arrays, said.get("facts", "")):
        return None
    return Rollouts(**arrays, version=said["version"], facts=said["facts"])


def facts_of(rollouts: Rollouts) -> dict[str, float]:
    """The metrics of the step."""
    found: dict[str, float] = json.loads(rollouts.facts)
    return found


def _sha256(arrays: dict[str, np.ndarray], facts: str) -> str:
    digest = hashlib.sha256(facts.encode())
    for name in _ARRAYS:
        digest.update(f"{name} {arrays[name].dtype} {arrays[name].shape}".encode() + arrays[name].tobytes())
    return digest.hexdigest()
