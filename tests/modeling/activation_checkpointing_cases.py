"""Code run on every rank in the tests of activation checkpointing."""

from typing import Any

import torch

from config.cli import REPOSITORY
from config.errors import UserError
from modeling.activation_checkpointing import blocks_of, recompute_blocks
from modeling.activation_checkpointing_budget import count_saved
from tests.support.models.small_run import SEQUENCE, batch_of, engine_of, masters_of, resolve, take
from tests.training.engine.sequence_cases import mine_of, whole_batch
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
    """Bytes that an engine's forward pass saves with none of its blocks recomputed, and with all."""
    mode = "model.activation_checkpointing=full"
    resolved = resolve(world, stage=stage, compute=compute, micro=2, overrides=[MODEL, mode, *overrides])
    with engine_of(world, resolved) as engine:
        inputs, labels = next(batch_of(world, 2, seed=1).micro_batches(world.device))
        blocks, found = blocks_of(engine.model), []
        for chosen in (range(0), range(len(blocks))):
            recompute_blocks(blocks, chosen)
            found.append(count_saved(engine.model, lambda: engine.loss_path.score(inputs, labels, 1.0)))
        parameters = sum(getattr(p, "ds_numel", p.numel()) * p.element_size() for p in engine.model.parameters())
        return {"none": found[0], "full": found[1], "parameters": parameters}


def refused(world: World, *, gib: float) -> str:
    """The error for a budget that is too small for any choice."""
    try:
        steps(world, stage=2, compute="fp32", overrides=budget(gib))
    except UserError as error:
        return str(error)
    return ""


def budget(gib: float) -> list[str]:
    return ["model.activation_checkpointing=budget", f"model.activation_memory_gib={gib!r}"]


LAYOUTS = {
    "plain": [],
    "documents": ["data.document_masking=true"],
    "sequence": ["data.document_masking=true", "parallel.sequence=2"],
    "tensor": ["parallel.tensor=2", "telemetry.every_steps=0"],
}
BIASED = "model.config={hidden_size: 32, intermediate_size: 48, num_hidden_layers: 3, num_attention_heads: 4, "
BIASED += "num_key_value_heads: 2, tie_word_embeddings: true, attention_bias: true, mlp_bias: true}"


def same_steps(
    world: World, *, stage: int, layout: str, overrides: list[str], kinds: dict[str, list[str]]
) -> dict[str, bool]:
    """Kinds of recomputation, by their overrides, to whether losses, norms and masters of three steps are those of a
    run that recomputes nothing, bit for bit. Biases are nonzero from the second step on."""
    micro, apart = 2, layout in ("documents", "sequence")
    data = World(world.rank // 2, 1, 0, world.device) if layout == "tensor" else world
    if layout == "sequence":
        data = world = world.sharing_sequences(2, timeout_minutes=2)
    if layout == "tensor":
        world = world.sharing_tensors(2, timeout_minutes=2)

    def numbers(kind: list[str]) -> dict[str, torch.Tensor]:
        given = [BIASED, *LAYOUTS[layout], *overrides, *kind]
        with engine_of(world, resolve(world, stage=stage, compute="fp32", micro=micro, overrides=given)) as engine:
            found = []
            for step in (1, 2, 3):
                batch = mine_of(data, whole_batch(step, apart=apart, length=SEQUENCE), micro=micro)
                health, _ = take(engine, batch, step=step, lr=0.01)
                found += [health.loss, health.grad_norm]
            return {"numbers": torch.tensor(found), **masters_of(engine)}

    expected = numbers([])
    assert all(bool(value.any()) for name, value in expected.items() if "bias" in name)
    found = {kind: numbers(given) for kind, given in kinds.items()}
    return {
        kind: all(torch.equal(value, each[name]) for name, value in expected.items()) for kind, each in found.items()
    }
