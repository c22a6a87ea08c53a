"""Single steps of a run compared with FP32: same masters, same optimizer state, same micro-batches.

    python -m training.parity.steps RUN --out FILE [--walk 2] --points 0,150,300 [--judge] [parity.key=value ...]

Started by `training.parity` on as many processes as the run had. At each point it restores the run's checkpoint and
takes a few real steps. For every one of them it measures, module by module,
- the *own error*: its output against the FP32 module's on the same inputs, without the error of earlier modules;
- the *output error*: its output against FP32's on FP32's inputs, the error accumulated so far;
- its gradients against FP32's: relative error, cosine, share of equal signs;
- the *update error*: the change of its masters against the optimizer in FP64 on the gradient that the engine reduced;
- the *drift*: the distance of the weights it computes with from its rounded masters;
- its *signature*: the parts of `training.parity.signature`, from which is judged whether rounding explains its error.

With --judge, as `launch.canary` starts it, FILE gets the verdict by the bounds of `parity:` beside what was measured.
Exit code 0: written, and within the bounds; 3: beyond them (1 for several processes under torchrun).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from config.cli import DIVERGED, DONE, Arguments, entry_point
from config.command_line import read_command_line
from config.errors import one_line
from config.files import write_atomically
from config.launcher import without_accelerate
from config.resolved import Resolved
from config.schema import ParitySection
from data.loader import Batch, Batches
from modeling.build import dropout_keys
from precision.dtypes import DTYPES
from precision.parity import Walk, blamed, first_divergence, judge_steps
from precision.statistics import compare_gradients, master_drift, to_plain
from tracking.record import Record
from tracking.run_dir import RunDir
from training.build import assemble
from training.engine import Engine
from training.engine.optimizer import implementation, rounding
from training.engine.optimizers.rule import UpdateInputs
from training.engine.tensors import (
    states_of,
    trainable_parameters,
    whole_gradient,
    whole_master,
    whole_state,
    whole_weight,
)
from training.parity.outputs import OutputErrors
from training.parity.reference import Reference, clip_coefficient
from training.parity.signature import Signatures
from training.progress import Progress
from training.schedule import scheduled_rate
from training.session import session

MAX_SKIPS = 12
"""Skipped steps after which a point is abandoned: a loss scale that starts at 65536 needs fewer to settle."""


@dataclass(frozen=True)
class Before:
    """The state of the optimizer before a step, by parameter name."""

    masters: dict[str, torch.Tensor]
    states: dict[str, list[torch.Tensor]]
    """What the optimizer keeps, in the order of its table's row; zeros before the first applied step."""


class StepParity:
    """Measures steps of one engine. Every method is a collective."""

    def __init__(self, engine: Engine, reference: Reference, resolved: Resolved) -> None:
        self._engine, self._reference, self._resolved = engine, reference, resolved
        self.no_dropout = bool(dropout_keys(engine.model.config))
        """Compare without dropout: which values a kernel drops may depend on the dtype."""

    def step(self, batch: Batch, *, applied: int, lr: float | None = None, apply: bool = True) -> dict[str, Any]:
        """Take one real step and measure it.

        applied: updates so far. lr: None is what the schedule says of them. apply: False measures the step and discards
        its gradients, as the guard does with one that it refuses.
        """
        engine, reference = self._engine, self._reference
        before = self._before()
        reference.load(before.masters)
        drift = self._drift(before)
        for model in (engine.model, reference.model):
            model.train(not self.no_dropout)
        errors = OutputErrors(reference.model, engine.model, world=engine.world)
        with errors.of_reference():
            loss, gradients = reference.loss_and_gradients(batch)
        compute, regions = DTYPES[engine.compute], engine.regions
        signatures = Signatures(reference.model, engine.model, compute=compute, regions=regions, world=engine.world)
        with errors.of_candidate(), signatures.of_candidate():
            outcome = engine.forward_backward(batch, step=batch.position + 1)
        health = engine.health(outcome)
        own = {name: whole_gradient(engine, parameter) for name, parameter in trainable_parameters(engine).items()}
        found = {name: gradient for name, gradient in own.items() if gradient is not None}
        agreement = to_plain(compare_gradients(found.items(), gradients.items()))
        lr = scheduled_rate(self._resolved.config, applied) if lr is None else lr
        update = engine.step(health, lr, apply=apply)
        measured: dict[str, Any] = {
            "loss": health.loss,
            "reference_loss": loss,
            "grad_norm": health.grad_norm,
            "reference_grad_norm": _norm(gradients),
            "own_grad_norm": _norm(found),
            "applied": update.applied,
            "loss_scale": update.loss_scale,
            "parameters": agreement,
            "reference_norms": to_plain({name: gradients[name].double().norm() for name in found}),
            "drift": drift,
            "update_error": {},
            **errors.measured(),
            "signature": signatures.measured(),
        }
        if update.applied:
            measured["update_error"] = self._update_errors(before, found, lr=lr, step=applied + 1)
        return measured

    def loss_with_dropout(self, batch: Batch) -> float:
        """The loss as the run computes it, from the random generators as they are. Changes no weight."""
        engine = self._engine
        engine.model.train()
        loss = engine.health(engine.forward_backward(batch, step=batch.position + 1)).loss
        engine.discard_gradients()
        return loss

    def _before(self) -> Before:
        engine = self._engine
        masters, states = {}, {}
        for name, parameter in trainable_parameters(engine).items():
            masters[name] = whole_master(engine, parameter)
            states[name] = [whole_state(engine, parameter, key) for key in states_of(engine, parameter)]
        return Before(masters, states)

    def _drift(self, before: Before) -> dict[str, float]:
        if self._engine.stage == 0:
            return {}  # the weights are the masters
        found = {}
        for name, parameter in trainable_parameters(self._engine).items():
            found[name] = master_drift(before.masters[name], whole_weight(self._engine, parameter)).maximum
        return to_plain(found)

    def _update_errors(
        self, before: Before, gradients: dict[str, torch.Tensor], *, lr: float, step: int
    ) -> dict[str, float]:
        """Relative distance of each update from what it should have been, beyond what rounding explains.

        That of the master in FP32, and what the optimizer computes in 16 bits.
        """
        section = self._resolved.config.optimizer
        update = implementation(section.name).update
        clip = clip_coefficient(_norm(gradients), section.gradient_clipping)
        found = {}
        for name, parameter in self._engine.model.named_parameters():
            if name not in gradients:
                continue
            master, group = before.masters[name], self._engine.group_of[id(parameter)]
            given = UpdateInputs(
                master,
                gradients[name] * clip,
                before.states[name],
                section=section,
                weight_decay=group["weight_decay"],
                lr=lr * group["lr_factor"],
                step=step,
                matrix=group["matrix"],
            )
            expected = update(given)
            actual = whole_master(self._engine, parameter).double() - master.double()
            explained = 2.0**-24 * float(master.double().norm()) + rounding(section.name, given)
            off = max(0.0, float((actual - expected).norm()) - explained)
            size = float(expected.norm())
            found[name] = off / size if size else (0.0 if off == 0 else math.inf)
        return found


def walk(steps: StepParity, batches: Batches, progress: Progress, *, length: int) -> list[dict[str, Any]]:
    """Measure steps from `progress` on until `length` of them were applied; the list has skipped ones, too.

    Of a model with dropout the first has `loss_with_dropout`, which the run's own loss is compared with.
    """
    batches.restore(progress.position)
    measured: list[dict[str, Any]] = []
    applied = 0
    while applied < length and len(measured) - applied < MAX_SKIPS:
        batch = batches.next_step()
        repeated = {"loss_with_dropout": steps.loss_with_dropout(batch)} if steps.no_dropout and not measured else {}
        found = repeated | steps.step(batch, applied=progress.applied + applied)
        applied += found["applied"]
        measured.append({"step": progress.step + len(measured) + 1, **found})
    return measured


def measure(run_dir: RunDir, resolved: Resolved, points: list[int], *, length: int) -> list[dict[str, Any]]:
    """For each point, in order, the measured steps after it; 0 is the start of the run. A collective."""
    with session(resolved) as opened:
        engine, batches = opened.engine, opened.batches
        checkpoints = opened.saved_checkpoints(run_dir.checkpoints)
        record = Record.silent()
        parts, start = assemble(resolved, engine, batches, record=record, checkpoints=checkpoints)
        reference = Reference(resolved, opened.model_config, opened.world, engine.teacher)
        steps = StepParity(engine, reference, resolved)
        found: list[dict[str, Any]] = []
        for point in points:
            progress = start
            if point:
                try:
                    progress = parts.load_state_dict(checkpoints.load(run_dir.checkpoints / f"step-{point}", engine))
                except Exception as error:  # a checkpoint that cannot be restored is a finding, not a crash
                    found.append({"point": point, "restored": False, "why": one_line(error), "steps": []})
                    continue
            found.append({"point": point, "restored": True, "steps": walk(steps, batches, progress, length=length)})
    return found


def verdict(found: Sequence[Mapping[str, Any]], bounds: ParitySection) -> dict[str, Any]:
    """{"failed", "checks", "modules", "first_parting", "walks"} of measured points, as plain types.

    modules: those to blame, the first of a step first; none where the whole step is wrong.
    """
    walks = [Walk(point["point"], point["restored"], point["steps"], None, point.get("why", "")) for point in found]
    checks = judge_steps(walks, bounds)
    return {
        "failed": [check.name for check in checks if not check.passed],
        "checks": [dataclasses.asdict(check) for check in checks],
        "modules": list(blamed(checks)),
        "first_parting": first_divergence(walks, bounds),
        "walks": list(found),
    }


def _norm(gradients: dict[str, torch.Tensor]) -> float:
    """Global L2 norm in FP64."""
    return math.sqrt(sum(float(gradient.double().square().sum()) for gradient in gradients.values()))


@entry_point(launched=True)
def main(arguments: list[str] | None = None) -> int:
    """Measure and write; rank 0 writes FILE."""
    parser = Arguments("python -m training.parity.steps", __doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--points", required=True, help="attempted steps after which to compare, such as 0,150,300")
    parser.add_argument("--walk", type=int, default=2, help="applied steps to compare at each point")
    parser.add_argument("--judge", action="store_true", help="write the verdict, too")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="parity.key=value")
    options = parser.parse_intermixed_args(arguments)
    given = ["--config", str(RunDir(options.run).config), *options.overrides]
    resolved = read_command_line(given, without_accelerate(os.environ))
    points = [int(point) for point in options.points.split(",")]
    found = measure(RunDir(options.run), resolved, points, length=options.walk)
    content: Any = verdict(found, resolved.config.parity) if options.judge else found
    if resolved.rank == 0:
        write_atomically(options.out, json.dumps(content).encode())
    return DIVERGED if options.judge and content["failed"] else DONE


if __name__ == "__main__":
    sys.exit(main())
