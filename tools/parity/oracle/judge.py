"""Recompute steps and evaluations of a run in plain torch and FP64, and compare them with what the run recorded.

    python -m tools.parity --oracle runs/NAME [--steps N]

Both twins of the gate share Mantissa's engine, data order and schedule, so an error there moves both alike. The oracle
shares none of them. From the run's config, its prepared data and its initial weights it derives by itself (`rules`):
which samples make a step, which tokens are labels and how much each counts, the learning rate, which parameters decay,
clipping, and the update. Sequences go through the model one by one, separated documents individually; parameters,
gradients and moments are FP64 (a model's own code may use less internally, as most norms do). The first steps are its
own updates; a later one is computed from the masters of the checkpoint before it.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig

from config.errors import UserError, one_line
from config.load import load_config
from config.schema import SAMPLING_TASKS, Config
from config.task import model_class_of
from modeling.build import build_model, dropout_keys
from precision.dtypes import DTYPES
from precision.tolerance import relative, unit_roundoff
from tools.dequantise import dequantise
from tools.parity.oracle.comparison import START, Comparison, checksum_at_start, checksum_in, relative_difference
from tools.parity.oracle.evaluation import compare_evaluations, load_masters
from tools.parity.oracle.low_rank import add_low_rank
from tools.parity.oracle.movement import DIRECTION, DISTANCE, Movement
from tools.parity.oracle.rules import loss_scale
from tools.parity.oracle.start import unlike_transformers
from tools.parity.oracle.tasks import TASKS, DroppedOut, OnAnswers, Task, undropped
from tools.parity.plain import clip_coefficient
from tools.parity.recompute import as_fp64
from tools.parity.rounding import ROUNDOFF_FP8
from tracking.compare.surviving import read_run_events, surviving
from tracking.pages.markdown import Table
from tracking.run_dir import RunDir
from tracking.summary import read_inputs
from training.checkpoint.partitions import open_saved_model
from training.corruption.rates import schedule
from training.engine.masters import Start
from training.engine.tensors import as_text, checksum
from training.tasks.shape import settle_labels, shape_of_model
from training.tasks.task import prepare

STEPS = 10
"""Default number of steps to recompute."""
_LAYERS = 4
"""Number of layers of the models that the bounds were set with."""
_DRAWS = 0.05
"""Largest distance between random numbers and the answers drawn with them; 1/3 for unrelated numbers."""
_LOSS, _NORM = "loss", "norm"
_PASSES = frozenset({_LOSS, _NORM})
_AMPLIFIED, _ROUNDINGS = (_LOSS, _NORM), 4
"""Comparisons that depend on earlier updates; and the factor allowed on what rounding the initial weights changes."""
_ORDERED = 100_000
"""About how many samples the order of steps is compared with; half a second, a few for rows that are padded."""
ALONE = "weights and config of transformers alone"
UNKNOWN = "the oracle does not compute it"
FIRST_NORM = "norm of the first update"
Log = Callable[[str], Any]


@dataclass
class Judged:
    """The comparisons that were made."""

    steps: int
    comparisons: list[Comparison]
    notes: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether every comparison is within its bound."""
        return all(comparison.holds for comparison in self.comparisons)

    def lines(self) -> list[str]:
        """Console lines: a table, and the verdict."""
        rows = [(each.what, f"{each.largest:.2e}", f"{each.bound:.2e}", each.where) for each in self.comparisons]
        failed = [each.what for each in self.comparisons if not each.holds]
        verdict = f"differs from the oracle in: {', '.join(failed)}" if failed else "as the oracle computed them"
        table = Table(("compared", "largest", "bound", "at"), rows)
        return [*table.lines(), *self.notes, f"{self.steps} steps {verdict}"]


class Unknown(UserError):
    """Something in a run that the oracle does not compute."""


def judge(run: Path, *, steps: int = STEPS, points: Sequence[int] = (), log: Log = print) -> Judged:
    """Recompute a run's first steps, the one after each of `points`, and its evaluations that have a checkpoint.

    The samples and tokens of all its steps are compared, too. steps: 0 for these and evaluations alone. points: steps
    with a checkpoint. Raises Unknown for a run that the oracle does not support, and UserError for one that it cannot
    read.
    """
    run_dir = RunDir(run)
    config = load_config(run_dir.config, [], None, started=True)
    config = replace(config, run=replace(config.run, dir=str(run.parent), name=run.name))  # wherever it is now
    _require_known(config)
    events = surviving(read_run_events(run_dir.events))
    first, later, notes = _recorded(run, events, steps, points)
    corpus = prepare(config, progress=True)
    environment = read_inputs(run_dir)["environment"]
    used = environment.get("data", {}).get("fingerprint")
    if used != corpus.fingerprint:
        raise UserError(f"{run}: its data are gone; what its config names now is {corpus.fingerprint}, and was {used}")
    config = settle_labels(config, corpus)
    shape = shape_of_model(config, corpus)
    if config.task in ("dpo", *SAMPLING_TASKS):  # their reference has no dropout
        for key in set(dropout_keys(shape)) - config.model.config.keys():
            setattr(shape, key, 0.0)
    drops, start = dropout_keys(shape), next(event for event in events if event["event"] == "run_start")
    device = (environment.get("accelerator") or {}).get("device", "cpu")
    unknown = _unknown_in_training(config) if steps else {}
    if steps and drops and (why := undropped(config, device)) is not None:
        unknown[f"the model has {drops[0]} = {getattr(shape, drops[0])}; {why}"] = frozenset()
    computes = _PASSES.intersection(*unknown.values())
    notes += [f"compared as far as it does not depend on it: {text}" for text in unknown]
    model, alone, said = _model(run, config, shape, compares=steps > 0)
    notes += said
    buffers = {name: buffer.dtype for name, buffer in model.named_buffers()}
    movement = Movement(model, config.optimizer)
    trained = ((name, item.detach().flatten()) for name, item in model.named_parameters() if item.requires_grad)
    at_start = Start("", {name: as_text(checksum(values, 0)) for name, values in trained})
    given = config, corpus, shape, model.double().train()
    held_out = TASKS[config.task](*given)
    repeats = steps and drops and _LOSS in computes
    task = DroppedOut(*given, ranks=start["world_size"]) if repeats else held_out
    layers = int(getattr(shape.get_text_config(), "num_hidden_layers", 0))
    teacher = None if held_out.frozen is None else held_out.frozen[1]
    compared = {ALONE: alone} | _comparisons(config, start, teacher=teacher, layers=layers)
    notes.append(_compare_start(at_start, environment, compared))
    if config.task not in SAMPLING_TASKS:
        _compare_order(held_out, undisturbed(events)[0], compared, size=config.batch.global_size)
    oracle = _Oracle(task, None if unknown else movement, computes)
    reused = [event for event in later if config.task == "grpo" and event["position"] % config.grpo.updates]
    for event in reused:
        notes.append(f"not recomputed: step {event['step']}, since the weights that scored its answers are gone")
        later.remove(event)
    later = later if _LOSS in computes else []
    if later and drops:
        notes.append("no later step recomputed: what was dropped there follows from all steps before")
        later = []
    notes += _compare_steps(oracle, first, later, run_dir, events, compared, log)
    del oracle, movement
    of_steps = [row for row in compared.values() if row.made]
    if config.task in SAMPLING_TASKS:
        notes.append("evaluations not compared: what they sample is not recorded")
        return Judged(len(first) + len(later), of_steps, notes)
    found, said = compare_evaluations(held_out, buffers, run_dir, events, bound=compared["loss"].bound)
    return Judged(len(first) + len(later), [*of_steps, *found], [*notes, *said])


def _compare_steps(
    oracle: _Oracle,
    first: Sequence[Mapping[str, Any]],
    later: Sequence[Mapping[str, Any]],
    run_dir: RunDir,
    events: Sequence[Mapping[str, Any]],
    compared: Mapping[str, Comparison],
    log: Log,
) -> list[str]:
    """Compare the first steps with the oracle's own updates, and later ones from the masters before; returns notes."""
    notes, own = [], []
    for event in first:
        own.append({**event, **oracle.step(event, compared, log)})
        checkpoint = _checkpoint(run_dir, event["step"])
        if checkpoint.is_dir() and oracle.movement is not None:
            oracle.movement.compare(open_saved_model(checkpoint).tensors, compared, f"step {event['step']}")
            notes.append(f"masters compared: step {event['step']}")
    if first and oracle.movement is not None and not notes:
        notes.append("masters not compared: the run has no checkpoint of these steps; set checkpoint.every_steps")
    if oracle.movement is not None and not all(compared[what].holds for what in _AMPLIFIED):
        notes += _widen(oracle, own, compared)
    for event in later:
        oracle.restart(_checkpoint(run_dir, event["step"] - 1), events)
        oracle.step(event, compared, log)
        notes.append(f"recomputed from its masters: step {event['step']}")
    return notes


def _widen(oracle: _Oracle, own: Sequence[Mapping[str, Any]], compared: Mapping[str, Comparison]) -> list[str]:
    """Widen bounds where rounding explains more. own: the first events with the oracle's results. Returns notes.

    Adam's first update follows a gradient's sign, which for one near zero is rounding; a high rate magnifies that.
    """
    apart, notes = {what: replace(row, largest=0.0) for what, row in compared.items()}, []
    oracle.begin_again()
    for event in own:
        oracle.step(event, apart, lambda _: None)
    for what in _AMPLIFIED:
        row, rounding = compared[what], apart[what].largest
        if _ROUNDINGS * rounding > row.bound:
            row.bound = _ROUNDINGS * rounding
            notes.append(
                f"bound of {what}: {_ROUNDINGS} times the {rounding:.1e} that rounding the first weights makes"
            )
    return notes


def _model(run: Path, config: Config, shape: PretrainedConfig, *, compares: bool) -> tuple[Any, Comparison, list[str]]:
    """The run's model with its initial weights, in FP32 and plain torch; if `compares`, how they compare with those of
    transformers alone, and notes. Raises Unknown."""
    shape.use_cache = False
    section = replace(config.model, attention=config.model.wide_attention)
    model: Any = build_model(
        section, shape, seed=config.run.seed, model_class=model_class_of(config), adapter=config.adapter
    )
    alone, notes = Comparison(ALONE, 0.0), []
    if compares:
        try:
            unlike = [*unlike_transformers(model, config)]
            alone.add(float(bool(unlike)), ", ".join(unlike[:4]))
        except Exception as problem:  # such as one of an architecture that it cannot load without help
            notes.append(f"{ALONE} not compared: {one_line(problem)}")
    dequantise(model)
    if getattr(model.config.get_text_config(), "_experts_implementation", None) is not None:
        model.set_experts_implementation("eager")  # grouped matmuls do not take FP64
    if config.adapter.kind == "lora":
        drawn: Sequence[str] = getattr(model, "drawn", ())
        if drawn:
            raise Unknown(f"{run}: the base's files lack {drawn[0]}, which is trained whole; {UNKNOWN}")
        add_low_rank(model, config.adapter, seed=config.run.seed)
    return model, alone, notes


def _require_known(config: Config) -> None:
    """Raises Unknown, naming the key, for what the oracle does not compute in any pass."""
    if config.adapter.kind == "dora":
        raise Unknown(f"adapter.kind = dora: {UNKNOWN}")
    if config.adapter.modules_to_save:
        raise Unknown(f"adapter.modules_to_save = {', '.join(config.adapter.modules_to_save)}: {UNKNOWN}")


def _unknown_in_training(config: Config) -> dict[str, frozenset[str]]:
    """Results of a step that do not depend on it, by text that names what the oracle does not compute in training."""
    iteration = config.optimizer.orthogonalization
    rows: tuple[tuple[str, Any, frozenset[str]], ...] = (
        ("adapter.dropout", config.adapter.dropout, frozenset()),
        ("optimizer.orthogonalization", iteration if iteration == "bf16" else None, _PASSES),
        ("model.balance_loss", config.model.balance_loss, frozenset({_LOSS})),
        ("model.router_z_loss", config.model.router_z_loss, frozenset({_LOSS})),
        ("sft.neftune_alpha", config.sft.neftune_alpha, frozenset()),
    )
    return {f"{key} = {value}: {UNKNOWN}": left for key, value, left in rows if value}


def _recorded(
    run: Path, events: Sequence[Mapping[str, Any]], count: int, points: Sequence[int]
) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]], list[str]]:
    """The `step` events 1 to `count` and those after later points, up to the first incident; and notes."""
    steps, reacted = undisturbed(events)
    by_step = {event["step"]: event for event in steps}
    first = [by_step[step] for step in range(1, count + 1) if step in by_step]
    if count and not first:
        raise UserError(f"{run}: has no first step to recompute")
    after = [point + 1 for point in points if point >= count]
    notes = [f"step {reacted} had an incident: what comes after it is not compared"]
    later = [by_step[step] for step in after if step in by_step]
    return first, later, notes if reacted <= max(count, *after, 0) else []


def undisturbed(events: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], float]:
    """The `step` events before the first incident, and its step; infinite without one."""
    reacted = min((event["step"] for event in events if event["event"] == "incident"), default=math.inf)
    return [event for event in events if event["event"] == "step" and event["step"] < reacted], reacted


def _compare_order(
    task: Task, steps: Sequence[Mapping[str, Any]], compared: Mapping[str, Comparison], *, size: int
) -> None:
    """Compare samples and tokens of all steps, or of some drawn ones, and whether each follows the one before."""
    began = {"step": 0, "position": -1, "tokens": 0}
    pairs = [pair for pair in pairwise([began, *steps]) if pair[1]["step"] == pair[0]["step"] + 1]
    for before, event in random.Random(0).sample(pairs, min(len(pairs), max(_ORDERED // size, 1))):
        ids, where = task.order.batch(event["position"]), f"step {event['step']}"
        next_one = event["position"] == before["position"] + 1 and event["sample_ids_sha256"] == _digest(ids)
        compared["samples"].add(float(not next_one), where)
        compared["tokens"].add(float(event["tokens"] - before["tokens"] != task.tokens(ids)), where)


def _digest(ids: Sequence[int]) -> str:
    return hashlib.sha256(np.array(ids, dtype="<i8").tobytes()).hexdigest()


def _checkpoint(run_dir: RunDir, step: int) -> Path:
    return run_dir.checkpoints / f"step-{step}" / "deepspeed"


def _compare_start(found: Start, environment: Mapping[str, Any], compared: dict[str, Comparison]) -> str:
    """Compare the oracle's initial weights with the checksum that the run recorded of its own; returns a note."""
    recorded, own = checksum_at_start(environment), checksum_in(str(found))
    if recorded is None:
        return f"{START} not compared: the run recorded no checksum of them"
    compared[START] = Comparison(START, 0.0)
    compared[START].add(float(recorded != own), own)
    return f"{START}: checksum {own}, the run's {recorded}"


def _comparisons(
    config: Config, start: Mapping[str, Any], *, teacher: str | None, layers: int
) -> dict[str, Comparison]:
    """The comparisons, with bounds several times what was measured (docs/parity.md). start: the `run_start` event.
    teacher: the dtype that a teacher computes in. layers: of the model.

    Bounds in 16 bits are multiples of the unit roundoff. Those of losses and norms grow with every `_LAYERS` layers,
    whose roundings at worst add up. The first update's norm is from the same weights; later ones have twice its bound
    for the rounding of earlier steps, and three times in FP32: the second was up to 1.3e-5 off in 45 steps of a Qwen3,
    where a gradient near zero made Adam's first update of one weight several percent off. Single masters are not
    compared in 16 bits: Adam's first steps follow a gradient's sign, which is rounding for the smallest ones. With a
    relative error e, bounded like the norm, e / pi of a normal gradient's values change sign, and the movement, of the
    same length, has a cosine of 1 - 2 e / pi.
    """
    computed = {start["compute"], *(start["regions"] or {}).values()}  # with a manifest the first is FP32
    computed |= {teacher} if teacher is not None else set()
    deeper = max(1.0, layers / _LAYERS)
    bounds = {"samples": 0.0, "tokens": 0.0, "learning rate": 1e-9}
    if "fp16" in computed:
        bounds["loss scale"] = 0.0
    if computed == {"fp32"}:
        bounds |= {"loss": 2e-6 * deeper, FIRST_NORM: 1e-5 * deeper, "norm": 3e-5 * deeper}
        bounds |= {"masters": 1e-3 * deeper, DISTANCE: 1e-5 * deeper}
    else:
        roundoff = max(ROUNDOFF_FP8 if name == "fp8" else unit_roundoff(DTYPES[name]) for name in computed)
        deep = roundoff * deeper
        bounds |= {"loss": deep / 2, FIRST_NORM: 4 * deep, "norm": 8 * deep}
        bounds[DISTANCE] = max(roundoff, 2.0**-10)
    if config.task in SAMPLING_TASKS and config.grpo.engine != "vllm":
        bounds["draws"] = _DRAWS
    if config.task == "dpo":  # a difference of sums of many log-probabilities
        bounds["loss"] *= 16
        bounds |= {what: 4 * bounds[what] for what in (FIRST_NORM, "norm") if what in bounds}
    if config.task in ("distill", "opd"):  # differences of log-probabilities that nearly cancel
        bounds["loss"] *= 2
    if config.optimizer.name == "lion":  # it follows the sign of a sum, even if that is rounding
        bounds.pop("masters", None)
    bounds[DIRECTION] = 2 * bounds["norm"] / math.pi * (8 if config.optimizer.name == "lion" else 1)
    if config.data.sources:
        bounds |= {"labels by source": 0.0, "loss by source": 4 * bounds["loss"]}
    return {what: Comparison(what, bound) for what, bound in bounds.items()}


class _Oracle:
    """The model, its optimizer and its data order, step by step."""

    def __init__(self, task: Task, movement: Movement | None, computes: Collection[str]) -> None:
        """movement: None: without updates. computes: of _PASSES, where the weights are known."""
        config, mixture = task.config, task.corpus.mixture
        self._config, self._task, self._model, self._order = config, task, task.model, task.order
        self._names = mixture.names if mixture is not None else ()
        self.movement, self._computes, self._has_weights = movement, computes, True
        peak, total = config.optimizer.learning_rate, config.scheduled_steps
        self._rate = schedule(config.schedule, peak=peak, total=total)
        self._scale = loss_scale(config.precision.loss_scale)
        self._applied = self._tokens = 0

    def begin_again(self) -> None:
        """Go back before the first step, with other rounding errors (`Movement.begin_again`)."""
        assert self.movement is not None
        self.movement.begin_again()
        self._scale = loss_scale(self._config.precision.loss_scale)
        self._applied = self._tokens = 0

    def step(self, event: Mapping[str, Any], compared: Mapping[str, Comparison], log: Log) -> dict[str, float]:
        """One step, compared with its event; returns the event's results. One that the run skipped is not applied."""
        ids, where = self._order.batch(event["position"]), f"step {event['step']}"
        computes = self._computes if self._has_weights else ()
        rate = self._rate(self._applied)
        loss, by_source = self._gradients(ids, event["position"], passes=_LOSS in computes)
        self._tokens += self._task.tokens(ids)
        named = self._model.named_parameters()
        norms = {name: float(item.grad.norm()) for name, item in named if item.grad is not None}
        norm = math.sqrt(sum(value**2 for value in norms.values()))
        compared["samples"].add(float(event["sample_ids_sha256"] != _digest(ids)), where)
        compared["tokens"].add(float(event["tokens"] != self._tokens), where)
        if isinstance(self._task, OnAnswers) and "draws" in compared and _LOSS in computes:
            compared["draws"].add(self._task.misdrawn(event["position"]), where)
        compared["learning rate"].add(relative_difference(event["lr"], rate), where)
        if self._scale is not None and "loss scale" in compared:
            compared["loss scale"].add(
                relative_difference(event["loss_scale"], self._scale(not event["applied"])), where
            )
        # advantages of a group add up to zero, and so does the loss of their first step
        scale = max(1.0, abs(loss)) if self._config.task == "grpo" else abs(loss)
        if _LOSS in computes:
            compared["loss"].add(relative(abs(event["loss"] - loss), scale), where)
        for number, name in enumerate(self._names):
            count, total = by_source.get(number, (0.0, 0.0))
            compared["labels by source"].add(relative_difference(event["labels_by_source"].get(name, 0), count), where)
            if count and _LOSS in computes:
                compared["loss by source"].add(
                    relative_difference(event["loss_by_source"].get(name, math.nan), total / count), f"{name}, {where}"
                )
        if event["applied"]:
            if _NORM in computes:
                compared["norm"].add(relative_difference(event["grad_norm"], norm), where)
                if not self._applied and FIRST_NORM in compared:
                    compared[FIRST_NORM].add(relative_difference(event["grad_norm"], norm), where)
            if self.movement is not None:
                shares = {name: value / norm if norm else 0.0 for name, value in norms.items()}
                factor = clip_coefficient(norm, self._config.optimizer.gradient_clipping)
                self.movement.update(rate, shares=shares, factor=factor)
            self._applied, self._has_weights = self._applied + 1, self.movement is not None
        self._model.zero_grad()
        if computes:
            log(f"{where}: loss {loss:.8g}, recorded {event['loss']:.8g}; norm {norm:.6g}, {event['grad_norm']:.6g}")
        return {"loss": loss, "grad_norm": norm}

    def _gradients(
        self, ids: Sequence[int], position: int, *, passes: bool
    ) -> tuple[float, dict[int, tuple[float, float]]]:
        """The loss of a global batch, whose gradient is left in the parameters: the mean over everything that counts.

        For a mixture also the count and the sum of losses by source. passes: False: counts alone.
        """
        parts = list(self._task.parts(ids, position))
        everything, loss = sum(part.counts for part in parts), 0.0
        by_source: dict[int, tuple[float, float]] = {}
        for part in parts if passes or self._names else ():
            value = 0.0
            if passes:
                with as_fp64():
                    summed = part.loss()
                (summed / everything).backward()
                value = float(summed.detach())
            loss += value / everything
            if self._names:
                number = self._order.source(part.sample)
                count, total = by_source.get(number, (0.0, 0.0))
                by_source[number] = count + part.counts, total + value
        return loss, by_source

    @torch.no_grad()
    def restart(self, folder: Path, events: Sequence[Mapping[str, Any]]) -> None:
        """Continue from the masters of a checkpoint, for the loss and the gradient of one step."""
        point = int(folder.parent.name.removeprefix("step-"))
        load_masters(self._model, folder)
        before = [event for event in events if event["event"] == "step" and event["step"] <= point]
        self._applied, self._tokens = sum(event["applied"] for event in before), before[-1]["tokens"]
        self._scale = self.movement = None  # these depend on all earlier steps
        self._has_weights = True
