"""Code run inside the processes of test_early_warnings.py: telemetry, figures of the engine, and an oracle in FP64."""

import math
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from config.errors import UserError
from precision.dtypes import DTYPES
from tests.support.models.flash_on_cpu import flash_on_cpu
from tests.support.models.gradient_oracle import gradient_statistics
from tests.support.models.plain_steps import mean_label_loss
from tests.support.models.small_run import batch_of, engine_of, manifest_of, masters_of, plain_model, resolve
from tests.training.jobs.step_cost_cases import collectives, parts_of
from tracking.compare.surviving import read_events
from training.distributed import World
from training.engine.tensors import local_weight, shard_of, whole_gradient
from training.progress import Progress
from training.step import train_step
from training.telemetry import Telemetry


def measured(
    world: World, *, stage: int, compute: str, probe: bool, folder: str = "", manifest: dict | None = None
) -> dict[str, Any]:
    """One measured step, the masters with and without having measured, and the FP32 gradient norms of the probe and of
    plain torch."""
    overrides = ["precision.loss_scale.initial=256"]
    if manifest is not None:
        overrides += manifest_of(folder, manifest)
    results = []
    for wanted in (False, True):
        resolved = resolve(world, stage=stage, compute=compute, micro=2, overrides=overrides)
        with engine_of(world, resolved) as engine:
            batch = batch_of(world, 2, seed=1)
            weights, plain = masters_of(engine), None
            if wanted:
                try:
                    telemetry = Telemetry(engine, probe=probe)
                except UserError as error:
                    return {"refused": str(error)}
                with telemetry.watching(batch):
                    probed = dict(telemetry._reference)
                    outcome = engine.forward_backward(batch, step=1)
                health = engine.health(outcome)
                oracle = _oracle(engine)
                telemetry.measure()
                engine.step(health, 0.001)
                plain = telemetry.finish(applied=True)
            else:
                engine.step(engine.health(engine.forward_backward(batch, step=1)), 0.001)
            results.append((masters_of(engine), plain))
    before, after = weights, results[1][0]
    moves = {}
    for name in before:
        module, move = name.rpartition(".")[0], (after[name] - before[name]).double().square().sum()
        known = moves.setdefault(module, [0.0, 0.0])
        moves[module] = [known[0] + float(move), known[1] + float(before[name].double().square().sum())]
    moved = sum(float((after[n] - before[n]).double().square().sum()) for n in before)
    size = sum(float(before[n].double().square().sum()) for n in before)
    return {
        "unchanged": all(torch.equal(results[0][0][name], after[name]) for name in after),
        "telemetry": results[1][1],
        "update_ratio": (moved / size) ** 0.5,
        "update_ratios": {module: (move / own) ** 0.5 for module, (move, own) in moves.items()},
        "oracle": oracle,
        "reference": _reference_norms(resolved, before),
        "probed": {name.rpartition(".")[0]: float(gradient.norm()) for name, gradient in probed.items()},
    }


def called_on_one_rank(world: World) -> dict[str, float]:
    """Largest activations where only rank 1 has called a module, as an expert that none of rank 0's tokens chose."""
    with engine_of(world, resolve(world, stage=2, compute="bf16", micro=2)) as engine:
        batch, telemetry = batch_of(world, 2, seed=1), Telemetry(engine, probe=False)
        with telemetry.watching(batch):
            outcome = engine.forward_backward(batch, step=1)
        if world.rank == 0:
            del telemetry._meter.maxima["lm_head"]
        health = engine.health(outcome)
        telemetry.measure()
        engine.step(health, 0.001)
        return telemetry.finish(applied=True)["activation_max"]


def recomputed_probe(world: World, *, stage: int) -> dict[str, dict[str, bool]]:
    """By the overrides that recompute blocks, parameters whose FP32 gradients are those of a pass that keeps them."""
    batch, found = batch_of(world, 2, seed=1), []
    for override in ("none", "full", "full model.checkpointing_reentrant=true", "ops"):
        overrides = f"model.activation_checkpointing={override}".split()
        with engine_of(world, resolve(world, stage=stage, compute="bf16", micro=2, overrides=overrides)) as engine:
            telemetry = Telemetry(engine, probe=True)
            with telemetry.watching(batch):
                found.append((override, telemetry._reference))
    (_, kept), *others = found
    return {
        override: {name: bool(gradient.any()) and torch.equal(gradient, kept[name]) for name, gradient in own.items()}
        for override, own in others
    }


def probed_beside_flash_attention(world: World, *, compute: str, overrides: Sequence[str]) -> list[str]:
    """Parameters whose FP32 gradients are other ones where the step attends by a kernel that refuses FP32."""
    batch, found = batch_of(world, 2, seed=1), []
    resolved = resolve(world, stage=2, compute=compute, micro=2, overrides=overrides)
    with flash_on_cpu(), engine_of(world, resolved) as engine:
        telemetry, config = Telemetry(engine, probe=True), engine.model.config
        for attention in ("sdpa", "flash_attention_2"):
            config._attn_implementation_internal = attention
            with telemetry.watching(batch):
                found.append(telemetry._reference)
                engine.forward_backward(batch, step=1)
            engine.discard_gradients()
            assert config._attn_implementation == attention
    return [name for name, gradient in found[0].items() if not torch.equal(gradient, found[1][name])]


def maxima(world: World) -> tuple[list[float], list[float]]:
    """The largest of two ranks' values of every kind, all pairs of them, and what they are by torch."""
    kinds = [0.0, -0.0, 5e-324, -5e-324, 1.5, -1.5, 1e308, -1e308, math.inf, -math.inf, math.nan, -math.nan]
    pairs = torch.cartesian_prod(*[torch.tensor(kinds, dtype=torch.float64)] * 2)
    mine = pairs[:, world.rank].contiguous()
    return world.maximum(mine).tolist(), world.gather(mine).amax(0).tolist()


def sent(world: World, **arguments: Any) -> dict[str, int]:
    """Bytes that the collectives of `Telemetry.finish` return on a rank, by their kind."""
    counted, finish = Counter[str](), Telemetry.finish

    def counted_finish(self: Telemetry, **options: Any) -> dict[str, Any]:
        with collectives(lambda result, *rest: result.nbytes) as found:
            fields = finish(self, **options)
        counted.update(found)
        return fields

    with patch.object(Telemetry, "finish", counted_finish):
        parameters = len(measured(world, **arguments)["telemetry"]["gradients"])
    return {**counted, "modules": parameters}


def _oracle(engine: Any) -> dict[str, dict[str, float]]:
    """The expected figures by module, from whole gradients value by value."""
    found: dict[str, dict[str, float]] = {}
    for module, group in groupby(engine.model.named_parameters(), key=lambda item: item[0].rpartition(".")[0]):
        whole = [(name, whole_gradient(engine, parameter)) for name, parameter in group]
        computes = engine.compute if engine.regions is None else engine.regions.dtypes.get(module, "fp32")
        if computes == "fp8":
            computes = engine.regions.manifest.default
        found |= gradient_statistics(whole, DTYPES[computes], scale=engine.loss_scale)
    return found


def apart(world: World, *, stage: int) -> dict[str, Any]:
    """The drift of a step at which one weight, on the rank that has its master, is not its master rounded."""
    resolved = resolve(world, stage=stage, compute="bf16", micro=2)
    with engine_of(world, resolved) as engine:
        batch = batch_of(world, 2, seed=1)
        telemetry = Telemetry(engine, probe=False)
        with telemetry.watching(batch):
            health = engine.health(engine.forward_backward(batch, step=1))
        parameter = dict(engine.model.named_parameters())["model.layers.1.mlp.down_proj.weight"]
        shard = shard_of(engine, parameter)
        if shard is not None and shard.start == 0:
            values = local_weight(parameter, shard, stage)
            place = int(values.abs().argmax())
            values[place] *= 1.5
        telemetry.measure()
        engine.step(health, 0.001)
        return telemetry.finish(applied=True)["drift"]


def _reference_norms(resolved: Any, weights: dict[str, torch.Tensor]) -> dict[str, float]:
    """FP32 gradient norms of the whole batch in plain torch, by module."""
    model = plain_model(resolved, weights)
    mean_label_loss(model, 1).backward()
    return {name.rpartition(".")[0]: float(p.grad.norm()) for name, p in model.named_parameters()}


BETAS, EPS, CLIPPING, STEPS = (0.5, 0.9), 1e-8, 0.5, 4


def figures(world: World, *, stage: int, compute: str) -> dict[str, Any]:
    """The last of a few steps as telemetry has it, and as plain torch in FP64 has it from the same weights."""
    overrides = [f"optimizer.betas={list(BETAS)}", f"optimizer.gradient_clipping={CLIPPING}"]
    recomputed = ("none", "full", "selective", "attention")[stage]
    overrides += ["precision.loss_scale.initial=256", f"model.activation_checkpointing={recomputed}"]
    resolved = resolve(world, stage=stage, compute=compute, micro=2, overrides=overrides)
    oracle = _Oracle(resolved)
    with engine_of(world, resolved) as engine:
        telemetry = Telemetry(engine, probe=False)
        for step in range(1, STEPS + 1):
            batch = batch_of(world, 2, seed=step)
            weights = masters_of(engine)
            if world.rank == 0:
                oracle.step(weights, step)
            with telemetry.watching(batch):
                outcome = engine.forward_backward(batch, step=step)
            health = engine.health(outcome)
            telemetry.measure()
            update = engine.step(health, 0.01)
            found = telemetry.finish(applied=update.applied, clip=update.clip_coefficient)
    known = world.from_main(oracle.figures() if world.rank == 0 else None)
    return {"found": found, "oracle": known, "clip": update.clip_coefficient}


class _Oracle:
    """The whole global batch in one model and one process."""

    def __init__(self, resolved: Any) -> None:
        self._resolved = resolved
        self._first: dict[str, Any] = defaultdict(float)
        self._second: dict[str, Any] = defaultdict(float)

    def step(self, weights: dict[str, torch.Tensor], step: int) -> None:
        """Gradient, and Adam's averages as their definition has them."""
        model = plain_model(self._resolved, weights).double()
        batch = batch_of(World(0, 1, 0, torch.device("cpu")), 8, seed=step)
        self._attention: dict[str, dict[str, float]] = {}
        self._channels: dict[str, float] = {}
        for name, module in model.named_modules() if step == STEPS else ():
            if name.endswith("self_attn"):
                module.register_forward_pre_hook(self._look_at_attention(name), with_kwargs=True)
            elif name.count(".") == 2 and ".layers." in name:
                module.register_forward_hook(self._look_at_channels(name))
        logits, labels = model(input_ids=batch.input_ids[0]).logits, batch.labels[0]
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
        (losses / batch.label_tokens).backward()
        gradients = {name: p.grad for name, p in model.named_parameters()}
        self._share = float(gradients["model.embed_tokens.weight"].square().sum())
        norm = torch.stack([gradient.square().sum() for gradient in gradients.values()]).sum()
        self._share /= float(norm)
        factor = min(1.0, CLIPPING / (float(norm.sqrt()) + 1e-6))
        self._gradients = {name: gradient * factor for name, gradient in gradients.items()}
        for name, gradient in self._gradients.items():
            self._first[name] = BETAS[0] * self._first[name] + (1 - BETAS[0]) * gradient
            self._second[name] = BETAS[1] * self._second[name] + (1 - BETAS[1]) * gradient**2

    def figures(self) -> dict[str, Any]:
        """After the last step."""
        adam = {}
        for name, gradient in self._gradients.items():
            if gradient.dim() < 2:
                continue
            second = self._second[name] / (1 - BETAS[1] ** STEPS)
            first = self._first[name] / (1 - BETAS[0] ** STEPS)
            surprise = (gradient**2 / second.clamp(min=EPS**2)).mean().sqrt()
            weights = [(1 - BETAS[0]) * BETAS[0] ** age / (1 - BETAS[0] ** STEPS) for age in range(STEPS)]
            noise = sum(weight**2 for weight in weights)
            signal = (first.square().sum() / second.sum() - noise) / (1 - noise)
            adam[name.rpartition(".")[0]] = {"rms": float(surprise), "signal": float(signal)}
        return {"attentions": self._attention, "channels": self._channels, "adam": adam, "embedding_share": self._share}

    def _look_at_attention(self, name: str) -> Any:
        def look(module: Any, args: Any, kwargs: Any) -> None:
            hidden = kwargs["hidden_states"].detach()
            heads, width, length = 2, 16, hidden.shape[1]
            angles = torch.arange(length)[:, None] * 10000.0 ** (-torch.arange(width // 2) * 2 / width)
            turn = torch.polar(torch.ones_like(angles), angles).to(torch.complex128)

            def turned(projection: Any) -> torch.Tensor:
                values = (hidden @ projection.weight.detach().T).view(-1, length, heads, width).transpose(1, 2)
                pairs = torch.complex(values[..., : width // 2], values[..., width // 2 :]) * turn
                return torch.cat([pairs.real, pairs.imag], dim=-1)

            logits = torch.einsum("bhqd,bhkd->bhqk", turned(module.q_proj), turned(module.k_proj)) / width**0.5
            seen = torch.ones(length, length, dtype=torch.bool).tril()
            entropy = torch.distributions.Categorical(logits=logits.masked_fill(~seen, -1e300)).entropy()
            means = (entropy[..., 1:] / torch.arange(2, length + 1).double().log()).mean((0, 2))
            figures = {"logit": logits[..., seen].max(), "entropy": means.mean(), "lowest_entropy": means.min()}
            self._attention[name] = {figure: float(value) for figure, value in figures.items()}

        return look

    def _look_at_channels(self, name: str) -> Any:
        def look(module: Any, args: Any, output: torch.Tensor) -> None:
            tokens = output.detach().flatten(0, 1)
            norms = (tokens / tokens.pow(2).mean(1, keepdim=True).sqrt()).pow(2).mean(0).sqrt()
            self._channels[name] = float((norms**4).mean() / (norms**2).mean() ** 2)

        return look


def spiked(world: World, *, stage: int, guard: str) -> dict[str, Any]:
    """A run whose gradients jump in steps 8 and 9 of 10, after inf in step 7, a measured one: its events but those of
    steps, and the losses."""
    overrides = (
        "optimizer.betas=[0.9, 0.999]",
        "optimizer.gradient_clipping=0",
        "guard.spike_sigmas=0",
        guard,
        "warnings.adam_rms=2.4",
        "telemetry.every_steps=7",
    )
    where = "rank: 0, module: model.layers.1.mlp.down_proj"
    faults = ", ".join(f"{{kind: gradient_spike, step: {step}, {where}, factor: 1000.0}}" for step in (8, 9))
    faults += f", {{kind: inf_gradient, step: 7, {where}}}"
    arguments: dict[str, Any] = {"stage": stage, "compute": "fp32", "overrides": (*overrides, f"faults=[{faults}]")}
    with tempfile.TemporaryDirectory() as folder, parts_of(world, Path(folder), **arguments) as made:
        parts = replace(made, telemetry=Telemetry(made.engine, probe=False))
        progress = Progress()
        for _ in range(10):
            progress, _, health = train_step(parts, progress)
        events = list(read_events(Path(folder) / "events.jsonl")) if world.is_main else []
    return {"events": [event for event in events if event["event"] != "step"], "loss": health.loss}
