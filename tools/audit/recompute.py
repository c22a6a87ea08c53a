"""Reads the steps that a probe recorded, recomputes the gradients of their micro-batches in plain torch, and determines
what the reduced gradient consists of.

The reduced gradient is fitted, parameter by parameter, by the gradients of each rank's micro-batches: a share is 0 if
that gradient was lost and 2 if it was added twice, whatever happened to the others. Rounding and distances are those of
`tools.parity.plain`. The passes are not those of `tools.parity`, whose oracle derives the batches and the loss from a
run config and prepared data: for another trainer's step only the model's inputs are known.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property, reduce
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from config import json_text
from config.errors import UserError, one_line
from precision.dtypes import DTYPES
from tools.parity.plain import Apart, in_dtype, sigmoid_preference
from tracking.compare.surviving import read_events

Tensors = dict[str, torch.Tensor]
"""Tensors by the name of a parameter or an input."""
_NAME = re.compile(r"step-(\d+)\.rank(\d+)\.pt$")
_OF_RUN = "training world stage compute model model_config parameters optimizer clipping engine trainer"
_OF_STEP = "training step rank stride start_stride frozen_stride scale applied applied_before groups weights"
_OF_STEP += " micros norm fp32 before after"
IGNORED = -100
_NO_INPUT = ("labels", "use_cache", "return_dict", "output_hidden_states", "num_items_in_batch")
_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm)
_OF_RUNTIME = ("dtype", "torch_dtype", "_attn_implementation", "attn_implementation")
"""Keys of a model's config that are not passed to a plain model."""

KNOWN_LOSSES = (None, "Trainer.compute_loss", "SFTTrainer.compute_loss", "DPOTrainer.compute_loss")
"""The trainers' methods whose losses are known here; None: a loop without a trainer."""


@dataclass
class Step:
    """One recorded step, as each rank wrote it."""

    number: int
    ranks: list[dict[str, Any]]

    @property
    def facts(self) -> dict[str, Any]:
        """Rank 0's record."""
        return self.ranks[0]

    @property
    def micros(self) -> dict[tuple[int, int], dict[str, Any]]:
        """Each micro-batch, by its rank and number."""
        return {(rank, at): micro for rank, facts in enumerate(self.ranks) for at, micro in enumerate(facts["micros"])}

    def named(self, kind: str) -> Tensors:
        """Rank 0's recorded tensors of this kind by parameter, FP32."""
        return {name: value.float() for name, value in self.facts.get(kind, {}).items()}


Objective = Callable[[Any, Step, dict[str, Any]], tuple[torch.Tensor, int]]
"""(model, step, a micro-batch of it) -> the loss summed over what counts in it, and its count."""


class Recorded(NamedTuple):
    """A probe's folder. `reported`: losses by step; `incomplete`: steps that a crash cut short; `ended`: why the probe
    recorded no more, if it did not go on to its last step."""

    facts: dict[str, Any]
    reported: dict[int, float]
    steps: list[Step]
    incomplete: list[int]
    ended: str


def read(folder: Path) -> Recorded:
    """Read a probe's folder. Raises UserError if it is not one, or ranks are missing."""
    path = folder / "probe.json"
    if not path.is_file():
        raise UserError(f"{folder} has no probe.json: give the folder that mantissa_probe.Probe wrote into")
    facts = json_text.read_object(path, "probe's JSON")
    if missing := [key for key in _OF_RUN.split() if key not in facts]:
        raise UserError(f"{path} has no {missing[0]}: it is not as mantissa_probe wrote it; record again")
    seen: dict[int, set[int]] = {}
    for found in filter(None, (_NAME.search(path.name) for path in folder.iterdir())):
        seen.setdefault(int(found[1]), set()).add(int(found[2]))
    wanted = set(range(facts["world"]))
    whole, odd = (sorted(number for number in seen if (seen[number] == wanted) is same) for same in (True, False))
    ended = [" ".join(path.read_text(encoding="utf-8").split()) for path in sorted(folder.glob("ended.rank*.txt"))]
    if not whole or any(seen[number] - wanted or number < max(whole) for number in odd):
        if ended and not whole:
            raise UserError(f"{folder}: the probe said: {ended[0]}")
        where = "no step was recorded"
        if odd:
            ranks = ", ".join(map(str, sorted(seen[odd[0]])))
            where = f"step {odd[0]} has files of rank {ranks}, and probe.json is of {len(wanted)} ranks"
        raise UserError(f"{folder}: {where}; copy the files of every rank of one training there, or record again")
    steps = [Step(number, [_read(folder, facts, number, rank) for rank in sorted(wanted)]) for number in whole]
    path, reported = folder / "reported.jsonl", {}
    for entry in read_events(path) if path.is_file() else ():
        if not all(isinstance(entry.get(key), int | float) for key in ("step", "loss")):
            raise UserError(f"{path}: {entry} has no step and loss; remove that line")
        reported[entry["step"]] = entry["loss"]
    return Recorded(facts, reported, steps, odd, "; ".join(ended))


def _read(folder: Path, facts: dict[str, Any], number: int, rank: int) -> dict[str, Any]:
    """A rank's file of a step; its tensors are read on use."""
    path = folder / f"step-{number:06d}.rank{rank}.pt"
    try:
        found: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu", mmap=True)
        training, *place = [found[key] for key in _OF_STEP.split()][:3]
    except Exception as error:  # torch raises many kinds for a truncated file
        why = f"cannot be read ({type(error).__name__}); record again, or delete step {number}'s files"
        raise UserError(f"{path} {why}") from error
    if training != facts["training"] or place != [number, rank]:
        told = f"is not of step {number} of rank {rank} of the training that probe.json is of"
        raise UserError(f"{path} {told}; record each training into its own folder")
    return found


class NotRecomputed(Exception):
    """A step cannot be recomputed; the text says why."""


@dataclass
class Fit:
    """Share of each micro-batch's gradient in the reduced gradient: 1 if correct.

    deviating: the shares in parameters where they differ from the majority; judged: the number of parameters. error:
    the part of the reduced gradient that no shares explain; noise: the same for plain torch's sum in the run's dtype.
    """

    overall: torch.Tensor
    deviating: Tensors
    judged: int
    error: float
    noise: float


@dataclass
class Micros:
    """The micro-batches of a step in which anything counts, one FP64 row each.

    Losses are sums over what counts, and gradients, by parameter, those of the sums. exact: in FP32 from the rounded
    weights for a 16-bit run, in FP64 for an FP32 run. plain: in the run's own dtype. reported: the loss passed to
    backward, as the engine divides it. places: rank and number of each. router_times: how often the routers' loss
    counts beside the mean, 0 if it does not.
    """

    places: list[tuple[int, int]]
    counts: torch.Tensor
    exact_loss: torch.Tensor
    plain_loss: torch.Tensor
    reported: torch.Tensor
    exact: Tensors
    plain: Tensors
    router_times: float

    def fit(self, reduced: Tensors, weights: torch.Tensor, tolerance: float) -> Fit:
        """reduced: unscaled, FP64. weights: those that a correct reduction gives the micro-batches' gradients."""
        count, explained, noise = len(weights), Apart(), Apart()
        columns = {name: self.exact[name] * weights[:, None] for name in reduced}
        sizes = {name: max(float(columns[name].sum(0).norm()), float(reduced[name].norm())) for name in reduced}
        found: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        for name in sorted(reduced, key=lambda name: -sizes[name]):
            value, rows, size = reduced[name], columns[name], sizes[name]
            if value.numel() < 8 * count or size < 1e-3 * max(sizes.values()):
                continue
            plain = weights @ (self.plain[name] - self.exact[name])
            noise.add(rows.sum(0) + plain, rows.sum(0))
            share, spread = torch.ones_like(weights), torch.zeros_like(weights)
            left = float((value - rows.sum(0)).square().sum())
            if left > 4 * float(plain.square().sum()) + (tolerance * size) ** 2:  # else it is correct
                inverse = torch.linalg.pinv(rows @ rows.T, hermitian=True, rtol=1e-9)
                share = inverse @ (rows @ value)
                left = float((value - share @ rows).square().sum())
                spread = (inverse.diagonal() * left / (value.numel() - count)).sqrt()
            explained.add(share @ rows, value)
            if float(spread.max()) < 0.1:  # else micro-batches are too alike to be told apart
                found[name] = share, (6 * spread).clamp_min(4 * tolerance)
        if not found:
            raise NotRecomputed("no parameter's gradient tells the micro-batches apart")
        overall = torch.stack([share for share, _ in found.values()]).median(0).values
        off = {name: share for name, (share, sure) in found.items() if bool(((share - overall).abs() > sure).any())}
        return Fit(overall, off, len(found), explained.error, noise.error)

    def rounded_sum(self, weights: torch.Tensor, dtype: torch.dtype) -> float:
        """Error of summing plain gradients over micro-batches and ranks in `dtype`, relative to FP64."""
        apart = Apart()
        for parts in (weights[:, None] * rows for rows in self.plain.values()):
            own: dict[int, torch.Tensor] = {}
            for (rank, _), part in zip(self.places, parts, strict=True):
                own[rank] = (own.get(rank, torch.zeros(1)) + part).to(dtype).double()
            apart.add(reduce(lambda total, part: (total + part).to(dtype).double(), own.values()), parts.sum(0))
        return apart.error


def _cross_entropy(recorded: Recorded) -> Objective:
    """Cross-entropy of the labels, from the model's inputs or the trainer's batch; all calls of a micro-batch.

    A model that is given labels adds its routers' loss to their mean: over what the Trainer counted, if it said so, and
    in TRL's SFTTrainer over a micro-batch's equal part of the step.
    """
    facts = recorded.facts["trainer"]
    smoothing, kind = facts.get("label_smoothing_factor") or 0.0, facts.get("loss_type")
    if kind not in (None, "nll", "chunked_nll"):
        raise NotRecomputed(f"the loss {kind} is not known here")

    def loss(model: Any, step: Step, micro: dict[str, Any]) -> tuple[torch.Tensor, int]:
        total, count = torch.zeros((), dtype=torch.float64), 0
        for call, labels in _labelled(micro, facts):
            found = _called(model, recorded, call["inputs"], call["routers"])
            total, counted = total + _nats(found, labels, smoothing).sum(), _count(labels)
            total = total + _router_labels(step, call, labels, facts) * _router_loss(model, recorded, found)
            count += counted
        return total, count

    return loss


def _router_labels(step: Step, call: dict[str, Any], labels: torch.Tensor, trainer: dict[str, Any]) -> float:
    """The labels by which the step's loss multiplies the mean that a call's routers add."""
    if "labels" not in call["inputs"]:
        return 0.0
    if "SFT" in trainer.get("class", ""):
        every = [_count(each) for other in step.micros.values() for _, each in _labelled(other, trainer)]
        return sum(every) / len(every)
    return float(call["inputs"].get("num_items_in_batch", _count(labels)))


def _router_times(recorded: Recorded, step: Step) -> float:
    """How often the routers' loss counts beside the mean over a step's labels; 0 if it is not asked for."""
    facts, config = recorded.facts["trainer"], recorded.facts["model_config"] or {}
    if "DPO" in facts.get("class", "") or not config.get("router_aux_loss_coef", 1.0):
        return 0.0
    calls = [pair for micro in step.micros.values() for pair in _labelled(micro, facts)]
    if not any(call["routers"] or config.get("output_router_logits") for call, _ in calls):
        return 0.0
    counted = sum(_router_labels(step, call, labels, facts) for call, labels in calls)
    return counted / sum(_count(labels) for _, labels in calls)


def _labelled(micro: dict[str, Any], trainer: dict[str, Any]) -> list[tuple[dict[str, Any], torch.Tensor]]:
    """The model's calls in a micro-batch, each with its labels, as a model takes them that shifts them itself."""
    found = []
    for call in micro["calls"]:
        given = micro["batch"] | call["inputs"]
        if (labels := given.get("labels")) is None:
            told = "the model was given no labels; set `probe.batch` to the micro-batch before the forward"
            raise NotRecomputed(told)
        if are_shifted(given) and not is_shifting(call, trainer):
            labels = functional.pad(labels, (1, 0), value=IGNORED)
        found.append((call, labels))
    return found


def are_shifted(given: Tensors) -> bool:
    """Whether counted labels are the tokens after their own position."""
    labels, ids = (given.get(key) for key in ("labels", "input_ids"))
    if labels is None or ids is None or labels.shape != ids.shape:
        return False
    counted = labels >= 0
    own = float((labels == ids)[counted].float().mean())
    ahead = float((labels[..., :-1] == ids[..., 1:])[counted[..., :-1]].float().mean())
    return own < 0.9 < ahead


def is_shifting(call: dict[str, Any], trainer: dict[str, Any]) -> bool:
    """Whether labels are shifted for the loss: by the model that is given them, or by the trainer."""
    return "labels" in call["inputs"] or trainer.get("loss") in KNOWN_LOSSES[1:]


def _count(labels: torch.Tensor) -> int:
    return int((labels[..., 1:] != IGNORED).sum())


def _preference(recorded: Recorded, source: str | None, start: Tensors) -> Objective:
    """DPO's sigmoid loss: chosen answers are the first half of a batch's rows. start: the first step's weights."""
    facts = recorded.facts["trainer"]
    if facts.get("loss_type") not in (["sigmoid"], "sigmoid"):
        raise NotRecomputed(f"the DPO loss {facts.get('loss_type')} is not known here, sigmoid is")
    for key, value in facts.get("preferences", {}).items():
        if value not in (None, False, "reverse_kl", "FDivergenceType.REVERSE_KL"):
            raise NotRecomputed(f"DPO with {key} = {value} is not known here")
    first = recorded.steps[0]
    if source is None and first.number != 1:
        raise NotRecomputed("the reference is not known: record step 1, or give --reference")
    moved = any(bool(value.any()) for value in first.named("exp_avg_sq_before").values())
    if source is None and (facts.get("resumed_from") or moved):
        raise NotRecomputed("the training was resumed, so step 1's policy is not the reference; give --reference")
    reference = Oracle(recorded, source, None).model
    if source is None:
        _set_weights(reference, recorded, start, DTYPES[recorded.facts["compute"]])
    settings = {"beta": float(facts["beta"]), "label_smoothing": float(facts.get("label_smoothing") or 0.0)}

    def loss(model: Any, step: Step, micro: dict[str, Any]) -> tuple[torch.Tensor, int]:
        batch = micro["batch"]
        if not {"input_ids", "completion_mask"} <= batch.keys():
            raise NotRecomputed("the batch has no input_ids and completion_mask, so that pairs cannot be told")
        inputs = {key: batch[key] for key in ("input_ids", "attention_mask")}
        answers = batch["input_ids"].masked_fill(batch["completion_mask"] == 0, IGNORED)
        with torch.no_grad():
            known = _nats(_called(reference, recorded, inputs), answers)
        found = _called(model, recorded, inputs)
        chosen, rejected = (known - _nats(found, answers)).chunk(2)
        pairs = sigmoid_preference(chosen - rejected, **settings).sum()
        return pairs + len(chosen) * _router_loss(model, recorded, found), len(chosen)

    return loss


def _called(model: Any, recorded: Recorded, inputs: Tensors, routers: bool = False) -> Any:
    """The model's output. routers: the trainer asked for its routers' loss, which the recorded config may do, too."""
    wanted: dict[str, Any] = {key: value for key, value in inputs.items() if key not in _NO_INPUT}
    ids, size = wanted.get("input_ids", torch.zeros(1)), model.get_input_embeddings().num_embeddings
    if other := ids[(ids < 0) | (ids >= size)].tolist():
        told = f"the batch has token {max(other)} and the model {size} embeddings: another tokenizer or model"
        raise UserError(f"{told}; give the one that was trained with --model")
    asked = (recorded.facts["model_config"] or {}).get("output_router_logits")
    if asked is not None or routers:
        wanted["output_router_logits"] = bool(asked or routers)
    return model(**wanted, use_cache=False)


def _nats(found: Any, labels: torch.Tensor, smoothing: float = 0.0) -> torch.Tensor:
    """The negative log-probability of each row's labels, part of which `smoothing` gives to all tokens alike."""
    logits = found.logits[..., : labels.shape[-1] - 1, :].movedim(-1, 1)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    kept: dict[str, Any] = {"ignore_index": IGNORED, "label_smoothing": smoothing, "reduction": "none"}
    return functional.cross_entropy(logits, labels[..., 1:], **kept).sum(-1)


def _router_loss(model: Any, recorded: Recorded, found: Any) -> Any:
    """The term that a mixture of experts adds to the mean loss; 0 where it was not asked to."""
    if (loss := getattr(found, "aux_loss", None)) is None:
        return 0.0
    config = recorded.facts["model_config"] or {}
    return config.get("router_aux_loss_coef", getattr(model, "router_aux_loss_coef", 0.0)) * loss


class Oracle:
    """The plain model of a recorded run, and its trainer's loss."""

    def __init__(self, recorded: Recorded, source: str | None, reference: str | None) -> None:
        """source: the checkpoint that training started from, if given. reference: DPO's reference model."""
        self._recorded, self._source, self._reference = recorded, source, reference
        self.stored: Tensors = {}
        """The checkpoint's weights."""
        if source is not None:
            with suppress(NotRecomputed):
                self.stored = {name: item.data for name, item in self.model.named_parameters()}

    @cached_property
    def model(self) -> Any:
        """The plain model in FP32, from the checkpoint or from the config that the probe kept.

        Raises UserError if it is another than was trained, NotRecomputed if that one is no causal language model.
        """
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as causal

        facts, source = self._recorded.facts, self._source
        told = f"--model {source}" if source else "the recorded config"
        config: dict[str, Any] = {"model_type": None, **(facts["model_config"] or {})}
        known = facts["model"] == causal.get(config["model_type"])
        if source is None and not known:
            told = f"{facts['model']} is no causal language model of transformers"
            raise NotRecomputed(f"{told}; give --model if one has its parameters")
        refused = UserError if known else NotRecomputed
        try:
            if source is not None:
                model: Any = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
            else:
                shape = AutoConfig.for_model(**{key: config[key] for key in config.keys() - {*_OF_RUNTIME}})
                model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32)
        except (OSError, ValueError) as error:
            raise refused(f"{told} cannot be loaded: {one_line(error)}") from error
        if getattr(model.config.get_text_config(), "_experts_implementation", None) is not None:
            model.set_experts_implementation("eager")  # grouped matmuls do not take FP64
        model.get_input_embeddings().padding_idx = facts.get("padding_idx")  # trainers change the config's later
        own = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
        trained = {name: shape for name, (shape, *_) in facts["parameters"].items()}
        if off := sorted(name for name in own.keys() | trained.keys() if own.get(name) != trained.get(name)):
            here, there = (held.get(off[0], "missing") for held in (own, trained))
            differs = f"{off[0]} is {here} in it and {there} in the probe; give the trained one with --model"
            raise refused(f"{told} is another model than the one trained: {differs}")
        return model.eval()

    @cached_property
    def _objective(self) -> Objective:
        pairs = "DPO" in self._recorded.facts["trainer"].get("class", "")
        if not pairs:
            return _cross_entropy(self._recorded)
        start = {} if self._reference else self._weights(self._recorded.steps[0])
        return _preference(self._recorded, self._reference, start)

    def _weights(self, step: Step) -> Tensors:
        """All weights at the start of a step: as recorded, or the checkpoint's where the part that was recorded equals
        them. Raises NotRecomputed if neither is known."""
        found, dtype = Tensors(), DTYPES[self._recorded.facts["compute"]]
        first = self._recorded.steps[0]
        for place, kind, key in ((first, "frozen", "frozen_stride"), (step, "before", "start_stride")):
            stride = place.facts[key]
            for name, value in place.named(kind).items():
                if stride > 1:
                    whole = self.stored.get(name, torch.zeros(1))
                    if not torch.equal(whole.reshape(-1)[::stride].to(dtype), value.to(dtype)):
                        told = "the probe kept a part of the weights; give --model, where step 1 began, or record with"
                        raise NotRecomputed(f"{told} a larger max_bytes")
                    value = whole
                found[name] = value
        if missing := self._recorded.facts["parameters"].keys() - found.keys():
            raise NotRecomputed(f"{min(missing)} was kept in the probe's first step alone, whose files are not there")
        return found

    def recompute(self, step: Step) -> Micros:
        """Every micro-batch of a step from its recorded masters, rounded to the run's dtype. Raises NotRecomputed."""
        recorded, compute = self._recorded, self._recorded.facts["compute"]
        calls = [call for micro in step.micros.values() for call in micro["calls"]]
        if recorded.facts["dropout"] or any(call.get("random") for call in calls):
            raise NotRecomputed("the forward pass draws random numbers, as dropout and NEFTune do")
        model, objective = self.model, self._objective
        _set_weights(model, recorded, self._weights(step))
        autocast = {call["autocast"] for call in calls} - {None}
        inside = getattr(torch, autocast.pop().removeprefix("torch.")) if autocast else None
        wide = torch.float64 if compute == "fp32" and inside is None else torch.float32
        buffers = {name: wide for name, buffer in model.named_buffers() if buffer.is_floating_point()}
        with in_dtype({model: compute}, buffers, computed=wide):
            places, counts, exact_loss, exact = _passes(model, step, objective)
        bits = recorded.facts.get("product_bits", 23)
        under = torch.autocast("cpu", dtype=inside, enabled=inside is not None)
        with in_dtype({model: compute}, {}), under, _Rounded(bits) if bits < 23 else nullcontext():
            *_, plain_loss, plain = _passes(model, step, objective)
        if not all(bool(rows.isfinite().all()) for rows in (*exact.values(), *plain.values())):
            raise NotRecomputed("those of plain torch are not finite")
        micros = [step.micros[place] for place in places]
        losses = torch.tensor([micro["loss"] / micro["divided_by"] for micro in micros], dtype=torch.float64)
        reported, times = losses / recorded.facts["world"], _router_times(recorded, step)
        return Micros(places, counts, exact_loss, plain_loss, reported, exact, plain, times)


class _Rounded(TorchDispatchMode):
    """Rounds the factors of matrix products in FP32 to so many bits of mantissa: TF32 keeps 10 of 23."""

    def __init__(self, bits: int) -> None:
        super().__init__()
        self._lost = 23 - bits

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func.overloadpacket in _PRODUCTS:
            args = (*args[:-2], *map(self._rounded, args[-2:]))
        return func(*args, **kwargs or {})

    def _rounded(self, factor: torch.Tensor) -> torch.Tensor:
        if factor.dtype != torch.float32:
            return factor
        return ((factor.view(torch.int32) + (1 << self._lost - 1)) & (-1 << self._lost)).view(torch.float32)


def _set_weights(model: Any, recorded: Recorded, weights: Tensors, dtype: torch.dtype = torch.float32) -> None:
    """Give a model weights, rounded to a dtype."""
    for name, parameter in model.named_parameters():
        parameter.data = weights[name].to(dtype).float()
        parameter.requires_grad_(recorded.facts["parameters"][name][1])


def _passes(model: Any, step: Step, objective: Objective) -> tuple[Any, torch.Tensor, torch.Tensor, Tensors]:
    """Places, counts, losses and recorded gradient values of the micro-batches, as in `Micros`."""
    trained = {name: item for name, item in model.named_parameters() if item.requires_grad}
    places, rows, gradients = [], [], {name: list[torch.Tensor]() for name in trained}
    for place, micro in step.micros.items():
        loss, counted = objective(model, step, micro)
        if not counted:
            continue
        found = torch.autograd.grad(loss, list(trained.values()), materialize_grads=True)
        for name, gradient in zip(trained, found, strict=True):
            gradients[name].append(gradient.flatten()[:: step.facts["stride"]].double())
        places.append(place)
        rows.append((counted, float(loss.detach())))
    if not rows:
        raise NotRecomputed("no label of the step counts")
    counts, losses = torch.tensor(rows, dtype=torch.float64).T
    return places, counts, losses, {name: torch.stack(each) for name, each in gradients.items()}
