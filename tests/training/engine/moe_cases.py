"""Code run inside the processes of test_moe.py. Every function is called on every rank."""

from typing import Any

import torch

from data.batches.loader import Batch
from modeling.linear_cross_entropy import label_loss_sum
from modeling.parameter_groups import parameter_groups
from tests.support.models.small_run import GLOBAL, batch_of, engine_of, masters_of, plain_model, resolve, take
from tests.training.engine.expert_cases import model_of
from tools.parity.reference import Reference
from training.distributed import World

ON = ("model.balance_loss=0.5", "model.router_z_loss=0.01")


def routed(world: World, *, family: str, stage: int, compute: str, routers: str) -> dict[str, Any]:
    """Each router's distance from FP64's scores on the same inputs; whether each moved in a step; the notes."""
    given = [model_of(family), f"precision.routers={routers}", "optimizer.weight_decay=0"]
    given.append("model.activation_checkpointing=full")
    resolved = resolve(world, stage=stage, compute=compute, micro=2, overrides=given)
    errors: dict[str, float] = {}

    def look(module: Any, args: Any, output: Any) -> None:
        weight, hidden = module.weight.detach().double(), args[0].detach().double()
        exact = (hidden.reshape(-1, hidden.shape[-1]) @ weight.T).softmax(-1).topk(module.top_k, -1).values
        if getattr(module, "norm_topk_prob", True):
            exact /= exact.sum(-1, keepdim=True)
        error = float((output[1].double() - exact).abs().max())
        errors[module] = max(errors.get(module, 0.0), error)

    with engine_of(world, resolved) as engine:
        found = [module for module in engine.model.modules() if "Router" in type(module).__name__]
        hooks = [module.register_forward_hook(look) for module in found]
        before = masters_of(engine)
        take(engine, batch_of(world, 2, seed=1), step=1, lr=0.001)
        after = masters_of(engine)
        for hook in hooks:
            hook.remove()
        moved = [not torch.equal(after[name], before[name]) for name in after if ".gate.weight" in name]
        return {"errors": list(errors.values()), "moved": moved, "notes": engine.notes}


def reference_norm(world: World, *, family: str, micro: int) -> float:
    """The gradient norm that parity's FP32 reference finds."""
    resolved = resolve(world, stage=0, compute="fp32", micro=micro, overrides=[model_of(family), *ON])
    with engine_of(world, resolved) as engine:
        reference = Reference(resolved, engine.model.config, world)
        reference.load(masters_of(engine).items())
    _, gradients = reference.loss_and_gradients(batch_of(world, micro, seed=1))
    return float(torch.stack([gradient.double().square().sum() for gradient in gradients.values()]).sum().sqrt())


def plain_step(world: World, *, family: str) -> dict[str, Any]:
    """The same step in plain torch, one process, the whole batch at once, by loops over tokens, layers and experts."""
    resolved = resolve(world, stage=0, compute="fp32", micro=GLOBAL, overrides=[model_of(family), *ON])
    with engine_of(world, resolved) as engine:
        weights = masters_of(engine)
    model: Any = plain_model(resolved, weights)
    section = resolved.config.optimizer
    optimizer = torch.optim.AdamW(parameter_groups(model, section), lr=0.001, betas=section.betas, eps=section.eps)
    batch: Batch = batch_of(world, GLOBAL, seed=1)
    output = model(input_ids=batch.input_ids[0], output_router_logits=True, use_cache=False)
    loss = label_loss_sum(output.logits, batch.labels[0]) / batch.label_tokens
    top_k, per_layer, z = model.config.num_experts_per_tok, [], []
    for logits in output.router_logits:
        experts = logits.shape[1]
        probabilities, used = logits.softmax(-1), [0] * experts
        for row in probabilities.tolist():
            for expert in sorted(range(experts), key=lambda number: -row[number])[:top_k]:
                used[expert] += 1
        shares = [count / len(logits) for count in used]
        per_layer.append(experts * sum(shares[e] * probabilities[:, e].mean() for e in range(experts)))
        z.append((logits.exp().sum(-1).log() ** 2).mean())
    balance, z_loss = sum(per_layer) / len(per_layer), sum(z) / len(z)
    (loss + 0.5 * balance + 0.01 * z_loss).backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return {
        "loss": float(loss.detach()),
        "grad_norm": float(norm),
        "balance": float(balance.detach()),
        "z": float(z_loss.detach()),
        "after": {name: parameter.detach().clone() for name, parameter in model.named_parameters()},
    }
