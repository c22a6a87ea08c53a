"""Sampling in the trainer's own process: a second copy of the model in the compute dtype, on every rank.

The copy is built as the trainer's model is, adapter included, so that it computes with the same tensors and names. It
holds the start weights until the first sync, and is what a reference is made from, too.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

import numpy as np
import torch
import transformers
from transformers import PretrainedConfig, PreTrainedModel

from config.resolved import Resolved
from config.task import model_class_of
from modeling.adapter import add_adapter
from modeling.build import build_model
from precision.routers import compute_routers_in_fp32
from training.engine import Engine
from training.rollouts.sampler import Answer, Request, Weights, uniforms
from training.rollouts.sync import digest


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

    identity = f"transformers {transformers.__version__}, torch {torch.__version__}"

    def __init__(
        self, model: PreTrainedModel, *, length: int, temperature: float, ends: Sequence[int], at_once: int
    ) -> None:
        """length: of the longest answer. ends: tokens that end one. at_once: answers that are drawn together."""
        self.model = model
        self._length, self._temperature, self._ends, self._at_once = length, temperature, ends, at_once
        self._takes_positions = "position_ids" in signature(model.forward).parameters

    @torch.no_grad()
    def receive(self, weights: Weights) -> None:
        """Copy every tensor into the parameter of its name."""
        own = dict(self.model.named_parameters(remove_duplicate=False))
        for name, tensor in weights:
            own[name].copy_(tensor)

    def digests(self) -> dict[str, str]:
        """Digests of its parameters: modules compute with nothing else."""
        return {name: digest(value) for name, value in self.model.named_parameters(remove_duplicate=False)}

    def sample(self, requests: Sequence[Request], *, version: str) -> list[Answer]:
        """Answers, some at a time; the copy has one version of the weights, that of the last sync."""
        parts = range(0, len(requests), self._at_once)
        return [answer for first in parts for answer in self._drawn(requests[first : first + self._at_once])]

    @torch.no_grad()
    def _drawn(self, requests: Sequence[Request]) -> list[Answer]:
        device, rows = self.model.device, len(requests)
        numbers = torch.from_numpy(np.stack([uniforms(request.key, self._length) for request in requests])).to(device)
        longest = max(len(request.prompt) for request in requests)
        ids = torch.zeros(rows, longest, dtype=torch.int64)
        seen = torch.zeros(rows, longest + self._length, dtype=torch.int64, device=device)
        for row, request in enumerate(requests):  # padded at the left, so that all go on at one place
            start = longest - len(request.prompt)
            ids[row, start:] = torch.from_numpy(request.prompt)
            seen[row, start:] = 1
        padded = bool((seen == 0).any())
        positions = (seen.cumsum(1) - 1).clamp(min=0)
        ids, past, first = ids.to(device), None, 0
        open_rows = torch.ones(rows, dtype=torch.bool, device=device)
        ends = torch.tensor(list(self._ends), dtype=torch.int64, device=device)
        drawn, found = [], []
        lengths = torch.full((rows,), self._length, device=device)
        for step in range(self._length):
            last = first + ids.shape[1]
            given: dict[str, Any] = {"attention_mask": seen[:, :last]} if padded else {}
            given |= {"position_ids": positions[:, first:last]} if self._takes_positions else {}
            output = self.model(input_ids=ids, past_key_values=past, use_cache=True, logits_to_keep=1, **given)
            past, first = output.past_key_values, last
            log_probs = torch.log_softmax(output.logits[:, -1].float() / self._temperature, -1)
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
        counts, unended = lengths.tolist(), open_rows.tolist()
        return [
            Answer(tokens[row, :count], scores[row, :count], not unended[row])
            for row, count in enumerate(int(count) for count in counts)
        ]

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
