"""Single steps of a run compared with FP32: same masters, same optimizer state, same micro-batches.

    python -m tools.parity.steps RUN --out FILE [--walk 2] --points 0,150,300 [--judge] [parity.key=value ...]

Started by `tools.parity` on as many processes as the run had. At each point it restores the run's checkpoint, takes a
few real steps and measures, module by module, what docs/parity.md lists under "Single steps": outputs, gradients and
updates against FP32's and FP64's, the effect of the dtype alone, and the *signature* from which
`tools.parity.rounding` judges whether rounding explains an error.

With --judge, as `launch.canary` starts it, FILE also gets the verdict by the bounds of `parity:`.
Exit code 0: written, and within the bounds; 3: beyond them (1 for several processes under torchrun).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch

from config.cli import DIVERGED, DONE, Arguments, entry_point
from config.command_line import read_command_line
from config.errors import one_line
from config.files import write_atomically
from config.launcher import without_accelerate
from config.optimizers import OPTIMIZERS
from config.resolved import Resolved
from config.schema import ParitySection
from data.batches.loader import Batch, Batches, sample_ids_sha256
from modeling.embedding_noise import KEYS
from modeling.objectives.objective import Scored
from modeling.router_balance import router_balance
from precision.dtypes import DTYPES
from precision.sampling import distances
from precision.statistics import PART, compare_gradients, in_fp64, to_plain
from precision.tolerance import relative, unit_roundoff
from tools.parity.alternatives import alternatives
from tools.parity.constants import of_update
from tools.parity.dropped import otherwise, rates
from tools.parity.fp8_linear import in_fp8
from tools.parity.fp8_products import Fp8Products
from tools.parity.judge_steps import (
    COMPARED,
    MOST_NAMED,
    PLAIN_MARGIN,
    SAME_LOSS,
    Walk,
    beyond_bounds,
    blamed,
    excess_of,
    first_divergence,
    judge_steps,
    lengths,
    more_than_noise,
)
from tools.parity.oracle.comparison import checksum_at_start, checksum_in
from tools.parity.plain import Apart, clip_coefficient
from tools.parity.recompute import MOST_VALUES
from tools.parity.reference import Reference, dropouts, tokens_by_expert
from tools.parity.routing import Choices, choosing, differ
from tools.parity.signature import Signatures, own_errors
from tools.parity.slices import Slices, whole_state
from tools.parity.task_loss import loss_errors, router_errors
from tracking.record import Record
from tracking.run_dir import RunDir
from training.build import assemble
from training.corruption.settings import decay_and_factor, hidden_matrices
from training.corruption.updates import excess
from training.distributed import World
from training.engine import Engine
from training.engine.ledger import read_start
from training.engine.optimizer import IMPLEMENTATIONS, rounding
from training.engine.optimizers.rule import UNIT, UpdateInputs
from training.engine.rng import generators, restore_generators
from training.engine.tensors import states_of, trainable_parameters, whole_gradient, whole_master, whole_weight
from training.progress import Progress
from training.schedule import scheduled_rate
from training.session import Session, session

MAX_SKIPS = 12
"""Number of skipped steps after which a point is abandoned: a loss scale of 65536 needs fewer to settle."""

_ACTS_BEYOND = ("sliding_window", "attention_chunk_size", "original_max_position_embeddings")
"""Lengths in a model's config up to which attention or rotary positions are as without them."""


class StepParity:
    """Measures steps of one engine. Every method is a collective."""

    def __init__(self, engine: Engine, reference: Reference, resolved: Resolved) -> None:
        self._engine, self._reference, self._resolved = engine, reference, resolved
        self._rules = decay_and_factor(reference.model, resolved.config.optimizer)
        self._hidden = hidden_matrices(reference.model, resolved.config.optimizer)
        self._most_apart: float | None = None
        """The largest error of sound alternatives so far, in units of plain torch's."""
        self._chosen: Choices | None = None
        self.speaks = engine.world.is_main
        self.no_dropout = bool(dropouts(engine.model))
        """Compare without dropout: which values a kernel drops may depend on the dtype."""

    def step(
        self,
        batch: Batch,
        *,
        applied: int,
        lr: float | None = None,
        apply: bool = True,
        dropped: bool = False,
        modules: bool = True,
    ) -> dict[str, Any]:
        """Take one real step and measure it.

        modules: compare module by module, which takes most of the time, and all gradients with plain torch, not only
        those out of bounds. applied: updates so far. lr: None: the
        schedule's rate after them. apply: False measures the step and discards its gradients, as the guard does with
        one that it refuses. dropped: a model with dropout takes the step with dropout as the generators draw it, after
        the passes without dropout that are compared with FP32; update, gradient norm and `loss_with_dropout` are then
        those of the step taken.
        """
        engine, reference = self._engine, self._reference
        drawn = generators(engine.world.device)
        reference.load((name, whole_master(engine, item)) for name, item in trainable_parameters(engine).items())
        drift = self._drift()
        for model in (engine.model, reference.model):
            model.train(not self.no_dropout)
        compute, regions, world = DTYPES[engine.compute], engine.regions, engine.world
        slices = Slices(world.tensor)
        expected: Choices = {}
        chosen: Choices = {}
        with slices.of_reference(reference.model), choosing(reference.model, expected):
            loss, gradients = reference.loss_and_gradients(batch)
        signatures = Signatures(
            reference.model, engine.model, compute=compute, regions=regions, world=world, slices=slices
        )
        first = next(batch.micro_batches(world.device))
        watch = signatures.watch_loss(reference.objective, *first, engine.loss_path.score) if modules else None
        products = Fp8Products(reference.model, engine.model, regions, world)
        with ExitStack() as stack:
            if modules:
                stack.enter_context(signatures.of_candidate())
                stack.enter_context(products.of_candidate())
            stack.enter_context(choosing(engine.model, chosen))
            outcome = engine.forward_backward(batch, step=batch.position + 1, on_loss=watch)
        health = compared = engine.health(outcome)
        other = differ(chosen, expected)
        self._chosen = chosen if chosen and not math.isnan(other) else None  # alternatives choose so, too
        routed_otherwise = float(world.sum(world.numbers([float(other == 1)]))) > 0
        if routed_otherwise:
            del gradients
            with self._routed():
                loss, gradients = reference.loss_and_gradients(batch)
        planned = self._planned_agreement(batch, gradients)
        found = self._reduced_gradients()
        agreement = _agreement(found, gradients)
        norms = {name: _norm({name: gradients[name]}) for name in found}
        reference_norm = _norm(gradients)
        del found  # which the engine still has
        compared_norms = {"parameters": agreement, "reference_norms": norms}
        beyond = beyond_bounds(compared_norms, self._resolved.config.parity)
        plain = self._plain_agreement(batch, gradients) if modules or beyond else {}
        others = self._alternatives(batch, gradients, plain, agreement, more_than_noise(compared_norms))
        del gradients
        if dropped and self.no_dropout:
            engine.discard_gradients()
            restore_generators(drawn, engine.world.device)
            engine.model.train()
            health = engine.health(engine.forward_backward(batch, step=batch.position + 1))
        found = self._reduced_gradients()
        lr = scheduled_rate(self._resolved.config, applied) if lr is None else lr
        states = self._states()
        update = engine.step(health, lr, apply=apply)
        signature = signatures.measured()
        shape, length = reference.model.config.get_text_config().to_dict(), self._resolved.config.data.longest
        signature["not_measured"] = idle(shape, length) | signature["not_measured"]
        measured: dict[str, Any] = {
            "loss": compared.loss,
            "reference_loss": loss,
            "grad_norm": health.grad_norm,
            "reference_grad_norm": reference_norm,
            "own_grad_norm": _norm(found),
            "applied": update.applied,
            "lr": lr,
            "loss_scale": update.loss_scale,
            "roundoff": unit_roundoff(DTYPES[self._coarsest]),
            "parameters": agreement,
            "planned": planned,
            "plain": {name: plain[name] for name in beyond if name in plain},
            "plain_error": {name: found["relative_error"] for name, found in plain.items()},
            "alternatives": others,
            "fp8_products": products.measured(),
            "reference_norms": norms,
            "drift": drift,
            "update_error": {},
            "update_rounding": {},
            **own_errors(signature),
            "signature": signature,
        }
        if dropped and self.no_dropout:
            measured["loss_with_dropout"] = health.loss
        if update.applied:
            measured |= self._judge_update(states, found, health.grad_norm, lr=lr, step=applied + 1)
            if not math.isfinite(compared.grad_norm):  # FP16's scale was too large for the step without dropout alone
                measured |= {"parameters": {}, "plain": {}, "plain_error": {}}
        return measured

    def _reduced_gradients(self) -> dict[str, torch.Tensor]:
        """Gradients by parameter name, for those that have one; unscaled, whole."""
        engine = self._engine
        own = {name: whole_gradient(engine, parameter) for name, parameter in trainable_parameters(engine).items()}
        return {name: gradient for name, gradient in own.items() if gradient is not None}

    def loss_with_dropout(self, batch: Batch) -> float:
        """The loss as the run computes it, with the current random generators. Changes no weight."""
        engine = self._engine
        engine.model.train()
        loss = engine.health(engine.forward_backward(batch, step=batch.position + 1)).loss
        engine.discard_gradients()
        return loss

    def evaluation_errors(self, batch: Batch) -> dict[str, Any]:
        """How an evaluation of a batch differs from what it should be. Changes no weight.

        evaluation_error: relative distance between the losses of two evaluations with different random numbers, which
        shows whatever is drawn or changed in evaluation, and between those of a micro-batch in the two modes, if
        nothing is dropped; bitwise 0 on a CPU for a sound model. evaluated_otherwise: modules in training mode, or with
        another output dtype than in training, to what they did.
        """
        engine, drawn = self._engine, generators(self._engine.world.device)
        with _watched(engine.model) as evaluated:
            first, second = (engine.evaluate([batch]).loss for _ in range(2))
        inputs, labels = next(batch.micro_batches(engine.world.device))
        inputs = {name: item for name, item in inputs.items() if name != KEYS}  # noise is of training alone
        with _watched(engine.model) as trained:
            apart = self._modes_apart(engine.model, lambda: engine.loss_path.score(inputs, labels, 1.0))
        if apart > SAME_LOSS:  # or as transformers' own code differs, as that of Phi-MoE and of fused kernels
            reference = self._reference
            reference.load((name, whole_master(engine, item)) for name, item in trainable_parameters(engine).items())
            if self._modes_apart(reference.model, lambda: reference.score(inputs, labels)):
                apart = 0.0
        restore_generators(drawn, engine.world.device)
        otherwise = {}
        for name, (training, dtype) in evaluated.items():
            if training:
                otherwise[name] = "in training mode"
            elif dtype != (of_training := trained.get(name, (True, dtype))[1]):
                otherwise[name] = f"in {dtype}, in training {of_training}"
        off = relative(abs(second - first), abs(first))
        return {"evaluation_error": max(off, apart), "evaluated_otherwise": otherwise}

    @torch.no_grad()
    def _modes_apart(self, model: torch.nn.Module, score: Callable[[], Scored]) -> float:
        """The largest relative distance of any rank between its losses in training and in evaluation mode; 0 for a
        model with dropout, which stays in evaluation mode, and a compiled one, whose two graphs may round differently.
        """
        losses = []
        for training in (False, True):  # training last, whose dtypes are then those that were watched
            model.train(training and not self.no_dropout)
            losses.append(float(score().loss))
        apart = relative(abs(losses[1] - losses[0]), abs(losses[0]))
        return 0.0 if self._resolved.config.model.compile else max(self._engine.world.gather_objects(apart))

    def dropout_errors(self, batch: Batch) -> dict[str, Any]:
        """dropped_otherwise: modules, with the rank, that drop another share in training than the architecture's own
        code with the same config, to what they do. Changes no weight. Empty for compiled models, which hide it."""
        engine, reference = self._engine, self._reference
        if self._resolved.config.model.compile:
            return {}
        drawn = generators(engine.world.device)
        inputs, labels = next(batch.micro_batches(engine.world.device))
        own = rates(engine.model, lambda: engine.loss_path.score(inputs, labels, 1.0))
        declared = rates(reference.model, lambda: reference.score(inputs, labels))
        restore_generators(drawn, engine.world.device)
        return {"dropped_otherwise": _by_rank(engine.world.gather_objects(otherwise(own, declared)))}

    def task_loss(self, batch: Batch) -> dict[str, Any]:
        """The errors of the task's and of routers' losses and their gradients on a micro-batch
        (`tools.parity.task_loss`), by rank, and the constants that differ from the config's. Changes no weight."""
        engine = self._engine
        drawn = generators(engine.world.device)
        engine.model.train(not self.no_dropout)
        given, config = next(batch.micro_batches(engine.world.device)), self._resolved.config
        of_task, note = loss_errors(engine, config, *given)
        found = of_task | router_errors(engine, config.model, *given), note
        restore_generators(drawn, engine.world.device)
        errors, notes = zip(*engine.world.gather_objects(found), strict=True)
        return {"task_loss": _by_rank(errors), "other_constants": [note for note in notes if note]}

    def _planned_agreement(self, batch: Batch, gradients: dict[str, torch.Tensor]) -> dict[str, Any]:
        """Agreement of FP32's gradients with those of the same model with only FP8's rounding, by parameter."""
        regions, model = self._engine.regions, self._reference.model
        names = regions.names_in("fp8") if regions else ()
        if regions is None or not names:
            return {}
        with in_fp8(model, names, regions.fp8), self._routed():
            return _agreement(self._reference.loss_and_gradients(batch)[1], gradients)

    def _plain_agreement(
        self, batch: Batch, gradients: dict[str, torch.Tensor], dice: torch.Generator | None = None
    ) -> dict[str, Any]:
        """Agreement of plain torch's gradients in the run's dtype with FP32's, by parameter.

        It is the best that the dtype allows: if terms cancel, rounding alone takes a gradient beyond every bound. Under
        a manifest the dtype is its coarsest, which allows a gradient no more than a run in that dtype alone. Empty in
        FP32 and with FP8, whose rounding `_planned_agreement` has.
        """
        engine = self._engine
        if self._coarsest == "fp32":
            return {}
        scale = engine.loss_scale * engine.world.zero_ranks  # of the loss that the engine differentiates
        with self._routed():
            return _agreement(self._reference.gradients_in(self._coarsest, batch, scale, dice), gradients)

    @property
    def _coarsest(self) -> str:
        """The coarsest dtype that a module computes in, by which plain torch can compute all; fp32 with FP8."""
        regions = self._engine.regions
        if regions is None or regions.names_in("fp8"):
            return self._engine.compute
        return next((dtype for dtype in ("bf16", "fp16") if regions.names_in(dtype)), "fp32")

    def _routed(self) -> AbstractContextManager[None]:
        """Context manager: the reference makes the choices of the run's routers and ReLUs, where they can be used."""
        chosen = self._chosen
        return nullcontext() if chosen is None else choosing(self._reference.model, {}, chosen)

    def _alternatives(
        self,
        batch: Batch,
        gradients: dict[str, torch.Tensor],
        plain: dict[str, Any],
        agreement: dict[str, Any],
        judged: list[str],
    ) -> dict[str, float]:
        """How far gradients of sound alternatives in the run's dtype are from FP32's, in units of plain torch's.

        For the first step in which plain torch was measured, and for those whose own gradients are further off than
        known alternatives explain: how far rounding goes changes as a model trains.
        """
        if not plain or self._engine.world.sequence is not None:
            return {}
        roundoff = unit_roundoff(DTYPES[self._coarsest])

        def farthest(found: dict[str, Any]) -> float:
            return max((excess_of(found[name], plain[name], roundoff) for name in judged), default=0.0)

        def is_beyond(apart: float) -> bool:
            allowed = max(self._resolved.config.parity.gradient_excess, PLAIN_MARGIN * apart)
            return self._engine.world.from_main(allowed < farthest(agreement) < math.inf)

        if self._most_apart is not None and not is_beyond(self._most_apart):
            return {}
        others = {}
        for what, context in alternatives(self._reference.model).items():
            with context:
                others[what] = farthest(self._plain_agreement(batch, gradients))
        if is_beyond(max(others.values())):  # those round all weights alike
            dice = torch.Generator().manual_seed(batch.position)
            others["weights rounded by chance"] = farthest(self._plain_agreement(batch, gradients, dice))
        self._most_apart = max([self._most_apart or 0.0, *others.values()])
        return others

    def accumulation_errors(self, batch: Batch) -> dict[str, float]:
        """The error of adding up the gradients of half a micro-batch's loss and of an eighth of that, by parameter.

        Half of it, so that both fit into FP16 where a step's gradients do. Each is first computed alone. FP32 rounds
        their sum once, adding up in 16 bits rounds it again. If passes are nondeterministic, four times their
        difference is allowed. Empty if the config reduces gradients in less than FP32, or any is not finite. Changes no
        weight.
        """
        if self._resolved.config.precision.reduce != "fp32" or self._engine.router is not None:
            return {}
        self._engine.model.train(not self.no_dropout)
        weights = ((0.5, 0.0), (0.0, 0.0625), (0.5, 0.0625))
        first, second, both = (self._summed(batch, each) for each in weights)
        if not all(bool(gradient.isfinite().all()) for gradient in both.values()):
            return {}
        found = {name: _distance(both[name], gradient, second[name]) for name, gradient in first.items()}
        del second, both
        if max(found.values(), default=0.0) > self._resolved.config.parity.accumulation_error:
            found = _beyond_noise(found, first, self._summed(batch, (0.5, 0.0)))
        return found

    def weighting_errors(self, batch: Batch) -> dict[str, Any]:
        """Errors of the weights that a step gives to its micro-batches' and ranks' parts of the global batch.

        weighting_error: by parameter, the relative distance of the reduced gradient from one summed here over the same
        passes, in which each label (pair, row) has equal weight. loss_error: the same for the reported loss. Roundings
        are the same in both, so a weight that is wrong by less than any 16-bit rounding shows. What routers add is
        recomputed from their logits and the config's factors. If passes are nondeterministic, four times their
        difference is allowed. Empty if gradients are not finite. Changes no weight.
        """
        engine = self._engine
        engine.model.train(not self.no_dropout)
        loss = engine.health(engine.forward_backward(batch, step=batch.position + 1)).loss
        own = self._taken_gradients()
        mean, expected = self._put_together(batch)
        if not all(bool(gradient.isfinite().all()) for gradient in (*own.values(), *expected.values())):
            return {}
        found = {name: _distance(gradient, expected[name]) for name, gradient in own.items()}
        off = relative(abs(loss - mean), abs(mean))
        bounds = self._resolved.config.parity
        if off > bounds.loss_error or max(found.values(), default=0.0) > bounds.weighting_error:
            again, repeated = self._put_together(batch)
            found = _beyond_noise(found, expected, repeated)
            off = max(0.0, off - 4.0 * relative(abs(again - mean), abs(mean)))
        return {"weighting_error": found, "loss_error": off}

    def _put_together(self, batch: Batch) -> tuple[float, dict[str, torch.Tensor]]:
        """The mean loss over everything that counts in the global batch, and its gradients by parameter name, FP32."""
        engine, world = self._engine, self._engine.world
        copies = world.world_size / world.zero_ranks  # ranks that share matrices have the same samples
        total = world.sum(world.numbers([float(batch.counted.sum())]))[0].clamp_(min=1.0) / copies
        weight = (world.zero_ranks / total).float()
        losses = torch.zeros((), dtype=torch.float64, device=world.device)
        router = router_balance(engine.model, self._resolved.config.model)

        def score(inputs: dict[str, Any], labels: torch.Tensor, scale: torch.Tensor | float = 0.0) -> Scored:
            scored = engine.loss_path.score(inputs, labels, scale)
            if router is not None and engine.router is not None:
                router.routed = engine.router.routed
            return scored

        experts = None if router is None else tokens_by_expert(router, score, batch, world)
        for index, (inputs, labels) in enumerate(batch.micro_batches(world.device)):
            scored = score(inputs, labels, weight * engine.loss_scale)
            loss = scored.loss * weight
            if router is not None and experts is not None:
                loss = loss + router.loss(experts)[0] * world.world_size  # over which gradients are averaged
            engine.backward(loss, last=index == len(batch.input_ids) - 1)
            losses += scored.loss.detach().double()
        gradients = self._taken_gradients()
        return float(world.sum(losses[None])[0] / copies / total), gradients

    def _summed(self, batch: Batch, weights: Sequence[float]) -> dict[str, torch.Tensor]:
        """Reduced gradient of the batch's first micro-batch, added up once per weight."""
        engine = self._engine
        inputs, labels = next(iter(batch.micro_batches(engine.world.device)))
        total = float(engine.world.sum(engine.world.numbers([float(batch.label_tokens)]))[0])
        for index, weight in enumerate(weights):
            factor = weight * engine.world.world_size / max(total, 1.0)
            scored = engine.loss_path.score(inputs, labels, factor * engine.loss_scale)
            engine.backward(scored.loss * factor, last=index == len(weights) - 1)
        return self._taken_gradients()

    def _taken_gradients(self) -> dict[str, torch.Tensor]:
        """The reduced gradients by parameter name, FP32; the engine then discards its own."""
        engine, found = self._engine, self._reduced_gradients()
        engine.gradients.norm()
        engine.discard_gradients()
        return found

    def _states(self) -> dict[str, list[torch.Tensor]]:
        """The optimizer's states by parameter name, in the order of its table row; zeros before the first update."""
        engine = self._engine
        return {
            name: [whole_state(engine, parameter, key) for key in states_of(engine, parameter)]
            for name, parameter in trainable_parameters(engine).items()
        }

    def _drift(self) -> dict[str, float]:
        if self._engine.stage == 0:
            return {}  # the weights are the masters
        found = {}
        for name, parameter in trainable_parameters(self._engine).items():
            pair = self._reference.weight(name), whole_weight(self._engine, parameter)
            parts = zip(*map(_parts, pair), strict=True)
            found[name] = float(torch.stack([distances(*part)[0] for part in parts]).amax())
        return found

    def _judge_update(
        self,
        states: dict[str, list[torch.Tensor]],
        gradients: dict[str, torch.Tensor],
        norm: float,
        *,
        lr: float,
        step: int,
    ) -> dict[str, Any]:
        """The distance of each parameter's update from what it should be.

        update_error: relative distance beyond what the rounding of the FP32 master, and of what the optimizer computes
        in 16 bits, explains. update_rounding: share of values whose master or moments are further from FP64 than FP32's
        rounding explains, for optimizers that update each value by itself (`training.corruption.updates`); it shows a
        moment in fewer bits or a slightly wrong coefficient, however small its effect on one update. constants: other
        values of the optimizer's constants that explain a deviating update, as text by parameter. states: before the
        update, as the reference's weights are the masters before it. norm: by which the engine clipped.
        """
        engine, section = self._engine, self._resolved.config.optimizer
        update, clipping = IMPLEMENTATIONS[section.name].update, section.gradient_clipping
        exact = clip_coefficient(_norm(gradients), clipping)
        reported = 1.0 / max(1.0, (norm + 1e-6) / clipping) if clipping else 1.0
        errors, beyond = {}, {}
        constants: dict[str, str] = {}
        for name, parameter in engine.model.named_parameters():
            if name not in gradients:
                continue
            decay, factor = self._rules[name]
            options: dict[str, Any] = {"section": section, "weight_decay": decay, "lr": lr * factor, "step": step}
            counted = OPTIMIZERS[section.name].by_value
            now = [whole_state(engine, parameter, key) for key in states_of(engine, parameter)] if counted else []
            before = [self._reference.weight(name), gradients[name], *states[name]]
            tensors = *before, whole_master(engine, parameter), *now
            # a part at a time where that is possible, since FP64 takes ten times the parameter's memory
            parts = zip(*map(_parts, tensors), strict=True) if counted else [tensors]
            moved, size, explained, within = Apart(), 0.0, 0.0, 0
            for master, gradient, *rest in parts:
                known, (found, *found_states) = rest[: len(states[name])], rest[len(states[name]) :]
                given = UpdateInputs(master, gradient * exact, known, matrix=name in self._hidden, **options)
                expected = update(given)
                moved.add(found.double() - given.master, expected)
                size += float(given.master.square().sum())
                explained += rounding(section.name, given)
                if counted:
                    taken = dataclasses.replace(given, gradient=gradient.double() * reported)
                    within += int((excess(taken, [found, *found_states]) <= 1).all(0).sum())
            beyond_rounding = max(0.0, math.sqrt(moved.off) - roundings_of_master(decay) * math.sqrt(size) - explained)
            errors[name] = relative(beyond_rounding, math.sqrt(moved.size))
            if counted:
                beyond[name] = 1.0 - within / gradients[name].numel()
            bounds = self._resolved.config.parity
            wrong = errors[name] > bounds.update_error or beyond.get(name, 0.0) > bounds.update_rounding
            if wrong and len(constants) < MOST_NAMED and gradients[name].numel() <= MOST_VALUES:
                clipped = gradients[name] * exact
                given = UpdateInputs(before[0], clipped, states[name], matrix=name in self._hidden, **options)
                constants[name] = of_update(given, whole_master(engine, parameter), now)
        return {"update_error": errors, "update_rounding": beyond, "constants": constants}


def idle(shape: Mapping[str, Any], length: int) -> dict[str, str]:
    """Keys of a model's config that do not act on sequences of this length, to why."""
    found = dict[str, str]()
    for key, value in shape.items():
        if isinstance(value, Mapping):  # by kind of layer
            found |= idle(value, length)
        elif key in _ACTS_BEYOND and value and value >= length:
            found[key] = f"{value} is not shorter than the sequences ({length})"
    return found


def roundings_of_master(decay: float) -> float:
    """Largest relative error of a master after an update in FP32; of weight decay by `decay` also those of its factor,
    which is just below 1, and of the product."""
    return UNIT * (2.5 if decay else 1.0)


def walk(
    steps: StepParity, batches: Batches, progress: Progress, *, length: int, sums: bool = True, modules: int = 1
) -> list[dict[str, Any]]:
    """Measure steps from `progress` on until `length` of them are applied; the list includes skipped ones.

    Later ones show a state that is wrong after the first. For a model with dropout that has `loss_with_dropout`, to
    compare the run's own loss with. sums: measure how gradients are added up, too, which the point of a run does not
    change. modules: number of applied steps that are compared module by module.
    """
    batches.restore(progress.position)
    measured: list[dict[str, Any]] = []
    applied = 0
    while applied < length and len(measured) - applied < MAX_SKIPS:
        batch = batches.next_step()
        repeated = {"loss_with_dropout": steps.loss_with_dropout(batch)} if steps.no_dropout and not measured else {}
        # again after a step that was skipped: gradients that overflow say nothing
        summed = {"accumulation_error": steps.accumulation_errors(batch)} if sums and not applied else {}
        weighted = {} if applied else steps.weighting_errors(batch)
        if not measured:
            repeated |= steps.evaluation_errors(batch) | steps.dropout_errors(batch) | steps.task_loss(batch)
        closely = applied < modules
        found = repeated | summed | weighted
        found |= steps.step(batch, applied=progress.applied + applied, modules=closely)
        applied += found["applied"]
        of_batch = {"position": batch.position, "sample_ids_sha256": sample_ids_sha256(batch.sample_ids)}
        measured.append({"step": progress.step + len(measured) + 1, **of_batch, **found})
        if steps.speaks:
            what = COMPARED if found["applied"] else "step skipped by the loss scaler:"
            print(f"{what} {measured[-1]['step']}", flush=True)
    return measured


class Recomputed:
    """A run recomputed from its checkpoints, alongside FP32. Every method is a collective."""

    def __init__(self, opened: Session, run_dir: RunDir) -> None:
        engine, resolved = opened.engine, opened.resolved
        self._run = run_dir
        self.batches, self._engine, self._folder = opened.batches, engine, run_dir.checkpoints
        self._checkpoints = opened.saved_checkpoints(self._folder)
        if opened.answers is not None:
            opened.answers.keep_in(run_dir.path / "rollouts", publishes=False)
        self._parts, self._start = assemble(
            resolved, engine, opened.batches, record=Record.silent(), checkpoints=self._checkpoints
        )
        reference = Reference(resolved, opened.model_config, opened.world, engine.teacher)
        self.parity = StepParity(engine, reference, resolved)

    def restored(self, point: int) -> Progress:
        """Load a checkpoint's state into the engine, or the run's start for 0; returns the progress there.

        The start is available only until a checkpoint has been restored.
        """
        if not point:
            recorded = checksum_at_start(json.loads(self._run.environment.read_text(encoding="utf-8")))
            own = checksum_in(read_start(self._engine).dtype)
            if recorded not in (None, own):
                raise RuntimeError(f"masters at the start have checksum {own}, the run's had {recorded}")
            return self._start
        return self._parts.load_state_dict(self._checkpoints.load(self._folder / f"step-{point}", self._engine))


def measure(
    run_dir: RunDir, resolved: Resolved, points: list[int], *, length: int, world: World | None = None
) -> list[dict[str, Any]]:
    """The measured steps after each point, in order; 0 is the start of the run. A collective.

    length: applied steps at the first point and the last. world: the process group, if already joined.
    """
    with session(resolved, world=world, shares=("sequence", "tensor", "expert")) as opened:
        run, found = Recomputed(opened, run_dir), []
        for point, count in zip(points, lengths(points, length), strict=True):
            try:
                progress = run.restored(point)
            except Exception as error:  # a checkpoint that cannot be restored is a finding, not a crash
                found.append({"point": point, "restored": False, "why": one_line(error), "steps": []})
                continue
            last, finely = point == points[-1], length if len(points) == 1 else 1  # more rows resolve smaller errors
            steps = walk(run.parity, run.batches, progress, length=count, sums=last, modules=finely)
            found.append({"point": point, "restored": True, "steps": steps})
    return found


def verdict(found: Sequence[Mapping[str, Any]], bounds: ParitySection) -> dict[str, Any]:
    """{"failed", "checks", "modules", "first_parting", "walks"} of measured points, as plain types.

    modules: those to blame, the first of a step first; none if the whole step is wrong.
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


@contextmanager
def _watched(model: torch.nn.Module) -> Iterator[dict[str, tuple[bool, str]]]:
    """Context manager: records for each called module whether it was in training mode, and its output's dtype."""
    seen: dict[str, tuple[bool, str]] = {}

    def note(name: str, module: torch.nn.Module, args: Any, output: Any) -> None:
        if isinstance(output, torch.Tensor):
            seen[name] = module.training, str(output.dtype).removeprefix("torch.")

    with ExitStack() as stack:
        for name, module in model.named_modules():
            stack.enter_context(module.register_forward_hook(partial(note, name)))
        yield seen


def _by_rank(found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The findings of all ranks, by name and rank."""
    return {f"{name} on rank {rank}": how for rank, each in enumerate(found) for name, how in each.items()}


def _parts(values: torch.Tensor) -> Sequence[torch.Tensor]:
    return values.reshape(-1).split(PART)


def _distance(found: torch.Tensor, *expected: torch.Tensor) -> float:
    """||found - expected|| / ||expected||, in FP64; expected: its terms."""
    apart = Apart()
    for part, *added in in_fp64(found, *expected):
        apart.add(part, torch.stack(added).sum(0))
    return apart.error


def _beyond_noise(
    found: Mapping[str, float], first: Mapping[str, torch.Tensor], again: Mapping[str, torch.Tensor]
) -> dict[str, float]:
    """Errors minus 4 times the distance between two passes over the same batch."""
    return {name: max(0.0, off - 4.0 * _distance(again[name], first[name])) for name, off in found.items()}


def _agreement(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """Agreement by parameter. Shares of signs get three standard errors of a share of 0.9 more: one sign that
    rounding turned, of the eight values of a norm over heads, is not a tenth of the gradient."""
    agreement: dict[str, Any] = to_plain(compare_gradients(found.items(), expected.items()))
    for name, its in agreement.items():
        its["sign_agreement"] = min(1.0, its["sign_agreement"] + 0.9 / found[name].numel() ** 0.5)
    return agreement


def _norm(gradients: dict[str, torch.Tensor]) -> float:
    """Global L2 norm in FP64."""
    parts = (part for gradient in gradients.values() for (part,) in in_fp64(gradient))
    return math.sqrt(sum(float(part.square().sum()) for part in parts))


@entry_point(launched=True)
def main(arguments: list[str] | None = None) -> int:
    """Measure and write; rank 0 writes FILE."""
    parser = Arguments("python -m tools.parity.steps", __doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--points", required=True, help="attempted steps after which to compare, such as 0,150,300")
    parser.add_argument("--walk", type=int, default=2, help="applied steps to compare at each point")
    parser.add_argument("--judge", action="store_true", help="write the verdict, too")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="parity.key=value")
    options = parser.parse_intermixed_args(arguments)
    given = ["--config", str(RunDir(options.run).config), *options.overrides]
    resolved = read_command_line(given, without_accelerate(os.environ), started=True)
    points = [int(point) for point in options.points.split(",")]
    found = measure(RunDir(options.run), resolved, points, length=options.walk)
    content: Any = verdict(found, resolved.config.parity) if options.judge else found
    if resolved.rank == 0:
        write_atomically(options.out, json.dumps(content).encode())
    return DIVERGED if options.judge and content["failed"] else DONE


if __name__ == "__main__":
    sys.exit(main())
