"""Code run inside the processes of the tests in this folder. Every function is called on every rank.

The oracle of shared sequences is the same model without the wrapper on whole ones, with transformers' own masks.
"""

import copy
import json
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import AutoConfig
from transformers.integrations import HfDeepSpeedConfig

from config.batch import WHOLE_POSITIONS
from config.cli import REPOSITORY
from config.errors import UserError
from config.schema import ModelSection
from modeling import chunked_head, kernels
from modeling.activation_checkpointing import blocks_of, recompute_blocks
from modeling.activation_checkpointing_budget import count_saved
from modeling.build import build_model
from modeling.kernels import Norm
from modeling.linear_cross_entropy import is_making_gradients
from modeling.sequence_parallel import SequenceAttention, require_equal_logits
from precision.inner_dtypes import LOSS_SUM, ROTARY
from precision.observe import Observation
from tests.support import refusals
from tests.support.models import interpreted_liger
from tests.support.models.small_models import distance, small_model
from tests.support.models.small_run import SEQUENCE, batch_of, engine_of, masters_of, resolve, take
from tests.training.engine.sequence_cases import mine_of, whole_batch
from training.attribution import attribute
from training.distributed import SliceGroup, World
from training.engine import Engine
from training.engine.build import _gather_partitioned, _keeping_dtypes
from training.engine.tensors import whole_gradient
from training.telemetry import Telemetry

MICRO = 2
LOSSES = {
    "full": ["model.loss=full"],
    "chunked": ["model.loss=chunked", "model.loss_chunk_tokens=7"],  # of the 32 tokens of a micro-batch
}


def two_steps(world: World, *, stage: int, compute: str, loss: str, overrides=(), manifest="") -> dict[str, Any]:
    """Two steps from the seeded weights, the second of which leaves a whole rank without labels, and an evaluation."""
    with engine_of(world, _resolved(world, stage, compute, loss, overrides, manifest)) as engine:
        found = _two_steps(world, engine, second="sequences")
        return found | {"chunked": engine.loss_path.chunked, "unchunked_reason": engine.loss_path.unchunked_reason}


def two_steps_of_kernels(world: World, *, stage: int, compute: str, kernels: str, overrides=()) -> dict[str, Any]:
    """Two steps from the seeded weights, and an evaluation."""
    with _engine(world, stage, compute, kernels, overrides) as engine:
        return _two_steps(world, engine) | {"notes": [note for note in engine.notes if "Liger" in note]}


def _two_steps(world: World, engine: Engine, second: str = "uneven") -> dict[str, Any]:
    """Two steps of two micro-batches a rank. second: mask of the second step's labels."""
    rows = []
    gradients: dict[str, Any] = {}
    for step, mask in ((1, "uneven"), (2, second)):
        health = engine.health(engine.forward_backward(batch_of(world, MICRO, seed=step, mask=mask), step=step))
        gradients = gradients or _gradients(engine)
        rows.append((health.loss, health.grad_norm, engine.step(health, 0.01).applied))
    evaluated = engine.evaluate([batch_of(world, MICRO, seed=9)]).loss
    masters = {name: master.cpu() for name, master in masters_of(engine).items()}
    return {"rows": rows, "evaluated": evaluated, "gradients": gradients, "masters": masters}


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
    found: dict[str, Any] = {}
    batch = batch_of(world, 2, seed=1)

    def recurrent(loss: str) -> Any:
        overrides = [*RECURRENT, f"model.loss={loss}"]
        return engine_of(world, resolve(world, stage=1, compute="fp32", micro=2, overrides=overrides))

    found["refused"] = refusals.refused(recurrent("chunked").__enter__)
    before, chunked_head.AUTO_FROM_LOGITS = chunked_head.AUTO_FROM_LOGITS, 1
    try:
        for loss, key in (("auto", "loss"), ("full", "loss_of_full")):
            with recurrent(loss) as engine:
                found[key] = engine.health(engine.forward_backward(batch, step=1)).loss
                if loss == "auto":
                    found["chunked"], found["reason"] = engine.loss_path.chunked, engine.loss_path.unchunked_reason
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
    return {name: gradient.double().cpu() / engine.loss_scale for name, gradient in found if gradient is not None}


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
    return refusals.refused(steps, world, stage=2, compute="fp32", overrides=budget(gib))


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
        data = world = world.sharing(sequence=2, timeout_minutes=2)
    if layout == "tensor":
        world = world.sharing(tensor=2, timeout_minutes=2)

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


SICK = "model.layers.0.mlp.up_proj"
SHAPE = "model.config={hidden_size: 32, intermediate_size: 48, num_hidden_layers: 1, num_attention_heads: 2, "
SHAPE += "num_key_value_heads: 1, tie_word_embeddings: true}"


def looks(world: World, *, kernels: str) -> dict[str, Any]:
    """Telemetry's and the observer's report on a step in BF16, and who is blamed for one that is not finite."""
    with _engine(world, 2, "bf16", kernels, ()) as engine:
        batch = batch_of(world, MICRO, seed=0)
        telemetry = Telemetry(engine, probe=True)
        with telemetry.watching(batch):
            engine.forward_backward(batch, step=1)
        probe = dict(telemetry._reference)
        telemetry.measure()
        event = telemetry.finish(applied=False)
        engine.discard_gradients()
        with Observation(engine.model) as seen:
            engine.forward_backward(batch, step=1)
        engine.discard_gradients()
        matmuls = {name: dtypes for name, dtypes in seen.computed.items() if "norm" not in name}
        with torch.no_grad():
            engine.model.get_submodule(SICK).weight[0, 0] = float("inf")
        outcome = engine.forward_backward(batch, step=1)
        finite, found = engine.health(outcome).finite, attribute(engine, batch, outcome, step=1)
        causes = [(rank, cause.module, cause.tensor, cause.kind) for rank, cause in found]
        observed = {"probe": probe, "event": event, "computed": matmuls, "flops": dict(seen.flops)}
        return observed | {"finite": finite, "causes": causes}


def _engine(world: World, stage: int, compute: str, kernels: str, overrides: tuple[str, ...]) -> Any:
    if kernels != "torch" and not interpreted_liger.why_not():
        interpreted_liger.prepare()
    given = [SHAPE, f"model.kernels={kernels}", *overrides]
    return engine_of(world, resolve(world, stage=stage, compute=compute, micro=MICRO, overrides=given))


def chosen(world: World, *, overrides: tuple[str, ...] = (), lacking: int | None = None) -> tuple[list[str], int]:
    """Each rank's remark on `model.kernels = auto`, and the number of modules whose class was replaced.

    lacking: the rank on whose machine a kernel is found to be wrong.
    """
    wrong = {"llama": Norm(1.0)} if lacking == world.rank else {}
    with mock.patch.dict(kernels.ARCHITECTURES, wrong), _engine(world, 2, "bf16", "auto", overrides) as engine:
        exchanged = sum(type(module).__mro__[1].__name__ == type(module).__name__ for module in engine.model.modules())
        return [note for note in engine.notes if "model.kernels" in note or "Liger" in note], exchanged


LENGTH = 22
"""[tokens] Longer than the windows."""


def against_the_whole(world: World, *, family: str, apart: bool, ranks: int, shape: dict[str, Any]) -> dict[str, float]:
    """Largest error of the logits of this rank's slice over the largest logit, and that of the gradients' sum.

    unused: the same of the model's own pass once the wrapper is there, which has to be its own.
    """
    world = world.sharing(sequence=ranks, timeout_minutes=2)
    group, model = world.sequence, small_model(family, **shape)
    assert group is not None
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():  # at 0.02 attention is next to uniform, and a wrong mask does little
        if parameter.dim() > 1:
            parameter.data.normal_(0.0, 0.2, generator=generator)
    ids = torch.randint(61, (2, LENGTH), generator=generator)
    length = -(-LENGTH // ranks) * ranks
    ids = torch.nn.functional.pad(ids, (0, length - LENGTH))
    positions = (torch.arange(length) % (7 if apart else length)).expand(ids.shape)
    whole = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    whole.square().mean().backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()

    attention = SequenceAttention(model, group, apart=apart)
    each = length // ranks
    mine = slice(group.rank * each, (group.rank + 1) * each)
    inputs = {"input_ids": ids[:, mine], "position_ids": positions[:, mine], WHOLE_POSITIONS: positions}
    logits = model(**inputs, use_cache=False).logits
    (logits.square().sum() / whole.numel()).backward()
    groups = world.world_size // ranks  # that do the same
    found = {name: world.sum(p.grad) / groups for name, p in model.named_parameters() if p.grad is not None}
    with torch.no_grad():
        own = model(input_ids=ids, position_ids=positions, use_cache=False).logits
    attention.close()
    largest = float(whole.abs().max())
    return {
        "logits": float((logits - whole[:, mine]).abs().max()) / largest,
        "gradients": distance(found, expected),
        "unused": float((own - whole).abs().max()) / largest,
        "name": model.config._attn_implementation,
    }


def buffers_of(world: World, *, stage: int, kind: str, keys: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Buffers of a new model in FP32 as it trains."""
    model = [f"model.architecture={kind}", f"model.config={json.dumps(keys)}"]
    with engine_of(world, resolve(world, stage=stage, compute="fp32", overrides=model)) as engine:
        return {name: value.clone() for name, value in engine.model.named_buffers()}


def apart_at_zero3(world: World, *, shapes: Sequence[tuple[str, str, dict[str, Any]]]) -> dict[str, list[str]]:
    """Names of parameters and buffers of new models that start with other values at ZeRO-3 than whole ones.

    shapes: model class, architecture and keys of its config.
    """
    found = {}
    for model_class, kind, keys in shapes:
        section, shape = ModelSection(architecture=kind), AutoConfig.for_model(kind, **keys)
        how: dict[str, Any] = {"seed": 0, "model_class": model_class}
        whole = build_model(section, copy.deepcopy(shape), **how)
        document = {"zero_optimization": {"stage": 3}, "train_micro_batch_size_per_gpu": 1}
        zero3 = HfDeepSpeedConfig(document)
        gather = partial(_gather_partitioned, world)
        with _keeping_dtypes():
            parts = build_model(section, copy.deepcopy(shape), gather=gather, **how)
        del zero3
        with gather(list(parts.parameters())):
            values = [dict(model.named_parameters()) | dict(model.named_buffers()) for model in (whole, parts)]
            assert values[0].keys() == values[1].keys()
            pairs = ((name, one, values[1][name]) for name, one in values[0].items())
            apart = [name for name, one, other in pairs if one.dtype != other.dtype or not torch.equal(one, other)]
        if apart:
            found[f"{model_class} {kind}"] = apart
    return found


class Idle(SliceGroup):
    """Ranks that trade nothing."""

    def exchange(self, rows: torch.Tensor, sent: list[int], received: list[int]) -> torch.Tensor:
        return rows


def sequence_refused(world: World, *, family: str, shape: dict[str, Any], idle: bool = False) -> str:
    """The error for a model, from its config or from comparing logits; empty: none."""
    world = world.sharing(sequence=2, timeout_minutes=2)
    group, model = world.sequence, small_model(family, **shape).eval()
    assert group is not None
    try:
        group = Idle(group.rank, group.size, group.group) if idle else group
        SequenceAttention(model, group, apart=False)
        found = require_equal_logits(
            lambda inputs: model(**inputs, use_cache=False).logits,
            model.config,
            group,
            torch.device("cpu"),
            apart=False,
            largest=1e-3,
        )
    except UserError as error:
        return str(error)
    return next((text for text in world.gather_objects(found) if text), "")
