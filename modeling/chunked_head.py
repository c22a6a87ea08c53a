"""Let a model's output embedding put out the loss instead of logits, whatever the model does around it.

The head's `forward` is replaced on the instance, so it runs where it always did: under ZeRO-3's hooks, which have
gathered its weight once by then, and inside its precision region. The loss leaves the model as its `logits`, so that
everything that watches a model's outputs, DeepSpeed's backward hooks first of all, finds it in its place.

What a model does to its logits after the head is found out by trying: one pass in which the head puts out numbers that
are known. Nothing, a factor (Granite, Cohere) and a soft cap (Gemma 2) can be done chunk by chunk; with anything else
the model has to be given its logits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from modeling.linear_cross_entropy import Head, linear_cross_entropy_sum

_LARGEST = 60.0
"""Logits that are tried reach from minus this to this: past every soft cap in use."""


@dataclass
class _Pass:
    """What the pass that runs now wants of the head."""

    labels: torch.Tensor | None
    """None: tried numbers instead of a loss."""
    gradient_scale: torch.Tensor | float = 1.0
    calls: int = 0
    tried: torch.Tensor | None = None
    loss: torch.Tensor | None = None


class ChunkedHead:
    """The output embedding of one model. Works on the model in place until `close`; idle outside of `loss_of`.

    To be made after DeepSpeed has laid its hooks: its own hook has to see what theirs have made of the loss.
    """

    def __init__(self, model: PreTrainedModel, *, chunk_tokens: int) -> None:
        """Raises ValueError, with the reason, where the head is not a plain linear layer."""
        head: Any = model.get_output_embeddings()
        kind = type(head)
        if kind is not nn.Linear or "forward" in head.__dict__:
            raise ValueError(f"its output embedding is {kind.__name__}, not a plain linear layer")
        self._model: Any = model
        self._head, self._chunk = head, chunk_tokens
        self._scale = 1.0
        self._cap: float | None = None
        self._pass: _Pass | None = None
        self._head_forward, self._model_forward = head.forward, model.forward
        self._own = "forward" in model.__dict__
        self._head.forward = self._of_head
        self._model.forward = self._of_model
        self._hook = head.register_forward_hook(self._keep_loss)
        self._hooks = len(head._forward_hooks)

    @property
    def watched(self) -> bool:
        """Someone has laid a hook on the head since, and is to see logits."""
        return len(self._head._forward_hooks) != self._hooks

    @contextmanager
    def loss_of(self, labels: torch.Tensor, gradient_scale: torch.Tensor | float) -> Iterator[None]:
        """Inside, the model puts out as its logits the summed loss over `labels`, of shape (1, 1, 1).

        labels: (batch, sequence) int64, already shifted. gradient_scale: what the loss's gradient is going to be.
        """
        self._pass = _Pass(labels, gradient_scale)
        try:
            yield
        finally:
            self._pass = None

    def learn(self, run: Callable[[], Any]) -> None:
        """Find out what the model does to its logits. run: a pass without gradients; the model's output.

        Raises ValueError, with the reason, where it is nothing that can be done chunk by chunk.
        """
        self._pass = _Pass(None)
        try:
            found = run().logits
            tried = self._pass.tried
            if self._pass.calls != 1 or tried is None:
                raise ValueError(f"it calls its output embedding {self._pass.calls} times a pass")
        finally:
            self._pass = None
        if found.shape != tried.shape:
            raise ValueError(f"it makes logits of {tuple(found.shape)} of {tuple(tried.shape)}")
        found = found.float()
        factor = float(found.flatten()[-1] / tried.flatten()[-1])
        cap = getattr(self._model.config.get_text_config(), "final_logit_softcapping", None)
        if torch.allclose(found, tried * factor, rtol=1e-5):
            self._scale = factor
        elif cap is not None and torch.allclose(found, cap * torch.tanh(tried / cap), rtol=1e-4):
            self._cap = float(cap)
        else:
            raise ValueError("it changes its logits in a way that is not known here")

    def close(self) -> None:
        """Give both modules their own forward back."""
        self._hook.remove()
        del self._head.forward
        if self._own:
            self._model.forward = self._model_forward
        else:
            del self._model.forward

    def _of_head(self, hidden: torch.Tensor) -> torch.Tensor:
        now, weight = self._pass, self._head.weight
        if now is None:
            return self._head_forward(hidden)
        now.calls += 1
        if now.labels is None:
            shape = (*hidden.shape[:-1], len(weight))
            steps = hidden.shape[:-1].numel() * len(weight)
            now.tried = torch.linspace(-_LARGEST, _LARGEST, steps, device=hidden.device).reshape(shape)
            return now.tried.clone()
        head = Head(weight, self._head.bias, self._scale, self._cap)
        loss = linear_cross_entropy_sum(
            hidden, head, now.labels, chunk_tokens=self._chunk, gradient_scale=now.gradient_scale
        )
        return loss.reshape(1, 1, 1)

    def _keep_loss(self, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        if self._pass is not None:
            self._pass.loss = output

    def _of_model(self, *args: Any, **kwargs: Any) -> Any:
        output = self._model_forward(*args, **kwargs)
        if self._pass is not None and self._pass.labels is not None:
            output.logits = self._pass.loss  # not what the model has made of it
        return output
