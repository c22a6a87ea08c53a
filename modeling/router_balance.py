"""The balancing loss of mixtures of experts over the global batch, so that it does not depend on the batch's split.

For each layer with E experts, of which every token uses k (Fedus et al. 2021, equations 4 to 6), averaged over the
layers:

    L = E sum_e f_e P_e     f_e: tokens sent to expert e, as a share of all tokens; it has no gradient
                            P_e: mean over all tokens of the probability that the router gives expert e

f_e covers all tokens of the step, on all ranks and in all micro-batches; P_e is a sum over tokens, whose parts add up.
The router's z-loss (Zoph et al. 2022, equation 5) is the mean over tokens of logsumexp(logits)^2. docs/moe.md says why
transformers' own loss, over one micro-batch and all layers together, depends on the split.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from config.errors import UserError
from config.schema import ModelSection

_VERIFIED = frozenset(
    {"ernie4_5_moe", "flex_olmo", "gpt_oss", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared"}
    | {"jamba", "jetmoe", "mellum", "minimax", "mixtral", "olmoe"}
    | {"qwen2_moe", "qwen3_5_moe", "qwen3_moe", "qwen3_next"}
)
"""Model types whose routers weight experts by a softmax of their logits, and whose choice can be observed, whatever
biases it. Others use a sigmoid (DeepSeek V3, MiniMax-M2, Laguna, Flint) or sample (Phi-3.5-MoE), so P is undefined.
"""
_COEFFICIENTS = ("router_aux_loss_coef", "aux_loss_coef", "ffn_config.moe_loss_weight")
"""Config keys of the weight of a model's own balancing loss: the second is JetMoe's, the third DBRX's."""


def router_balance(model: PreTrainedModel, section: ModelSection) -> "RouterBalance | None":
    """The terms that model.balance_loss and model.router_z_loss ask for; None if neither does. Raises UserError."""
    if not section.balance_loss and not section.router_z_loss:
        return None
    reason = _unbalanced_reason(model)
    if reason is not None:
        key = "balance_loss" if section.balance_loss else "router_z_loss"
        kind = f"model {model.config.model_type}"
        raise UserError(f"model.{key} = {getattr(section, key):g}: not supported for {kind}: {reason}; set it to 0")
    return RouterBalance(model, balance=section.balance_loss, z=section.router_z_loss)


def untrained_balance(model: PreTrainedModel, section: ModelSection) -> list[str]:
    """A note if the model has a balancing loss but the config does not ask for one."""
    own = None if section.balance_loss else _own_balance(model.config.get_text_config())
    if own is None:
        return []
    reason = _unbalanced_reason(model)
    instead = "set model.balance_loss to train one over the whole global batch"
    if reason is not None:
        instead = f"model.balance_loss is not supported for model {model.config.model_type} either: {reason}"
    return [f"the model's own balancing loss of experts ({own}) is not trained: {instead}"]


def _own_balance(config: Any) -> str | None:
    """`key = value` of the coefficient with which transformers would add its own loss; None if there is none."""
    for key in _COEFFICIENTS:
        value: Any = config
        for name in key.split("."):
            value = getattr(value, name, None)
        if value:
            return f"{key} = {value:g}"
    return None


def _unbalanced_reason(model: PreTrainedModel) -> str | None:
    """Why the loss is not defined for a model; None if it is."""
    if model.config.get_text_config().model_type.removesuffix("_text") not in _VERIFIED:
        return "no router was seen to choose experts by a softmax of its logits"
    return None if _routers(model) else "its config has no routers"


def _routers(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [module for module in model.modules() if type(module).__name__.endswith(("TopKRouter", "TopKGating"))]


METRICS = ("router/balance_loss", "router/z_loss", "router/busiest", "router/entropy")
"""Router figures of one step, as `RouterBalance.loss` and `load` return them."""


class RouterBalance:
    """The balancing terms of one model's micro-batches."""

    def __init__(self, model: PreTrainedModel, *, balance: float, z: float) -> None:
        """balance, z: coefficients of the two losses."""
        self._routers = _routers(model)
        self._balance, self._z = balance, z
        self.routed: Sequence[tuple[torch.Tensor, torch.Tensor]] = ()
        """Each router's logits of the last pass, (tokens, experts), and the experts it chose, (tokens, k) int64."""

    def watching(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The model's forward pass, wrapped to fill `routed` in each call."""

        def watched(**inputs: Any) -> Any:
            found: list[tuple[torch.Tensor, torch.Tensor]] = []

            def see(module: Any, _: Any, output: Any) -> None:
                if len(output) == 3:  # Granite's of transformers 5.17 has them in the other order
                    first, _, last = output
                    found.append((first, last) if first.is_floating_point() else (last, first))
                else:  # JetMoe's has its logits last, and takes the largest
                    found.append((output[-1], output[-1].detach().topk(module.top_k).indices))

            # added last, to see the outputs as ZeRO-3's own hooks leave them; recomputations are not recorded
            hooks = [module.register_forward_hook(see) for module in self._routers]
            try:
                return forward(**inputs)
            finally:
                self.routed = found
                for hook in hooks:
                    hook.remove()

        return watched

    def counts(self) -> torch.Tensor:
        """(layers, experts) float64: the last pass's number of tokens per expert."""
        rows = []
        for logits, chosen in self.routed:
            flat = chosen.flatten()
            rows.append(flat.new_zeros(logits.shape[-1]).scatter_add_(0, flat, torch.ones_like(flat)))
        return torch.stack(rows).double()

    def loss(self, counts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The last pass's part of the weighted loss, () FP32, and of the two terms, (2,). counts: of the whole step."""
        experts, tokens = counts.shape[1], counts[0].sum() / self.routed[0][1].shape[-1]
        shares = (counts / tokens).float()
        balance = z = torch.zeros((), device=counts.device)
        for (logits, _), share in zip(self.routed, shares, strict=True):
            wide = logits.float()
            balance = balance + experts * (wide.softmax(-1).sum(0) * share).sum()
            z = z + wide.logsumexp(-1).square().sum()
        parts = torch.stack([balance, z]) / (tokens.float() * len(self.routed))
        weights = parts.new_tensor([self._balance, self._z])
        return (parts * weights).sum(), parts.detach().double()

    def load(self, counts: torch.Tensor) -> torch.Tensor:
        """(2,) float64: the busiest expert's tokens relative to a fair share in its layer; and the entropy of the
        experts' shares relative to its maximum, log E, averaged over layers."""
        shares = counts / counts.sum(1, keepdim=True)
        entropy = -torch.special.xlogy(shares, shares).sum(1).mean() / math.log(counts.shape[1])
        return torch.stack([shares.max() * counts.shape[1], entropy])
