"""What Mantissa costs over a plain DeepSpeed loop, step by step in the same processes.

    deepspeed --num_gpus 2 --module training.benchmark.steps --config config/recipes/benchmark.yaml [--pairs 300]
        [--steps 1] [--at-least 0.99] [key.sub=value ...]

Two engines start from the same weights and train on the same batches with the same learning rates: one by
`deepspeed.initialize` and the loop of its documentation, the other by Mantissa as the config has it, with guard,
events, console and wandb. Blocks of `--steps` steps take turns, and who comes first changes from pair to pair, so that
a machine whose speed drifts by a tenth within a minute disturbs both alike; jobs that run one after another
(`training.benchmark`) cannot tell a hundredth apart on it. What a job costs before and after its steps is not in it.

Ratios are of tokens per second, Mantissa's over bare: the median of the pairs, and that of all their seconds together,
in which a step that is rarely slow counts. Intervals are those of 2,000 bootstrap resamples of the pairs, 2.5 to 97.5%.
Losses have to agree as in `training.benchmark`. Exit code 3: losses part, or the median's interval is below
`--at-least`.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import deepspeed
import numpy as np
import torch

from config.cli import Arguments, entry_point
from config.command_line import read_command_line
from config.errors import UserError
from config.resolved import Resolved
from data.loader import Batches
from data.prepare import Corpus
from modeling.activation_checkpointing import apply_activation_checkpointing
from modeling.build import build_model, model_config
from training.benchmark.command import FAILED, TOLERANCE
from training.benchmark.guard import open_parts
from training.distributed import Place
from training.engine.optimizer import build_optimizer
from training.parts import Parts
from training.progress import Progress
from training.schedule import scheduled_rate
from training.session import batch_shape, session
from training.step import train_step

WARM_UP_STEPS = 5


class BareLoop:
    """`deepspeed.initialize`, then forward, backward, step, on batches of its own."""

    def __init__(self, resolved: Resolved, corpus: Corpus, place: Place) -> None:
        config = resolved.config
        shape = model_config(config.model, vocab_size=corpus.vocab_size, sequence_length=config.data.sequence_length)
        model = build_model(config.model, shape, seed=config.run.seed, gather=lambda _: nullcontext(True)).train()
        mode: Any = config.model.activation_checkpointing
        apply_activation_checkpointing(
            model, mode, reentrant=config.model.checkpointing_reentrant, every=config.model.checkpointing_every
        )
        optimizer = build_optimizer(model, config.optimizer, offload=resolved.offload != "none", device=place.device)
        peak = config.optimizer.learning_rate
        rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: scheduled_rate(config, n) / peak)
        self._engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, lr_scheduler=rates, config=resolved.deepspeed
        )
        self._device, self._share = place.device, 1.0 / resolved.batch.accumulation
        self.batches = Batches(corpus.train, seed=config.run.seed, **batch_shape(resolved, corpus))
        self.losses: list[torch.Tensor] = []

    def step(self) -> None:
        """One optimizer step."""
        loss = torch.zeros((), device=self._device)
        for inputs, labels in self.batches.next_step().micro_batches(self._device):
            one = self._engine(**inputs, labels=labels, shift_labels=labels, use_cache=False).loss
            self._engine.backward(one)
            self._engine.step()
            loss += one.detach() * self._share
        self.losses.append(loss)


@dataclass(frozen=True)
class Measured:
    """What all pairs gave."""

    bare: np.ndarray
    """(pairs,) float64 [s a step]"""
    guarded: np.ndarray
    """(pairs,) float64 [s a step]"""
    loss_distance: float
    """[fraction] Largest relative difference of two losses of the same step."""


def measure(parts: Parts, bare: BareLoop, *, pairs: int, steps: int) -> Measured:
    """Time both in turn. A collective."""
    progress, device, losses = Progress(), parts.engine.place.device, []

    def guarded() -> None:
        nonlocal progress
        progress, _, health = train_step(parts, progress)
        losses.append(health.loss)

    def seconds_per_step(step: Callable[[], None]) -> float:
        started = time.perf_counter()
        for _ in range(steps):
            step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - started) / steps

    for _ in range(WARM_UP_STEPS):
        bare.step()
        guarded()
    taken = np.empty((pairs, 2))
    for pair in range(pairs):
        for which in (0, 1) if pair % 2 == 0 else (1, 0):
            taken[pair, which] = seconds_per_step((bare.step, guarded)[which])
    # every rank's equal share of label tokens: the mean of the ranks' means is that of the global batch
    plain = parts.engine.place.gather(torch.stack(bare.losses).double()).mean(dim=0).cpu().numpy()
    return Measured(taken[:, 0], taken[:, 1], float(np.max(np.abs(plain / np.array(losses) - 1.0))))


def interval(bare: np.ndarray, guarded: np.ndarray, *, median: bool) -> tuple[float, float, float]:
    """Tokens per second of guarded over bare: the ratio, and the ends of its bootstrap interval.

    bare, guarded: (pairs,) seconds. median: of the pairs' ratios; otherwise of the sums.
    """
    drawn = np.random.default_rng(0).integers(0, len(bare), size=(2000, len(bare)))
    ratios = bare / guarded
    if median:
        found, resampled = float(np.median(ratios)), np.median(ratios[drawn], axis=1)
    else:
        found, resampled = float(bare.sum() / guarded.sum()), bare[drawn].sum(axis=1) / guarded[drawn].sum(axis=1)
    low, high = np.quantile(resampled, [0.025, 0.975])
    return found, float(low), float(high)


def require_comparable(resolved: Resolved) -> None:
    """Raises UserError for settings that the plain loop does not have, or two engines in one process cannot."""
    model, data = resolved.config.model, resolved.config.data
    for key, value, allowed in (
        ("ZeRO stage", resolved.zero_stage, (0, 1, 2)),
        ("precision.path", resolved.config.precision.path, ("cast",)),
        ("model.activation_checkpointing", model.activation_checkpointing, ("none", "full", "selective")),
        ("data.document_masking", data.document_masking, (False,)),
        ("model.compile", model.compile, (False,)),
    ):
        if value not in allowed:
            wanted = ", ".join(map(str, allowed))
            raise UserError(f"{key} = {value}: the plain loop is compared for {wanted} only; see training.benchmark")


def report(measured: Measured, *, steps: int, compute: str, at_least: float | None) -> int:
    """Print what was measured; the exit code."""
    bare, guarded = measured.bare, measured.guarded
    print(f"\n{len(bare)} pairs of {steps} steps; ratios of tokens/s, Mantissa's over bare [95% of resamples]")
    print(f"bare      {np.median(bare) * 1e3:9.2f} ms a step (median)")
    print(
        f"mantissa  {np.median(guarded) * 1e3:9.2f} ms a step, {np.median(guarded - bare) * 1e3:+.2f} (median of pairs)"
    )
    middle = interval(bare, guarded, median=True)
    print("median    {:9.4f} [{:.4f} to {:.4f}]".format(*middle))
    print("all       {:9.4f} [{:.4f} to {:.4f}]".format(*interval(bare, guarded, median=False)))
    print(f"losses    {measured.loss_distance:9.1e} apart at most")
    if not measured.loss_distance <= TOLERANCE[compute]:
        print(f"error: losses part: {measured.loss_distance:.1e} is more than {TOLERANCE[compute]:g}", file=sys.stderr)
        return FAILED
    if at_least is not None and middle[2] < at_least:
        print(f"error: the median is below {at_least:g} for certain: at most {middle[2]:.4f}", file=sys.stderr)
        return FAILED
    return 0


@entry_point(launched=True)
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison."""
    parser = Arguments(
        prog="training.benchmark.steps", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pairs", type=int, default=300, help="pairs of blocks")
    parser.add_argument("--steps", type=int, default=1, help="steps in a block")
    parser.add_argument("--at-least", type=float, help="exit code 3 where tokens/s over bare is surely below")
    options, rest = parser.parse_known_args(arguments)
    total = WARM_UP_STEPS + options.pairs * options.steps
    resolved = read_command_line([*rest, f"run.steps={total}"])
    require_comparable(resolved)
    with session(resolved) as opened, open_parts(opened) as parts:
        bare = BareLoop(resolved, opened.corpus, opened.place)
        measured = measure(parts, bare, pairs=options.pairs, steps=options.steps)
        bare.batches.close()
    if resolved.rank != 0:
        return 0
    return report(measured, steps=options.steps, compute=resolved.compute, at_least=options.at_least)


if __name__ == "__main__":
    sys.exit(main())
