"""One step's passes on this rank, observed by hooks that change nothing, and compared with plain torch afterwards.

- *Modules*: outputs of one micro-batch, for the inputs that the run's module got, on some tokens or the first sample.
- *Gradients*: of each linear layer its weight's reduced gradient G, against what its inputs and the gradients of its
  outputs sum up to over the micro-batches and ranks of the step. Compared are v G u for random signs u and v (Freivalds
  1979), whose mean square is |G|^2: every value of G is in it, at the cost of a few columns of a product.
- *Loss*: the gradient of the output embedding's input, of some labels of each micro-batch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map

from config.errors import one_line
from config.resolved import Resolved
from data.batches.loader import IGNORED_LABEL, Batch
from modeling.embedding_noise import has_noise
from modeling.objectives.label_prediction import LabelPrediction
from precision.activation_signals import unseen
from precision.closeness import IN_HALVES, OTHER_KERNEL, distance
from precision.dtypes import DTYPES
from precision.manifest import find_regions
from precision.tolerance import unit_roundoff
from training.corruption.plain import in_dtype, is_random, plain, weights_of
from training.engine import Engine
from training.engine.tensors import local_gradient, shape_of, shard_of

_TOKENS = 64
"""Rows of a module's output, and labels of the loss, that are compared."""
_BLOCKS = 4
"""Blocks that a step recomputes; they take turns."""
_SIGNS = 8
"""Pairs of random signs u and v for each linear layer."""


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
    """Some rows of them."""
    versions: list[tuple[torch.Tensor, int]]
    """Inputs that are kept whole: a later version was changed in place."""


class Passes:
    """The record of one step: `watching` around its passes, then `compared`, between backward and step."""

    def __init__(self, engine: Engine, resolved: Resolved, batch: Batch, *, turn: int, whole: bool) -> None:
        """turn: how many steps were checked before, which decides what is drawn; the same on all ranks. whole: compare
        all of it; else the gradients alone."""
        self._engine, self._resolved, self._batch, self._turn = engine, resolved, batch, turn
        self._drawn, self._micro = turn % len(batch.input_ids), -1
        self.skipped: dict[str, str] = {}
        """Parts that were not compared, each with the reason."""
        self._head: Any = engine.model.get_output_embeddings()
        self._hidden = engine.loss_path.unhooked()
        self._of_samples: set[str] = set()
        self._modules = self._draw() if whole else {}
        self._linears = self._followed()
        self._signs = {name: self._drawn_signs(row, module) for row, (name, module) in enumerate(self._linears.items())}
        self._calls: dict[str, _Call] = {}
        self._came: dict[str, list[torch.Tensor]] = defaultdict(list)
        self._of_loss: list[list[torch.Tensor]] = []
        self._judges_loss = whole and self._can_judge_loss()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around forward and backward of the step."""
        with ExitStack() as stack:
            stack.callback(self._engine.model.register_forward_pre_hook(self._begin).remove)
            for name, module in (self._modules | self._linears).items():
                hook = module.register_forward_hook(partial(self._leave, name), with_kwargs=True)
                stack.callback(hook.remove)
            if self._judges_loss:
                stack.callback(self._head.register_forward_pre_hook(self._enter_head).remove)
            yield

    @torch.no_grad()
    def compared(self) -> list[Row]:
        """Every comparison of this rank. A collective."""
        found: list[tuple[str, str, torch.Tensor]] = []
        for name, module in self._modules.items():
            weights, call = weights_of(self._engine, module), self._calls.pop(name, None)
            if call is None:
                continue
            try:
                found += [("modules", name, item) for item in self._compare(name, module, weights, call)]
            except Exception as error:  # inputs that the architecture's own code cannot take in another dtype
                self.skipped[type(module).__name__] = one_line(error, 120)
        found += [("gradients", f"{name}.weight", item) for name, item in self._compare_gradients()]
        found += [("loss", "loss", item) for item in self._compare_loss()]
        numbers = torch.stack([item for *_, item in found]).tolist() if found else []
        return [Row(check, name, *pair) for (check, name, _), pair in zip(found, numbers, strict=True)]

    def _draw(self) -> dict[str, nn.Module]:
        kinds, regions = find_regions(self._engine.model), self._engine.regions
        found: dict[str, nn.Module] = {}
        if regions is not None:
            self.skipped["manifest"] = "of its regions only linear layers and norms are compared, none in FP8"
        attentions = [name for name, kind in kinds.items() if kind == "attention"]
        blocks = list(dict.fromkeys(name.rpartition(".")[0] for name in attentions))
        turns = range(self._turn * _BLOCKS, (self._turn + 1) * _BLOCKS) if blocks else ()
        drawn = {blocks[number % len(blocks)] for number in turns}
        self._of_samples = {*blocks, *attentions}
        for name, module in self._engine.model.named_modules():
            leaf = next(module.children(), None) is None
            if module in self._hidden or not (leaf or name in drawn or name.rpartition(".")[0] in drawn):
                continue
            if regions is not None and (kinds.get(name) not in ("matmul", "norm") or regions.dtypes[name] == "fp8"):
                continue
            inside = [key for key in kinds if f"{key}.".startswith(f"{name}.")]
            attention = self._resolved.config.model.attention
            if any("expert" in key or kinds[key] == "functional" for key in inside):
                self.skipped["experts"] = "the run itself routes their tokens"
            elif is_random(module) or has_noise(module):
                self.skipped["dropout"] = "modules with dropout or noise are not compared"
            elif name in self._of_samples and (attention not in ("sdpa", "eager") or self._resolved.batch.sequence > 1):
                self.skipped["attention"] = f"{attention}, or ranks that share sequences, cannot be recomputed"
            else:
                found[name] = module
        return found

    def _followed(self) -> dict[str, Any]:
        """Linear layers whose weight is trained, whole on each rank and used by no other module."""
        model, regions = self._engine.model, self._engine.regions
        users = Counter(id(item) for _, item in model.named_parameters(remove_duplicate=False))
        eight_bit = regions.names_in("fp8") if regions is not None else ()
        return {
            name: module
            for name, module in model.named_modules()
            if type(module) is nn.Linear
            and module not in self._hidden
            and module.weight.requires_grad
            and users[id(module.weight)] == 1
            and name not in eight_bit
            and "expert" not in name
        }

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._micro += _in_forward()

    def _leave(self, name: str, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if not _in_forward():  # a recomputation, or a pass of a reference
            return
        if name in self._linears and output.requires_grad:
            with unseen(output.device.type):  # a product of the check is none of the module's
                given = args[0].detach().reshape(-1, args[0].shape[-1]).to(self._wide)
                output.register_hook(partial(self._follow, name, given @ self._signs[name][0], given.norm()))
        if self._micro != self._drawn or name not in self._modules or name in self._calls:
            return
        alone = name not in self._of_samples and not kwargs and [*map(torch.is_tensor, (*args, output))] == [True, True]
        call = _of_tokens(args[0].detach(), output.detach(), self._turn) if alone else None
        self._calls[name] = call or _of_first_sample(args, kwargs, output)

    def _compare(self, name: str, module: nn.Module, weights: Any, call: _Call) -> list[torch.Tensor]:
        if any(tensor._version != version for tensor, version in call.versions):
            raise ValueError("its inputs are changed in place")
        regions, attention = self._engine.regions, self._resolved.config.model.attention
        made: list[list[torch.Tensor]] = []
        planned = None if regions is None else DTYPES[regions.dtypes[name]]
        dtypes = (planned or DTYPES[self._engine.compute], *(item.dtype for item in call.outputs))
        u = max(map(unit_roundoff, dtypes))
        for dtype in (planned, torch.float64 if u == unit_roundoff(torch.float32) else torch.float32):
            args, kwargs = in_dtype((call.args, call.kwargs), dtype)
            with torch.autocast(self._engine.world.device.type, enabled=False):
                output = plain(module, weights, dtype, attention)(*args, **kwargs)
            made.append([_some_rows(item) if call.versions else item for item in _floats(output)])
        # sound kernels round the halves of a linear layer's sum, the sum, and that with its bias
        kernel = IN_HALVES if any(isinstance(item, nn.Linear) for item in module.modules()) else OTHER_KERNEL
        three = zip(call.outputs, *made, strict=False)
        return [distance(run, plan.to(run.dtype), exact, roundoff=u, kernel=kernel) for run, plan, exact in three]

    @property
    def _wide(self) -> torch.dtype:
        """The dtype of the sums, whose roundings are small beside the run's."""
        return torch.float64 if self._engine.compute == "fp32" else torch.float32

    def _drawn_signs(self, row: int, module: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """(inputs, _SIGNS) and (outputs, _SIGNS) of one layer; others in each turn, and never of training's numbers."""
        dice = torch.Generator().manual_seed(1_000_003 * self._turn + row)
        outputs, inputs = shape_of(module.weight)
        signs = torch.randint(2, (inputs + outputs, _SIGNS), generator=dice).mul_(2).sub_(1)
        signs = signs.to(self._engine.world.device, self._wide)
        return signs[:inputs], signs[inputs:]

    @torch.no_grad()
    def _follow(self, name: str, given: torch.Tensor, size: torch.Tensor, gradient: torch.Tensor) -> None:
        came = gradient.detach().reshape(-1, gradient.shape[-1]).to(self._wide)
        sums = ((came @ self._signs[name][1]).double() * given.double()).sum(0)
        self._came[name].append(torch.cat([sums, sums.square().mean()[None], came.norm().double()[None] * size]))

    def _compare_gradients(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Error and bound of each, relative to the terms of the sum over micro-batches and ranks, added in quadrature:
        four roundings of each, and FP32's of the sums over tokens. A collective."""
        engine, regions, ranks = self._engine, self._engine.regions, self._engine.world.world_size
        table = torch.zeros(len(self._linears), 2 * _SIGNS + 3, dtype=torch.float64, device=engine.world.device)
        for row, (name, module) in zip(table, self._linears.items(), strict=True):
            row[: _SIGNS + 1] = self._reduced(name, module) / (1 if engine.stage else ranks)
            if self._came[name]:
                row[_SIGNS + 1 :] = torch.stack(self._came[name]).sum(0) / ranks
                row[-2] /= ranks
        engine.world.sum(table)
        terms = len(self._batch.input_ids) * ranks
        for row, (name, module) in zip(table, self._linears.items(), strict=True):
            if not self._came[name]:  # as Mamba's dt_proj
                self.skipped[name] = "its weight is used without a call of the layer"
                continue
            u = unit_roundoff(DTYPES[engine.compute if regions is None else regions.dtypes.get(name, "fp32")])
            mine, square, expected, sizes = row.split([_SIGNS, 1, _SIGNS, 2])
            # a few signs may all but cancel; the whole gradient's own norm does not
            size = torch.maximum(sizes[0], square[0]).sqrt()
            tiny = torch.finfo(torch.float16).smallest_normal * u * (shape_of(module.weight).numel() * terms) ** 0.5
            bound = 4 * u * size + 8 * unit_roundoff(torch.float32) * sizes[1] + tiny
            error = ((mine - expected).norm() / _SIGNS**0.5).nan_to_num(torch.inf)
            yield name, torch.stack([error, bound]) / size.clamp_min(torch.finfo(torch.float64).tiny)

    def _reduced(self, name: str, module: Any) -> torch.Tensor:
        """(_SIGNS + 1,) float64: v G u of this rank's part of a reduced gradient, and its norm squared."""
        found = torch.zeros(_SIGNS + 1, dtype=torch.float64, device=self._engine.world.device)
        shard = shard_of(self._engine, module.weight)
        gradient = local_gradient(module.weight, shard, self._engine.stage) if shard is not None else None
        if shard is None or gradient is None:
            return found
        u, v = self._signs[name]
        first, before = divmod(shard.start, len(u))
        after = -(before + shard.length) % len(u)
        rows = functional.pad(gradient.to(found.device, self._wide), (before, after)).view(-1, len(u))
        found[:-1] = ((rows @ u).double() * v[first : first + len(rows)].double()).sum(0)
        found[-1] = torch.linalg.vector_norm(rows, dtype=torch.float64).square()
        return found

    def _can_judge_loss(self) -> bool:
        config: Any = self._engine.model.config.get_text_config()
        if type(self._engine.objective) is not LabelPrediction or self._resolved.batch.sequence > 1:
            self.skipped["loss"] = "it is not a cross-entropy of whole sequences"
        elif self._engine.regions is not None or not isinstance(self._head, nn.Linear):
            self.skipped["loss"] = "its output embedding is not a linear layer in the run's dtype"
        elif any(getattr(config, name, None) not in (None, 1.0) for name in ("logits_scaling", "logit_scale")):
            self.skipped["loss"] = "the model scales its logits"
        return "loss" not in self.skipped

    def _enter_head(self, module: nn.Module, args: Any) -> None:
        if not (_in_forward() and args[0].requires_grad):
            return
        labels = self._batch.labels[self._micro].flatten()
        counted = (labels != IGNORED_LABEL).nonzero().flatten()
        counted = counted[_spread(len(counted), max(1, _TOKENS // len(self._batch.labels)), self._turn)]
        places = counted.to(args[0].device)

        def of_labels(values: torch.Tensor) -> torch.Tensor:
            return values.detach().reshape(-1, values.shape[-1])[places]

        kept = [labels[counted].to(args[0].device), of_labels(args[0])]
        self._of_loss.append(kept)
        args[0].register_hook(lambda came: kept.append(of_labels(came)))

    def _compare_loss(self) -> list[torch.Tensor]:
        engine = self._engine
        made: list[torch.Tensor] = []
        seen = [kept for kept in self._of_loss if len(kept) == 3]
        count = engine.world.sum(engine.world.numbers([float((self._batch.labels != IGNORED_LABEL).sum())]))
        weights = weights_of(engine, self._head) if self._judges_loss else {}
        if not seen or not sum(len(labels) for labels, *_ in seen):
            return []
        labels, hidden, came = (torch.cat(items) for items in zip(*seen, strict=True))
        factor = engine.world.zero_ranks / float(count) * engine.loss_scale
        cap = getattr(engine.model.config.get_text_config(), "final_logit_softcapping", None)
        wide = torch.float64 if hidden.dtype == torch.float32 else torch.float32
        for dtype in (hidden.dtype, wide):
            given, own = hidden.to(dtype).requires_grad_(), in_dtype(weights, dtype)
            with torch.enable_grad():
                logits = functional.linear(given, own["weight"], own.get("bias")).to(wide)
                logits = cap * torch.tanh(logits / cap) if cap else logits
                loss = functional.cross_entropy(logits, labels, reduction="sum") * factor
            made += torch.autograd.grad(loss, given)
        return [distance(came, *made, roundoff=unit_roundoff(hidden.dtype), kernel=2.0)]


def _in_forward() -> bool:
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1


def _spread(count: int, wanted: int, turn: int) -> slice:
    """At most this many of `count` places, evenly spread; different ones in each turn."""
    every = max(1, count // wanted)
    return slice(turn % every, turn % every + every * wanted, every)


def _of_tokens(given: torch.Tensor, output: torch.Tensor, turn: int) -> _Call | None:
    """A call on some of its tokens; None where it does not make one row of each token."""
    width = given.shape[-1:] if given.is_floating_point() else ()
    if output.shape[:-1] != given.shape[: given.dim() - len(width)]:
        return None
    rows = _spread(output.shape[:-1].numel(), _TOKENS, turn)
    few = (values.reshape(-1, *last)[rows].clone() for values, last in ((given, width), (output, output.shape[-1:])))
    return _Call((next(few),), {}, [*few], [])


def _of_first_sample(args: Any, kwargs: dict[str, Any], output: Any) -> _Call:
    tensors = [item for item in tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor)]
    samples = next((len(item) for item in tensors if item.dim() > 1), 1)

    def first(value: Any) -> Any:
        several = isinstance(value, torch.Tensor) and value.dim() > 1 and len(value) == samples
        return value[:1] if several else value

    args, kwargs = tree_map(first, (args, kwargs))
    outputs = [_some_rows(first(item)).clone() for item in _floats(output)]
    return _Call(args, kwargs, outputs, [(item, item._version) for item in tensors])


def _some_rows(values: torch.Tensor) -> torch.Tensor:
    flat = values.detach().reshape(-1, values.shape[-1])
    return flat[_spread(len(flat), _TOKENS, 0)]


def _floats(tree: Any) -> list[torch.Tensor]:
    return [item for item in tree_leaves(tree) if isinstance(item, torch.Tensor) and item.is_floating_point()]
