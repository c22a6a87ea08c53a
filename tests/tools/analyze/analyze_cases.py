"""Functions that run inside the processes of test_analyze.py."""

import json
from pathlib import Path
from typing import Any

import torch

from data.text.tokenizer import load_tokenizer
from modeling.linear_cross_entropy import label_loss_sum
from precision.dtypes import DTYPES
from precision.manifest import load_manifest
from precision.observe import Observation, verify
from precision.regions import Regions
from tests.support.models.small_run import (
    RandomBatches,
    batch_of,
    engine_of,
    manifest_of,
    masters_of,
    plain_model,
    resolve,
)
from tests.training.tasks import classify_cases, seq2seq_cases, sft_cases
from tools.analyze.gradients import Fp32Gradients, on_the_cast_path, under_manifest
from tools.analyze.proposal import Limits
from tools.analyze.survey import Hopeless, Plan, survey
from training.distributed import World
from training.engine.rng import generators
from training.session import session

MICRO = 2
FP32 = {"default": "fp32", "rules": []}


def resolve_manifest(world: World, *, stage: int, folder: str, tree: dict[str, Any], overrides: tuple[str, ...] = ()):
    """The small run on the manifest path."""
    given = [*manifest_of(folder, tree), *overrides]
    return resolve(world, stage=stage, compute="fp32", micro=MICRO, overrides=given)


def plan(**changes: Any) -> Plan:
    """A plan of few steps."""
    given = {"steps": 2, "sequences": 2, "most_regions": 64, "held_out": 1, "compute": "bf16", "limits": Limits()}
    return Plan(**given | changes)


def errors(world: World, *, stage: int, folder: str, trees: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Gradient errors of manifests as the engine has them and as plain torch has them, and traces left."""
    resolved = resolve_manifest(world, stage=stage, folder=folder, tree=FP32)
    with engine_of(world, resolved) as engine:
        batch, weights = batch_of(world, MICRO, seed=3), masters_of(engine)
        reference = Fp32Gradients(engine, batch)
        found = {"fp32": (reference.error().error, reference.error().whole)}
        for name, tree in trees.items():
            for scale in (1.0, 2.0**12):
                with under_manifest(engine, tree):
                    error = reference.error(scale=scale)
                    found[f"{name} {scale:g}"] = (error.error, error.whole)
        for compute in ("bf16", "fp16"):
            with on_the_cast_path(engine, compute, routers="fp32"):
                error = reference.error(scale=2.0**12)
                found[f"cast {compute}"] = (error.error, error.whole)
                assert error.finite == 1.0
        again = reference.error().error
        engine.regions.set("model.layers.1.self_attn.v_proj", "bf16")
        found["set by hand"] = (reference.error().error, reference.error().whole)
        after = masters_of(engine)
    plain = {name: _plain_gradients(resolved, weights, world, Path(folder), tree) for name, tree in trees.items()}
    plain |= {
        f"cast {compute}": _plain_gradients(resolved, weights, world, Path(folder), FP32, compute)
        for compute in ("bf16", "fp16")
    }
    exact = _plain_gradients(resolved, weights, world, Path(folder), FP32)
    return {
        "found": found,
        "expected": {name: _errors(gradients, exact) for name, gradients in plain.items()},
        "reference": _errors(reference._gradients, exact)[0] if world.is_main else 0.0,
        "again": again,
        "unchanged": all(torch.equal(weights[name], after[name]) for name in weights),
    }


def repeated_with_dropout(world: World, *, folder: str) -> dict[str, float]:
    """Error of FP32 against itself with dropout, and between two passes that drop different values."""
    dropout = ("model.config.attention_dropout=0.3",)
    resolved = resolve_manifest(world, stage=1, folder=folder, tree=FP32, overrides=dropout)
    with engine_of(world, resolved) as engine:
        reference = Fp32Gradients(engine, batch_of(world, MICRO, seed=3))
        repeated = reference.error().error
        reference._generators = generators(world.device)
        return {"repeated": repeated, "without the random numbers": reference.error().error}


def surveyed(world: World, *, stage: int, folder: str, changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """A survey of the small model, and the losses of the same training without one."""
    resolved = resolve_manifest(world, stage=stage, folder=folder, tree=FP32)
    plain = []
    with engine_of(world, resolved) as engine:
        stream = RandomBatches(world, MICRO)
        for step in range(2):
            health = engine.health(engine.forward_backward(stream.next_step(), step=step + 1))
            engine.step(health, 0.01 * (step + 1) / 40)
            plain.append(health.loss)
    with engine_of(world, resolved) as engine:
        result = survey(engine, RandomBatches(world, MICRO), resolved, plan(**(changes or {})), str)
    return {"result": result, "plain": plain}


def computes_as_promised(world: World, *, folder: str, tree: dict[str, Any]) -> dict[str, float]:
    """FLOP shares of a pass of the small model under a manifest that was verified."""
    resolved = resolve_manifest(world, stage=2, folder=folder, tree=tree)
    with engine_of(world, resolved) as engine:
        with Observation(engine.model) as seen:
            outcome = engine.forward_backward(batch_of(world, MICRO, seed=1), step=1)
        assert engine.health(outcome).finite
        engine.discard_gradients()
        verify(seen, engine.regions.dtypes, may_idle=engine.regions.may_idle)
        return seen.flop_share()


def _plain_gradients(
    resolved: Any, weights: dict, world: World, folder: Path, tree: dict, cast: str | None = None
) -> dict[str, torch.Tensor]:
    """Gradients under a manifest in plain torch: every rank's micro-batches one after another, summed in FP64.

    cast: of a model whose weights are in this dtype instead.
    """
    model = plain_model(resolved, weights)
    path = folder / f"plain-{world.rank}.json"
    path.write_text(json.dumps(tree))
    if cast is None:
        Regions(model, load_manifest(path))
    for parameter in model.parameters():
        parameter.data = parameter.data.to(DTYPES[cast or "fp32"])
    places = [World(rank, world.world_size, rank, world.device) for rank in range(world.world_size)]
    batches = [batch_of(other, MICRO, seed=3) for other in places]
    tokens = sum(batch.label_tokens for batch in batches)
    named = dict(model.named_parameters())
    total = {name: torch.zeros_like(parameter, dtype=torch.float64) for name, parameter in named.items()}
    for batch in batches:
        for ids, labels in zip(batch.input_ids, batch.labels, strict=True):
            loss = label_loss_sum(model(input_ids=ids, use_cache=False).logits, labels) / tokens
            gradients = torch.autograd.grad(loss * 2.0**12, list(named.values()))
            for name, gradient in zip(named, gradients, strict=True):
                total[name] += gradient.double() / 2.0**12
    return total


def _errors(gradients: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Root mean square over values of the parameters' relative errors, and the relative error of all together."""
    off = torch.stack([(gradients[name] - true).double().square().sum() for name, true in exact.items()])
    size = torch.stack([true.square().sum() for true in exact.values()])
    counts = torch.tensor([true.numel() for true in exact.values()])
    return float((off / size * counts).sum() / counts.sum()) ** 0.5, float(off.sum() / size.sum()) ** 0.5


RESOLVE: dict[str, Any] = {
    "classify": classify_cases.resolve,
    "seq2seq": seq2seq_cases.resolve,
    "sft": sft_cases.resolve,
}


def surveyed_task(
    world: World, *, folder: Path, task: str, overrides: tuple[str, ...], compute: str = "bf16"
) -> dict[str, Any]:
    """A survey of a task's own data and model, and in what each region computes in a training step as it proposes.

    compute: the dtype that the config asks for.
    """
    given = (*manifest_of(folder, FP32), "guard.spike_sigmas=0", *overrides)
    resolved = RESOLVE[task](folder, overrides=given)
    with session(resolved, world=world) as opened:
        engine = opened.engine
        tokenizer = load_tokenizer(opened.corpus.tokenizer_folder)
        try:
            measured = plan(steps=0, sequences=1, most_regions=1, compute=compute)
            result = survey(engine, opened.batches, resolved, measured, lambda token: tokenizer.decode([token]))
        except Hopeless as error:
            return {"hopeless": str(error)}
        with under_manifest(engine, result["proposal"]["manifest"]), Observation(engine.model) as seen:
            outcome = engine.forward_backward(opened.batches.next_step(), step=2)
            finite = engine.health(outcome).finite
            engine.discard_gradients()
            assert engine.regions is not None
            verify(seen, engine.regions.dtypes, may_idle=engine.regions.may_idle)
        return {"result": result, "share": seen.flop_share(), "finite": finite}
