"""The balancing loss of mixtures of experts, over the whole global batch, so that it does not depend on how it is cut.

For each layer with E experts, of which every token takes k (Fedus et al. 2021, "Switch Transformers", equations 4 to 6;
with k > 1 as in transformers' `load_balancing_loss_func`, which gives k where all experts are used alike):

    L = E sum_e f_e P_e     f_e: tokens sent to expert e, as a share of all tokens; it has no gradient
                            P_e: mean over all tokens of the probability that the router gives expert e

and the mean over the layers. transformers pools all layers into one f and one P, so that one layer's surplus hides
another's lack, and takes both over one micro-batch: a product of means, so the router's gradient depends on the cut.
Here f_e is of all tokens of the step, on all ranks and in all micro-batches; P_e is a sum over tokens, whose parts add
up.

The router's z-loss (Zoph et al. 2022, "ST-MoE", equation 5) is the mean over tokens of logsumexp(logits)^2.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from config.errors import UserError
from config.schema import ModelSection

_LOAD_BALANCING = "load_balancing_loss_func"
_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef", "ffn_config.moe_loss_weight")
"""Names that models give the weight of their own balancing loss: the second is JetMoe's, the third DBRX's."""


def router_balance(model: PreTrainedModel, section: ModelSection) -> RouterBalance | None:
    """The terms that model.balance_loss and model.router_z_loss ask for; None without. Raises UserError."""
    if not section.balance_loss and not section.router_z_loss:
        return None
    reason = _unbalanced_reason(model)
    if reason is not None:
        key = "balance_loss" if section.balance_loss else "router_z_loss"
        kind = f"model {model.config.model_type}"
        raise UserError(f"model.{key} = {getattr(section, key):g}: cannot be had for {kind}: {reason}; set it to 0")
    return RouterBalance(model, balance=section.balance_loss, z=section.router_z_loss)


def untrained_balance(model: PreTrainedModel, section: ModelSection) -> list[str]:
    """A note where the model has a balancing loss and the config does not ask for one."""
    if section.balance_loss:
        return []
    own = _own_balance(model.config.get_text_config())
    if own is None:
        return []
    reason = _unbalanced_reason(model)
    instead = "set model.balance_loss to train one over the whole global batch"
    if reason is not None:
        instead = f"model.balance_loss cannot be had for model {model.config.model_type} either: {reason}"
    return [f"the model's own balancing loss of experts ({own}) is not trained: {instead}"]


def _own_balance(config: Any) -> str | None:
    """`key = value` of the coefficient with which transformers would add its loss to the model's; None without one."""
    for key in _COEFFICIENTS:
        value: Any = config
        for name in key.split("."):
            value = getattr(value, name, None)
        if value:
            return f"{key} = {value:g}"
    return None


def _unbalanced_reason(model: PreTrainedModel) -> str | None:
    """Why the loss is not defined for a model; None where it is: softmax over all experts, the first k of them used."""
    if not hasattr(sys.modules[type(model).__module__], _LOAD_BALANCING):
        return "it has no routers with a softmax over its experts"
    if getattr(model.config.get_text_config(), "num_experts_per_tok", None) is None:
        return "its config does not say how many experts a token takes (num_experts_per_tok)"
    return None


METRICS = ("router/balance_loss", "router/z_loss", "router/busiest", "router/entropy")
"""Router figures of one step, as `RouterBalance.loss` and `load` return them."""


class RouterBalance:
    """The balancing terms of one model's micro-batches."""

    def __init__(self, model: PreTrainedModel, *, balance: float, z: float) -> None:
        """balance, z: coefficients of the two losses."""
        self._top_k = int(model.config.get_text_config().num_experts_per_tok)
        self._balance, self._z = balance, z
        self.logits: Sequence[torch.Tensor] = ()
        """Router logits of the last pass, by layer."""

    def watching(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The model's forward pass, whose routers' logits are kept until the next one."""

        def watched(**inputs: Any) -> Any:
            output = forward(**inputs, output_router_logits=True)
            # JetMoe's attention hands on its router's logits, and transformers lists them twice
            self.logits = tuple({id(logits): logits for logits in output.router_logits}.values())
            return output

        return watched

    def counts(self) -> torch.Tensor:
        """(layers, experts) float64: tokens of the last pass by expert."""
        rows = []
        for logits in self.logits:
            chosen = logits.detach().float().softmax(-1).topk(self._top_k, dim=-1).indices
            rows.append(torch.nn.functional.one_hot(chosen, logits.shape[-1]).sum((0, 1)))
        return torch.stack(rows).double()

    def loss(self, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The last pass's part of the step's loss, with and without coefficients: () FP32, and (2,) float64 detached.

        counts: (layers, experts), of all tokens of the step.
        """
        experts, tokens = counts.shape[1], counts[0].sum() / self._top_k
        shares = (counts / tokens).float()
        balance = z = torch.zeros((), device=counts.device)
        for logits, share in zip(self.logits, shares, strict=True):
            wide = logits.float()
            balance = balance + experts * (wide.softmax(-1).sum(0) * share).sum()
            z = z + wide.logsumexp(-1).square().sum()
        parts = torch.stack([balance, z]) / (tokens.float() * len(self.logits))
        weights = parts.new_tensor([self._balance, self._z])
        return (parts * weights).sum(), parts.detach().double()

    def load(self, counts: torch.Tensor) -> torch.Tensor:
        """(2,) float64: the busiest expert's tokens over those of its fair share, in its layer; and the entropy of the
        experts' shares over its largest value, log E, the mean over layers."""
        shares = counts / counts.sum(1, keepdim=True)
        entropy = -torch.special.xlogy(shares, shares).sum(1).mean() / math.log(counts.shape[1])
        return torch.stack([shares.max() * counts.shape[1], entropy])
