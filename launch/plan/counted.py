"""What autograd keeps of one micro-batch, counted in a forward pass on the meta device.

Formulas (memory.py) know the blocks of a few families whose weights are all trained. Of a model with an adapter, where
a frozen weight's input is not kept, and of an encoder or another block it is counted what the model's own code saves,
storage by storage: nothing is computed, so a model of any size takes a second.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from unittest.mock import patch
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from launch.plan.layout import Layout

_MATMULS = ("aten::mm", "aten::addmm", "aten::convolution")
"""Whose results activation_checkpointing = ops keeps, beside those of fused attention."""
_INNER = {"aten::mm": 0, "aten::addmm": 1, "aten::bmm": 0, "aten::baddbmm": 1}
"""Matmuls whose FLOPs are counted, and the argument whose last dimension they sum over."""


@dataclass(frozen=True)
class Counted:
    """[bytes] Of one token of the micro-batch that was counted. Those of blocks are means over the blocks."""

    block: float
    """Kept in a block of which nothing is recomputed."""
    attention: float
    """Of these in its attention module, the module's input included."""
    matmuls: float
    """Results of its matmuls and of fused attention, kept or not."""
    outside: float
    """Kept outside of the blocks, without the logits."""
    weight_flops: float
    """[FLOP] Of a token's matmuls with weights, the head's included, in the forward pass."""
    attention_flops: float
    """[FLOP] Of the products inside attention, over the whole square."""


def count_activations(model: Any, blocks: Sequence[Any], layout: Layout, *, encoder: bool) -> Counted | None:
    """Run the model (on the meta device, changed in place) once in training on a micro-batch of `layout`.

    encoder: it gets an attention mask, which masks something where rows are padded; so does one that reads sources for
    a decoder. None where the model's code cannot run without values, as JetMoe's.
    """
    import torch

    dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[layout.compute]
    model.to(device="meta", dtype=dtype).train()
    rows = layout.micro * layout.rows
    read = layout.sequence if layout.targets else layout.tokens // rows
    ids = torch.zeros(rows, read, dtype=torch.int64, device="meta")
    inputs: dict[str, Any] = {"input_ids": ids}
    if encoder or layout.targets:
        inputs["attention_mask"] = torch.ones_like(ids)
    if layout.targets:
        inputs["decoder_input_ids"] = ids.new_zeros(rows, layout.targets)
    if not encoder:
        inputs["use_cache"] = False
    if layout.masked:
        inputs["position_ids"] = ids
    counter = _Counter(model, on_cpu=layout.on_cpu)
    padded = layout.task == "classify" or bool(layout.targets)
    try:
        with counter.watching(blocks), _answering(not (padded or layout.masked), counter):
            alive = model(**inputs)
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        # What torch and a model's own code raise where they ask a tensor without memory for its values; the planner
        # then estimates by its rule and says so.
        return None
    found = counter.sizes()
    del alive
    tokens, each = layout.tokens, layout.tokens * len(blocks)
    inside, attention, outside = (sum(found[scope]) for scope in ("block", "attention", "outside"))
    return Counted(
        block=(inside + attention) / each,
        attention=attention / each,
        matmuls=counter.matmuls / each,
        outside=outside / tokens,
        weight_flops=counter.weight_flops / tokens,
        attention_flops=counter.attention_flops / tokens,
    )


class _Kept:
    """One storage that a node of the graph keeps. It is gone when its last node is."""

    def __init__(self, storage: Any, size: float, scope: str) -> None:
        self.storage, self.size, self.scope = storage, size, scope


class _Counter:
    """Storages that autograd keeps, by the part of the model that first saved them."""

    def __init__(self, model: Any, *, on_cpu: bool) -> None:
        self._known = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        self._kept: WeakValueDictionary[int, _Kept] = WeakValueDictionary()
        self._inside = dict.fromkeys(("block", "attention", "dropout"), 0)
        self._model, self._on_cpu = model, on_cpu
        self.matmuls = 0.0
        """[bytes] Results of matmuls in blocks."""
        self.weight_flops = self.attention_flops = 0.0

    @contextmanager
    def watching(self, blocks: Sequence[Any]) -> Iterator[None]:
        """Inside, what is saved is counted. blocks: the model's."""
        from torch.autograd.graph import saved_tensors_hooks

        with ExitStack() as stack:
            for block in blocks:
                self._enter(stack, block, "block")
                for module in filter(_is_attention, block.modules()):
                    self._enter(stack, module, "attention")
            for module in self._model.modules():
                if type(module).__name__ == "Dropout":
                    self._enter(stack, module, "dropout")
            stack.enter_context(saved_tensors_hooks(self._pack, lambda kept: kept.storage))
            yield

    def sizes(self) -> dict[str, list[float]]:
        """[bytes] Of what is kept now, by scope."""
        found: dict[str, list[float]] = {"block": [], "attention": [], "outside": []}
        for kept in self._kept.values():
            found[kept.scope].append(kept.size)
        return found

    def add_result(self, *tensors: Any) -> None:
        """Count results of a matmul, if it is in a block."""
        if self._inside["block"]:
            self.matmuls += sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @property
    def on_cpu(self) -> bool:
        """Whether the run computes on a CPU."""
        return self._on_cpu

    def _enter(self, stack: ExitStack, module: Any, scope: str) -> None:
        def count(change: int) -> Any:
            def hook(*_: Any) -> None:
                self._inside[scope] += change

            return hook

        for handle in (module.register_forward_pre_hook(count(1)), module.register_forward_hook(count(-1))):
            stack.callback(handle.remove)

    def _pack(self, tensor: Any) -> Any:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return _Kept(storage, 0.0, "block")
        kept = self._kept.get(key)
        if kept is None:
            # A GPU's dropout keeps a mask of bytes, a CPU's its factors.
            narrow = self._inside["dropout"] and not self._on_cpu
            size = storage.nbytes() / (tensor.element_size() if narrow else 1)
            scope = "attention" if self._inside["attention"] else "block" if self._inside["block"] else "outside"
            kept = self._kept[key] = _Kept(storage, size, scope)
        return kept


def _is_attention(module: Any) -> bool:
    """As `modeling.activation_checkpointing` finds what it recomputes."""
    below = list(module.modules())[1:]
    inner = any("Attention" in type(child).__name__ for child in below)
    return "Attention" in type(module).__name__ and bool(below) and not inner


@contextmanager
def _answering(answer: bool, counter: _Counter) -> Iterator[None]:
    """Inside, a question about a tensor's values is answered so, and fused attention keeps what its kernels keep.

    Models ask whether a mask masks anything, to do without it.
    """
    import torch
    from torch.nn import functional
    from torch.utils._python_dispatch import TorchDispatchMode

    class Answers(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._local_scalar_dense.default:
                return answer
            result = func(*args, **(kwargs or {}))
            name = func._schema.name
            if name in _MATMULS:
                counter.add_result(result)
            if name in _INNER:
                flops = 2.0 * result.numel() * args[_INNER[name]].shape[-1]
                if name in _MATMULS:
                    counter.weight_flops += flops
                else:
                    counter.attention_flops += flops
            return result

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: Any, key: Any, value: Any, bias: Any) -> Any:
            batch, heads, length, _ = query.shape
            result = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
            sums = query.new_empty(batch, heads, length, dtype=torch.float32)
            ctx.save_for_backward(query, key, value, bias, result, sums)
            counter.add_result(result, sums)
            counter.attention_flops += 2.0 * sums.numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])
            return result

    original = functional.scaled_dot_product_attention

    def attention(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, **rest: Any) -> Any:
        trained = attn_mask is not None and attn_mask.requires_grad  # T5's positions
        if counter.on_cpu and (dropout_p or trained):  # is not fused there
            return original(query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, **rest)
        bias = attn_mask
        if bias is not None and bias.dtype == torch.bool:
            bias = torch.empty_like(bias, dtype=query.dtype)
        return Fused.apply(query, key, value, bias)

    with Answers(), patch.object(functional, original.__name__, attention):
        yield
