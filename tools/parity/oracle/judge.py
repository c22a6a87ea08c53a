"""Recompute the first steps of a run in plain torch and FP64, and compare them with what the run recorded.

    python -m tools.parity --oracle runs/NAME [--steps N]

Both twins of the gate share Mantissa's engine, data order and schedule, so an error there moves both alike. This shares
none of them. From the run's config, its prepared data and its initial weights it derives by itself (`rules`): which
samples make a step, which tokens are labels and how much each counts, the learning rate, which parameters decay,
clipping, and the update. Sequences go through the model one by one, documents that are kept apart each by itself;
parameters, gradients and moments are FP64 (a model's own code may compute in less inside, as most norms do).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from config.errors import UserError
from config.load import load_config
from config.schema import Config
from config.task import model_class_of
from data.corpora.corpus import Corpus
from modeling.build import build_model, dropout_keys
from precision.dtypes import DTYPES
from precision.tolerance import unit_roundoff
from tools.dequantise import dequantise
from tools.parity.oracle.low_rank import add_low_rank
from tools.parity.oracle.optimizers import optimizer_of
from tools.parity.oracle.rules import loss_scale, schedule
from tools.parity.oracle.tasks import TASKS, DroppedOut, Task, undropped
from tools.parity.rounding import ROUNDOFF_FP8
from tracking.jsonl import read_run_events, surviving
from tracking.pages.markdown import Table
from tracking.run_dir import RunDir
from tracking.summary import read_inputs
from training.checkpoint.partitions import open_saved_model
from training.tasks.shape import settle_labels, shape_of_model
from training.tasks.task import prepare

STEPS = 10
"""Default number of steps that are recomputed."""
_NOTHING = 1e-7
"""Share of the whole gradient's norm below which a parameter's is FP32's rounding."""
UNKNOWN = "the oracle does not compute it"
FIRST_NORM = "norm of the first update"
VALIDATION = "validation loss"
Log = Callable[[str], Any]


@dataclass
class Comparison:
    """One quantity over all steps."""

    what: str
    bound: float
    largest: float = 0.0
    """Relative difference, or for samples and tokens 1 where they differ; of masters in their movement."""
    where: str = ""
    """The step, or the parameter, where it is largest."""

    def add(self, difference: float, where: str) -> None:
        """Take one more difference into account."""
        if not (difference <= self.largest or math.isnan(self.largest)):
            self.largest, self.where = difference, where

    @property
    def holds(self) -> bool:
        """Whether it is within its bound; what is not a number is not."""
        return self.largest <= self.bound


@dataclass
class Judged:
    """The comparisons that were made."""

    steps: int
    comparisons: list[Comparison]
    notes: list[str] = field(default_factory=list)

    @property
    def holds(self) -> bool:
        """Whether all of it is within its bounds."""
        return all(comparison.holds for comparison in self.comparisons)

    def lines(self) -> list[str]:
        """Console lines: a table, and the verdict."""
        rows = [(each.what, f"{each.largest:.2e}", f"{each.bound:.2e}", each.where) for each in self.comparisons]
        failed = [each.what for each in self.comparisons if not each.holds]
        verdict = f"differs from the oracle in: {', '.join(failed)}" if failed else "as the oracle computed them"
        table = Table(("compared", "largest", "bound", "at"), rows)
        return [*table.lines(), *self.notes, f"{self.steps} steps {verdict}"]


def judge(run: Path, *, steps: int | None = None, log: Log = print) -> Judged:
    """Recompute a run's first steps and compare. Raises UserError for a run that the oracle does not know."""
    run_dir = RunDir(run)
    config = load_config(run_dir.config, [], None)
    _require_known(config)
    events = surviving(read_run_events(run_dir.events))
    recorded, notes = _first_steps(run, events, steps or STEPS)
    corpus = prepare(config, progress=True)
    environment = read_inputs(run_dir)[2]
    used = environment.get("data", {}).get("fingerprint")
    if used != corpus.fingerprint:
        raise UserError(f"{run}: its data are gone; what its config names now is {corpus.fingerprint}, and was {used}")
    config = settle_labels(config, corpus)
    shape = shape_of_model(config, corpus)
    if config.task == "dpo":  # whose reference has none
        for key in set(dropout_keys(shape)) - config.model.config.keys():
            setattr(shape, key, 0.0)
    drops, start = dropout_keys(shape), next(event for event in events if event["event"] == "run_start")
    device = (environment.get("accelerator") or {}).get("device", "cpu")
    why = undropped(config, device) if drops else None
    if why is not None:
        raise UserError(f"{run}: the model has {drops[0]} = {getattr(shape, drops[0])}; {why}")
    shape.use_cache = False
    model = build_model(
        config.model, shape, seed=config.run.seed, model_class=model_class_of(config), adapter=config.adapter
    )
    dequantise(model)
    if getattr(shape.get_text_config(), "_experts_implementation", None) is not None:
        model.set_experts_implementation("eager")  # grouped matmuls do not take FP64
    if config.adapter.kind == "lora":
        drawn: Sequence[str] = getattr(model, "drawn", ())
        if drawn:
            raise UserError(f"{run}: the base's files lack {drawn[0]}, which is trained whole; {UNKNOWN}")
        add_low_rank(model, config.adapter, seed=config.run.seed)
    given = config, corpus, shape, model.double().train()
    task = DroppedOut(*given, ranks=start["world_size"]) if drops else TASKS[config.task](*given)
    held_out = (TASKS[config.task](*given) if drops else task).held_out()
    oracle = _Oracle(config, corpus, task, model)
    compared = _comparisons(config, start, teacher=getattr(task, "computes", None))
    for event in recorded:
        oracle.step(event, compared, log)
        checkpoint = run_dir.checkpoints / f"step-{event['step']}" / "deepspeed"
        if checkpoint.is_dir():
            oracle.compare_masters(checkpoint, compared, f"step {event['step']}")
            notes.append(f"masters compared: step {event['step']}")
    if not any(note.startswith("masters") for note in notes):
        notes.append("masters not compared: the run has no checkpoint of these steps; set checkpoint.every_steps")
    notes.append(oracle.compare_evaluation(held_out, run_dir, events, compared))
    return Judged(len(recorded), list(compared.values()), notes)


def _require_known(config: Config) -> None:
    """Raises UserError, naming the key, for what the oracle does not compute."""
    model, adapter, optimizer = config.model, config.adapter, config.optimizer
    for key, value, known in (
        ("adapter.kind", adapter.kind, adapter.kind != "dora"),
        ("adapter.dropout", adapter.dropout, not adapter.dropout),
        ("adapter.modules_to_save", ", ".join(adapter.modules_to_save), not adapter.modules_to_save),
        ("optimizer.orthogonalization", optimizer.orthogonalization, optimizer.orthogonalization == "fp32"),
        ("model.balance_loss", model.balance_loss, not model.balance_loss),
        ("model.router_z_loss", model.router_z_loss, not model.router_z_loss),
        ("sft.neftune_alpha", config.sft.neftune_alpha, not config.sft.neftune_alpha),
    ):
        if not known:
            raise UserError(f"{key} = {value}: {UNKNOWN}")


def _first_steps(run: Path, events: Sequence[Mapping[str, Any]], count: int) -> tuple[list[dict[str, Any]], list[str]]:
    """The `step` events 1 to `count`, as far as nothing but the plain rule made them; and what cut them short."""
    by_step = {event["step"]: dict(event) for event in events if event["event"] == "step"}
    reacted = min((event["step"] for event in events if event["event"] == "incident"), default=math.inf)
    found: list[dict[str, Any]] = []
    for step in range(1, count + 1):
        if step not in by_step or step >= reacted:
            break
        found.append(by_step[step])
    if not found:
        raise UserError(f"{run}: has no first step to recompute")
    notes = [] if step < reacted else [f"step {reacted} had an incident: what comes after it is not compared"]
    return found, notes


def _comparisons(config: Config, start: Mapping[str, Any], *, teacher: str | None) -> dict[str, Comparison]:
    """The comparisons, with bounds several times what was measured (docs/parity.md). start: the `run_start` event.
    teacher: the dtype that one computes in.

    Those of 16 bits are multiples of the unit roundoff. The norm of the first update is of the same weights; later ones
    have twice its bound, since the weights have parted by the rounding of the steps before. Single masters are not
    compared there: Adam's first steps go by a gradient's sign, and that of the smallest ones is rounding.
    """
    computed = {start["compute"], *(start["regions"] or {}).values()}  # of a manifest's run the first is FP32
    computed |= {teacher} if teacher is not None else set()
    bounds = {"samples": 0.0, "tokens": 0.0, "learning rate": 1e-9}
    if "fp16" in computed:
        bounds["loss scale"] = 0.0
    if computed == {"fp32"}:
        bounds |= {"loss": 2e-6, "norm": 1e-5, "masters": 1e-3, "distance moved": 1e-5}
    else:
        roundoff = max(ROUNDOFF_FP8 if name == "fp8" else unit_roundoff(DTYPES[name]) for name in computed)
        bounds |= {"loss": roundoff / 2, FIRST_NORM: 4 * roundoff, "norm": 8 * roundoff}
        bounds["distance moved"] = max(roundoff, 2.0**-10)
    if config.task == "dpo":  # of a difference of sums of many log-probabilities
        bounds["loss"] *= 16
        bounds |= {what: 4 * bounds[what] for what in (FIRST_NORM, "norm") if what in bounds}
    if config.task == "distill":  # of differences of log-probabilities that nearly cancel
        bounds["loss"] *= 2
    if config.optimizer.name == "lion":  # it goes by the sign of a sum, also where that is rounding
        bounds.pop("masters", None)
        bounds["distance moved"] *= 8
    if config.data.sources:
        bounds |= {"labels by source": 0.0, "loss by source": 4 * bounds["loss"]}
    return {what: Comparison(what, bound) for what, bound in bounds.items()}


class _Oracle:
    """The model, its optimizer and its data order, step by step."""

    def __init__(self, config: Config, corpus: Corpus, task: Task, model: PreTrainedModel) -> None:
        self._config, self._task, self._model, self._order = config, task, model, task.order
        self._names = corpus.mixture.names if corpus.mixture is not None else ()
        self._optimizer = optimizer_of(model, config.optimizer)
        peak, total = config.optimizer.learning_rate, config.scheduled_steps
        self._rate = schedule(config.schedule, peak=peak, total=total)
        self._scale = loss_scale(config.precision.loss_scale)
        self._trained = {name: item for name, item in model.named_parameters() if item.requires_grad}
        self._start = {name: parameter.detach().clone() for name, parameter in self._trained.items()}
        self._weight = dict.fromkeys(self._trained, 0.0)
        """The largest share that a parameter's gradient had of the whole's norm in any step."""
        self._applied = self._tokens = 0
        self._first_loss = 0.0

    def step(self, event: Mapping[str, Any], compared: Mapping[str, Comparison], log: Log) -> None:
        """One step, compared with its event. A step that the run did not apply is not applied here."""
        ids, where = self._order.batch(event["position"]), f"step {event['step']}"
        rate, (loss, by_source) = self._rate(self._applied), self._gradients(ids, event["position"])
        self._tokens += self._task.tokens(ids)
        norms = {name: float(p.grad.norm()) for name, p in self._trained.items() if p.grad is not None}
        norm = math.sqrt(sum(value**2 for value in norms.values()))
        for name, value in norms.items():
            self._weight[name] = max(self._weight[name], value / norm if norm else 0.0)
        digest = hashlib.sha256(np.array(ids, dtype="<i8").tobytes()).hexdigest()
        compared["samples"].add(float(event["sample_ids_sha256"] != digest), where)
        compared["tokens"].add(float(event["tokens"] != self._tokens), where)
        compared["learning rate"].add(_relative(event["lr"], rate), where)
        if self._scale is not None and "loss scale" in compared:
            compared["loss scale"].add(_relative(event["loss_scale"], self._scale(not event["applied"])), where)
        self._first_loss = self._first_loss or loss
        compared["loss"].add(_relative(event["loss"], loss), where)
        for number, name in enumerate(self._names):
            count, total = by_source.get(number, (0.0, 0.0))
            compared["labels by source"].add(_relative(event["labels_by_source"].get(name, 0), count), where)
            if count:
                compared["loss by source"].add(
                    _relative(event["loss_by_source"].get(name, math.nan), total / count), f"{name}, {where}"
                )
        if event["applied"]:
            compared["norm"].add(_relative(event["grad_norm"], norm), where)
            if not self._applied and FIRST_NORM in compared:
                compared[FIRST_NORM].add(_relative(event["grad_norm"], norm), where)
            if self._config.optimizer.gradient_clipping:
                torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._config.optimizer.gradient_clipping)
            for group in self._optimizer.param_groups:
                group["lr"] = rate * group["factor"]
            self._optimizer.step()
            self._applied += 1
        self._optimizer.zero_grad()
        log(f"{where}: loss {loss:.8g}, recorded {event['loss']:.8g}; norm {norm:.6g}, {event['grad_norm']:.6g}")

    def _gradients(self, ids: Sequence[int], position: int) -> tuple[float, dict[int, tuple[float, float]]]:
        """The loss of a global batch, whose gradient is left in the parameters: the mean over everything that counts.

        And of a mixture by source what counts, and the sum of its losses.
        """
        parts = list(self._task.parts(ids, position))
        everything, loss = sum(part.counts for part in parts), 0.0
        by_source: dict[int, tuple[float, float]] = {}
        for part in parts:
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
    def compare_evaluation(
        self, held_out: Task, run_dir: RunDir, events: Sequence[Mapping[str, Any]], compared: dict[str, Comparison]
    ) -> str:
        """Recompute the newest evaluation whose checkpoint exists, from that one's masters; a note that names it.

        It need not be of the steps that were recomputed. Nothing else says which samples an evaluation is of and what
        its mean is taken over: both twins of a gate share that. The difference is a share of the loss, or of the first
        step's where that is larger: a loss that has nearly vanished keeps the roundings of its logits.
        """
        losses = {event["step"]: event["loss"] for event in events if event["event"] == "eval"}
        saved = {step: run_dir.checkpoints / f"step-{step}" / "deepspeed" for step in losses}
        step = max((step for step, folder in saved.items() if folder.is_dir()), default=None)
        if step is None:
            return "no evaluation compared: the run has no checkpoint of a step that evaluated"
        try:
            masters = open_saved_model(saved[step]).tensors
        except UserError as problem:  # such as one that is encrypted
            return f"no evaluation compared: {problem}"
        for name, parameter in self._trained.items():
            parameter.copy_(masters[name].read().double())
        self._model.eval()
        total = counts = 0.0
        for position, ids in enumerate(held_out.order.evaluated()):
            for part in held_out.parts(ids, position):
                total, counts = total + float(part.loss()), counts + part.counts
        compared[VALIDATION] = Comparison(VALIDATION, compared["loss"].bound)
        expected = total / max(counts, 1.0)
        compared[VALIDATION].add(abs(losses[step] - expected) / max(abs(expected), self._first_loss), f"step {step}")
        return f"evaluation compared: step {step}"

    @torch.no_grad()
    def compare_masters(self, folder: Path, compared: Mapping[str, Comparison], where: str) -> None:
        """The masters of a checkpoint with these, against how far they have moved from the start.

        An FP32 master is rounded once in each update, by 2^-24 of itself at most: so much is no difference. Parameters
        whose gradient is nothing but rounding, as a bias of keys, are left out: Adam goes by its sign all the same.
        """
        saved = open_saved_model(folder).tensors
        along = squares = 0.0
        for name, parameter in self._trained.items():
            if 0 < self._weight[name] < _NOTHING:
                continue
            start, master = self._start[name], saved[name].read().double()
            moved, found = parameter - start, master - start
            along, squares = along + float((moved * found).sum()), squares + float(moved.square().sum())
            if "masters" in compared:
                rounded = self._applied * 2.0**-24 * float(master.norm())
                distance = max(float((found - moved).norm()) - rounded, 0.0)
                compared["masters"].add(distance / float(moved.norm()) if distance else 0.0, f"{name}, {where}")
        compared["distance moved"].add(abs(along / squares - 1.0) if squares else 0.0, where)


def _relative(found: float, expected: float) -> float:
    """|found - expected| / |expected|; 0 where both are 0, nan where the run recorded no number."""
    difference = abs(found - expected)
    return difference / abs(expected) if expected else (0.0 if difference == 0 else math.inf)
