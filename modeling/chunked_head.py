"""Makes a model's output embedding return the loss instead of logits, whatever the model does around it.

The head's `forward` is replaced on the instance, so it runs where it always did: under ZeRO-3's hooks and inside its
precision region. The model returns the loss as its `logits`, where DeepSpeed's backward hooks and everything else that
reads a model's outputs find it. Hooks on the head get it too: observing a step must not change it.

Whatever a model does to its logits after the head is inferred from one pass in which the head returns known numbers.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from config.schema import ModelSection
from modeling.linear_cross_entropy import Head, Vocabulary, linear_cross_entropy

_PROBE_LIMIT = 60.0
"""Probe logits range from minus this to plus this, past every soft cap in use."""
CHUNK_LOGITS, CHUNK_LOGITS_ON_A_GPU = 2**26, 2**28
"""[logits] Size of one chunk, unless model.loss_chunk_tokens says otherwise: 256 MiB in FP32, and on a GPU 512 MiB in
16 bits. Each chunk reads and writes the FP32 gradient of the head's weight, 1 GiB for the 1B recipe."""
AUTO_FROM_LOGITS = 2**22
"""[logits] Micro-batches from this size on are chunked by model.loss = auto, even into one chunk. At this size an FP32
softmax and its gradients take 48 MiB, and more time than gradients computed in place; below it, as much time
(docs/loss.md)."""
_MULTIPLE = 64
"""[tokens] Chunks are multiples of this, for tensor cores."""


def loss_chunk(model: ModelSection, *, tokens: int, vocabulary: int, on_cpu: bool) -> int:
    """[tokens] Chunk size of the loss for a micro-batch of `tokens` tokens; 0: all logits at once."""
    if model.loss == "full" or (model.loss == "auto" and tokens * vocabulary < AUTO_FROM_LOGITS):
        return 0
    fitting = (CHUNK_LOGITS if on_cpu else CHUNK_LOGITS_ON_A_GPU) // vocabulary // _MULTIPLE * _MULTIPLE
    return model.loss_chunk_tokens or max(fitting, _MULTIPLE)


@dataclass
class _Pass:
    """The current pass: what the head should return, and what it returned."""

    labels: torch.Tensor | None
    """None: return probe logits instead of a loss."""
    gradient_scale: torch.Tensor | float = 1.0
    weights: torch.Tensor | None = None
    judged: bool = False
    calls: int = 0
    probe: torch.Tensor | None = None
    loss: torch.Tensor | None = None


class ChunkedHead:
    """The output embedding of one model. Changes the model in place until `close`; inactive outside of `loss_of`.
    Create it after DeepSpeed has registered its hooks: its own hook must see the loss that theirs return."""

    def __init__(
        self, model: PreTrainedModel, *, chunk_tokens: int, shared: Vocabulary | None = None, softmax: Any = None
    ) -> None:
        """shared, softmax: as in `Head`. Raises ValueError if the head is not a plain linear layer."""
        head: Any = model.get_output_embeddings()
        kind, self._shared = type(head), shared
        plain = kind is nn.Linear if shared is None else getattr(head, "gather_output", False)
        if not plain or "forward" in head.__dict__:
            raise ValueError(f"its output embedding is {kind.__name__}, not a plain linear layer")
        self._model: Any = model
        self._head, self._chunk, self._softmax = head, chunk_tokens, softmax
        self._scale = 1.0
        self._cap: float | None = None
        self._pass: _Pass | None = None
        self._head_forward, self._model_forward = head.forward, model.forward
        self._own = "forward" in model.__dict__
        self._head.forward = self._forward_head
        self._model.forward = self._forward_model
        self._hook = head.register_forward_hook(self._keep_loss)
        self.label_losses = torch.zeros(0)
        """Losses of the last pass inside `loss_of`, shaped like its labels, before weights and without gradient."""
        self.right: torch.Tensor | None = None
        """Result of `likeliest` for the labels of the last pass inside `loss_of`; None unless it was `judged`."""

    @contextmanager
    def loss_of(
        self,
        labels: torch.Tensor,
        gradient_scale: torch.Tensor | float,
        weights: torch.Tensor | None = None,
        *,
        judged: bool = False,
    ) -> Iterator[None]:
        """Context manager: the model returns as its logits the loss summed over `labels`, of shape (1, 1, 1).

        labels: (batch, sequence) int64, already shifted. gradient_scale: the gradient that the loss will receive.
        weights: FP32 factors on the losses, shaped like the labels; None: 1 each. judged: fill `right`; only without
        gradients.
        """
        self._pass = _Pass(labels, gradient_scale, weights, judged)
        try:
            yield
        finally:
            self._pass = None

    def detect_logit_transform(self, run: Callable[[], Any]) -> None:
        """Detect what the model does to its logits. run: a pass without gradients. Raises ValueError."""
        self._pass = _Pass(None)
        try:
            found = run().logits
            probe = self._pass.probe
            if self._pass.calls != 1 or probe is None:
                raise ValueError(f"it calls its output embedding {self._pass.calls} times per pass")
        finally:
            self._pass = None
        if found.shape != probe.shape:
            raise ValueError(f"it makes logits of {tuple(found.shape)} of {tuple(probe.shape)}")
        found = found.float()
        factor = float(found.flatten()[-1] / probe.flatten()[-1])
        cap = getattr(self._model.config.get_text_config(), "final_logit_softcapping", None)
        if torch.allclose(found, probe * factor, rtol=1e-5):
            self._scale = factor
        elif cap is not None and torch.allclose(found, cap * torch.tanh(probe / cap), rtol=1e-4):
            self._cap = float(cap)
        else:
            raise ValueError("it changes its logits in an unknown way")

    def close(self) -> None:
        """Restore the forward of both modules."""
        self._hook.remove()
        del self._head.forward
        if self._own:
            self._model.forward = self._model_forward
        else:
            del self._model.forward

    def _forward_head(self, hidden: torch.Tensor) -> torch.Tensor:
        now, weight = self._pass, self._head.weight
        if now is None:
            return self._head_forward(hidden)
        now.calls += 1
        if now.labels is None:
            vocabulary = len(weight) if self._shared is None else self._shared.size
            shape = (*hidden.shape[:-1], vocabulary)
            steps = hidden.shape[:-1].numel() * vocabulary
            now.probe = torch.linspace(-_PROBE_LIMIT, _PROBE_LIMIT, steps, device=hidden.device).reshape(shape)
            return now.probe.clone()
        self.right = torch.zeros(now.labels.shape, device=hidden.device) if now.judged else None
        head = Head(weight, self._head.bias, self._scale, self._cap, self._shared, self._softmax)
        loss, self.label_losses = linear_cross_entropy(
            hidden,
            head,
            now.labels,
            chunk_tokens=self._chunk,
            gradient_scale=now.gradient_scale,
            weights=now.weights,
            right=self.right,
        )
        loss = loss.reshape(1, 1, 1)
        now.loss = loss if now.loss is None else now.loss  # for a call that bypasses hooks
        return loss

    def _keep_loss(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if self._pass is not None:
            self._pass.loss = output

    def _forward_model(self, *args: Any, **kwargs: Any) -> Any:
        output = self._model_forward(*args, **kwargs)
        if self._pass is not None and self._pass.labels is not None:
            output.logits = self._pass.loss  # discards whatever the model did to it
        return output
