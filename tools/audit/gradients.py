"""The gradients of a recorded step's micro-batches in plain torch, and what the reduced gradient is made of.

The reduced gradient is fitted, parameter by parameter, by the gradients of each rank's micro-batches: the share of one
is 0 where it was lost and 2 where it was added twice, whatever happened to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from config.errors import UserError
from precision.dtypes import DTYPES
from tools.audit.recorded import Recorded, Step

IGNORED = -100
_NO_INPUT = ("labels", "shift_labels", "use_cache", "return_dict", "output_hidden_states", "num_items_in_batch")

Objective = Callable[[Any, list[dict[str, torch.Tensor]]], tuple[torch.Tensor, int]]
"""(model, a micro-batch's inputs) -> the sum over what counts in it, and how much does."""


class NotRecomputed(Exception):
    """A step cannot be recomputed, and why."""


@dataclass
class Micro:
    """One rank's micro-batch, recomputed. Losses are sums over what counts; gradients are of the exact sum."""

    rank: int
    number: int
    counted: int
    exact_loss: float
    plain_loss: float
    reported: float
    """The loss that went into backward, as the engine divides it by the accumulation."""
    exact: dict[str, torch.Tensor]
    plain: dict[str, torch.Tensor]


def labelled(model: Any, parts: list[dict[str, torch.Tensor]]) -> tuple[torch.Tensor, int]:
    """Cross-entropy of the labels, which the model was given or the trainer has; all calls of a micro-batch."""
    *calls, batch = parts
    total, counted = torch.zeros((), dtype=torch.float64), 0
    for inputs in calls:
        given = batch | inputs
        if not given.keys() & {"labels", "shift_labels"}:
            raise NotRecomputed(
                "the model was given no labels; set `probe.batch` to the micro-batch before the forward"
            )
        shifted = given.get("shift_labels")
        targets = functional.pad(given["labels"][..., 1:], (0, 1), value=IGNORED) if shifted is None else shifted
        logits = _logits(model, inputs)
        total = total + functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]), targets.reshape(-1), ignore_index=IGNORED, reduction="sum"
        )
        counted += int((targets != IGNORED).sum())
    return total, counted


def preferred(reference: Any, beta: float) -> Objective:
    """DPO's sigmoid loss (Rafailov et al. 2023, equation 7): chosen answers are the first half of a batch's rows."""

    def loss(model: Any, given: list[dict[str, torch.Tensor]]) -> tuple[torch.Tensor, int]:
        batch = given[-1]
        if not {"input_ids", "completion_mask"} <= batch.keys():
            raise NotRecomputed("the batch has no input_ids and completion_mask, so that pairs cannot be told")
        with torch.no_grad():
            known = _answers(reference, batch)
        chosen, rejected = (_answers(model, batch) - known).chunk(2)
        return -functional.logsigmoid(beta * (chosen - rejected)).sum(), len(chosen)

    return loss


def _answers(model: Any, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The log-probability of each row's answer."""
    logits = _logits(model, {key: batch[key] for key in ("input_ids", "attention_mask")})[:, :-1]
    likely = logits.log_softmax(-1).gather(-1, batch["input_ids"][:, 1:, None])[..., 0]
    return (likely * batch["completion_mask"][:, 1:]).sum(-1)


def _logits(model: Any, inputs: Mapping[str, torch.Tensor]) -> torch.Tensor:
    wanted = {key: value for key, value in inputs.items() if key not in _NO_INPUT}
    ids = wanted.get("input_ids")
    size = model.get_input_embeddings().num_embeddings
    if ids is not None and int(ids.max()) >= size:
        raise UserError(
            f"the batch has token {int(ids.max())} and the model {size} embeddings: another tokenizer or model; "
            "give the one that was trained with --model"
        )
    logits: torch.Tensor = model(**wanted, use_cache=False).logits
    return logits if logits.dtype == torch.float64 else logits.float()


def load_model(recorded: Recorded, source: str | None) -> Any:
    """The plain model in FP32, of `source` or of the config that the probe kept."""
    from transformers import AutoConfig, AutoModelForCausalLM

    if source is not None:
        try:
            model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        except (OSError, ValueError) as error:
            raise UserError(f"--model {source} cannot be loaded: {str(error).splitlines()[0]}") from error
    else:
        config = dict(recorded.facts["model_config"] or {})
        kind, known = config.pop("model_type", None), (config.get("architectures") or [recorded.facts["model"]])
        if kind is None or recorded.facts["model"] not in known:
            raise NotRecomputed(
                f"{recorded.facts['model']} is no model that transformers builds by itself; give --model"
            )
        for name in ("dtype", "torch_dtype", "_attn_implementation", "attn_implementation"):
            config.pop(name, None)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **config), dtype=torch.float32)
    embedding: Any = model.get_input_embeddings()
    embedding.padding_idx = recorded.facts.get("padding_idx")  # trainers change the config's afterwards
    own = {name: list(parameter.shape) for name, parameter in model.named_parameters()}
    trained = {name: row[0] for name, row in recorded.facts["parameters"].items()}
    if own != trained:
        different = sorted(n for n in own.keys() | trained.keys() if own.get(n) != trained.get(n))
        here, there = (held.get(different[0], "missing") for held in (own, trained))
        raise UserError(
            f"{source or 'the recorded config'} is another model than the one trained: {different[0]} is {here} in it "
            f"and {there} in the probe; give the trained one with --model"
        )
    return model


def recompute(model: Any, recorded: Recorded, step: Step, objective: Objective) -> list[Micro]:
    """Every micro-batch of a step from its recorded masters, rounded as the run computes.

    Exact is FP32 of the rounded weights in a run of 16 bits, and FP64 in one of FP32; plain is the run's own dtype.
    """
    autocast = next((call["autocast"] for micro in step.facts["micros"] for call in micro["calls"]), None)
    dtype = DTYPES[recorded.facts["compute"]]
    before = step.named("before") | step.named("frozen")
    if any(before[name].shape != parameter.shape for name, parameter in model.named_parameters()):
        raise NotRecomputed("the masters were not kept whole (max_bytes)")
    exact = torch.float64 if dtype == torch.float32 and autocast is None else torch.float32
    found: list[Micro] = []
    passes: list[list[Any]] = []
    for compute in (exact, dtype):
        for name, parameter in model.named_parameters():
            parameter.data = before[name].to(dtype).to(compute)
            parameter.requires_grad_(recorded.facts["parameters"][name][2])
        for buffer in model.buffers():
            if buffer.is_floating_point() and compute == torch.float64:
                buffer.data = buffer.data.double()
        inside = getattr(torch, str(autocast).removeprefix("torch.")) if autocast and compute == dtype else None
        ambient = torch.autocast("cpu", dtype=inside, enabled=inside is not None)
        passes.append([])
        for rank, facts in enumerate(step.ranks):
            for number in range(len(facts["micros"])):
                model.zero_grad(set_to_none=True)
                with ambient:
                    loss, counted = objective(model, step.inputs(rank, number))
                if counted:
                    loss.backward()
                gradients = {
                    name: (torch.zeros(parameter.numel()) if parameter.grad is None else parameter.grad.reshape(-1))[
                        :: step.facts["stride"]
                    ].double()
                    for name, parameter in model.named_parameters()
                    if parameter.requires_grad
                }
                passes[-1].append((rank, number, counted, float(loss.detach()), gradients))
    for (rank, number, counted, loss, gradients), (_, _, _, plain_loss, plain) in zip(*passes, strict=True):
        micro = step.ranks[rank]["micros"][number]
        reported = micro["loss"] / micro["divided_by"] / recorded.facts["world"]
        found.append(Micro(rank, number, counted, loss, plain_loss, reported, gradients, plain))
    return found


@dataclass
class Fit:
    """How much of each micro-batch's gradient the reduced gradient holds: 1 where it is right."""

    overall: torch.Tensor
    deviating: dict[str, torch.Tensor]
    """The shares of parameters that have others than most."""
    judged: int
    error: float
    """The part of the reduced gradient that no shares explain."""
    noise: float
    """The same of a sum that plain torch makes in the run's dtype."""


def fit(reduced: Mapping[str, torch.Tensor], micros: list[Micro], weights: torch.Tensor, tolerance: float) -> Fit:
    """reduced: unscaled, FP64. weights: of each micro-batch's gradient, which a right reduction gives it."""
    columns = {name: torch.stack([each.exact[name] for each in micros]) * weights[:, None] for name in reduced}
    largest = max(max(float(columns[name].sum(0).norm()), float(reduced[name].norm())) for name in reduced)
    found: list[tuple[float, str, torch.Tensor, torch.Tensor]] = []
    off = whole = noise = 0.0
    for name, value in reduced.items():
        rows = columns[name]
        size = max(float(rows.sum(0).norm()), float(value.norm()))
        if value.numel() < 8 * len(micros) or size < 1e-3 * largest:
            continue
        plain = float((weights @ torch.stack([each.plain[name] - each.exact[name] for each in micros])).square().sum())
        whole, noise = whole + float(value.square().sum()), noise + plain
        share, spread = torch.ones_like(weights), torch.zeros_like(weights)
        left = float((value - rows.sum(0)).square().sum())
        if left > 4 * plain + (tolerance * size) ** 2:  # else it is what it should be
            inverse = torch.linalg.pinv(rows @ rows.T, hermitian=True, rtol=1e-9)
            share = inverse @ (rows @ value)
            left = float((value - share @ rows).square().sum())
            spread = (inverse.diagonal() * left / (value.numel() - len(micros))).sqrt()
        off += left
        if float(spread.max()) < 0.1:  # else micro-batches are too alike to be told apart
            found.append((size, name, share, spread))
    if not found:
        raise NotRecomputed("no parameter's gradient tells the micro-batches apart")
    overall = torch.stack([share for _, _, share, _ in found]).median(0).values
    least = torch.tensor(4 * tolerance)
    deviating = {
        name: share
        for _, name, share, spread in sorted(found, key=lambda each: -each[0])
        if bool(((share - overall).abs() > torch.maximum(6 * spread, least)).any())
    }
    return Fit(
        overall, deviating, len(found), (off / whole) ** 0.5 if whole else 0.0, (noise / whole) ** 0.5 if whole else 0.0
    )


def rounded_sum(micros: list[Micro], weights: torch.Tensor, dtype: torch.dtype) -> float:
    """How far summing plain gradients over micro-batches and ranks in `dtype` is from summing them in FP64."""
    off = size = 0.0
    for name in micros[0].plain:
        exact = torch.zeros_like(micros[0].plain[name])
        by_rank: dict[int, Any] = {}
        for each, weight in zip(micros, weights.tolist(), strict=True):
            part = each.plain[name] * weight
            exact = exact + part
            by_rank[each.rank] = (by_rank.get(each.rank, 0.0) + part).to(dtype).double()
        total = torch.zeros_like(exact)
        for part in by_rank.values():
            total = (total + part).to(dtype).double()
        off, size = off + float((total - exact).square().sum()), size + float(exact.square().sum())
    return float((off / size) ** 0.5) if size else 0.0
