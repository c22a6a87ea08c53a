"""Expert parallelism (`parallel.expert`): each of N ranks holds E / N of every layer's E experts.

In each layer a rank sends every (token, expert) pair to the rank that has the expert, which computes it and sends the
result back (Lepikhin et al. 2021, "GShard"); none is dropped. The sender weights the results and sums them, so routers
and the counts of `router_balance` are the same as without expert parallelism. The model's own module computes with the
rank's slice of transformers' three-dimensional tensors as if there were no other experts.
"""

from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from modeling.tensor_parallel import CUT, Cut, Exchange, Ranks, refuse_model

MEASURED = frozenset({"mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "phimoe", "deepseek_v3", "glm4_moe", "granitemoe"})
"""Model types whose masters, losses and norms were compared with those of one rank (docs/moe.md)."""

EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Config keys for the number of experts in a layer."""
_CHOSEN = ("num_experts_per_tok", "top_k_experts")
"""Config keys for the number of experts that a token's router chooses; the second is Gemma 4's."""


def expert_count(shape: PretrainedConfig) -> int | None:
    """Experts in a layer according to a model's config; None if it names none."""
    text = shape.get_text_config()
    return next((int(getattr(text, key)) for key in EXPERT_COUNTS if getattr(text, key, None)), None)


def used_by_token(shape: torch.Size, config: Any) -> int:
    """[parameters] Number of a whole tensor that one token uses: of fused experts, those that its router chooses."""
    text = config.get_text_config()
    chosen = next((int(each) for key in _CHOSEN if (each := getattr(text, key, None))), 0)
    fused = chosen and len(shape) == 3 and shape[0] == expert_count(text)
    return shape.numel() * chosen // shape[0] if fused else shape.numel()


def require_shareable_experts(shape: PretrainedConfig, ranks: int) -> None:
    """Raises UserError, with the reason, for a model whose experts cannot be shared among this many ranks."""
    kind, count = shape.get_text_config().model_type, expert_count(shape)
    reason = None
    if kind not in MEASURED:
        reason = f"it is verified for {', '.join(sorted(MEASURED))}"
    elif count is None or count % ranks:
        reason = f"its {count} experts do not divide among {ranks} ranks"
    refuse_model("expert", ranks, shape, reason)


def share_experts(model: nn.Module, group: Ranks, name: str) -> int:
    """Keep this rank's experts of each layer, in place; returns the number of layers. name: DeepSpeed's group name."""
    layers = 0
    module: Any
    for module in filter(_has_experts, model.modules()):
        count, own = int(module.num_experts), int(module.num_experts) // group.size
        how = Cut(0, (own,) * group.size)
        for key, whole in list(module.named_parameters(recurse=False)):
            if whole.shape[0] != count:
                raise ValueError(f"{type(module).__name__}.{key} has {whole.shape[0]} rows for {count} experts")
            # a copy: a view would keep the whole tensor in memory
            parameter: Any = nn.Parameter(how.slice_of(whole.detach(), group.rank).clone())
            parameter.allreduce, parameter.group_name = False, name
            setattr(parameter, CUT, how)
            setattr(module, key, parameter)
        module.num_experts = own
        module.forward = partial(_dispatched, module, group)
        layers += 1
    if not layers:
        raise ValueError("no layer has experts in tensors of three dimensions")
    return layers


def _has_experts(module: Any) -> bool:
    own = module.parameters(recurse=False)
    return type(module).__name__.endswith("Experts") and any(parameter.dim() == 3 for parameter in own)


def _dispatched(
    experts: Any, group: Ranks, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """The experts' own forward pass, spread over the ranks of a group. A collective, as is its backward pass. hidden:
    (tokens, width). index: (tokens, k) int64, among all experts. weights: (tokens, k)."""
    own, size, k = experts.num_experts, group.size, index.shape[1]
    order = index.flatten().argsort(stable=True)
    by_expert = torch.bincount(index.flatten(), minlength=own * size)
    of_mine = group.exchange(by_expert.view(size, own), [1] * size, [1] * size)
    sent, received = torch.stack([by_expert.view(size, own).sum(1), of_mine.sum(1)]).tolist()
    rows = Exchange.apply(hidden.repeat_interleave(k, 0)[order], sent, received, group)
    ids = torch.arange(own, device=rows.device).repeat(size).repeat_interleave(of_mine.flatten(), output_size=len(rows))
    idle = not len(rows)
    if idle:  # a dummy row whose result is not used: the backward pass runs as on other ranks, collectives included
        rows, ids = torch.cat([rows, rows.new_zeros(1, rows.shape[1])]), ids.new_zeros(1)
    found = type(experts).forward(experts, rows, ids[:, None], rows.new_ones(len(rows), 1))
    found = Exchange.apply(found[:-1] if idle else found, received, sent, group)
    pairs = found[order.argsort()].view(*index.shape, -1)
    return (pairs * weights.unsqueeze(-1)).sum(1).to(hidden.dtype)
