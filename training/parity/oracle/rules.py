"""Data order, learning rate and optimizer of a config, written down a second time.

Nothing here is taken from data/sampler.py, training/schedule.py, modeling/parameter_groups.py or the engine, on
purpose: what both sides share is never found wrong. The order is that of docs/data.md in plain Python integers, the
schedules are transformers', the optimizers torch's.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

from config.errors import UserError
from config.schema import Config, LossScaleSection, OptimizerSection, ScheduleSection
from data.row_shards import RowShards
from data.shards import TokenShards

_STRETCH, _ROUNDS, _WORD = 16, 8, (1 << 64) - 1
IGNORED = -100
"""Label of a token that is not predicted."""


class Order:
    """Which samples make the global batch at a position, and their sequences."""

    def __init__(self, config: Config, shards: TokenShards | RowShards, *, end_of_document: int) -> None:
        self._shards, self._length = shards, config.data.sequence_length
        self._seed, self._size = config.run.seed, config.batch.global_size
        self._apart, self._end = config.keeps_documents_apart, end_of_document
        self._arrays: list[np.ndarray] = []
        self._samples = shards.sequences(self._length)
        if isinstance(shards, TokenShards):
            self._arrays = [shard.array for shard in shards.shards]
            self._samples = sum(self._windows(array) for array in self._arrays)

    def batch(self, position: int) -> list[int]:
        """The samples of a global batch, in order. position: global batches before it."""
        if not isinstance(self._shards, RowShards) or self._apart:
            return self._shuffled(position)
        stretch, within = divmod(position, _STRETCH)  # rows that are padded: those of similar length together
        ids = [sample for k in range(_STRETCH) for sample in self._shuffled(stretch * _STRETCH + k)]
        ids.sort(key=self._places)
        number = permuted(within, samples=_STRETCH, seed=self._seed, epoch=stretch)
        return ids[number * self._size : (number + 1) * self._size]

    def places(self, ids: Sequence[int]) -> int:
        """[tokens] Inputs of these samples, padding aside."""
        return sum(map(self._places, ids))

    def sequences(self, ids: Sequence[int]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Inputs and labels, (n,) int64 each, of everything in these samples that is attended to as a whole."""
        for sample in ids:
            if isinstance(self._shards, RowShards):
                for tokens, trained in self._shards.sequence(sample):
                    labels = np.where(trained[1:].astype(bool), tokens[1:].astype(np.int64), IGNORED)
                    yield _pair(tokens[:-1], labels)
                continue
            window = self._window(sample).astype(np.int64)
            inputs, labels = window[:-1], window[1:].copy()
            if not self._apart:
                yield _pair(inputs, labels)
                continue
            labels[inputs == self._end] = IGNORED  # nothing follows from the end of a document
            borders = [0, *(np.flatnonzero(inputs == self._end) + 1).tolist(), len(inputs)]
            for start, end in pairwise(borders):
                if start < end:
                    yield _pair(inputs[start:end], labels[start:end])

    def _places(self, sample: int) -> int:
        if isinstance(self._shards, TokenShards):
            return self._length
        return sum(len(tokens) - 1 for tokens, _ in self._shards.sequence(sample))

    def _windows(self, array: np.ndarray) -> int:
        """So many windows a shard has; each begins with the last token of the one before."""
        return (len(array) - 1) // self._length if len(array) else 0

    def _window(self, sample: int) -> np.ndarray:
        for array in self._arrays:
            if sample < self._windows(array):
                return array[sample * self._length : (sample + 1) * self._length + 1]
            sample -= self._windows(array)
        raise IndexError(sample)

    def _shuffled(self, position: int) -> list[int]:
        found = []
        for index in range(position * self._size, (position + 1) * self._size):
            epoch, within = divmod(index, self._samples)
            found.append(permuted(within, samples=self._samples, seed=self._seed, epoch=epoch))
        return found


def _pair(inputs: np.ndarray, labels: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(inputs.astype(np.int64)), torch.from_numpy(labels.astype(np.int64))


def permuted(index: int, *, samples: int, seed: int, epoch: int) -> int:
    """Element `index` of an epoch's permutation of [0, samples): a Feistel network with cycle walking."""
    half = max(3, ((samples - 1).bit_length() + 1) // 2)
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * _ROUNDS, person=b"mantissa-order").digest()
    keys = struct.unpack(f"<{_ROUNDS}Q", digest)
    low = (1 << half) - 1
    while True:
        left, right = index >> half, index & low
        for key in keys:
            left, right = right, left ^ (_mixed(right ^ key) & low)
        index = left << half | right
        if index < samples:
            return index


def _mixed(value: int) -> int:
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _WORD
    return value ^ value >> 31


def schedule(section: ScheduleSection, *, peak: float, total: int) -> Callable[[int], float]:
    """Learning rate of the update after so many applied ones, of `total` planned, from transformers' schedules.

    Theirs start at 0 and end one step after the last; docs/numerics.md says how the two are lined up.
    """
    warmup, last = section.warmup_steps, max(total - 1, 1)
    rising = _factor(transformers.get_constant_schedule_with_warmup, warmup)
    ratio = section.final_ratio
    if section.name == "constant" or last <= warmup:  # the decay starts with the last step, or never
        falling = lambda step: 1.0  # noqa: E731
    elif section.name == "cosine":
        falling = _factor(
            transformers.get_cosine_with_min_lr_schedule_with_warmup, warmup, num_training_steps=last, min_lr_rate=ratio
        )
    elif section.name == "linear":
        line = _factor(transformers.get_linear_schedule_with_warmup, warmup, num_training_steps=last)
        falling = lambda step: ratio + (1.0 - ratio) * line(step)  # noqa: E731
    else:
        decay = max(round(section.decay_fraction * total), 1)
        start = max(warmup, last - decay)
        options = {"num_stable_steps": start - warmup, "num_decay_steps": last - start, "decay_type": "linear"}
        falling = _factor(transformers.get_wsd_schedule, warmup, min_lr_ratio=ratio, **options)
    return lambda applied: peak * (rising(applied + 1) if applied < warmup else falling(min(applied, last)))


def _factor(make: Callable[..., Any], warmup: int, **options: Any) -> Callable[[int], float]:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    found: Callable[[int], float] = make(optimizer, num_warmup_steps=warmup, **options).lr_lambdas[0]
    return found


def loss_scale(section: LossScaleSection) -> Callable[[bool], float] | None:
    """Of each step in turn, from whether it overflowed, the loss scale that it has; None for a policy not known here.

    DeepSpeed's rule: of the overflows since the scale last grew all but the first few halve it, and each window without
    one after the step that follows an overflow doubles it, from the next step on.
    """
    if section.policy == "static":
        return lambda overflow: section.initial_scale
    if section.policy != "deepspeed":
        return None
    scale, tolerated, clean = section.initial_scale, section.tolerated_overflows - 1, -1

    def of_step(overflow: bool) -> float:
        nonlocal scale, tolerated, clean
        now = scale
        clean = -1 if overflow else clean + 1
        if overflow:
            scale = scale if tolerated else max(scale / 2.0, section.minimum)
            tolerated = max(tolerated - 1, 0)
        elif clean and clean % section.window == 0:
            scale, tolerated = min(scale * 2.0, section.largest_scale), section.tolerated_overflows - 1
        return now

    return of_step


def optimizer_of(model: nn.Module, section: OptimizerSection) -> torch.optim.Optimizer:
    """torch's optimizer on a model's parameters; each group has the factor of the scheduled rate as `factor`.

    Matrices decay; norms, biases and embeddings do not. Raises UserError for an optimizer that torch does not have.
    """
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        decay = section.weight_decay if parameter.dim() >= 2 and id(parameter) not in embeddings else 0.0
        factor = 1.0
        for group in section.groups:
            if fnmatchcase(name, group.match):  # the last one that matches
                own = section.weight_decay if parameter.dim() >= 2 and id(parameter) not in embeddings else 0.0
                decay = own if group.weight_decay is None else group.weight_decay
                factor = 1.0 if group.learning_rate is None else group.learning_rate / section.learning_rate
        groups.setdefault((decay, factor), []).append(parameter)
    listed = [{"params": found, "weight_decay": key[0], "factor": key[1]} for key, found in groups.items()]
    if section.name == "adamw":
        return torch.optim.AdamW(listed, lr=0.0, betas=section.betas, eps=section.eps, foreach=False)
    if section.name == "sgd":
        momentum = 0.9 if section.momentum is None else section.momentum
        return torch.optim.SGD(listed, lr=0.0, momentum=momentum, foreach=False)
    raise UserError(f"optimizer.name = {section.name}: the oracle knows torch's own, adamw and sgd")
