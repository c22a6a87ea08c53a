"""Experts that ranks share, through the engine; run on real ranks by test_expert_parallel.py.

The oracle is plain torch on one rank: all experts, the whole global batch, torch's own AdamW and clipping.
"""

import copy
from collections.abc import Sequence
from functools import partial
from itertools import chain, pairwise
from typing import Any

import torch
from deepspeed.runtime.zero import partition_parameters
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from config.resolved import Resolved
from lab.matrix.run import fp32_model
from modeling.expert_parallel import share_experts
from tests.support.models.plain_steps import EVALUATED, distance_of_updates, farthest, plain_steps, trained
from tests.support.models.small_run import batch_of, engine_of, masters_of, plain_model, refusal, resolve, take
from tests.training.engine.optimizer_cases import exchanges
from training.distributed import World
from training.engine.expert_slices import forget_groups
from training.engine.masters import local_states

STEPS = 3
LR = 0.01
MEASURED = {
    "mixtral": "num_local_experts: 4",
    "qwen3_moe": "num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 16",
    "qwen2_moe": "num_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 16, "
    "shared_expert_intermediate_size: 16",
    "olmoe": "num_experts: 4, num_experts_per_tok: 2",
    "phimoe": "num_local_experts: 4, router_jitter_noise: 0.0, input_jitter_noise: 0.0",
    "deepseek_v3": "n_routed_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 16, n_group: 1, topk_group: 1, "
    "first_k_dense_replace: 1, q_lora_rank: 16, kv_lora_rank: 16, qk_rope_head_dim: 8, qk_nope_head_dim: 8, "
    "v_head_dim: 16, n_shared_experts: 1",
    "glm4_moe": "n_routed_experts: 4, num_experts_per_tok: 2, moe_intermediate_size: 16, n_group: 1, topk_group: 1, "
    "first_k_dense_replace: 1, n_shared_experts: 1, head_dim: 16",
    "granitemoe": "num_local_experts: 4, num_experts_per_tok: 2",
}
"""Kind of model to what its config needs beside the sizes of all."""


def model_of(kind: str) -> str:
    """The override that makes a small model of a kind of MEASURED."""
    shape = "hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 2"
    shape += f", initializer_range: 0.2, num_key_value_heads: 2, {MEASURED[kind]}"
    return f"model={{architecture: {kind}, config: {{{shape}}}}}"


def resolved_of(
    world: World, kind: str, *, stage: int, compute: str, ranks: int, micro: int, overrides: Sequence[str] = ()
) -> Resolved:
    """A run of a small model of a kind of MEASURED, whose experts are shared by this many ranks."""
    given = [model_of(kind), f"parallel.expert={ranks}", "optimizer.eps=0.01", "telemetry.every_steps=0", *overrides]
    return resolve(world, stage=stage, compute=compute, micro=micro, overrides=given)


def against_one_rank(
    world: World,
    *,
    stage: int,
    compute: str = "fp32",
    kind: str = "mixtral",
    ranks: int = 2,
    micro: int = 2,
    overrides: Sequence[str] = (),
) -> dict[str, Any]:
    """Errors of losses, norms, the evaluation and the masters after three steps. kind: of MEASURED."""
    world = world.sharing(expert=ranks, timeout_minutes=2)
    resolved = resolved_of(world, kind, stage=stage, compute=compute, ranks=ranks, micro=micro, overrides=overrides)
    with engine_of(world, resolved) as engine:
        start = masters_of(engine)
        found = trained(engine, partial(batch_of, world, micro), steps=STEPS, lr=LR)
        held = sum(parameter.numel() for parameter in engine.model.parameters())
        found.append(engine.evaluate([batch_of(world, micro, seed=EVALUATED)]).loss)
        masters = masters_of(engine)
        regions = {} if engine.regions is None else dict(engine.regions.dtypes)
    drawn = fp32_model(resolved.config.model, seed=resolved.config.run.seed)
    plain: Any = plain_model(resolved, start)
    if resolved.config.optimizer.name != "adamw":  # its rule is written out in FP64, which grouped products do not take
        plain.double().set_experts_implementation("eager")
    expected = plain_steps(plain, resolved.config.optimizer, steps=STEPS, lr=LR)
    weights = {name: parameter.detach() for name, parameter in plain.named_parameters()}
    experts = [n for n in masters if ".experts." in n]
    return {
        "start": max(float((start[name] - value).detach().abs().max()) for name, value in drawn.named_parameters()),
        "numbers": farthest(found, expected),
        "masters": distance_of_updates(masters, weights, start),
        "experts": max(float((masters[n] - weights[n]).norm() / (weights[n] - start[n]).norm()) for n in experts),
        "norm": expected[1],
        "regions": regions,
        "held": held / sum(parameter.numel() for parameter in drawn.parameters()),
    }


def skipped(world: World, *, stage: int, ranks: int = 2, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Three FP16 steps, in the second of which a gradient of rank 1's experts is inf."""
    world = world.sharing(expert=ranks, timeout_minutes=2)
    given = ["faults=[{kind: inf_gradient, step: 2, rank: 1, module: model.layers.0.mlp.experts}]"]
    given += ["precision.loss_scale.initial=256", *overrides]
    resolved = resolved_of(world, "mixtral", stage=stage, compute="fp16", ranks=ranks, micro=2, overrides=given)
    norms, applied, held = [], [], []
    with engine_of(world, resolved) as engine:
        for step in range(1, STEPS + 1):
            health, update = take(engine, batch_of(world, 2, seed=step), step=step, lr=LR / step)
            norms.append(health.grad_norm)
            applied.append(update.applied)
            states = (local_states(engine.deepspeed.basic_optimizer, name) for name in ("exp_avg", "exp_avg_sq"))
            held.append([tensor.clone() for tensor in (*engine.masters(), *chain(*states))])
    same = [all(map(torch.equal, before, after)) for before, after in pairwise(held)]
    return {"norms": norms, "applied": applied, "same": same}


def sent_elsewhere(world: World) -> tuple[int, int]:
    """Values that Muon sends other ranks in a step, and back: of dense matrices, and of shared experts."""
    shared = world.sharing(expert=2, timeout_minutes=2)
    given = resolved_of(shared, "mixtral", stage=2, compute="fp32", ranks=2, micro=2, overrides=["optimizer.name=muon"])
    with engine_of(shared, given) as engine:
        health = engine.health(engine.forward_backward(batch_of(shared, 2, seed=1), step=1))
        with exchanges() as sent:
            engine.step(health, LR)
    there, back, *of_experts = (sum(values) - values[world.rank] for values in sent)  # a flat tensor of each
    assert len(of_experts) == 2
    return there + back, sum(of_experts)


def refused(world: World, *, overrides: Sequence[str]) -> str:
    """Why no engine is built."""
    shared = world.sharing(expert=2, timeout_minutes=2)
    given = resolved_of(shared, "mixtral", stage=2, compute="fp32", ranks=2, micro=2, overrides=overrides)
    try:
        return refusal(shared, given)
    finally:
        forget_groups()


def order_of_gathers(world: World, *, overrides: Sequence[str]) -> list[int]:
    """Sizes of the groups that ZeRO-3 gathers over, where each rank names the parameters in an order of its own."""
    shared, sizes = world.sharing(expert=2, timeout_minutes=2), []
    given = resolved_of(shared, "mixtral", stage=3, compute="fp32", ranks=2, micro=2, overrides=overrides)
    with engine_of(shared, given) as engine:
        parameters = dict(engine.model.named_parameters())
        dense = parameters["model.layers.0.self_attn.q_proj.weight"]
        expert = parameters["model.layers.0.mlp.experts.down_proj"]
        gather = partition_parameters._dist_allgather_fn

        def recorded(part: torch.Tensor, whole: torch.Tensor, group: Any = None) -> Any:
            sizes.append(torch.distributed.get_world_size(group))
            return gather(part, whole, group)

        partition_parameters._dist_allgather_fn = recorded
        try:
            named = [dense, expert] if world.rank % 2 else [expert, dense]
            dense.all_gather_coalesced(named).wait()
        finally:
            partition_parameters._dist_allgather_fn = gather
            dense.partition([dense, expert])
    return sizes


def dispatched(world: World, *, chosen: int) -> dict[str, Any]:
    """A layer's output and gradients against those of experts that are not shared, where each token takes `chosen`."""
    world = world.sharing(expert=2, timeout_minutes=2)
    assert world.experts is not None
    torch.manual_seed(0)
    plain = MixtralExperts(MixtralConfig(hidden_size=8, intermediate_size=6, num_local_experts=4))
    for parameter in plain.parameters():
        torch.nn.init.normal_(parameter)
    layer = copy.deepcopy(plain)
    share_experts(torch.nn.ModuleList([layer]), world.experts, "ep_size_2")
    index = torch.full((5, 1), chosen)
    every = torch.randn(2, 5, 8)
    found = []
    for module, hidden in ((layer, every[world.rank].clone()), (plain, every.flatten(0, 1).clone())):
        hidden.requires_grad_()
        output = module(hidden, index.repeat(len(hidden) // 5, 1), torch.full((len(hidden), 1), 0.5))
        output.square().sum().backward()
        found.append((output.detach(), hidden.grad, [parameter.grad for parameter in module.parameters()]))
    (output, gradient, own), (whole, gradients, of_all) = found
    mine, experts = slice(world.rank * 5, world.rank * 5 + 5), slice(world.rank * 2, world.rank * 2 + 2)
    return {
        "output": float((output - whole[mine]).abs().max()),
        "hidden": float((gradient - gradients[mine]).abs().max()),
        "experts": max(float((a - b[experts]).abs().max()) for a, b in zip(own, of_all, strict=True)),
        "idle": all(not bool(value.any()) for value in own),
    }
