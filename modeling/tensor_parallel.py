"""Tensor parallelism (`parallel.tensor`): which models support it, and how their parameters are cut.

DeepSpeed's AutoTP cuts the linear layers of a block by transformers' `tp_plan`, so that a rank has whole heads (Shoeybi
et al. 2019, "Megatron-LM"). Norms, embeddings and biases added after a reduction are replicated on every rank.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import PretrainedConfig

from config.errors import UserError

MEASURED = frozenset(
    {"llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "mistral", "granite", "cohere", "cohere2", "smollm3"}
    | {"gpt_neox", "opt", "starcoder2", "phi", "stablelm", "nemotron"}
)
"""Model types whose masters, losses and norms were compared with those of one rank (docs/parallel.md)."""

_HEAD_NORMS = ("use_qk_norm", "qk_layernorm")
"""Config keys of per-head norms that are in no `tp_plan`: a rank would train them on its own heads alone."""
_INNER_DROPOUT = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "activation_dropout")
"""Config keys of dropout inside layers that are cut, where a rank draws for its own heads or values."""


class Ranks(Protocol):
    """A group of ranks, each with a slice of something, in the order of the slices."""

    @property
    def rank(self) -> int:
        """The index of this rank's slice, from 0."""

    @property
    def size(self) -> int:
        """The number of slices."""

    def exchange(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        """rows: (n, ...), first the `sent[0]` for rank 0, ... -> (m, ...), first the `received[0]` from rank 0, ..."""


class Exchange(torch.autograd.Function):
    """Sends rows to the ranks of a group and, in the backward pass, their gradients back."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sent: list[int], received: list[int], group: Ranks) -> torch.Tensor:
        ctx.way = received, sent, group
        return group.exchange(rows, sent, received)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return ctx.way[2].exchange(gradients[0], *ctx.way[:2]), None, None, None


def unshared_reason(shape: PretrainedConfig, ranks: int) -> str | None:
    """Why a model's matrices cannot be shared among `ranks`; None if they can. shape: the model's config."""
    text = shape.get_text_config()
    if text.model_type not in MEASURED:
        return f"it is verified for {', '.join(sorted(MEASURED))}"
    heads = text.num_attention_heads
    groups = getattr(text, "num_key_value_heads", None) or heads
    for count, what in ((heads, "attention heads"), (groups, "key and value heads")):
        if count % ranks:
            return f"its {count} {what} do not divide among {ranks} ranks"
    inner = next(getattr(text, key) for key in _INNER_KEYS if getattr(text, key, None) is not None)
    if inner % ranks:
        return f"the {inner} inner values of its MLP do not divide among {ranks} ranks"
    for key in _INNER_DROPOUT:
        if getattr(text, key, None):
            value = getattr(text, key)
            return f"{key} = {value:g} would drop the same values of every rank's heads (set model.config.{key}=0)"
    for key in _HEAD_NORMS:
        if getattr(text, key, None):
            return f"DeepSpeed does not sum the gradients of the norms of {key} = true, which each rank has whole"
    return None


def refuse_model(key: str, ranks: int, shape: PretrainedConfig, reason: str | None) -> None:
    """Raises UserError if there is a reason why a model does not support a key of `parallel`. shape: its config."""
    if reason is not None:
        kind = shape.get_text_config().model_type
        raise UserError(f"parallel.{key} = {ranks}: not supported for model {kind}: {reason}; set it to 1")


def require_shareable(shape: PretrainedConfig, ranks: int) -> None:
    """Raises UserError, with the reason, for a model whose matrices cannot be shared among this many ranks."""
    refuse_model("tensor", ranks, shape, unshared_reason(shape, ranks))


_INNER_KEYS = ("intermediate_size", "ffn_dim", "n_inner")


@dataclass(frozen=True)
class Place:
    """Where a slice lies in the whole tensor, in memory order: `width` consecutive values in every `whole` values."""

    width: int
    whole: int
    first: int
    """Offset of the slice in every `whole` values."""

    def in_whole(self, index: torch.Tensor) -> torch.Tensor:
        """Map indices in the slice to indices in the whole tensor."""
        return index // self.width * self.whole + self.first + index % self.width


@dataclass(frozen=True)
class Cut:
    """How a parameter is cut among ranks."""

    dimension: int
    sizes: tuple[int, ...]
    """[rows or columns] Size of each rank's slice."""

    def whole(self, slice_shape: torch.Size) -> torch.Size:
        """The shape of the whole parameter."""
        sizes = list(slice_shape)
        sizes[self.dimension] = sum(self.sizes)
        return torch.Size(sizes)

    def place(self, slice_shape: torch.Size, rank: int) -> Place:
        """The place of a rank's slice in the whole parameter."""
        inner = slice_shape[self.dimension + 1 :].numel()
        width, whole = (size * inner for size in (self.sizes[rank], sum(self.sizes)))
        return Place(width, whole, sum(self.sizes[:rank]) * inner)

    def slice_of(self, whole: torch.Tensor, rank: int) -> torch.Tensor:
        """A view of a rank's slice of the whole parameter."""
        return whole.narrow(self.dimension, sum(self.sizes[:rank]), self.sizes[rank])


def cut(parameter: Any) -> Cut | None:
    """The recorded cut of a parameter; None if this rank has all of it."""
    found: Cut | None = getattr(parameter, CUT, None)
    return found


def cut_of(parameter: Any) -> Cut | None:
    """AutoTP's cut of a parameter; None for a replica. Raises ValueError unless it is one slice per rank."""
    described = getattr(parameter, _DESCRIBED, None)
    if described is None or described["replicated"]:
        if getattr(parameter, "tensor_model_parallel", False) and described is None:
            raise ValueError("it is cut in a way that DeepSpeed does not describe")
        return None
    sizes, dimension = described["partition_sizes"], described["partition_dim"]
    if described["sub_param_shape"] is not None or not sizes or dimension is None:
        raise ValueError("it is cut in several pieces for each rank")
    return Cut(int(dimension), tuple(map(int, sizes)))


CUT = "mantissa_cut"
"""Attribute of a parameter that says how it is cut."""
_DESCRIBED = "ds_autotp_universal_checkpoint_meta"
