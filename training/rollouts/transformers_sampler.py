"""The sampler in the trainer's process: a second copy of the model on every rank, with the trainer's tensors and names.

It is built as the trainer's model is, adapter included, in the compute dtype. vllm_sampler.py has the sampler that asks
servers. Token ids go in and come out, never text; every rank makes its own requests.
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
from torch.nn.utils.rnn import pad_sequence
from transformers import PretrainedConfig, PreTrainedModel

from config.errors import UserError
from config.resolved import Resolved
from config.schema import GrpoSection
from config.task import model_class_of
from data.corpora.sampler import uniforms
from modeling.adapter import add_adapter
from modeling.build import attending_in_fp32, build_model
from modeling.objectives.objective import Forward
from precision.routers import compute_routers_in_fp32
from training.distributed import World
from training.engine import Engine
from training.engine.flips import as_integers
from training.engine.ledger import PrecisionError

Weights = Iterable[tuple[str, torch.Tensor]]
"""Name and whole tensor of every parameter, in the dtype that the trainer computes with; a tied one under each name."""

PERSON = b"mantissa-answer"  # keeps the random numbers of an answer apart from other uses of its key
_NEVER_TWICE = -30.0  # [nats] an answer of smaller log-probability is drawn twice less than once in 1e13 pairs


class Request(NamedTuple):
    prompt: np.ndarray  # (n,) int64
    key: str  # seed of this answer alone: its random numbers do not depend on what is sampled beside it


class Answer(NamedTuple):
    ids: np.ndarray  # (n,) int64, with its end token if it ended; 1 <= n <= grpo.max_new_tokens
    log_probs: np.ndarray  # (n,) float32, by the softmax(logits / temperature) that it was drawn from
    ended: bool  # False if it was cut off at grpo.max_new_tokens


def drawn(logits: torch.Tensor, draws: torch.Tensor, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows, 1) tokens, where (rows, vocabulary) logits' cumulative distributions reach `draws`, (rows,) in [0, 1); and
    their log-probabilities in FP32."""
    log_probs = torch.log_softmax(logits.float() / temperature, -1)
    reached = log_probs.double().exp().cumsum(-1)
    place = draws[:, None].double() * reached[:, -1:]
    ids = torch.searchsorted(reached, place, right=True).clamp_(max=reached.shape[-1] - 1)
    return ids, log_probs.gather(1, ids)


def digest(tensor: torch.Tensor) -> str:
    """SHA-256 of a tensor's dtype, shape and values; -0.0 counts as 0.0, since kernels may exchange the two."""
    values = (tensor.detach() + 0.0).contiguous().cpu()
    head = f"{tensor.dtype} {tuple(tensor.shape)}".encode()
    return hashlib.sha256(head + values.reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def differing_from(model: PreTrainedModel, weights: Weights) -> list[str]:
    """Names of the tensors of which the model has another dtype, shape or bit."""
    own = dict(model.named_parameters(remove_duplicate=False))
    pairs = ((name, own[name], tensor) for name, tensor in weights)
    return [name for name, a, b in pairs if a.dtype != b.dtype or not torch.equal(as_integers(a), as_integers(b))]


def copy_of_model(resolved: Resolved, shape: PretrainedConfig, engine: Engine) -> PreTrainedModel:
    """The run's model with its start weights and the trainer's dtypes, in evaluation mode, whole on this rank."""
    config, seed = resolved.config, resolved.config.run.seed
    model = build_model(config.model, shape, seed=seed, model_class=model_class_of(config), adapter=config.adapter)
    model = add_adapter(model, config.adapter, seed=seed, model_class=model_class_of(config))
    if resolved.compute != "fp32" and config.precision.routers == "fp32":
        compute_routers_in_fp32(model)
    for own, trained in zip(model.parameters(), engine.model.parameters(), strict=True):
        # trained weights are copied: memory mapped from a file is unaligned, where kernels add in another order
        shared = engine.stage < 3 and not trained.requires_grad
        own.data = trained.data if shared else own.data.to(engine.world.device, trained.dtype, copy=True)
    for buffer, its in zip(model.buffers(), engine.model.buffers(), strict=True):
        buffer.data = its.detach().clone()
    return model.eval().requires_grad_(False)


class TransformersSampler:
    """Draws each token by inverting the cumulative distribution at a random number that belongs to the answer."""

    identity = f"transformers {transformers.__version__}, torch {torch.__version__}"  # for the record

    def __init__(self, model: PreTrainedModel, section: GrpoSection, world: World, *, ends: Sequence[int]) -> None:
        """model: the copy, with the start weights until the first sync. ends: tokens that end an answer."""
        self.model, self._section, self._world, self._ends = model, section, world, list(ends)
        self.folder = Path()  # for the run's answers
        self.frozen: dict[str, str] = {}  # digests of weights that are not trained
        takes = signature(model.forward).parameters
        self._takes_positions = "position_ids" in takes
        if "past_key_values" not in takes:
            raise UserError(f"task = grpo: cannot sample from {model.config.model_type}, which has no past_key_values")

    def require_whole(self, answers: Sequence[Answer]) -> None:
        """Raises PrecisionError for answers cut wrongly, not finite, or repeated in their group too improbably."""
        size, longest, problem = self._section.group_size, self._section.max_new_tokens, ""
        for number, (ids, log_probs, ended) in enumerate(answers):
            ends, likelihood = np.isin(ids, self._ends), log_probs.sum()
            before = answers[number - number % size : number]
            whole = ended or len(ids) == longest
            if ends[:-1].any() or ends[-1] != ended or not whole or len(ids) != len(log_probs):
                problem = f"cut an answer wrongly: number {number} has {len(ids)} of at most {longest} tokens, end "
                problem += f"tokens at {np.flatnonzero(ends).tolist()}, and ended = {ended}"
            elif not np.isfinite(log_probs).all():
                problem = f"says a log-probability that is not finite of answer number {number}"
            elif likelihood < _NEVER_TWICE and any(np.array_equal(ids, other.ids) for other in before):
                problem = f"repeated answer number {number} in its group, whose probability is e^{likelihood:.0f}: "
                problem += "seeds are not the samples' own"
            if problem:
                raise PrecisionError(f"the sampler {problem}; nothing was learned")

    @torch.no_grad()
    def receive(self, weights: Weights) -> None:
        """Take new weights, and drop caches of others. A collective: every rank consumes all of `weights`."""
        own = dict(self.model.named_parameters(remove_duplicate=False))
        for name, tensor in weights:
            if own[name].data_ptr() != tensor.data_ptr():
                own[name].copy_(tensor)

    def differing(self, weights: Weights, expected: Mapping[str, str]) -> list[str]:
        """Names of tensors that the sampler computes with and that differ from the trainer's. expected: digests."""
        return differing_from(self.model, weights)

    def sample(self, requests: Sequence[Request], *, version: str) -> list[Answer]:
        """Answers in the order of the requests, by the weights of this version (`synchronise`)."""
        size = self._section.at_once
        parts = (requests[first : first + size] for first in range(0, len(requests), size))
        return [answer for part in parts for answer in self._drawn(part)]

    @torch.no_grad()
    def _drawn(self, requests: Sequence[Request]) -> list[Answer]:
        device, most = self.model.device, self._section.max_new_tokens
        draws = torch.from_numpy(np.stack([uniforms(each.key, most, person=PERSON) for each in requests])).to(device)
        prompts = [torch.from_numpy(request.prompt) for request in requests]
        # padded on the left, so that all answers start at one place
        ids = pad_sequence(prompts, batch_first=True, padding_side="left").to(device)
        absent = ids.shape[1] - torch.tensor([len(prompt) for prompt in prompts], device=device)
        mask = (torch.arange(ids.shape[1] + most, device=device) >= absent[:, None]).long()
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        padded, past, first = not bool(mask.all()), None, 0
        ends, rows = torch.tensor(self._ends, device=device), torch.arange(len(requests), device=device)
        live, lengths = torch.ones_like(rows, dtype=torch.bool), torch.zeros_like(rows)  # live: in the batch, not ended
        tokens = torch.zeros(len(requests), most, dtype=torch.int64, device=device)
        scores = tokens.float()
        for step in range(most):
            last = first + ids.shape[1]
            given: dict[str, Any] = {"attention_mask": mask[:, :last]} if padded else {}
            given |= {"position_ids": positions[:, first:last]} if self._takes_positions else {}
            output = self.model(input_ids=ids, past_key_values=past, use_cache=True, logits_to_keep=1, **given)
            past, first = output.past_key_values, last
            ids, log_probs = drawn(output.logits[:, -1], draws[:, step], self._section.temperature)
            tokens[rows, step], scores[rows, step] = ids[:, 0], log_probs[:, 0]
            lengths[rows] += live
            live &= ~torch.isin(ids[:, 0], ends)
            if not (left := int(live.sum())):
                break
            if 8 * left <= 7 * len(live):  # answers that ended leave the batch
                kept = live.nonzero()[:, 0]
                past.reorder_cache(kept)
                ids, mask, positions, draws, rows, live = (x[kept] for x in (ids, mask, positions, draws, rows, live))
        found = zip(tokens.cpu().numpy(), scores.cpu().numpy(), lengths.tolist(), strict=True)
        return [self._answer_of(row[:length], own[:length]) for row, own, length in found]

    def _answer_of(self, ids: np.ndarray, log_probs: np.ndarray) -> Answer:
        return Answer(ids, log_probs, bool(ids[-1] in self._ends))

    def in_fp32(self) -> Forward:
        """The copy's forward pass computed in FP32, with its weights and buffers widened."""
        named = (*self.model.named_parameters(), *self.model.named_buffers())
        wide = {name: value.float() if value.is_floating_point() else value for name, value in named}

        def forward(**given: Any) -> Any:
            with attending_in_fp32(self.model):
                return functional_call(self.model, wide, kwargs=given)

        return forward

    def close(self) -> None:
        """Release what is held outside of this process."""
