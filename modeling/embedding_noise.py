"""Uniform noise on the embeddings in training, as a regulariser for fine-tuning.

Each value of the embedding layer's output gets epsilon alpha / sqrt(L d) added (Jain et al. 2023, "NEFTune", algorithm
1), with epsilon uniform in (-1, 1), L the number of tokens in the row and d the width. Epsilon is a hash of the token's
key, which comes with the batch, and the channel: it does not depend on how a batch is split, and no generator is saved.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

KEYS, LENGTHS = "noise_keys", "row_lengths"
"""Extra inputs of a batch, (micro, sequence) int64 each: a token's key, and the number of tokens in its row, 0 for
padding, which gets no noise."""
_CHUNK_VALUES, _CACHED_VALUES = 1 << 22, 1 << 16
"""Values hashed at once: 32 MiB of int64; on a CPU, as many as its caches hold."""
_GOLDEN, _FIRST, _SECOND = (
    factor - (1 << 64) for factor in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


class EmbeddingNoise:
    """Adds noise to the output of one model's input embedding, inside `of` and in training only."""

    def __init__(self, model: PreTrainedModel, alpha: float) -> None:
        """alpha: above 0; 5 to 15 in the paper."""
        self._alpha = alpha
        self._now: tuple[torch.Tensor, torch.Tensor] | None = None
        model.get_input_embeddings().register_forward_hook(self._add)

    @contextmanager
    def of(self, inputs: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Context manager: training passes get the noise of a micro-batch. inputs: from `Batch.micro_batches`; yields
        those meant for the model. A batch without KEYS gets no noise."""
        self._now = (inputs[KEYS], inputs[LENGTHS]) if KEYS in inputs else None
        try:
            yield {name: value for name, value in inputs.items() if name not in (KEYS, LENGTHS)}
        finally:
            self._now = None

    def _add(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> torch.Tensor | None:
        if self._now is None or not module.training:
            return None
        keys, lengths = self._now
        width = output.shape[-1]
        size = torch.where(lengths > 0, self._alpha * torch.rsqrt(lengths.float() * width), 0.0)
        noise = uniform(keys.flatten(), width).view_as(output)
        return (output + noise.mul_(size.unsqueeze(-1))).to(output.dtype)  # summed in FP32, rounded once


def has_noise(module: nn.Module) -> bool:
    """Whether noise is added to what a module returns in training."""
    hooks = module._forward_hooks.values()
    return any(isinstance(getattr(hook, "__self__", None), EmbeddingNoise) for hook in hooks)


@torch.no_grad()
def uniform(keys: torch.Tensor, width: int) -> torch.Tensor:
    """(n, width) FP32, uniform over the 2^23 odd multiples of 2^-23 in (-1, 1), drawn by SplitMix64 (Steele, Lea and
    Flood 2014) from each state in `keys`, (n,) int64.
    """
    found = torch.empty(len(keys), width, device=keys.device)
    steps = torch.arange(1, width + 1, device=keys.device) * _GOLDEN  # int64 wraps around like unsigned numbers
    rows = max(1, (_CACHED_VALUES if keys.device.type == "cpu" else _CHUNK_VALUES) // width)
    for start in range(0, len(keys), rows):
        value = keys[start : start + rows, None] + steps
        value.bitwise_xor_(_shifted(value, 30)).mul_(_FIRST)
        value.bitwise_xor_(_shifted(value, 27)).mul_(_SECOND)
        value.bitwise_xor_(_shifted(value, 31))
        found[start : start + rows] = _shifted(value, 41)
    return found.add_(0.5).mul_(2.0**-22).sub_(1.0)


def _shifted(value: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical right shift; int64's own would replicate the sign bit."""
    return (value >> bits).bitwise_and_((1 << (64 - bits)) - 1)
