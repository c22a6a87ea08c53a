"""Sequence parallelism: attention over sequences of which each rank has a slice.

Around attention the ranks of a group trade tokens for heads by an all-to-all, and back (Jacobs et al. 2023, "DeepSpeed
Ulysses"); docs/parallel.md has more. A model builds its mask for its slice only, so that mask is not used: whether
documents are kept apart is known, where they begin follows from the positions of the whole sequence, and a layer's
window is the one it passes to its attention.

DeepSpeed's own wrapper (UlyssesSPAttentionHF) replaces a function for the whole process and drops masks
(docs/upstream/). This one belongs to one model, registered under its own `_attn_implementation` name. Forward passes
without WHOLE_POSITIONS, such as those that generate text, use the model's own attention.
"""

import itertools
import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import pad
from transformers import PretrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from config.batch import WHOLE_POSITIONS
from config.errors import UserError, one_line
from modeling.tensor_parallel import Exchange, Ranks, refuse_model

LARGEST_IN_FP32 = 1e-3
"""[fraction of the largest logit] Difference put down to rounding in `require_equal_logits`."""
LARGEST_IN_16_BITS = 0.1
"""The same for a model that computes in BF16 or FP16."""
_SLICE = 8
"""[tokens] Length of each rank's slice in `require_equal_logits`."""

_numbers = itertools.count(1)


class SequenceAttention:
    """Sequence-parallel attention of one model. Changes the model in place until `close`."""

    def __init__(self, model: PreTrainedModel, group: Ranks, *, apart: bool) -> None:
        """apart: documents that share a sequence do not see each other. Raises UserError, with the reason."""
        shape = model.config.get_text_config()
        self._own = str(model.config._attn_implementation)
        refuse_model("sequence", group.size, shape, unshared_reason(shape, self._own, group.size))
        self._group, self._apart = group, apart
        self._windows = _windows(shape)
        self._configs = {id(item): item for item in (model.config, shape)}.values()
        self._name = f"sequence_parallel_{next(_numbers)}"
        self._positions: torch.Tensor | None = None
        self._masks: dict[int | None, torch.Tensor | None] = {}
        ALL_ATTENTION_FUNCTIONS[self._name] = self._attend
        self._hook = model.register_forward_pre_hook(self._begin, with_kwargs=True)

    def close(self) -> None:
        """Restore the model's own attention."""
        self._use(self._own)
        self._hook.remove()
        del ALL_ATTENTION_FUNCTIONS[self._name]

    def begin(self, positions: torch.Tensor | None) -> None:
        """Attend to whole sequences with these positions until the next call; None: the model's own attention."""
        self._positions, self._masks = positions, {}
        self._use(self._own if positions is None else self._name)

    def _begin(self, model: torch.nn.Module, args: tuple, given: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        self.begin(given.pop(WHOLE_POSITIONS, None))
        return args, given

    def _use(self, implementation: str) -> None:
        for config in self._configs:
            config._attn_implementation_internal = implementation

    def _attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        **options: Any,
    ) -> tuple[torch.Tensor, None]:
        """Attention over whole sequences, called by transformers. query, key, value: (micro, heads, slice, head size)
        -> (micro, slice, heads, head size). mask: that of the slice or None; not used."""
        group = self._group
        repeats = math.lcm(key.shape[1], group.size) // key.shape[1]
        if repeats > 1:
            key, value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
        query, key, value = (_traded(item, group) for item in (query, key, value))
        window = self._window_of(module, options)
        stand_in: Any = SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1], is_causal=True)
        options = {name: item for name, item in options.items() if name not in ("position_ids", "is_causal")}
        found, _ = sdpa_attention_forward(stand_in, query, key, value, self._mask(window), **options)
        return _traded(found, group), None

    def _window_of(self, module: torch.nn.Module, options: dict[str, Any]) -> int | None:
        """[tokens] Attention window of this layer, including the token itself; None: all tokens before it. Raises
        UserError if it is not the one in the model's config, or not causal: the mask is then unknown."""
        window = options.get("sliding_window", getattr(module, "sliding_window", None)) or None
        layer = getattr(module, "layer_idx", None)
        expected = self._windows[layer] if layer is not None and layer < len(self._windows) else None
        causal = options.get("is_causal")
        if window == expected and (getattr(module, "is_causal", True) if causal is None else causal):
            return window
        raise UserError(
            f"parallel.sequence = {self._group.size}: not supported for this model: its layer {layer} is not causal, "
            f"or passes the window {window} to its attention where the config says {expected}; set it to 1"
        )

    def _mask(self, window: int | None) -> torch.Tensor | None:
        """(micro, 1, whole, whole) bool, True where a token sees another; None: every token sees all before it."""
        assert self._positions is not None, "attention of a slice outside of the model's forward pass"
        positions = self._positions
        length = positions.shape[1]
        if window is not None and window >= length:
            window = None
        if window not in self._masks:
            self._masks[window] = _visible(positions, window, apart=self._apart)
        return self._masks[window]


def unshared_reason(shape: PretrainedConfig, attention: str, ranks: int) -> str | None:
    """Why attention of this implementation cannot be shared among `ranks`; None if no reason is known."""
    if attention != "sdpa":
        return f"its attention is {attention}, and only sdpa is verified"
    heads = getattr(shape, "num_attention_heads", None)
    if heads is None:
        return "its config names no attention heads"
    if heads % ranks:
        return f"its {heads} attention heads do not divide among {ranks} ranks"
    kinds = set(getattr(shape, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        return f"it has layers of {', '.join(sorted(kinds))}, which need the whole sequence"
    if getattr(shape, "attention_chunk_size", None):
        return "it uses chunked attention"
    moving = _rope_types(getattr(shape, "rope_parameters", None) or {}) & {"dynamic", "longrope"}
    if moving:
        return f"the frequencies of its rotary embedding ({', '.join(moving)}) depend on the length of its input"
    return None


def _rope_types(parameters: Any) -> set[str]:
    """Types of rotary embedding, of the model or of each type of its layers."""
    if not isinstance(parameters, dict):
        return set()
    found = {str(parameters["rope_type"])} if "rope_type" in parameters else set()
    return found.union(*(_rope_types(item) for item in parameters.values()))


def _windows(shape: PretrainedConfig) -> list[int | None]:
    """[tokens] Attention window of each layer according to the config; None: no window."""
    window, kinds = getattr(shape, "sliding_window", None), getattr(shape, "layer_types", None)
    if kinds:
        return [window if kind == "sliding_attention" else None for kind in kinds]
    return [window or None] * shape.num_hidden_layers


def _visible(positions: torch.Tensor, window: int | None, *, apart: bool) -> torch.Tensor | None:
    """(rows, 1, length, length) bool; None where every token sees all before it. positions: (rows, length) int64."""
    if window is None and not apart:
        return None
    place = torch.arange(positions.shape[1], device=positions.device)
    seen = place[:, None] >= place
    if window is not None:
        seen = seen & (place[:, None] - place < window)
    if not apart:
        return seen[None, None]
    document = pad((positions.diff(dim=1) != 1).cumsum(1), (1, 0))
    return (seen & (document[:, :, None] == document[:, None]))[:, None]


def _traded(values: torch.Tensor, group: Ranks) -> torch.Tensor:
    """An all-to-all: the second dimension is split, part i going to rank i, and what comes is joined on the third."""
    parts, one_each = torch.stack(values.chunk(group.size, 1)), [1] * group.size
    return torch.cat(Exchange.apply(parts, one_each, one_each, group).unbind(), 2)


@torch.no_grad()
def require_equal_logits(
    forward: Callable[[dict[str, Any]], torch.Tensor],
    config: PretrainedConfig,
    group: Ranks,
    device: torch.device,
    *,
    apart: bool,
    largest: float,
) -> str | None:
    """Compare this rank's slice of a short sequence with the model's own pass over it; returns the problem or None.

    forward: calls the model in evaluation mode and returns its logits. apart: the sequence holds two documents, the
    second beginning inside a slice. largest: allowed difference, relative to the largest logit.
    """
    vocabulary, length = config.get_text_config().vocab_size, _SLICE * group.size
    ids = torch.arange(length, device=device).unsqueeze(0) * 7 % vocabulary
    positions = torch.arange(length, device=device).unsqueeze(0)
    if apart:
        positions = positions % (_SLICE + _SLICE // 2)
    mine = slice(group.rank * _SLICE, (group.rank + 1) * _SLICE)
    here = f"parallel.sequence = {group.size}: not supported for model {config.model_type}:"
    try:
        sliced = forward({"input_ids": ids[:, mine], "position_ids": positions[:, mine], WHOLE_POSITIONS: positions})
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:  # code that builds its own masks
        return f"{here} it cannot run on slices of a sequence: {one_line(error)}; set it to 1"
    whole = forward({"input_ids": ids, "position_ids": positions}).float()
    difference = float((sliced.float() - whole[:, mine]).abs().max() / whole.abs().max())
    if difference <= largest:
        return None
    return (
        f"{here} on slices of a sequence its logits differ by {difference:.1e} of the largest from those on the whole; "
        "set it to 1"
    )
