"""A rollout engine: it samples answers with weights that it is given, and says what it computes with.

`TransformersSampler` is one in the trainer's own process: a second copy of the model in the compute dtype on every
rank, built as the trainer's is, adapter included, so that it computes with the same tensors and names. vllm_sampler.py
has another, in servers. Token ids go in and come out, never text; every rank asks its own requests.
"""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from inspect import signature
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

from config.resolved import Resolved
from config.schema import GrpoSection
from config.task import model_class_of
from data.corpora.sampler import splitmix
from modeling.adapter import add_adapter
from modeling.build import build_model
from precision.routers import compute_routers_in_fp32
from training.distributed import World
from training.engine import Engine
from training.engine.ledger import PrecisionError

Weights = Iterable[tuple[str, torch.Tensor]]
"""Name and whole tensor of every parameter, in the dtype that the trainer computes with; a tied one under each name."""


class Request(NamedTuple):
    """One answer to be sampled."""

    prompt: np.ndarray
    """(n,) int64"""
    key: str
    """Seed of this answer and no other: whatever else is sampled beside it, it draws the same random numbers."""


class Answer(NamedTuple):
    """A sampled answer."""

    ids: np.ndarray
    """(n,) int64, an end token included where it has ended; 1 <= n <= grpo.max_new_tokens."""
    log_probs: np.ndarray
    """(n,) float32: of each under softmax(logits / temperature), as sampled from."""
    ended: bool
    """False where it was cut off at its length. Only this says so: an end token is a token like any other."""


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's dtype, shape and values, -0.0 as 0.0, which kernels may write for it."""
    values = (tensor.detach() + 0.0).contiguous().cpu()
    head = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    return hashlib.sha256(head + values.reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether dtype, shape and every bit are equal."""
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    alike = one.dtype == other.dtype and one.shape == other.shape
    return alike and torch.equal(*(x.detach().reshape(-1).view(bits) for x in (one, other)))


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
    dtypes = {name: parameter.dtype for name, parameter in engine.model.named_parameters()}
    for name, parameter in model.named_parameters():
        # a copy, since memory that is mapped from files is unaligned: kernels would add in another order
        parameter.data = parameter.data.to(engine.world.device, dtypes[name], copy=True)
    buffers = dict(engine.model.named_buffers())
    for name, buffer in model.named_buffers():
        buffer.data = buffers[name].detach().clone()
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
        """Raises PrecisionError for an answer that does not end where its end token is, or else at its longest."""
        for number, (ids, log_probs, ended) in enumerate(answers):
            ends = np.isin(ids, self._ends)
            full = len(ids) == self._section.max_new_tokens
            if ends[:-1].any() or ends[-1] != ended or not (ended or full) or len(ids) != len(log_probs):
                at = np.flatnonzero(ends).tolist()
                raise PrecisionError(
                    f"the sampler cut an answer wrongly: number {number} has {len(ids)} tokens, end tokens at {at}, "
                    f"and ended = {ended}, where it ends with its first end token or has grpo.max_new_tokens = "
                    f"{self._section.max_new_tokens}; nothing was learned"
                )

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
        """Answers in the order of the requests, by the weights of that version (`Synced.version`)."""
        size = self._section.at_once
        parts = (requests[first : first + size] for first in range(0, len(requests), size))
        return [answer for part in parts for answer in self._drawn(part)]

    @torch.no_grad()
    def _drawn(self, requests: Sequence[Request]) -> list[Answer]:
        device, rows, most = self.model.device, len(requests), self._section.max_new_tokens
        numbers = torch.from_numpy(np.stack([uniforms(request.key, most) for request in requests])).to(device)
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
        open_rows = torch.ones(rows, dtype=torch.bool, device=device)
        ends = torch.tensor(self._ends, dtype=torch.int64, device=device)
        drawn, found = [], []
        lengths = torch.full((rows,), most, device=device)
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
            ending = open_rows & torch.isin(ids[:, 0], ends)
            lengths[ending] = step + 1
            open_rows &= ~ending
            if not bool(open_rows.any()):
                break
        tokens, scores = torch.cat(drawn, 1).cpu().numpy(), torch.cat(found, 1).cpu().numpy()
        rows_of = zip(tokens, scores, lengths.tolist(), open_rows.tolist(), strict=True)
        return [Answer(row[:count], own[:count], not cut_off) for row, own, count, cut_off in rows_of]

    @contextmanager
    def in_fp32(self) -> Iterator[PreTrainedModel]:
        """The copy computing in FP32 with the values that its weights have; afterwards they are what they were."""
        module: Any = self.model
        held = [(tensor, tensor.data) for tensor in (*module.parameters(), *module.buffers())]
        module.to(dtype=torch.float32)
        try:
            yield self.model
        finally:
            for tensor, data in held:
                tensor.data = data

    def close(self) -> None:
        """Nothing is held but the model."""


def uniforms(key: str, count: int) -> np.ndarray:
    """(count,) float64 in [0, 1): the random numbers of the answer with that key."""
    return (splitmix(key, count, person=b"mantissa-answer") >> np.uint64(11)).astype(np.float64) * 2.0**-53
