"""The partial sums of parameters' gradients, which are sums over all positions.

torch 2.13's `native_layer_norm_backward` and `embedding_dense_backward` on a CPU add up one position after the other in
the weight's dtype; a linear layer's products, and its bias, are added up in FP32 and rounded once. On a GPU all of
these add up in FP32, so that the resulting bound is wider there than necessary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers.pytorch_utils import Conv1D

from tools.parity.recompute import Call


@dataclass(frozen=True)
class Walk:
    """Squares of the partial sums T_k leading to one gradient, added up over all its values in FP64."""

    squares: float
    in_plan: bool
    """Whether they are rounded to the plan's dtype, rather than only in a computation that is FP32 throughout."""


@torch.no_grad()
def walks(module: torch.nn.Module, call: Call, exact: torch.Tensor | None) -> dict[str, Walk]:
    """The walk of each parameter, by its name in the module. call: with the gradient that arrived at its output. exact:
    that of its weight in FP64; None if it is not compared.

    Empty for modules written out in Python: their terms are rounded before they are added, in FP32 as in 16 bits.
    """
    if 0 not in call.came or not (call.args or call.kwargs):
        return {}
    given, came = call.args[0] if call.args else next(iter(call.kwargs.values())), call.came[0].double()
    if isinstance(module, torch.nn.LayerNorm):
        rows = module.normalized_shape
        values, came = (item.double().reshape(-1, *rows) for item in (given, came))
        over = tuple(range(1, values.dim()))
        centred = values - values.mean(over, keepdim=True)
        normed = centred * (centred.square().mean(over, keepdim=True) + module.eps).rsqrt()
        return {"weight": Walk(_squares((came * normed).cumsum(0)), True), "bias": Walk(_squares(came.cumsum(0)), True)}
    if isinstance(module, torch.nn.Embedding):
        return {"weight": Walk(_by_token(given.reshape(-1), came.flatten(0, -2), module.padding_idx), True)}
    if isinstance(module, torch.nn.Linear | Conv1D):
        values, came = (item.double().reshape(-1, item.shape[-1]) for item in (given, came))
        # T_k in random order has mean square (k / n)^2 S^2 + k / n (1 - k / n) Q, S the sum and Q the sum of squares of
        # its terms; sums over k
        squares, terms = 0.0 if exact is None else _squares(exact), values.square().sum(1) @ came.square().sum(1)
        weight = Walk(len(came) * (squares / 3 + float(terms) / 6), False)
        return {"weight": weight, "bias": Walk(_squares(came.cumsum(0)), False)}
    return {}


def _by_token(tokens: torch.Tensor, came: torch.Tensor, padding: int | None) -> float:
    """Sums of an embedding's gradient, separately for each token. tokens: (n,); came: (n, width) FP64."""
    order = tokens.argsort(stable=True)
    tokens, sums = tokens[order], came[order].cumsum(0)
    starts = torch.ones_like(tokens, dtype=torch.bool)
    starts[1:] = tokens[1:] != tokens[:-1]
    before = torch.cat((torch.zeros_like(sums[:1]), sums[:-1]))[starts]  # what came before each token's first
    counted = torch.ones_like(starts) if padding is None else tokens != padding
    return _squares((sums - before[starts.cumsum(0) - 1])[counted])


def _squares(values: torch.Tensor) -> float:
    return float(values.square().sum())
