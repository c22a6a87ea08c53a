"""The sampler in transformers' continuous batches: an answer that ends makes room for the next.

transformers would draw with one seed for all requests. Here each answer's own random numbers travel with its request, a
processor of logits draws the token, and the greedy choice that follows takes it.
"""

import logging
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig
from transformers.generation.configuration_utils import ContinuousBatchingConfig
from transformers.generation.continuous_batching.cb_logits_processors import ContinuousBatchingLogitsProcessor

from config.errors import UserError, one_line
from data.corpora.sampler import uniforms
from training.rollouts.transformers_sampler import PERSON, Answer, Request, TransformersSampler, drawn

_PAGE = 32  # [tokens] of keys and values that are allocated together
_HOW: dict[str, Any] = {"allow_block_sharing": False, "use_async_batching": False, "use_cuda_graph": False}


class _Draws(ContinuousBatchingLogitsProcessor):
    """Draws the next token of every request in a batch, and keeps its log-probability."""

    supported_kwargs, ignored_kwargs = dict[str, type](), ()

    def __init__(self, requests: Sequence[Request], most: int, temperature: float) -> None:
        self._draws = {one.key: uniforms(one.key, most, person=PERSON) for one in requests}
        self._temperature = temperature
        self.log_probs: dict[str, list[float]] = {key: [] for key in self._draws}
        self._batch: list[str] = []

    def fill_defaults(self, int32_tensor: torch.Tensor) -> None:
        int32_tensor.zero_()

    def prepare_tensor_args(self, requests_with_new_token: list[Any]) -> torch.Tensor:
        self._batch = [request.state.request_id for request in requests_with_new_token]
        own = [self._draws[key][len(self.log_probs[key])] for key in self._batch]
        return torch.tensor(own, dtype=torch.float32).view(torch.int32)

    def __call__(self, scores: torch.Tensor, tensor_arg: torch.Tensor) -> torch.Tensor:
        ids, log_probs = drawn(scores, tensor_arg[: len(scores)].view(torch.float32), self._temperature)
        for key, value in zip(self._batch, log_probs[:, 0].tolist(), strict=False):  # further rows have no new token
            self.log_probs[key].append(value)
        return torch.full_like(scores, -1.0).scatter_(1, ids, 1.0)


class ContinuousSampler(TransformersSampler):
    """The same copy with the same random numbers, and transformers' own loop."""

    identity = f"{TransformersSampler.identity}, continuous batches"

    def sample(self, requests: Sequence[Request], *, version: str) -> list[Answer]:
        """Answers in the order of the requests. Raises UserError for a model that transformers cannot batch so."""
        size, most, model = self._section.at_once, self._section.max_new_tokens, self.model
        longest = max((len(request.prompt) for request in requests), default=0) + most
        room: dict[str, Any] = {"num_blocks": size * -(-longest // _PAGE), "page_size": _PAGE}
        room |= {"max_batch_tokens": size + longest, "max_requests_per_batch": size}
        how = ContinuousBatchingConfig(**_HOW, **room, auto_switch_to_flash=False)
        greedy = GenerationConfig(do_sample=False, eos_token_id=self._ends, max_new_tokens=most)
        draws, tokens = _Draws(requests, most, self._section.temperature), dict[str, np.ndarray]()
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)  # errors are raised below
        try:
            manager = model.init_continuous_batching(greedy, how)  # type: ignore[operator]
            manager.logit_processor.logits_processor.append(draws)
            manager.logit_processor.tensors_required, manager.logit_processor.do_processing = 1, True
            for request in requests:  # before the start, so that batches do not depend on time
                manager.add_request(request.prompt.tolist(), request_id=request.key)
            manager.start()
            try:
                while len(tokens) < len(requests):
                    result = manager.get_result(timeout=1.0)
                    if result is not None and result.error is None:
                        tokens[result.request_id] = np.array(result.generated_tokens)
                    elif result is not None or not manager.is_running():
                        raise RuntimeError(result and result.error)
            finally:
                manager.stop()
        except (RuntimeError, ValueError) as error:
            why = f"transformers cannot sample from {model.config.model_type} so ({one_line(error)})"
            raise UserError(f"grpo.engine = continuous: {why}; set it to transformers") from None
        return [self._answer_of(tokens[one.key], np.array(draws.log_probs[one.key], np.float32)) for one in requests]
