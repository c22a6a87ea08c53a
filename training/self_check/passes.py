"""One step's passes on this rank, observed by hooks that change nothing, and compared with plain torch afterwards.

- *Modules*: outputs of one micro-batch, for the inputs that the run's module got. Those that treat each token alone on
  some tokens, and of some blocks the attention and the block itself on the first sample.
- *Gradients*: of each linear layer a block of its weight's reduced gradient, against what its inputs and the gradients of
  its outputs sum up to over the micro-batches and ranks of the step.
- *Loss*: the gradient of the output embedding's input, of some tokens of each micro-batch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map
from transformers.pytorch_utils import Conv1D

from config.errors import one_line
from config.resolved import Resolved
from data.batches.loader import IGNORED_LABEL, Batch
from modeling.compiling import CompiledBlock
from modeling.objectives.label_prediction import LabelPrediction
from precision.closeness import OTHER_KERNEL, distance
from precision.dtypes import DTYPES
from precision.manifest import find_regions
from precision.tolerance import unit_roundoff
from training.engine import Engine
from training.engine.tensors import local_gradient, shape_of, shard_of
from training.self_check.plain import in_dtype, is_random, plain, weights_of

_ROWS = 64
"""Tokens of each module, and of the loss over all micro-batches."""
_BLOCKS = 4
"""Blocks of a step whose attention is computed again; they take turns."""
_BLOCK = 8, 32
"""Outputs and inputs of a linear layer whose gradients are compared."""
_HALVES = 2.0
"""[factor] Tolerated errors of a linear layer: sound kernels add up halves of a sum, each rounded to 16 bits."""


class Row(NamedTuple):
    """One comparison."""

    check: str
    where: str
    error: float
    bound: float


class _Call(NamedTuple):
    args: Any
    kwargs: dict[str, Any]
    outputs: list[torch.Tensor]
    versions: list[tuple[torch.Tensor, int]]


class Passes:
    """What is seen of one step. `watching` around its passes, then `compared`, between backward and step."""

    def __init__(self, engine: Engine, resolved: Resolved, batch: Batch, *, turn: int) -> None:
        """turn: how many steps were checked before, which decides what is drawn; the same on all ranks."""
        self._engine, self._resolved, self._batch, self._turn = engine, resolved, batch, turn
        self._drawn, self._micro = turn % len(batch.input_ids), -1
        self.skipped: dict[str, str] = {}
        """What was not compared, and why."""
        self._head = engine.model.get_output_embeddings()
        self._alone, self._whole = self._modules()
        self._linears = self._followed()
        self._calls: dict[str, _Call] = {}
        self._sums = {name: torch.zeros(0) for name in self._linears}
        self._sizes = {name: torch.zeros(0) for name in self._linears}
        self._of_loss: list[list[torch.Tensor]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around forward and backward of the step."""
        with ExitStack() as stack:
            stack.callback(self._engine.model.register_forward_pre_hook(self._begin).remove)
            for name, module in (self._alone | self._whole | self._linears).items():
                hook = module.register_forward_hook(partial(self._leave, name), with_kwargs=True)
                stack.callback(hook.remove)
            if self._judges_loss():
                stack.callback(self._head.register_forward_pre_hook(self._enter_head).remove)
            yield

    @torch.no_grad()
    def compared(self) -> list[Row]:
        """Every comparison of this rank. A collective."""
        found: list[tuple[str, str, torch.Tensor]] = []
        for name, module in (self._alone | self._whole).items():
            weights = weights_of(self._engine, module)
            call = self._calls.pop(name, None)
            if call is None:
                continue
            if any(tensor._version != version for tensor, version in call.versions):
                self.skipped[name] = "its inputs are changed in place"
                continue
            try:
                found += [("modules", name, item) for item in self._compare(name, module, weights, call)]
            except Exception as error:  # inputs that the architecture's own code cannot take in another dtype
                self.skipped[name] = one_line(error, 120)
        found += self._compare_gradients()
        found += self._compare_loss()
        numbers = torch.stack([item for *_, item in found]).tolist() if found else []
        return [Row(check, name, *pair) for (check, name, _), pair in zip(found, numbers, strict=True)]

    def _modules(self) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
        """Modules that are compared token by token, and those for which one sample is computed again."""
        model, regions = self._engine.model, self._engine.regions
        kinds, compiled = find_regions(model), _inside_compiled(model)
        attentions = [name for name, kind in kinds.items() if kind == "attention"]
        blocks = list(dict.fromkeys(name.rpartition(".")[0] for name in attentions))
        start = self._turn * _BLOCKS
        drawn = {blocks[index % len(blocks)] for index in range(start, start + _BLOCKS)} if blocks else set()
        alone: dict[str, nn.Module] = {}
        whole: dict[str, nn.Module] = {}
        for name, module in model.named_modules():
            parent, leaf = name.rpartition(".")[0], next(module.children(), None) is None
            wanted = leaf or name in blocks or name in attentions or parent in blocks
            if not wanted or not name or module in compiled or (module is self._head and self._engine.loss_path.chunked):
                continue
            reason = self._reason(name, module, kinds)
            if reason:
                self.skipped[reason[0]] = reason[1]
            elif name not in blocks and name not in attentions:
                alone[name] = module
            elif (name if name in blocks else parent) in drawn:
                whole[name] = module
        return alone, whole

    def _reason(self, name: str, module: nn.Module, kinds: dict[str, Any]) -> tuple[str, str] | None:
        """What a module belongs to that is not compared, and why; None where it is."""
        regions, inside = self._engine.regions, f"{name}."
        if any("expert" in key or kinds[key] == "functional" for key in kinds if f"{key}.".startswith(inside)):
            return "experts", "which tokens they get is decided in the run"
        if is_random(module):
            return "dropout", "modules that drop values are not compared"
        if regions is not None:
            if regions.dtypes.get(name) == "fp8":
                return "fp8", "its scales are the run's own"
            if kinds.get(name) not in ("matmul", "norm") and not isinstance(module, nn.Embedding):
                return "manifest", "of its regions linear layers, norms and embeddings are compared"
        if name in kinds and kinds[name] == "attention" and self._resolved.batch.sequence > 1:
            return "attention", "ranks share its sequences"
        if kinds.get(name) == "attention" and self._resolved.config.model.attention not in ("sdpa", "eager"):
            return "attention", f"{self._resolved.config.model.attention} is not computed again in plain torch"
        return None

    def _followed(self) -> dict[str, nn.Module]:
        """Linear layers whose weight is trained, whole on each rank and used by no other module."""
        named = list(self._engine.model.named_parameters(remove_duplicate=False))
        users, compiled = Counter(id(item) for _, item in named), _inside_compiled(self._engine.model)
        found: dict[str, nn.Module] = {}
        for name, module in self._engine.model.named_modules():
            weight = getattr(module, "weight", None)
            if type(module) not in (nn.Linear, Conv1D) or module in compiled or "expert" in name:
                continue
            if module is self._head and self._engine.loss_path.chunked:
                continue
            if weight is not None and weight.requires_grad and users[id(weight)] == 1:
                found[name] = module
        return found

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._micro += _in_forward()

    def _leave(self, name: str, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if not _in_forward():  # a recomputation, or a pass of a reference
            return
        if name in self._linears and output.requires_grad:
            self._follow(name, args[0], output)
        if self._micro != self._drawn or name in self._calls or name not in self._alone | self._whole:
            return
        if name in self._alone:
            call = self._of_tokens(args, kwargs, output)
            if call is not None:
                self._calls[name] = call
                return
            if next(module.children(), None) is not None or next(module.parameters(), None) is not None:
                self.skipped[name] = "it does not treat each token alone"
                return
        self._calls[name] = _of_first_sample(args, kwargs, output)

    def _of_tokens(self, args: Any, kwargs: dict[str, Any], output: Any) -> _Call | None:
        """A call on some of its tokens; None where it is none that treats each alone."""
        if kwargs or len(args) != 1 or not isinstance(args[0], torch.Tensor) or not isinstance(output, torch.Tensor):
            return None
        given = args[0].detach()
        width = given.shape[-1:] if given.is_floating_point() else ()
        if output.shape[:-1] != given.shape[: given.dim() - len(width)]:
            return None
        rows = _spread(output.shape[:-1].numel(), _ROWS, self._turn)
        few = given.reshape(-1, *width)[rows].clone()
        return _Call((few,), {}, [output.detach().reshape(-1, output.shape[-1])[rows].clone()], [])

    def _compare(self, name: str, module: nn.Module, weights: Any, call: _Call) -> list[torch.Tensor]:
        regions, attention = self._engine.regions, self._resolved.config.model.attention
        compute = DTYPES[self._engine.compute if regions is None else regions.dtypes.get(name, "fp32")]
        coarsest = max(unit_roundoff(compute), *(unit_roundoff(item.dtype) for item in call.outputs), 0.0)
        wide = torch.float64 if coarsest <= unit_roundoff(torch.float32) else torch.float32
        narrow = None if regions is None or compute != torch.float32 else compute
        made = []
        for dtype in (narrow, wide):
            autocast = dtype is None and regions is not None
            args, kwargs = in_dtype((call.args, call.kwargs), dtype)
            with torch.autocast(self._engine.world.device.type, dtype=compute if autocast else None, enabled=autocast):
                made.append(_floats(plain(module, weights, dtype, attention)(*args, **kwargs)))
        kernel = _HALVES if type(module) in (nn.Linear, Conv1D) else OTHER_KERNEL
        found = []
        for run, planned, exact in zip(call.outputs, *made, strict=False):
            if name in self._whole or not call.versions == []:
                planned, exact = (_some_rows(item) for item in (planned, exact))
            if run.shape != exact.shape:
                raise ValueError(f"it makes {tuple(run.shape)}, plain torch {tuple(exact.shape)}")
            found.append(distance(run, planned.to(run.dtype), exact, roundoff=coarsest, kernel=kernel))
        return found

    def _block(self, module: Any) -> tuple[slice, torch.Tensor]:
        """The inputs and the outputs of a linear layer whose gradients are followed."""
        out, inputs = _sizes(module)
        first = (self._turn * _BLOCK[1]) % max(1, inputs - _BLOCK[1] + 1)
        every = max(1, out // _BLOCK[0])
        start = self._turn % every
        return slice(first, first + _BLOCK[1]), torch.arange(start, out, every)[: _BLOCK[0]]

    def _follow(self, name: str, given: torch.Tensor, output: torch.Tensor) -> None:
        inputs, _ = self._block(self._linears[name])
        kept = given.detach().reshape(-1, given.shape[-1])[:, inputs].clone()
        output.register_hook(partial(self._came, name, kept))

    @torch.no_grad()
    def _came(self, name: str, given: torch.Tensor, gradient: torch.Tensor) -> None:
        _, outputs = self._block(self._linears[name])
        came = gradient.detach().reshape(-1, gradient.shape[-1])
        came = came[:, outputs.to(came.device)].double()
        block, size = came.T @ given.double(), came.norm() * given.double().norm()
        sizes = torch.stack([block.norm(), size])
        seen = self._sums[name].numel()
        self._sums[name] = self._sums[name] + block if seen else block
        self._sizes[name] = self._sizes[name] + sizes if seen else sizes

    def _compare_gradients(self) -> list[tuple[str, str, torch.Tensor]]:
        engine, (out, inputs) = self._engine, _BLOCK
        device, ranks = engine.world.device, engine.world.world_size
        table = torch.zeros(len(self._linears), 2 * out * inputs + 2, dtype=torch.float64, device=device)
        for row, (name, module) in zip(table, self._linears.items(), strict=True):
            if self._sums[name].numel():
                row[: self._sums[name].numel()] = self._sums[name].flatten() / ranks
                row[-2:] = self._sizes[name] / ranks
            mine = self._reduced(module)
            row[out * inputs : out * inputs + len(mine)] = mine / (1 if engine.stage else ranks)
        engine.world.sum(table)
        if engine.regions is not None:
            dtypes = [DTYPES[engine.regions.dtypes.get(name, "bf16")] for name in self._linears if self._dtype_known(name)]
            u = max((unit_roundoff(dtype) for dtype in dtypes), default=unit_roundoff(torch.bfloat16))
        else:
            u = unit_roundoff(DTYPES[engine.compute])
        terms = len(self._batch.input_ids) * ranks
        tiny = torch.finfo(torch.float16).smallest_normal * u * (out * inputs * terms) ** 0.5
        found = []
        for row, name in zip(table, self._linears, strict=True):
            expected, mine = row[: 2 * out * inputs].view(2, -1)
            error = (mine - expected).norm()
            bound = 3 * terms**0.5 * u * row[-2] + 8 * unit_roundoff(torch.float32) * row[-1] + tiny
            size = expected.norm().clamp_min(torch.finfo(torch.float64).tiny)
            error = torch.where(error.isfinite(), error, torch.inf)
            found.append(("gradients", f"{name}.weight", torch.stack([error / size, bound / size])))
        return found

    def _dtype_known(self, name: str) -> bool:
        regions = self._engine.regions
        return regions is not None and regions.dtypes.get(name) in DTYPES

    def _reduced(self, module: Any) -> torch.Tensor:
        """This rank's values of the block of a reduced gradient, 0 those of other ranks; float64."""
        engine, (out, inputs) = self._engine, _sizes(module)
        columns, rows = self._block(module)
        of_inputs = torch.arange(inputs)[columns]
        places = rows[:, None] * inputs + of_inputs if type(module) is nn.Linear else of_inputs * out + rows[:, None]
        shard = shard_of(engine, module.weight)
        gradient = local_gradient(module.weight, shard, engine.stage) if shard is not None else None
        if shard is None or gradient is None:
            return torch.zeros(places.numel(), dtype=torch.float64, device=engine.world.device)
        places = places.flatten().to(gradient.device) - shard.start
        here = (places >= 0) & (places < shard.length)
        values = gradient[places.clamp(0, shard.length - 1)].double()
        return torch.where(here, values, 0.0).to(engine.world.device)

    def _judges_loss(self) -> bool:
        config: Any = self._engine.model.config.get_text_config()
        if type(self._engine.objective) is not LabelPrediction or self._resolved.batch.sequence > 1:
            self.skipped["loss"] = "it is compared where it is the cross-entropy of whole sequences"
        elif self._engine.regions is not None:
            self.skipped["loss"] = "the manifest decides what it computes in"
        elif any(getattr(config, name, None) not in (None, 1.0) for name in ("logits_scaling", "logit_scale")):
            self.skipped["loss"] = "the model scales its logits"
        return isinstance(self._head, nn.Linear) and "loss" not in self.skipped

    def _enter_head(self, module: nn.Module, args: Any) -> None:
        if not (_in_forward() and args and args[0].requires_grad):
            return
        labels = self._batch.labels[self._micro].flatten()
        counted = (labels != IGNORED_LABEL).nonzero().flatten()
        counted = counted[_spread(len(counted), max(1, _ROWS // len(self._batch.labels)), self._turn)]
        labels, places = (item.to(args[0].device) for item in (labels[counted], counted))
        kept = [args[0].detach().reshape(-1, args[0].shape[-1])[places].clone(), labels]
        self._of_loss.append(kept)
        args[0].register_hook(lambda came: kept.append(came.detach().reshape(-1, came.shape[-1])[places].clone()))

    def _compare_loss(self) -> list[tuple[str, str, torch.Tensor]]:
        engine = self._engine
        seen = [item for item in self._of_loss if len(item) == 3 and len(item[1])]
        count = engine.world.sum(engine.world.numbers([float((self._batch.labels != IGNORED_LABEL).sum())]))
        weights = weights_of(engine, self._head) if self._judges_loss() else {}
        if not seen or not weights:
            return []
        hidden, labels, came = (torch.cat(items) for items in zip(*seen, strict=True))
        factor = engine.world.zero_ranks / float(count.clamp(min=1.0)) * engine.loss_scale
        cap = getattr(engine.model.config.get_text_config(), "final_logit_softcapping", None)
        made = []
        fp32 = hidden.dtype == torch.float32
        for dtype in (hidden.dtype, torch.float64 if fp32 else torch.float32):
            given = hidden.to(dtype).requires_grad_()
            with torch.enable_grad():
                own = in_dtype(weights, dtype)
                logits = functional.linear(given, own["weight"], own.get("bias"))
                logits = logits if fp32 else logits.float()
                logits = cap * torch.tanh(logits / cap) if cap else logits
                loss = functional.cross_entropy(logits, labels, reduction="sum") * factor
                made.append(torch.autograd.grad(loss, given)[0])
        item = distance(came, made[0], made[1], roundoff=unit_roundoff(hidden.dtype), kernel=_HALVES)
        return [("loss", "(loss)", item)]


def _in_forward() -> bool:
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1


def _inside_compiled(model: nn.Module) -> set[nn.Module]:
    """Modules inside compiled blocks, which would run uncompiled under hooks."""
    blocks = (module for module in model.modules() if isinstance(module.__dict__.get("forward"), CompiledBlock))
    return {inner for block in blocks for inner in block.modules() if inner is not block}


def _spread(count: int, wanted: int, turn: int) -> slice:
    """At most so many of `count` places, evenly spread; others in each turn."""
    every = max(1, count // wanted)
    start = turn % every
    return slice(start, start + every * wanted, every)


def _sizes(module: Any) -> tuple[int, int]:
    """Outputs and inputs of a linear layer, also where ZeRO-3 partitions its weight."""
    shape = shape_of(module.weight)
    return (shape[0], shape[1]) if type(module) is nn.Linear else (shape[1], shape[0])


def _of_first_sample(args: Any, kwargs: dict[str, Any], output: Any) -> _Call:
    tensors = [item for item in tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor)]
    samples = next((item.shape[0] for item in tensors if item.dim() > 1), 1)

    def first(value: Any) -> Any:
        several = isinstance(value, torch.Tensor) and value.dim() > 1 and value.shape[0] == samples > 1
        return value[:1] if several else value

    args, kwargs = tree_map(first, (args, kwargs))
    outputs = [_some_rows(first(item)).clone() for item in _floats(output)]
    return _Call(args, kwargs, outputs, [(item, item._version) for item in tensors])


def _some_rows(values: torch.Tensor) -> torch.Tensor:
    flat = values.detach().reshape(-1, values.shape[-1])
    return flat[_spread(len(flat), _ROWS, 0)]


def _floats(tree: Any) -> list[torch.Tensor]:
    return [item for item in tree_leaves(tree) if isinstance(item, torch.Tensor) and item.is_floating_point()]
