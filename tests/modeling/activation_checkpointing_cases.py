"""What runs inside the processes of the tests of activation checkpointing, on every rank."""

from typing import Any

from config.cli import REPOSITORY
from config.errors import UserError
from modeling.activation_checkpointing import blocks_of, recompute_blocks
from modeling.activation_checkpointing_budget import count_saved
from tests.support.models.small_run import batch_of, engine_of, masters_of, resolve
from training.distributed import World

MODEL = "model.config={hidden_size: 32, intermediate_size: 48, num_hidden_layers: 5, num_attention_heads: 2, "
MODEL += "num_key_value_heads: 2, tie_word_embeddings: true}"
MIXED = ["precision.path=manifest", f"precision.manifest={REPOSITORY}/config/manifests/llama_mixed.json"]


def steps(world: World, *, stage: int, compute: str, overrides: list[str]) -> dict[str, Any]:
    """Losses, gradient norms and masters of two engine steps, and which blocks are recomputed."""
    resolved = resolve(world, stage=stage, compute=compute, micro=2, overrides=[MODEL, *overrides])
    with engine_of(world, resolved) as engine:
        healths = []
        for step in (1, 2):
            healths.append(engine.health(engine.forward_backward(batch_of(world, 2, seed=step), step=step)))
            engine.step(healths[-1], 0.001)
        recomputed = [i for i, block in enumerate(blocks_of(engine.model)) if block.gradient_checkpointing]
        numbers = {"losses": [health.loss for health in healths], "norms": [health.grad_norm for health in healths]}
        return numbers | {"recomputed": recomputed, "masters": masters_of(engine)}


def counted(world: World, *, stage: int, compute: str, overrides: list[str]) -> dict[str, Any]:
    """What an engine's forward pass saves with none of its blocks recomputed, and with all."""
    mode = "model.activation_checkpointing=full"
    resolved = resolve(world, stage=stage, compute=compute, micro=2, overrides=[MODEL, mode, *overrides])
    with engine_of(world, resolved) as engine:
        inputs, labels = next(batch_of(world, 2, seed=1).micro_batches(world.device))
        blocks, found = blocks_of(engine.model), []
        for chosen in (range(0), range(len(blocks))):
            recompute_blocks(blocks, chosen)
            found.append(
                count_saved(engine.model, lambda: engine.loss_path.score(inputs, labels, 1.0, inspected=False))
            )
        parameters = sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for p in engine.model.parameters())
        return {"none": found[0], "full": found[1], "parameters": parameters}


def refused(world: World, *, gib: float) -> str:
    """What is said of a budget that nothing fits."""
    try:
        steps(world, stage=2, compute="fp32", overrides=budget(gib))
    except UserError as error:
        return str(error)
    return ""


def budget(gib: float) -> list[str]:
    return ["model.activation_checkpointing=budget", f"model.activation_memory_gib={gib!r}"]
