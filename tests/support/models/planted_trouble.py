"""Runs of a tiny Llama that go wrong, each in one way: when a warning came, and when the loss showed it.

    python -m tests.support.models.planted_trouble [CASE ...] [--healthy SEEDS]

Each token of 64 follows from the one before the last, which only attention can find; then trouble begins. Telemetry is
measured in every step, so that what is counted is the figure's own lead. "The loss rose" at the first step from there
on at which the mean of the last 5 losses is 10% above that of the same run without the trouble.
"""

import argparse
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from config.machine.processes import free_port
from data.batches.loader import Batch
from tests.support.models.small_run import engine_of, resolve
from training import distributed
from training.early_warnings import EarlyWarning, EarlyWarnings
from training.engine import Engine
from training.engine.tensors import trainable_parameters
from training.telemetry import Telemetry

_SEQUENCES, _LENGTH, _VOCABULARY = 64, 16, 64
_RISE = 1.1
_MEAN_OF = 5
_WARM_UP = 20
_RATE = 0.01


def batch(seed: int, *, chain: int = 0) -> Batch:
    """Sequences in which each token has two equally likely successors, two places later."""
    generator = torch.Generator().manual_seed(1000 + chain)
    successors = torch.randint(_VOCABULARY, (_VOCABULARY, 2), generator=generator)
    generator.manual_seed(seed)
    tokens = torch.randint(_VOCABULARY, (_SEQUENCES, 2), generator=generator)
    for _ in range(_LENGTH - 1):
        choice = torch.randint(2, (_SEQUENCES,), generator=generator)
        tokens = torch.cat([tokens, successors[tokens[:, -2], choice][:, None]], dim=1)
    labels = tokens[:, 1:].clone()
    return Batch(0, tokens[None, :, :-1], labels[None], np.arange(_SEQUENCES), labels.numel())


@dataclass(frozen=True)
class Case:
    """One kind of trouble."""

    expected: str
    """The signal that is to warn."""
    trouble: Callable[[Engine, int], float] = lambda engine, since: 1.0
    """Called before each step from `begin` on, with how many came before; what to multiply the learning rate by."""
    overrides: tuple[str, ...] = ()
    gradients: Callable[[Engine, int], None] = lambda engine, since: None
    """Called between backward pass and norm."""
    begin: int = 40
    steps: int = 130
    rises: bool = True
    """Whether the loss rises at all; where it does not, a warning has nothing to come before."""


def _scaled(engine: Engine, name: str, factor: float) -> None:
    """Multiply the weights of all modules of this name."""
    with torch.no_grad():
        for full, parameter in trainable_parameters(engine).items():
            if f".{name}." in full:
                parameter.mul_(factor)


def _growing_logits(engine: Engine, since: int) -> float:
    for name in ("q_proj", "k_proj"):
        _scaled(engine, name, 1.06)
    return 1.0


def _hot_rate(engine: Engine, since: int) -> float:
    return float(1.05**since)


def _growing_router(engine: Engine, since: int) -> float:
    _scaled(engine, "gate", 1.2)
    return 1.0


def _favoured_expert(engine: Engine, since: int) -> float:
    with torch.no_grad():
        for full, parameter in trainable_parameters(engine).items():
            if full.endswith("router.bias"):
                parameter[0].add_(0.02 * 1.05**since)
    return 1.0


def _favoured_key(engine: Engine, since: int) -> float:
    for name, module in engine.model.named_modules():
        if name.endswith(".self_attn"):
            if since == 0:
                module.register_forward_pre_hook(_with_mask, with_kwargs=True)
            module.favour = 4.0 * 1.05**since
    return 1.0


def _with_mask(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A causal mask by which every query's score for the first key is higher."""
    count, length, _ = kwargs["hidden_states"].shape
    mask = torch.full((length, length), -torch.inf).triu(1)
    mask[:, 0] += module.favour
    return args, {**kwargs, "attention_mask": mask.expand(count, 1, length, length)}


def _one_channel(engine: Engine, since: int) -> float:
    with torch.no_grad():
        for full, parameter in trainable_parameters(engine).items():
            if full.endswith("down_proj.weight"):
                parameter[3].mul_(1.1)
    return 1.0


def _growing_embedding_gradient(engine: Engine, since: int) -> None:
    for full, parameter in trainable_parameters(engine).items():
        if "embed_tokens" in full and parameter.grad is not None:
            parameter.grad.mul_(1.3**since)


def _one_jump(engine: Engine, since: int) -> None:
    for parameter in trainable_parameters(engine).values():
        if since == 0 and parameter.grad is not None:
            parameter.grad.mul_(100.0)


_UNCLIPPED = ("optimizer.betas=[0.9, 0.999]", "optimizer.gradient_clipping=0")
_ROUTED = ("model.config.num_local_experts=4", "model.config.num_experts_per_tok=1", "model.balance_loss=0.01")
_EXPERTS = ("model.architecture=mixtral", "model.router_z_loss=0.001", *_ROUTED)
_BIASED = ("model.architecture=gpt_oss", "model.config.head_dim=16", *_ROUTED)
CASES = {
    "queries and keys growing 6% a step": Case("attention_logit", _growing_logits),
    "embedding's gradient growing 30% a step": Case("embedding_share", gradients=_growing_embedding_gradient),
    "one channel growing 10% a step": Case("kurtosis_growth", _one_channel, begin=100, steps=180),
    "learning rate growing 5% a step": Case("update_growth", _hot_rate, begin=100, steps=180),
    "one gradient 100 times as large, beta2 = 0.999": Case("gradient_jump", overrides=_UNCLIPPED, gradients=_one_jump),
    "router logits growing 20% a step": Case("router_z", _growing_router, _EXPERTS, begin=100, steps=180),
    "the same, signal bounded": Case(
        "signal_share", _growing_router, (*_EXPERTS, "warnings.signal_share=0.5"), begin=100, steps=180
    ),
    "first key's score growing 5% a step": Case("attention_entropy", _favoured_key, begin=100, steps=200),
    "one expert's bias growing": Case("router_entropy", _favoured_expert, _BIASED, begin=100, steps=240, rises=False),
}


@dataclass(frozen=True)
class Outcome:
    """Warnings and losses of one run."""

    warnings: list[tuple[int, EarlyWarning]]
    losses: list[float]

    def rose(self, twin: "Outcome", begin: int) -> int | None:
        """Step at which the loss had risen; None if it did not. twin: the same run without the trouble."""
        for step in range(begin, min(len(self.losses), len(twin.losses)) + 1):
            mine, other = (sum(run.losses[step - _MEAN_OF : step]) for run in (self, twin))
            if not mine <= _RISE * other:
                return step
        return None

    def warned(self, signal: str, begin: int) -> int | None:
        """Step of the first warning of a signal since the trouble began."""
        return next((step for step, found in self.warnings if found.signal == signal and step >= begin), None)


def run(world: distributed.World, case: Case, *, planted: bool, seed: int = 0) -> Outcome:
    """A run with the trouble, or its sound twin."""
    overrides = ["optimizer.weight_decay=0", f"run.seed={seed}", f"batch.global_size={_SEQUENCES}", *case.overrides]
    resolved = resolve(world, stage=0, compute="fp32", micro=_SEQUENCES, overrides=overrides)
    section = resolved.config.optimizer
    outcome = Outcome([], [])
    with engine_of(world, resolved) as engine:
        telemetry = Telemetry(engine, probe=False)
        judge = EarlyWarnings(
            resolved.config.warnings,
            beta2=section.betas[1],
            clipping=section.gradient_clipping,
            in_fp16=lambda _: False,
        )
        for step in range(1, case.steps + 1):
            since = step - case.begin
            going_wrong = planted and since >= 0
            rate = _RATE * min(1.0, step / _WARM_UP) * (case.trouble(engine, since) if going_wrong else 1.0)
            data = batch(seed * 100_000 + step)
            with telemetry.watching(data):
                result = engine.forward_backward(data, step=step)
            if going_wrong:
                case.gradients(engine, since)
            health = engine.health(result)
            outcome.losses.append(health.loss)
            if not health.finite:
                break
            found = judge.before_step(health)
            telemetry.measure()
            update = engine.step(health, rate)
            fields = telemetry.finish(applied=update.applied, clip=update.clip_coefficient)
            found += judge.after_step(health, applied=update.applied, warm=step > _WARM_UP)
            found += judge.after_telemetry(step, fields, warm=step > _WARM_UP)
            outcome.warnings.extend((step, warning) for warning in found)
    return outcome


def found(world: distributed.World, *, name: str) -> tuple[int | None, int | None]:
    """Steps at which the signal of a case warned and at which the loss had risen; None where one did not."""
    case = CASES[name]
    twin, outcome = (run(world, case, planted=planted) for planted in (False, True))
    return outcome.warned(case.expected, case.begin), outcome.rose(twin, case.begin)


@contextmanager
def alone() -> Iterator[distributed.World]:
    """A process group of this process."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    torch.set_num_threads(1)
    yield distributed.start(rank=0, world_size=1, local_rank=0)
    distributed.stop()


def _print(name: str, outcome: Outcome) -> None:
    print(f"{name}: loss {outcome.losses[-1]:.3f} at {len(outcome.losses)}")
    for step, warning in outcome.warnings:
        print(f"   {step}: {warning.signal} {warning.module} {warning.value:.3g}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cases", nargs="*", help="words of their names; all")
    parser.add_argument("--healthy", type=int, default=0, metavar="SEEDS", help="sound runs of so many seeds, too")
    options = parser.parse_args()
    with alone() as world:
        for seed in range(1, options.healthy + 1):
            case = Case("", steps=180)
            _print(f"sound, seed {seed}", run(world, case, planted=False, seed=seed))
        twins: dict[tuple[tuple[str, ...], int], Outcome] = {}
        for name, case in CASES.items():
            if options.cases and not any(word in name for word in options.cases):
                continue
            key = case.overrides, case.steps
            if key not in twins:
                twins[key] = run(world, case, planted=False)
                _print(f"sound twin {key}", twins[key])
            outcome = run(world, case, planted=True)
            _print(name, outcome)
            rose, warned = outcome.rose(twins[key], case.begin), outcome.warned(case.expected, case.begin)
            print(f"=> {name} from {case.begin} on: {case.expected} warned at {warned}, the loss rose at {rose}")


if __name__ == "__main__":
    main()
