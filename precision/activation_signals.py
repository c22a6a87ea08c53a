"""Early signs of trouble in the forward pass: attention's largest logit and entropy, and outlier channels.

docs/early-warnings.md says what they mean and where they come from. Attention entropy is given as a share of the
logarithm of the number of keys seen; a query that sees only one key is left out. The kurtosis of channel norms is
mean(s^4) / mean(s^2)^2, with s the root mean square of a channel over all tokens, each scaled as by RMSNorm: otherwise
the few tokens of enormous norm that healthy language models have (Sun et al. 2024) would decide it alone.

Everything is computed in FP32 and stays on the device. Queries are sampled, at most POSITIONS per sequence, evenly
spaced and including the last; so are tokens for channels, at most TOKENS per call. Dispatch modes see none of this.
"""

import functools
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Self

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from precision.findings import in_backward, tensors_of

POSITIONS = 16
"""Largest number of queries measured in a sequence."""
TOKENS = 512
"""Largest number of tokens measured in a module's output, per call."""
OUTLIER = 6.0
"""Smallest norm of an outlier channel, in units of the median channel's. Dettmers et al. 2022 ("LLM.int8()", section
4.1) look for magnitudes of 6 after norms, which make a typical magnitude about 1."""


class AttentionMeter:
    """Context manager: measures largest logit and entropy of each attention that transformers' interface dispatches."""

    def __init__(self, model: nn.Module, *, active: bool = True) -> None:
        """active: False measures nothing, for compiled blocks, which would otherwise be recompiled."""
        self._names = {module: name for name, module in model.named_modules()}
        self._active = active
        self.largest: dict[str, torch.Tensor] = {}
        """Module name to () float32."""
        self.entropies: dict[str, torch.Tensor] = {}
        """Module name to (2, heads) float64: the sum of the queries' entropy shares, and the number of queries."""

    def __enter__(self) -> Self:
        if self._active:
            interface: Any = ALL_ATTENTION_FUNCTIONS
            find: Callable[..., Any] = interface.get_interface

            def get_interface(implementation: str, default: Any) -> Any:
                return self._measured(find(implementation, default))

            interface.get_interface = get_interface
        return self

    def __exit__(self, *error: object) -> None:
        ALL_ATTENTION_FUNCTIONS.__dict__.pop("get_interface", None)

    def _measured(self, attention: Any) -> Any:
        @functools.wraps(attention)
        def measured(
            module: Any, query: Any, key: Any, value: Any, mask: Any = None, *rest: Any, **options: Any
        ) -> Any:
            name = self._names.get(module)
            if name is not None and query.dim() == key.dim() == 4 and not in_backward():
                with unseen(query.device.type):
                    self._measure(name, module, query.detach(), key.detach(), mask, options)
            return attention(module, query, key, value, mask, *rest, **options)

        return measured

    def _measure(
        self, name: str, module: nn.Module, query: torch.Tensor, key: torch.Tensor, mask: Any, options: dict[str, Any]
    ) -> None:
        """query: (batch, heads, queries, d); key: (batch, heads or groups of them, keys, d)."""
        batch, heads, queries, _ = query.shape
        at = torch.arange(queries - 1, -1, -math.ceil(queries / POSITIONS), device=query.device)
        chosen = query[:, :, at].float().reshape(batch, key.shape[1], -1, query.shape[3])
        scaling = options.get("scaling")
        logits = chosen @ key.float().mT * (query.shape[3] ** -0.5 if scaling is None else scaling)
        logits = logits.view(batch, heads, len(at), key.shape[2])
        if options.get("softcap") is not None:
            logits = options["softcap"] * torch.tanh(logits / options["softcap"])
        if options.get("position_bias") is not None:
            logits = logits + options["position_bias"][:, :, at]
        if isinstance(mask, torch.Tensor) and mask.dim() == 4:
            rows = mask[:, :, at, : key.shape[2]] if mask.shape[2] > 1 else mask[..., : key.shape[2]]
            seen = rows if rows.dtype == torch.bool else rows > torch.finfo(rows.dtype).min / 2
            if rows.dtype != torch.bool:
                logits = logits + rows.float()
        else:
            seen = _seen_without_mask(module, mask, at, key.shape[2], options)
        logits = logits.masked_fill(~seen, -torch.inf)
        largest, known = logits.amax(), self.largest.get(name)
        self.largest[name] = largest if known is None else torch.maximum(known, largest)
        shares, counted = _entropy_shares(logits, seen)
        sums = torch.stack([shares.sum((0, 2)), counted.expand_as(shares).sum((0, 2))]).double()
        self.entropies[name] = sums + self.entropies.get(name, 0.0)


def _seen_without_mask(
    module: nn.Module, mask: Any, at: torch.Tensor, keys: int, options: dict[str, Any]
) -> torch.Tensor:
    """(batch or 1, 1, queries, keys) bool: which keys the queries at positions `at` see, decided as by kernels without
    a pairwise mask: by causality, sliding window, padding and the positions at which documents begin."""
    of_keys = torch.arange(keys, device=at.device)
    causal = options.get("is_causal")
    causal = getattr(module, "is_causal", True) if causal is None else causal
    seen = at[:, None] >= of_keys if causal else torch.ones(len(at), keys, dtype=torch.bool, device=at.device)
    if options.get("sliding_window"):
        seen = seen & ((at[:, None] - of_keys).abs() < options["sliding_window"])
    seen = seen[None, None]
    positions = options.get("position_ids")
    if isinstance(positions, torch.Tensor) and positions.dim() == 2 and positions.shape[1] == keys:
        document = (positions == 0).cumsum(1)
        seen = seen & (document[:, at, None] == document[:, None, :])[:, None]
    if isinstance(mask, torch.Tensor) and mask.dim() == 2:
        seen = seen & mask.bool()[:, None, None, :keys]
    return seen


def _entropy_shares(logits: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(batch, heads, queries) entropy as a share of the largest possible one, 0 where fewer than two keys are seen; and
    where more are, as bool that expands to it. logits: (batch, heads, queries, keys), -inf where not seen."""
    count = seen.sum(-1)
    counted = count > 1
    entropy = torch.special.entr(logits.softmax(-1)).sum(-1)
    return torch.where(counted, entropy / count.clamp(min=2).log(), 0.0), counted


class OutputMeter:
    """Context manager: calls `_measure` with the name and the output of each call of some modules."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        """modules: by name."""
        self._modules, self._hooks = modules, ExitStack()

    def __enter__(self) -> Self:
        for name, module in self._modules.items():
            hook = functools.partial(self._measure, name)
            self._hooks.callback(module.register_forward_hook(hook, prepend=True).remove)
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.close()

    def _measure(self, name: str, module: nn.Module, args: tuple, output: Any) -> None:
        raise NotImplementedError


class ChannelMeter(OutputMeter):
    """Context manager: `squares` maps a module name to (channels,) float64: squares of each channel of the module's
    output, summed over calls and tokens, with every token scaled to a mean square of 1."""

    def __init__(self, modules: dict[str, nn.Module]) -> None:
        """modules: by name; their first output has channels as its last dimension."""
        super().__init__(modules)
        self.squares: dict[str, torch.Tensor] = {}

    def _measure(self, name: str, module: nn.Module, args: tuple, output: Any) -> None:
        found = next((tensor for tensor in tensors_of(output) if tensor.is_floating_point()), None)
        if found is None or not found.numel() or in_backward():
            return
        with unseen(found.device.type):
            tokens = found.detach().flatten(0, -2)
            squares = tokens[:: math.ceil(len(tokens) / TOKENS)].float().square()
            means = squares.mean(1).clamp(min=torch.finfo(torch.float32).tiny)
            self.squares[name] = (means.reciprocal() @ squares).double() + self.squares.get(name, 0.0)


def channel_figures(squares: torch.Tensor) -> tuple[float, int]:
    """Kurtosis of the channels' norms, and number of outliers. squares: (channels,), summed over all ranks."""
    total, fourth = float(squares.mean()), float(squares.square().mean())
    median = float(squares.median())
    return (fourth / total**2 if total else 1.0), int((squares > OUTLIER**2 * median).sum())


@contextmanager
def unseen(device: str) -> Iterator[None]:
    """Context manager: no gradients, no autocast and no dispatch modes."""
    with torch.no_grad(), _disable_current_modes(), torch.autocast(device, enabled=False):
        yield
