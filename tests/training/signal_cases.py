"""Code run inside the processes of test_early_warnings.py: figures of the engine, and an oracle in FP64."""

import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from tests.support.models.small_run import batch_of, engine_of, masters_of, plain_model, resolve
from tests.training.jobs.step_cost_cases import parts_of
from tracking.compare.surviving import read_events
from training.distributed import World
from training.progress import Progress
from training.step import train_step
from training.telemetry import Telemetry

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
    """A run whose gradients jump in step 8 of 10: its events but those of steps, and the losses."""
    overrides = (
        "optimizer.betas=[0.9, 0.999]",
        "optimizer.gradient_clipping=0",
        "guard.spike_sigmas=0",
        guard,
        "warnings.adam_rms=2.4",
    )
    fault = "faults=[{kind: gradient_spike, step: 8, rank: 0, module: model.layers.1.mlp.down_proj, factor: 1000.0}]"
    arguments: dict[str, Any] = {"stage": stage, "compute": "fp32", "overrides": (*overrides, fault)}
    with tempfile.TemporaryDirectory() as folder, parts_of(world, Path(folder), **arguments) as made:
        parts = replace(made, telemetry=Telemetry(made.engine, probe=False))
        progress = Progress()
        for _ in range(10):
            progress, _, health = train_step(parts, progress)
        events = list(read_events(Path(folder) / "events.jsonl")) if world.is_main else []
    return {"events": [event for event in events if event["event"] != "step"], "loss": health.loss}
