"""The engine's loss: as the task's objective computes it, or from chunks of logits that are not kept."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from config.batch import slice_length
from config.errors import UserError
from config.resolved import Resolved
from data.batches.loader import Batch
from modeling.chunked_head import ChunkedHead, loss_chunk
from modeling.compiling import CompiledBlock
from modeling.document_masking import rows_of
from modeling.objectives.label_prediction import LabelPrediction
from modeling.objectives.objective import Forward, Objective, Scored
from modeling.router_balance import RouterBalance
from training.distributed import World
from training.engine.tensor_slices import shared_vocabulary


def label_tokens_of_all(batch: Batch, world: World) -> torch.Tensor:
    """() float64: the divisor of the step's mean, at least 1. A collective if `batch` knows only its own labels."""
    if batch.label_tokens_of_all is None:
        found = world.sum(world.numbers([batch.label_tokens]))[0] * world.zero_ranks / world.world_size
        return found.clamp_(min=1.0)
    return torch.full((), float(max(batch.label_tokens_of_all, 1)), dtype=torch.float64, device=world.device)


class LossPath:
    """Summed losses of micro-batches on one DeepSpeed engine."""

    def __init__(
        self,
        engine: Any,
        objective: Objective,
        resolved: Resolved,
        world: World,
        router: RouterBalance | None,
        softmax: Callable[..., torch.Tensor] | None,
    ) -> None:
        """A collective if the loss is chunked: it runs two tokens through the model. router: watches its routers.
        softmax: the kernel of a chunk; None: torch's operators. Raises UserError if the config asks for a chunked loss
        and the model does not support one."""
        self._engine, self._objective, self._device = engine, objective, world.device
        self._labels = objective if isinstance(objective, LabelPrediction) else None
        self._forward = engine if router is None else router.watching(engine)
        self._head: ChunkedHead | None = None
        self.unchunked_reason: str | None = None
        """Why a loss that should be chunked is not; None otherwise."""
        section, model = resolved.config.model, engine.module
        if self._labels is None:  # only the cross-entropy at every label may be computed in chunks
            return
        tokens = resolved.batch.micro_size * slice_length(resolved.config.data.label_length, resolved.batch.sequence)
        vocabulary, on_cpu = model.config.get_text_config().vocab_size, world.device.type == "cpu"
        chunk = loss_chunk(section, tokens=tokens, vocabulary=vocabulary, on_cpu=on_cpu)
        if not chunk:
            return
        try:
            shared = shared_vocabulary(model, world.tensor)
            self._head = ChunkedHead(model, chunk_tokens=chunk, shared=shared, softmax=softmax)
            self._head.detect_logit_transform(self._forward_two_tokens)
        except ValueError as problem:
            if self._head is not None:
                self._head.close()
            self._head = None
            self.unchunked_reason = f"model {model.config.model_type}: {problem}"
            if section.loss == "chunked":
                fix = "set model.loss=auto or full"
                raise UserError(f"model.loss = chunked: not supported for {self.unchunked_reason}; {fix}") from problem

    @property
    def chunked(self) -> bool:
        """Whether the loss is computed from chunks of logits, which are not kept."""
        return self._head is not None

    def score(
        self,
        inputs: dict[str, Any],
        labels: torch.Tensor,
        gradient_scale: torch.Tensor | float,
        *,
        forward: Forward | None = None,
    ) -> Scored:
        """Summed loss of a micro-batch. gradient_scale: factor of the backward pass. forward: None is the engine's."""
        head, chunked, forward = self._head, self._labels, forward or self._forward
        with rows_of(inputs):
            if head is None or chunked is None:
                return self._objective.score(forward, inputs, labels)
            weights = chunked.weights(inputs, labels)
            with chunked.noisy(inputs) as given, head.loss_of(labels, gradient_scale, weights, judged=chunked.judges):
                loss = forward(**given, use_cache=False).logits.sum()
            return chunked.scored(loss, head.label_losses, labels, weights, head.right)

    def unhooked(self) -> set[nn.Module]:
        """Modules that cannot be observed: those inside compiled blocks, which would run uncompiled under hooks, and
        the head of a chunked loss, which returns the loss."""
        model = self._engine.module
        blocks = [item for item in model.modules() if isinstance(item.__dict__.get("forward"), CompiledBlock)]
        found = {inner for block in blocks for inner in block.modules() if inner is not block}
        return found | ({model.get_output_embeddings()} if self.chunked else set())

    @torch.no_grad()
    def _forward_two_tokens(self) -> Any:
        self._engine.eval()
        two = torch.zeros((1, 2), dtype=torch.int64, device=self._device)
        has_decoder = self._engine.module.config.is_encoder_decoder
        inputs = {"input_ids": two} | ({"decoder_input_ids": two} if has_decoder else {})
        output = self._engine(**inputs, use_cache=False)
        self._engine.train()
        return output
