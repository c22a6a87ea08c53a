"""Code run inside the processes of test_chunked_loss_training.py. Every function is called on every rank."""

import json
from pathlib import Path
from typing import Any

from config.errors import UserError
from modeling import chunked_head
from modeling.linear_cross_entropy import is_making_gradients
from precision.inner_dtypes import LOSS_SUM, ROTARY
from precision.observe import Observation
from tests.support.models.small_run import batch_of, engine_of, masters_of, resolve
from training.attribution import attribute
from training.distributed import World
from training.engine import Engine
from training.engine.tensors import whole_gradient

LOSSES = {
    "full": ["model.loss=full"],
    "chunked": ["model.loss=chunked", "model.loss_chunk_tokens=7"],  # of the 32 tokens of a micro-batch
}


def two_steps(world: World, *, stage: int, compute: str, loss: str, overrides=(), manifest="") -> dict[str, Any]:
    """Two steps from the seeded weights, two micro-batches a rank, and an evaluation."""
    with engine_of(world, _resolved(world, stage, compute, loss, overrides, manifest)) as engine:
        rows = []
        gradients: dict[str, Any] = {}
        for step in (1, 2):
            mask = "sequences" if step == 2 else "uneven"  # the second leaves a whole rank without labels
            health = engine.health(engine.forward_backward(batch_of(world, 2, seed=step, mask=mask), step=step))
            gradients = gradients or _gradients(engine)
            rows.append((health.loss, health.grad_norm, engine.step(health, 0.01).applied))
        evaluated = engine.evaluate([batch_of(world, 2, seed=9)]).loss
        found = {"rows": rows, "evaluated": evaluated, "gradients": gradients, "masters": masters_of(engine)}
        return found | {"chunked": engine.loss_path.chunked, "unchunked_reason": engine.loss_path.unchunked_reason}


def observed(world: World, *, loss: str, folder: str) -> dict[str, Any]:
    """The report on a step with the head in another dtype than the rest, the shape of what a hook on the head
    sees, and the step's losses with and without them."""
    shapes = set()
    with engine_of(
        world, _resolved(world, 1, "fp32", loss, ("model.config.tie_word_embeddings=false",), folder)
    ) as engine:
        batch = batch_of(world, 2, seed=1)
        unseen = engine.health(engine.forward_backward(batch, step=1))
        engine.discard_gradients()
        head = engine.model.get_output_embeddings()
        handle = head.register_forward_hook(lambda module, inputs, output: shapes.add(tuple(output.shape)))
        with Observation(engine.model, in_backward=is_making_gradients) as seen:
            health = engine.health(engine.forward_backward(batch, step=1))
        handle.remove()
        engine.discard_gradients()
        inner = {what: dict(seen.inner.found[what]) for what in (LOSS_SUM, ROTARY)}
    return {
        "step": (health.loss, health.grad_norm),
        "unseen": (unseen.loss, unseen.grad_norm),
        "shapes": shapes,
        "computed": seen.computed,
        "flops": dict(seen.flops),
        "inner": {what: set().union(*found.values()) for what, found in inner.items()},
    }


def spoiled(world: World, *, loss: str, module: str, kind: str) -> dict[str, Any]:
    """The rank blamed for a step that a fault on rank 0 spoils, and the shapes of the model's outputs meanwhile."""
    fault = f"faults=[{{kind: {kind}, step: 1, rank: 0, module: {module}}}]"
    shapes = set()
    with engine_of(world, _resolved(world, 2, "bf16", loss, (fault,), "")) as engine:
        batch = batch_of(world, 2, seed=1)
        outcome = engine.forward_backward(batch, step=1)
        finite = engine.health(outcome).finite
        engine.model.register_forward_hook(lambda module, inputs, output: shapes.add(tuple(output.logits.shape)))
        found = attribute(engine, batch, outcome, step=1)
        engine.discard_gradients()
    blamed = [(rank, finding.module, finding.tensor, finding.kind) for rank, finding in found]
    return {"finite": finite, "blamed": blamed, "shapes": shapes}


def unwanted(world: World) -> dict[str, Any]:
    """The gradients of a step whose first micro-batch counts for nothing: its loss gets the factor 0."""
    resolved = _resolved(world, 1, "fp32", "chunked", (), "")
    with engine_of(world, resolved, defect="{kind: skipped_accumulation}") as engine:
        engine.health(engine.forward_backward(batch_of(world, 2, seed=1), step=1))
        return _gradients(engine)


RECURRENT = [
    "model.architecture=recurrent_gemma",
    "model.config={hidden_size: 32, intermediate_size: 48, num_hidden_layers: 1, num_attention_heads: 2}",
]


def cannot(world: World) -> dict[str, Any]:
    """A model whose logits are changed in an unknown way: what chunked says, and auto where it would be chunked."""
    found: dict[str, Any] = {"refused": ""}
    batch = batch_of(world, 2, seed=1)

    def recurrent(loss: str) -> Any:
        overrides = [*RECURRENT, f"model.loss={loss}"]
        return engine_of(world, resolve(world, stage=1, compute="fp32", micro=2, overrides=overrides))

    try:
        with recurrent("chunked"):
            pass
    except UserError as error:
        found["refused"] = str(error)
    before, chunked_head.AUTO_FROM_LOGITS = chunked_head.AUTO_FROM_LOGITS, 1
    try:
        for loss, key in (("auto", "loss"), ("full", "loss_of_full")):
            with recurrent(loss) as engine:
                found[key] = engine.health(engine.forward_backward(batch, step=1)).loss
                if loss == "auto":
                    found |= {
                        "chunked": engine.loss_path.chunked,
                        "unchunked_reason": engine.loss_path.unchunked_reason,
                    }
    finally:
        chunked_head.AUTO_FROM_LOGITS = before
    return found


def _resolved(world: World, stage: int, compute: str, loss: str, overrides: tuple[str, ...], manifest: str) -> Any:
    more = [*LOSSES[loss], *overrides]
    if manifest:
        path = Path(manifest) / f"{world.rank}.json"
        rules = [{"match": "lm_head", "compute": "fp16", "reason": "to be another dtype than its surroundings"}]
        path.write_text(json.dumps({"default": "bf16", "rules": rules}))
        more += ["precision.path=manifest", "precision.compute=auto", f"precision.manifest={path}"]
    return resolve(world, stage=stage, compute="fp32" if manifest else compute, micro=2, overrides=more)


def _gradients(engine: Engine) -> dict[str, Any]:
    found = ((name, whole_gradient(engine, parameter)) for name, parameter in engine.model.named_parameters())
    return {name: gradient.double() / engine.loss_scale for name, gradient in found if gradient is not None}
