"""Count activations and operators of one micro-batch by running the real model on fake tensors.

The model runs as in training, with its precision regions, its adapter, and attention shared among ranks. What autograd
saves is added up storage by storage, and each operator of the forward and backward pass is recorded with its FLOPs and
the bytes of its operands. Nothing is computed, so a model of any size takes seconds.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch
from weakref import WeakValueDictionary

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from config.batch import WHOLE_POSITIONS
from config.cli import REPOSITORY
from config.errors import UserError, one_line
from config.task import ENCODER_TASKS
from launch.plan.layout import Layout
from launch.plan.operations import HEAD, Log, Operation
from modeling.activation_checkpointing import KEPT_OPERATORS, blocks_of, is_attention
from modeling.sequence_parallel import SequenceAttention
from precision.dtypes import DTYPES
from precision.manifest import load_manifest
from precision.regions import Regions

SCOPES = ("Norm", "attention", "MLP", "block")
"""Parts of a model that an operator may be in, innermost first."""


@dataclass(frozen=True)
class Counted:
    """[bytes] Sizes per token of the counted micro-batch. Values per block are means over the blocks."""

    block: float
    """Activations kept in a block without recomputation."""
    attention: float
    """The part of these in the block's attention module, including the module's input."""
    matmuls: float
    """Results of the block's matmuls and fused attention, whether kept or not."""
    outside: float
    """Activations kept outside the blocks, without the logits."""
    weights: float
    """[bytes] 16-bit copies of one block's weights kept by autocast, independent of the number of tokens."""
    weight_flops: float
    """[FLOP] Matmuls with weights in the forward pass, including the head's."""
    attention_flops: float
    """[FLOP] Matmuls inside attention in the forward pass, over the full square."""
    operations: tuple[Operation, ...] = ()
    """Operators of the whole micro-batch without head and loss; empty if the backward pass needs values."""


def count_activations(model: Any, layout: Layout) -> Counted:
    """Run the model (on the meta device, modified in place) once in training mode on a micro-batch of `layout`. Raises
    UserError if the model's code cannot run without values."""
    model.to(DTYPES[layout.compute])
    with FakeTensorMode(allow_non_fake_inputs=True):
        model.to_empty(device="cpu").train()
        if layout.manifest:
            manifest = load_manifest(REPOSITORY / str(layout.config.precision.manifest))
            Regions(model, manifest, layout.config.precision.fp8)
        if layout.sharing > 1:
            group: Any = SimpleNamespace(
                rank=0, size=layout.sharing, exchange=lambda parts, *_: torch.empty_like(parts)
            )
            SequenceAttention(model, group, apart=layout.masked)
        blocks, head = blocks_of(model), model.get_output_embeddings()
        counter = _Counter(model, head, on_cpu=layout.on_cpu)
        padded = layout.config.task == "classify" or bool(layout.targets)
        try:
            inputs = _inputs(layout)
            found = _pass(counter, blocks, lambda: model(**inputs), answer=not (padded or layout.masked))
        except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
            # Raised by torch or the model's code when asking a fake tensor for its values.
            raise UserError(
                f"task = {layout.config.task}: launch.plan cannot count {model.config.model_type} without its values "
                f"({one_line(error)}); try a step with the longest rows"
            ) from error
    tokens, each = layout.tokens, layout.tokens * len(blocks)
    return Counted(
        block=(found["block"] + found["attention"]) / each,
        attention=found["attention"] / each,
        matmuls=counter.matmuls / each,
        outside=found["outside"] / tokens,
        weights=found["weights"] / len(blocks),
        weight_flops=counter.weight_flops / tokens,
        attention_flops=counter.attention_flops / tokens,
        operations=tuple(counter.log.operations),
    )


def count_operations(model: Any, blocks: Sequence[Any], run: Callable[[], Any], *, head: Any) -> list[Operation]:
    """Operators of any model's forward and backward pass on a GPU, counted as in `count_activations`. run: the forward
    pass, called under FakeTensorMode. head: the module that produces logits."""
    counter = _Counter(model, head, on_cpu=False)
    _pass(counter, blocks, run, answer=True)
    return counter.log.operations


def _pass(counter: "_Counter", blocks: Sequence[Any], run: Callable[[], Any], *, answer: bool) -> dict[str, float]:
    """Run forward and backward; returns the bytes kept in between, by scope."""
    with counter.watching(blocks), _answering(answer, counter):
        output = run()
        found = counter.sizes()
        counter.log.run_backward(output)
    return found


def _inputs(layout: Layout) -> dict[str, Any]:
    """Arguments of a model's forward pass. Encoders, including that of an encoder-decoder, get an attention mask, as
    for padded rows."""
    encoder = layout.config.task in ENCODER_TASKS
    rows = layout.micro * layout.rows
    read = layout.sequence if layout.targets else layout.tokens // rows
    ids = torch.zeros(rows, read, dtype=torch.int64)
    inputs: dict[str, Any] = {"input_ids": ids}
    if encoder or layout.targets:
        inputs["attention_mask"] = torch.ones_like(ids)
    if layout.targets:
        inputs["decoder_input_ids"] = ids.new_zeros(rows, layout.targets)
    if not encoder:
        inputs["use_cache"] = False
    if layout.masked or layout.sharing > 1:
        inputs["position_ids"] = ids
    if layout.sharing > 1:
        inputs[WHOLE_POSITIONS] = ids.new_zeros(rows, layout.sequence)
    return inputs


class _Kept:
    """One storage kept by nodes of the autograd graph; freed with the last of them."""

    def __init__(self, storage: Any, size: float, scope: str) -> None:
        self.storage, self.size, self.scope = storage, size, scope  # holding the storage keeps its address


class _Counter:
    """Tracks the storages that autograd keeps, by the part of the model that first saved them."""

    def __init__(self, model: Any, head: Any, *, on_cpu: bool) -> None:
        self._known = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        self._kept: WeakValueDictionary[int, _Kept] = WeakValueDictionary()
        self._inside = dict.fromkeys((*SCOPES, "dropout"), 0)
        self._copies: dict[int, Any] = {}
        self._model, self._head = model, head
        self.log = Log()
        self.on_cpu = on_cpu
        self.matmuls = 0.0
        """[bytes] Results of matmuls in blocks."""
        self.weight_flops = self.attention_flops = 0.0

    @contextmanager
    def watching(self, blocks: Sequence[Any]) -> Iterator[None]:
        """Context manager: count what autograd saves. blocks: those of the model."""
        with ExitStack() as stack:
            for block in blocks:
                self._enter(stack, block, "block")
                for module in filter(is_attention, block.modules()):
                    self._enter(stack, module, "attention")
            for module in self._model.modules():
                kind = type(module).__name__
                scope = "dropout" if kind == "Dropout" else next((s for s in ("Norm", "MLP") if kind.endswith(s)), "")
                if scope:
                    self._enter(stack, module, scope)
            if self._head is not None:
                handle = self._head.register_forward_pre_hook(lambda *_: self.log.enter(HEAD))
                stack.callback(handle.remove)
            hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda kept: kept[1])
            stack.enter_context(hooks)
            yield

    def sizes(self) -> dict[str, float]:
        """[bytes] Currently kept, by scope."""
        found = dict.fromkeys(("block", "attention", "outside", "weights"), 0.0)
        for kept in self._kept.values():
            found[kept.scope] += kept.size
        return found

    def add_result(self, *tensors: Any) -> None:
        """Count the results of a matmul if it is in a block."""
        if self._inside["block"]:
            self.matmuls += sum(tensor.nbytes for tensor in tensors)

    def add_cast(self, source: torch.Tensor, result: torch.Tensor) -> None:
        """Record a cast copy of a weight, which autocast keeps and whose size does not depend on the tokens."""
        if source.untyped_storage()._cdata in self._known:
            self._copies[result.untyped_storage()._cdata] = result.untyped_storage()

    def _enter(self, stack: ExitStack, module: Any, scope: str) -> None:
        def count(change: int) -> Any:
            def hook(*_: Any) -> None:
                self._inside[scope] += change
                self.log.enter(next((name for name in SCOPES if self._inside[name]), "outside"))

            return hook

        for handle in (module.register_forward_pre_hook(count(1)), module.register_forward_hook(count(-1))):
            stack.callback(handle.remove)

    def _pack(self, tensor: Any) -> Any:
        return self._kept_of(tensor), tensor.detach()

    def _kept_of(self, tensor: Any) -> _Kept:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known:
            return _Kept(storage, 0.0, "block")
        kept = self._kept.get(key)
        if kept is None:
            # Dropout keeps a byte mask on a GPU, and its factors on a CPU.
            narrow = self._inside["dropout"] and not self.on_cpu
            size = storage.nbytes() / (tensor.element_size() if narrow else 1)
            inside = [scope for scope in ("attention", "block") if self._inside[scope]]
            scope = inside[0] if inside else "outside"
            if key in self._copies:
                # The copy of the head's weight belongs to the loss.
                scope, size = "weights", size if inside else 0.0
            kept = self._kept[key] = _Kept(storage, size, scope)
        return kept


@contextmanager
def _answering(answer: bool, counter: _Counter) -> Iterator[None]:
    """Context manager: scalars read from fake tensors are `answer`, and fused attention saves what its kernels save.
    Models read scalars to find out whether a mask masks anything, and drop it if not."""

    class Answers(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._local_scalar_dense.default:
                return answer
            name = func._schema.name
            if name == "aten::_grouped_mm":  # on fake tensors torch accepts only BF16
                result = args[0].new_empty(len(args[0]), args[1].shape[-1])
            else:
                result = func(*args, **(kwargs or {}))
            if name == "aten::_to_copy":
                counter.add_cast(args[0], result)
            flops = counter.log.add(func, args, kwargs or {}, result)
            if name in KEPT_OPERATORS and isinstance(result, torch.Tensor):
                counter.add_result(result)
            if name in KEPT_OPERATORS and not counter.log.backward:
                counter.weight_flops += flops
            elif not counter.log.backward:
                counter.attention_flops += flops
            return result

    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, query: Any, key: Any, value: Any, bias: Any, causal: bool) -> Any:
            batch, heads, length, _ = query.shape
            result = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
            sums = query.new_empty(batch, heads, length, dtype=torch.float32)
            ctx.save_for_backward(query, key, value, bias, result, sums)
            counter.add_result(result, sums)
            flops = 2.0 * sums.numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])
            counter.attention_flops += flops
            ctx.flops = flops / 2 if causal else flops
            counter.log.note("attention", ctx.flops, (query, key, value, bias), (result,))
            return result

        @staticmethod
        def backward(ctx: Any, *upstream: Any) -> Any:
            query, key, value, bias, result, _ = ctx.saved_tensors
            made = [item.new_empty(item.shape) for item in (query, key, value)]
            # as in FlashAttention 2: five matmuls, each of the size of the forward pass's two
            counter.log.note("attention", 2.5 * ctx.flops, (query, key, value, bias, result, *upstream), made)
            return *made, torch.zeros_like(bias) if ctx.needs_input_grad[3] else None, None

    original = functional.scaled_dot_product_attention

    def attention(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, **rest: Any) -> Any:
        trained = attn_mask is not None and attn_mask.requires_grad  # T5's position bias
        if counter.on_cpu and (dropout_p or trained):  # not fused on a CPU
            return original(query, key, value, attn_mask=attn_mask, dropout_p=dropout_p, **rest)
        if torch.is_autocast_enabled("cpu"):
            query, key, value = (item.to(torch.get_autocast_dtype("cpu")) for item in (query, key, value))
        bias = attn_mask
        if bias is not None and bias.dtype == torch.bool:
            bias = torch.empty_like(bias, dtype=query.dtype)
        return Fused.apply(query, key, value, bias, bool(rest.get("is_causal")))

    # transformers builds every mask if it takes fake tensors for a graph export, so hide that they are fake
    unseen = patch("transformers.utils.import_utils.is_fake_tensor", return_value=False)
    with Answers(), patch.object(functional, original.__name__, attention), unseen:
        yield
