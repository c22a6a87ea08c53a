"""A rollout engine: it samples answers with weights that it is given, and says what it computes with.

`TransformersSampler` is one in the trainer's own process: a second copy of the model in the compute dtype on every
rank, built as the trainer's is, adapter included, so that it computes with the same tensors and names. vllm_sampler.py
has another, in servers. Token ids go in and come out, never text; every rank asks its own requests.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from torch.func import functional_call
from transformers import PretrainedConfig, PreTrainedModel

from config.resolved import Resolved
from config.schema import GrpoSection
from config.task import model_class_of
from data.corpora.sampler import uniforms
from modeling.adapter import add_adapter
from modeling.build import build_model
from modeling.objectives.objective import Forward
from precision.routers import compute_routers_in_fp32
from training.distributed import World
from training.engine import Engine
from training.engine.flips import as_integers
from training.engine.ledger import PrecisionError

Weights = Iterable[tuple[str, torch.Tensor]]
"""Name and whole tensor of every parameter, in the dtype that the trainer computes with; a tied one under each name."""

PERSON = b"mantissa-answer"
"""Keeps the random numbers of an answer apart from others of the same key."""
_NEVER_TWICE = -30.0
"""[nats] Log-probability of an answer below which two of a group are equal less than once in 1e13 pairs."""


class Request(NamedTuple):
    """One answer to be sampled."""

    prompt: np.ndarray  # (n,) int64
    key: str
    """Seed of this answer and no other: whatever else is sampled beside it, it draws the same random numbers."""


class Answer(NamedTuple):
    """A sampled answer."""

    ids: np.ndarray
    """(n,) int64, an end token included where it has ended; 1 <= n <= grpo.max_new_tokens."""
    log_probs: np.ndarray  # (n,) float32: of each under softmax(logits / temperature), as sampled from
    ended: bool
    """False where it was cut off at its length. Only this says so: an end token is a token like any other."""


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's dtype, shape and values, -0.0 as 0.0, which kernels may write for it."""
    values = (tensor.detach() + 0.0).contiguous().cpu()
    head = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    return hashlib.sha256(head + values.reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether dtype, shape and every bit are equal."""
    alike = one.dtype == other.dtype and one.shape == other.shape
    return alike and torch.equal(as_integers(one), as_integers(other))


def differing_from(model: PreTrainedModel, weights: Weights) -> list[str]:
    """Names of the tensors of which the model has another dtype, shape or value."""
    own = dict(model.named_parameters(remove_duplicate=False))
    return [name for name, tensor in weights if not _same(own[name], tensor)]


def copy_of_model(resolved: Resolved, shape: PretrainedConfig, engine: Engine) -> PreTrainedModel:
    """The model of a run with its start weights, in the trainer's dtypes, in evaluation mode, whole on this rank."""
    config, seed = resolved.config, resolved.config.run.seed
    model = build_model(config.model, shape, seed=seed, model_class=model_class_of(config), adapter=config.adapter)
    if config.adapter.kind != "none":
        model = add_adapter(model, config.adapter, seed=seed, model_class=model_class_of(config))
    if resolved.compute != "fp32" and config.precision.routers == "fp32":
        compute_routers_in_fp32(model)
    for own, trained in zip(model.parameters(), engine.model.parameters(), strict=True):
        # a copy, since memory that is mapped from files is unaligned: kernels would add in another order
        own.data = own.data.to(engine.world.device, trained.dtype, copy=True)
    for buffer, its in zip(model.buffers(), engine.model.buffers(), strict=True):
        buffer.data = its.detach().clone()
    return model.eval().requires_grad_(False)


class TransformersSampler:
    """Draws tokens by inverting the distribution function at a random number of the answer's own."""

    def __init__(self, model: PreTrainedModel, section: GrpoSection, world: World, *, ends: Sequence[int]) -> None:
        """model: the copy, with the start weights until the first sync. ends: tokens that end an answer."""
        self.model, self._section, self._world, self._ends = model, section, world, list(ends)
        self.folder = Path()
        """Where the run keeps its answers."""
        self.identity = f"transformers {transformers.__version__}, torch {torch.__version__}"
        """Name and version, for the record."""
        self.frozen: dict[str, str] = {}
        """`digest` of weights that are not trained."""
        self._takes_positions = "position_ids" in signature(model.forward).parameters

    def require_whole(self, answers: Sequence[Answer]) -> None:
        """Raises PrecisionError for an answer that does not end where its end token is, or else at its longest, that
        has no log-probabilities, or that a seed of its own would not have drawn once more in its group."""
        size, problem = self._section.group_size, ""
        for number, (ids, log_probs, ended) in enumerate(answers):
            ends = np.isin(ids, self._ends)
            full = len(ids) == self._section.max_new_tokens
            before = answers[number - number % size : number]
            if ends[:-1].any() or ends[-1] != ended or not (ended or full) or len(ids) != len(log_probs):
                problem = (
                    f"cut an answer wrongly: number {number} has {len(ids)} tokens, end tokens at "
                    f"{np.flatnonzero(ends).tolist()}, and ended = {ended}, where it ends with its first end token or "
                    f"has grpo.max_new_tokens = {self._section.max_new_tokens}"
                )
            elif not np.isfinite(log_probs).all():
                problem = f"says a log-probability that is not finite of answer number {number}"
            elif log_probs.sum() < _NEVER_TWICE and any(np.array_equal(ids, other.ids) for other in before):
                problem = (
                    f"repeated answer number {number} in its group, whose probability is e^{log_probs.sum():.0f}: "
                    "seeds are not the samples' own"
                )
            if problem:
                raise PrecisionError(f"the sampler {problem}; nothing was learned")

    @torch.no_grad()
    def receive(self, weights: Weights) -> None:
        """Take new weights, and forget whatever was computed with others (prefix caches). Every rank iterates over all
        of `weights`, since making them may be a collective."""
        own = dict(self.model.named_parameters(remove_duplicate=False))
        for name, tensor in weights:
            own[name].copy_(tensor)

    def differing(self, weights: Weights, expected: Mapping[str, str]) -> list[str]:
        """The trainer's names of the tensors that it computes with now, whatever it received, that are not the
        trainer's. expected: `digest` of each."""
        return differing_from(self.model, weights)

    def sample(self, requests: Sequence[Request], *, version: str) -> list[Answer]:
        """Answers in the order of the requests, by the weights of that version (`synchronise`)."""
        size = self._section.at_once
        parts = (requests[first : first + size] for first in range(0, len(requests), size))
        return [answer for part in parts for answer in self._drawn(part)]

    @torch.no_grad()
    def _drawn(self, requests: Sequence[Request]) -> list[Answer]:
        device, rows, most = self.model.device, len(requests), self._section.max_new_tokens
        draws = [uniforms(request.key, most, person=PERSON) for request in requests]
        numbers = torch.from_numpy(np.stack(draws)).to(device)
        longest = max(len(request.prompt) for request in requests)
        ids = torch.zeros(rows, longest, dtype=torch.int64)
        seen = torch.zeros(rows, longest + most, dtype=torch.int64, device=device)
        for row, request in enumerate(requests):  # padded at the left, so that all go on at one place
            start = longest - len(request.prompt)
            ids[row, start:] = torch.from_numpy(request.prompt)
            seen[row, start:] = 1
        padded = bool((seen == 0).any())
        positions = (seen.cumsum(1) - 1).clamp(min=0)
        ids, past, first = ids.to(device), None, 0
        ended = torch.zeros(rows, dtype=torch.bool, device=device)
        ends = torch.tensor(self._ends, dtype=torch.int64, device=device)
        drawn, found = [], []
        for step in range(most):
            last = first + ids.shape[1]
            given: dict[str, Any] = {"attention_mask": seen[:, :last]} if padded else {}
            given |= {"position_ids": positions[:, first:last]} if self._takes_positions else {}
            output = self.model(input_ids=ids, past_key_values=past, use_cache=True, logits_to_keep=1, **given)
            past, first = output.past_key_values, last
            log_probs = torch.log_softmax(output.logits[:, -1].float() / self._section.temperature, -1)
            reached = log_probs.double().exp().cumsum(-1)
            place = numbers[:, step, None] * reached[:, -1:]
            ids = torch.searchsorted(reached, place, right=True).clamp_(max=reached.shape[-1] - 1)
            drawn.append(ids)
            found.append(log_probs.gather(1, ids))
            ended |= torch.isin(ids[:, 0], ends)
            if bool(ended.all()):
                break
        tokens, scores = torch.cat(drawn, 1).cpu().numpy(), torch.cat(found, 1).cpu().numpy()
        stops = np.isin(tokens, self._ends)
        counts = np.where(stops.any(axis=1), stops.argmax(axis=1) + 1, most)
        answers = zip(tokens, scores, counts, ended.tolist(), strict=True)
        return [Answer(row[:count], own[:count], stopped) for row, own, count, stopped in answers]

    def in_fp32(self) -> Forward:
        """The copy's forward pass in FP32, with the values that its weights have."""
        named = (*self.model.named_parameters(), *self.model.named_buffers())
        wide = {name: value.float() if value.is_floating_point() else value for name, value in named}
        return lambda **given: functional_call(self.model, wide, kwargs=given)

    def close(self) -> None:
        """Nothing is held but the model."""
