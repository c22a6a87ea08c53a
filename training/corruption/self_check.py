"""Comparison of steps with plain torch while the run trains: when it is due, and the verdict.

An unchecked step costs a comparison of a few numbers. A checked step has the same results bit for bit: hooks only copy
(passes.py), and everything is recomputed apart from it (plain.py, updates.py, copies.py).
"""

import copy
import hashlib
import math
import random
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any

import torch
from transformers import PretrainedConfig

from config.errors import one_line
from config.optimizers import OPTIMIZERS
from config.resolved import Resolved
from config.schema import SAMPLING_TASKS
from config.task import model_class_of
from data.batches.loader import NO_SAMPLE, Batch
from data.corpora.corpus import Corpus
from data.corpora.source_check import wrong_preparation
from modeling.adapter import add_adapter
from modeling.build import empty_model
from modeling.document_masking import LARGEST_LEAK
from precision.loss_scale import ScalePolicy, make_policy
from precision.step_health import Health
from training.corruption.copies import Copies, follows_length
from training.corruption.passes import Passes, Row, verdicts
from training.corruption.plain import drops, is_random
from training.corruption.rates import SAME_RATE, schedule
from training.corruption.samples import are_evaluated, is_in_order, wrong_samples
from training.corruption.settings import decay_and_factor
from training.corruption.updates import UpdateCheck
from training.early_warnings import EarlyWarning
from training.engine import Engine
from training.engine.health import Evaluation, Outcome, Update
from training.engine.masters import sum_of_squares
from training.engine.rng import generators
from training.engine.tensors import local_gradient, own_shards, trainable_parameters

SIGNAL = "self_check"
_EARLY = (1, 3, 240)
"""Steps of a session that are compared whole."""
_CHEAP = 24
"""Step of a session that is compared without recomputing modules and logits, which cost most; a multiple of 2, 3, 4, 6
and 8, since some errors come in every so many steps."""
_AHEAD = 8  # number of leading tokens whose logits later tokens must not change
_VALUES = 32  # number of values of each parameter whose update is compared
_EVALUATED = 2  # number of batches of an evaluation that are evaluated again
_EVALUATIONS = 10  # of so many later evaluations one is compared
_NORM = 1e-4
"""[fraction] Tolerated error of the gradient norm, for FP32 sums in two orders; 8.8e-8 in a correct run."""
_WORDS = {
    "modules": "its output is further from FP32 than plain torch's in its dtype",
    "code": "its code computes something else in FP32 than plain torch",
    "backward": "the gradient of its input is further from FP32 than plain torch's in its dtype",
    "gradients": "its reduced gradient does not follow from its inputs and outputs over all ranks and micro-batches",
    "loss": "it is not the mean cross-entropy over labels, or its gradient is not",
    "norm": "the gradient norm is not that of the reduced gradients",
    "updates": "the update is not the result of the optimizer's rule",
    "copies": "its values differ between ranks, or from its rounded master",
    "between": "it does not get what the model's own code hands to it",
    "evaluation": "it is not the mean over the labels of the validation set",
    "scale": "the loss scale or its counters do not follow their rule",
    "schedule": "it, or its groups' settings, departed from the schedule in as many steps as the error says",
    "samples": "the batch is not what its samples and their order say",
    "prepared": "they are not what the tokenizer and the chat template make of the source; see python -m data.show",
    "constants": "it is not that of a model that the config makes",
    "draws": "they are the same, so the same values are dropped",
}
_STATES = (
    *("training", "gradient_checkpointing", "use_cache", "kwargs"),
    *("dtype", "torch_dtype", "architectures", "name_or_path", "transformers_version"),
)
"""Attributes of modules and configs that are not constants of the architecture; `peft` notes in `kwargs` how it found
the base loaded."""
_OF_ALL = ("gradients", "norm", "constants", "draws", "evaluation", "scale", "schedule")
"""Checks of what ranks share or sum, so that no single rank is to blame."""


class SelfCheck:
    """Checks steps of one run. In a step, call the methods from `watching` to `finish` in their order here."""

    def __init__(self, engine: Engine, resolved: Resolved, shape: PretrainedConfig, corpus: Corpus) -> None:
        """shape: the model's config."""
        self._engine, self._resolved, self._shape, self._corpus = engine, resolved, shape, corpus
        self._evaluations = 0
        self._every, self._gradients = resolved.config.guard.self_check_every, resolved.config.guard.gradient_checks
        self._whole = self._recomputes = False
        self._turn = 0
        self._passes: Passes | None = None
        self._updates: UpdateCheck | None = None
        self._rows: list[tuple[Row, int]] = []
        self._skipped: dict[str, str] = {}
        self._samples: list[Row] = []
        self._policy: ScalePolicy | None = None
        self._scales = self._rates = self._moved = 0
        self._groups: list[tuple[Any, ...]] = []
        self._history: dict[str, torch.Tensor] = {}
        self._happened = set[str]()
        self._after = False
        self._drawn = set[str]()

    def due(self, step: int, first: int) -> bool:
        """Whether an attempted step, from 1, is checked. first: the session's first step."""
        if self._policy is None and (state := self._engine.scaler_state()) is not None:
            self._policy = make_policy(self._resolved.config.precision.loss_scale)
            self._policy.load_state_dict(state)
        if self._updates is not None:
            self._moved += self._updates.changed()
        if self._every:
            # early steps, since most errors show soon, and a random one of every `self_check_every`, since a fixed
            # period could miss a periodic error forever
            start = (step - 1) // self._every * self._every
            drawn = random.Random(f"{self._resolved.config.run.seed} {start}").randrange(self._every)
            own = step - first + 1
            early = own == 1 or (own in _EARLY and own < self._every)
            self._recomputes = self._after or early or step == start + 1 + drawn
            self._whole = self._recomputes or own == _CHEAP < self._every
            self._after = False
        return self._whole or bool(self._gradients and step % self._gradients == 0)

    def happened(self, what: str) -> None:
        """Call on all ranks after something that comes between steps: the step after the session's first is checked."""
        self._after |= what not in self._happened
        self._happened.add(what)

    def watching(self, batch: Batch, position: int) -> AbstractContextManager[None]:
        """Context of a due step's forward and backward. position: number of global batches before this one."""
        self._rows, self._skipped = [], {}
        self._samples = self._compare_samples(batch, position) + self._look_ahead() + self._prepared()
        self._passes = Passes(
            self._engine, self._resolved, batch, turn=self._turn, whole=self._recomputes, history=self._history
        )
        return self._passes.watching()

    def after_passes(self, outcome: Outcome, health: Health) -> list[EarlyWarning]:
        """Warnings about forward and backward; call between backward and step. A collective."""
        assert self._passes is not None
        passes, self._passes = self._passes, None
        if not health.finite:
            self._skipped["passes"] = "the step is not finite"
            return []
        rows = [*passes.compared(), self._norm(health), *passes.recorded(outcome), *self._samples, *self._constants()]
        rows += [*self._draws(outcome), *self._reported(outcome, health)]
        rows += self._copies(health.step) if self._whole and not self._turn else []  # weights as they were loaded
        self._skipped |= passes.skipped
        return self._judge(rows, health.step)

    def before_update(self) -> None:
        """Call right before the step is applied."""
        config, self._updates = self._resolved.config, None
        if not self._whole:
            return
        name = config.optimizer.name
        if self._resolved.offload != "none":
            self._skipped["updates"] = "masters are offloaded"
            return
        if not OPTIMIZERS[name].by_value:
            self._skipped["updates"] = f"{name}'s step depends on whole parameters: what does not is compared"
        seed = config.run.seed + self._turn
        self._updates = UpdateCheck(self._engine, config.optimizer, values=_VALUES, seed=seed, of_each=True)
        self._updates.before_update()

    @cached_property
    def _schedule(self) -> Callable[[int], float]:
        config = self._resolved.config
        return schedule(config.schedule, peak=config.optimizer.learning_rate, total=config.scheduled_steps)

    def forget(self, scaler: dict[str, Any] | None = None) -> None:
        """Call after a checkpoint was loaded, with its loss scaler's state, from which the replay goes on."""
        self._policy, self._updates, self._drawn = None, None, set()
        self._history.clear()
        if scaler is not None and self._engine.scaler_state() is not None:
            self._policy = make_policy(self._resolved.config.precision.loss_scale)
            self._policy.load_state_dict(scaler)
        if self._turn:
            self.happened("load")

    def follow(self, health: Health, update: Update, *, lr: float, applied: int, factor: float) -> None:
        """Call after every attempted step, to replay loss scale and schedule. applied: updates before it. factor: the
        guard's, on the rate."""
        self._rates += update.applied and not math.isclose(lr, self._schedule(applied) * factor, rel_tol=SAME_RATE)
        rates, groups = self._engine.group_settings(lr)
        self._groups = self._groups or groups
        self._rates += groups != self._groups or not rates
        if not update.applied:
            self.happened("skip")
        if self._policy is not None and (update.applied or health.scale_overflowed):
            self._policy.update(not update.applied)
            self._scales += self._engine.scaler_state() != self._policy.state_dict()

    def after_update(self, health: Health, *, scale: float, applied: int, factor: float) -> list[EarlyWarning]:
        """Warnings about the update. applied: updates before it. factor: the guard's, on the rate. A collective."""
        if not self._whole:
            return []
        rows = [Row("scale", "loss scale", float(self._scales), 0.0)] if self._policy is not None else []
        rows.append(Row("schedule", "learning rate", float(self._rates), 0.0))
        rows.append(Row("updates", "masters or moments between two steps", float(self._moved), 0.0))
        if self._updates is not None:
            lr = self._schedule(applied) * factor
            self._updates.after_update(norm=health.grad_norm, scale=scale, lr=lr, step=applied + 1)
            done = self._updates.compared
            worst = torch.stack([item.excess.max() for item in done]).tolist() if done else []
            rows += [Row("updates", item.slice.name, error, 1.0) for item, error in zip(done, worst, strict=True)]
        return self._judge([*rows, *self._copies(health.step)], health.step)

    def due_evaluation(self, applied: int) -> bool:
        """Whether to compare this evaluation: the session's first, the first after an update, and a random one of every
        ten, unless the task samples answers for it. applied: updates before it."""
        block, at = divmod(self._evaluations, _EVALUATIONS)
        drawn = random.Random(f"{self._resolved.config.run.seed} evaluation {block}").randrange(_EVALUATIONS)
        due = self._evaluations == 0 or (applied > 0 and "evaluation" not in self._happened) or (block and at == drawn)
        self._evaluations += 1
        if applied:
            self.happened("evaluation")
        return bool(due and self._every and self._resolved.config.task not in SAMPLING_TASKS)

    def after_evaluation(self, found: Evaluation, batches: Iterable[Batch], step: int) -> list[EarlyWarning]:
        """Warnings about an evaluation, which is repeated with modules compared in the first micro-batch; of one with
        more than `_EVALUATED` batches, the first ones and the last are evaluated alone. A collective."""
        engine, self._rows, self._skipped, training = self._engine, [], {}, self._engine.model.training
        totals = torch.zeros(2, dtype=torch.float64, device=engine.world.device)
        wrong, rows, first = list[str](), list[Row](), True
        few, last, count, ids, labels_of_all = list[Batch](), deque[Batch](maxlen=1), 0, list[int](), 0.0
        for count, batch in enumerate(batches, start=1):
            ids += batch.sample_ids[batch.sample_ids != NO_SAMPLE].tolist()
            labels_of_all += batch.label_tokens
            wrong += wrong_samples(batch, self._resolved, self._corpus, held_out=True) if self._reads_samples else []
            (few if count < _EVALUATED else last).append(batch)
        few += last
        wrong += [] if are_evaluated(ids, self._resolved, self._corpus) else ["which samples are evaluated"]
        labels_of_all = float(engine.world.sum(engine.world.numbers([labels_of_all])))
        rows.append(Row("evaluation", "labels", abs(found.counted - labels_of_all) / max(labels_of_all, 1.0), 1e-9))
        none_saved = torch.autograd.graph.saved_tensors_hooks(lambda value: None, lambda value: value)
        if float(engine.world.sum(engine.world.numbers([float(count > len(few))]))):
            found = engine.evaluate(few)
        engine.model.eval()
        for batch in few:
            for inputs, labels in batch.micro_batches(engine.world.device):
                with torch.no_grad():
                    totals[0] += engine.loss_path.score(inputs, labels, 1.0).loss.double()
                if first:
                    passes = Passes(engine, self._resolved, batch, turn=self._turn, whole=True, trains=False)
                    # grad mode tells the pass from a reference's; nothing is kept, since no backward pass follows
                    with passes.watching(), torch.enable_grad(), none_saved:
                        engine.loss_path.score(inputs, labels, 1.0)
                    rows, first = [*rows, *passes.compared()], False
            totals[1] += int(batch.counted.sum())
        engine.model.train(training)
        total, count = engine.world.sum(totals).tolist()
        again, finite = total / max(count, 1.0), math.isfinite(found.loss) or math.isfinite(total)
        error = abs(found.loss - again) / max(abs(found.loss), 1e-30) if finite else 0.0
        return self._judge([Row("evaluation", "loss", error, 1e-5), *rows, *verdicts("samples", wrong)], step)

    def finish(self) -> dict[str, Any]:
        """Fields of the `self_check` event."""
        self._turn += 1
        worst: dict[str, dict[str, Any]] = {}
        for check in dict.fromkeys(row.check for row, _ in self._rows):
            found = [item for item in self._rows if item[0].check == check]
            (row, rank), breaches = max(found, key=_excess), sum(_excess(item) > 1 for item in found)
            fields = {"where": row.where, "rank": rank, "error": row.error, "bound": row.bound}
            worst[check] = {"compared": len(found), "breaches": breaches, **fields}
        if self._whole and not {"updates", "evaluation"} & worst.keys():
            self._skipped.setdefault("updates", "the step was not applied")
        return {"checks": worst, "skipped": self._skipped}

    def _judge(self, mine: Sequence[Row], step: int) -> list[EarlyWarning]:
        """One warning for each check that some rank fails, the same on all ranks. A collective."""
        found: dict[tuple[str, str], tuple[Row, int]] = {}
        for rank, (rows, skipped) in enumerate(self._engine.world.gather_objects((mine, self._skipped))):
            self._skipped = skipped | self._skipped
            for row in rows:
                item = row, rank
                found[row.check, row.where] = max(found.get((row.check, row.where), item), item, key=_excess)
        self._rows += found.values()
        warnings = []
        for check in dict.fromkeys(check for check, _ in found):
            breaches = (item for item in found.values() if item[0].check == check and _excess(item) > 1)
            if broken := sorted(breaches, key=_excess, reverse=True):
                (row, rank), names = broken[0], tuple(row.where for row, _ in broken)
                others = f" and {len(broken) - 1} more" if len(broken) > 1 else ""
                who = "all ranks together" if check in _OF_ALL else f"rank {rank}"
                reason = (
                    f"{row.where}{others}, {who}, step {step}: {_WORDS[check]} (error {row.error:.3g}, "
                    f"bound {row.bound:.3g}); run python -m tools.parity on this config"
                )
                warnings.append(EarlyWarning(SIGNAL, row.where, row.error, row.bound, names, reason))
        return warnings

    @property
    def _reads_samples(self) -> bool:
        return self._resolved.config.task in ("pretrain", "sft") and self._resolved.batch.sequence == 1

    def _compare_samples(self, batch: Batch, position: int) -> list[Row]:
        if not self._reads_samples:
            return []
        found = [] if is_in_order(batch, position, self._resolved, self._corpus) else ["the order of samples"]
        return verdicts("samples", found + wrong_samples(batch, self._resolved, self._corpus))

    def _prepared(self) -> list[Row]:
        """Comparison of the prepared data with their source; in the session's first step, on rank 0."""
        if self._turn or not self._whole or self._engine.world.rank:
            return []
        try:
            return verdicts("prepared", wrong_preparation(self._resolved.config, self._corpus))
        except Exception as error:  # a source that is gone since
            self._skipped["prepared"] = one_line(error, 120)
            return []

    @torch.no_grad()
    def _look_ahead(self) -> list[Row]:
        """The change of early logits when later tokens change; in the session's first step."""
        engine = self._engine
        if self._turn or not self._whole or not self._reads_samples:
            return []
        vocabulary = engine.model.config.get_text_config().vocab_size
        ids = torch.arange(2 * _AHEAD, device=engine.world.device)[None] * 7 % vocabulary
        changed = torch.cat([ids[:, :_AHEAD], (ids[:, _AHEAD:] + 1 + vocabulary // 2) % vocabulary], dim=1)
        engine.model.eval()
        before, after = (engine.logits({"input_ids": one}).float() for one in (ids, changed))
        engine.model.train()
        first, second = (after - before).abs().amax((0, 2)).split(_AHEAD)
        return [Row("between", "causal mask", float(first.max()), LARGEST_LEAK * float(second.max()))]

    def _constants(self) -> list[Row]:
        """Comparison of numbers in modules, buffers and the model's config with a newly built model's."""
        if not self._whole or self._engine.world.experts is not None:
            return []
        try:
            return verdicts("constants", [*self._unlike()])
        except Exception as error:  # an architecture that can only be built from its files
            self._skipped["constants"] = one_line(error, 120)
            return []

    def _unlike(self) -> Iterator[str]:
        mine, quantised = dict(self._engine.model.named_modules()), self._resolved.config.adapter.base != "compute"
        still = (name for name, item in mine.items() if not item.training and (drops(item) or not name))
        yield from (f"{name}.training" for name in still)
        for name, right in self._fresh.named_modules():
            if follows_length(right):
                continue
            other = mine.get(name)
            if other is None or (type(other).__name__ != type(right).__name__ and not quantised):
                yield name
                continue
            own, buffers = vars(other), dict(other.named_buffers(recurse=False))
            yield from (f"{name}.{key}" for key in _differing(vars(right), own))
            for key, value in right.named_buffers(recurse=False):
                if key in buffers and not torch.equal(buffers[key].cpu(), value.cpu().to(buffers[key].dtype)):
                    yield f"{name}.{key}"
        settings = decay_and_factor(self._fresh, self._resolved.config.optimizer)
        for name, parameter in trainable_parameters(self._engine).items():
            group = self._engine.group_of[id(parameter)]
            if settings.get(name) not in (None, (group["weight_decay"], group["lr_factor"])):
                yield f"{name}'s weight decay or factor of the rate"
        config: Any = self._fresh.config  # as its class changes it: Pegasus' decoder is no encoder-decoder
        yield from (f"config.{key}" for key in _differing(config.to_dict(), self._engine.model.config.to_dict()))

    @cached_property
    def _fresh(self) -> torch.nn.Module:
        config = self._resolved.config
        kind = model_class_of(config)
        model: Any = empty_model(config.model, copy.deepcopy(self._shape), model_class=kind)
        model.drawn = getattr(self._engine.model, "drawn", [])  # which decides what an adapter trains whole
        follows_rows = [module for module in self._engine.model.modules() if hasattr(module, "set_attention_type")]
        for module in [*model.modules()] if follows_rows else ():  # BigBird's attention follows the length of its rows
            if hasattr(module, "set_attention_type"):
                module.set_attention_type(follows_rows[0].attention_type)
        return add_adapter(model, config.adapter, seed=config.run.seed, model_class=kind)

    def _draws(self, outcome: Outcome) -> list[Row]:
        """Whether ranks or steps of a model that drops values have the same random numbers. A collective."""
        if not self._whole or not is_random(self._engine.model):
            return []
        now = generators(self._engine.world.device)
        if all(torch.equal(now[name], state) for name, state in outcome.generators.items()):  # a rate that nothing uses
            return []
        states = {name: state.cpu().numpy().tobytes() for name, state in outcome.generators.items()}
        # a GPU's is a seed of 8 bytes and an offset
        seed = hashlib.sha256(states["cuda"][:8] if "cuda" in states else states["cpu"]).hexdigest()
        seeds = self._engine.world.gather_objects(seed)
        state = hashlib.sha256(b"".join(states[name] for name in sorted(states))).hexdigest()
        wrong = ["random numbers of two ranks"] if len({*seeds}) < len(seeds) else []
        wrong += ["random numbers of two steps"] if state in self._drawn else []
        self._drawn.add(state)
        return verdicts("draws", wrong)

    def _reported(self, outcome: Outcome, health: Health) -> list[Row]:
        """Comparison of the step's recorded loss with the mean of the ranks' sums. A collective."""
        if not self._whole:
            return []
        total = float(self._engine.world.sum(outcome.loss_sum.clone()))
        mean = total / max(float(outcome.label_tokens), 1.0)
        return [Row("loss", "reported loss", abs(health.loss - mean) / max(abs(mean), 1e-30), 1e-9)]

    def _norm(self, health: Health) -> Row:
        """Comparison of the recorded norm with that of the reduced gradients. A collective."""
        engine = self._engine
        gradients = (local_gradient(parameter, shard, engine.stage) for _, parameter, shard in own_shards(engine))
        total = sum_of_squares((gradient for gradient in gradients if gradient is not None), engine.world.device)
        norm = float(engine.world.sum(total) if engine.stage else total) ** 0.5 / engine.loss_scale
        return Row("norm", "gradient", abs(health.grad_norm - norm) / max(norm, 1e-30), _NORM)

    def _copies(self, step: int) -> list[Row]:
        """Comparison of weights and buffers between ranks, and with their rounded masters. A collective."""
        if self._engine.world.experts is not None:
            self._skipped["copies"] = "ranks have experts of their own"
            return []
        copies = Copies(self._engine, every=1)
        sums = self._engine.world.gather(copies.sums(step)).tolist()
        wrong = any(row[:2] != sums[0][:2] or row[2] for row in sums)
        flips = copies.examine(repair=False) if wrong else []
        own = [flip.parameter for flip in flips if self._engine.world.rank == flip.ranks[0]]
        return verdicts("copies", own) if own else [Row("copies", "all values", 0.0, 1.0)]


def _differing(right: Mapping[str, Any], own: Mapping[str, Any]) -> Iterator[str]:
    """Keys whose numbers or words differ."""
    for key, value in right.items():
        if key in _STATES:
            continue
        if isinstance(value, dict) and isinstance(own.get(key), dict) and not key.startswith("_"):
            yield from (f"{key}.{inner}" for inner in _differing(value, own[key]))
        elif _is_plain(value) and _as_json(own.get(key, value)) != _as_json(value):
            yield from () if key.startswith("_") else (key,)


def _is_plain(value: Any) -> bool:
    """Whether a value is a number, a text, a flag, or a sequence of these."""
    each = value if isinstance(value, list | tuple) else (value,)
    return all(type(one) in (bool, int, float, str) for one in each)


def _as_json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def _excess(item: tuple[Row, int]) -> float:
    row, _ = item
    ratio = row.error / row.bound if row.bound else math.inf if row.error else 0.0
    return math.inf if math.isnan(ratio) else ratio  # a nan would pass every comparison
