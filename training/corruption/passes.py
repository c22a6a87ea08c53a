"""Comparison of one step's forward and backward on this rank with plain torch. Hooks record it and change nothing.

- *Modules*: outputs in one micro-batch, recomputed from the module's own inputs, for some tokens or one sample.
- *Gradients*: of linear layers and embeddings; in a whole comparison, of norms and the output embedding as well
  (gradient_sums.py).
- *Loss*: the recorded loss, and the gradient of the output embedding's input at some labels of each micro-batch.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only

from config.errors import one_line
from config.resolved import Resolved
from data.batches.loader import IGNORED_LABEL, Batch
from modeling.embedding_noise import has_noise
from modeling.objectives.label_prediction import LabelPrediction
from precision.activation_signals import unseen
from precision.closeness import IN_HALVES, OTHER_KERNEL, distance, distance_in_fp32
from precision.dtypes import DTYPES
from precision.manifest import find_regions
from precision.tolerance import unit_roundoff
from training.corruption.between import Between
from training.corruption.gradient_sums import GradientSums, can_follow, is_norm
from training.corruption.plain import in_dtype, is_random, own_code, plain, weights_of
from training.engine import Engine
from training.engine.health import Outcome

_TOKENS = 64  # number of compared rows of a module's output, and of labels of the loss
_BLOCKS = 2  # number of blocks recomputed in a step; blocks take turns
_LOGITS = 1 << 24  # number of logits recomputed at a time
_FACTORS = ("logits_scaling", "logit_scale", "lm_head_multiplier", "logits_soft_cap")
"""Keys of a model's config by which it changes its logits, other than the soft cap of Gemma's family."""


class Row(NamedTuple):
    check: str
    where: str
    error: float
    bound: float


def verdicts(check: str, wrong: Sequence[str]) -> list[Row]:
    """The comparisons of a check without an error measure: one for each wrong item, or one that everything passed."""
    return [Row(check, name, 1.0, 0.0) for name in wrong] or [Row(check, "all", 0.0, 1.0)]


class _Call(NamedTuple):
    args: Any
    kwargs: dict[str, Any]
    outputs: list[torch.Tensor]
    """Some rows of each output."""
    versions: list[tuple[torch.Tensor, int]]
    """Inputs kept by reference, with their version counters: a larger one later means a change in place."""


class Passes:
    """The record of one step: `watching` its passes, then `compared`, between backward and step."""

    def __init__(
        self,
        engine: Engine,
        resolved: Resolved,
        batch: Batch,
        *,
        turn: int,
        whole: bool,
        trains: bool = True,
        history: dict[str, torch.Tensor] | None = None,
    ) -> None:
        """turn: number of steps checked before, which selects what is compared; the same on all ranks. whole: compare
        everything, else only gradients. trains: whether a backward pass follows. history: of the gradients' errors in
        the steps before."""
        self._engine, self._resolved, self._batch, self._turn = engine, resolved, batch, turn
        self._drawn, self._micro = -turn % len(batch.input_ids) if trains else 0, -1
        self._row = _row_of(batch, self._drawn, turn)
        self.skipped: dict[str, str] = {}
        """Maps what was not compared to the reason."""
        self._head: Any = engine.model.get_output_embeddings()
        self._head_name = next((name for name, item in engine.model.named_modules() if item is self._head), "")
        self._hidden = engine.loss_path.unhooked()
        self._of_samples: set[str] = set()
        self._waiting: tuple[str, ...] = ()
        self._stations: dict[str, nn.Module] = {}
        self._modules = self._draw() if whole else {}
        self._judges_loss = whole and trains and self._can_judge_loss()
        self._followed = self._draw_followed() if trains else {}
        again = {self._head_name: self._head} if self._judges_loss else {}
        self._sums = GradientSums(engine, self._followed | again, turn=turn, history=history)
        self._between: Between | None = None
        if self._stations and self._head_name:
            stations = self._stations | {self._head_name: self._head}
            self._between = Between(engine, stations, resolved.config.model.attention, row=self._row)
        self._calls: dict[str, _Call] = {}
        self._back: dict[str, dict[str, torch.Tensor]] = {}
        self._of_loss: list[list[torch.Tensor]] = []
        self._count = engine.world.sum((batch.labels != IGNORED_LABEL).sum().double().to(engine.world.device))
        self._factor = engine.world.zero_ranks / self._count.clamp(min=1.0) * engine.loss_scale
        self._cap: float | None = getattr(engine.model.config.get_text_config(), "final_logit_softcapping", None)
        self._without: list[str] = []
        self._total = torch.zeros(2, dtype=torch.float64, device=engine.world.device)

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context of the step's forward and backward."""
        with ExitStack() as stack:
            stack.callback(self._engine.model.register_forward_pre_hook(self._begin).remove)
            for name, module in (self._modules | self._followed).items():
                hook = module.register_forward_hook(partial(self._leave, name), with_kwargs=True)
                stack.callback(hook.remove)
                if name in self._stations and name in self._of_samples:
                    stack.callback(module.register_forward_pre_hook(partial(self._enter_block, name)).remove)
            if self._between is not None:
                stack.enter_context(self._between.watching())
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
                found += [(check, name, item) for check, item in self._compare(name, module, weights, call)]
            except Exception as error:  # the architecture's own code does not take these inputs in another dtype
                self.skipped[type(module).__name__] = one_line(error, 120)
        first, between = len(found), list[Row]()
        try:
            between = verdicts("between", self._between.compared()) if self._between is not None else []
        except Exception as error:  # a model that is more than a chain of blocks
            self.skipped["between"] = one_line(error, 120)
        terms = len(self._batch.input_ids) * self._engine.world.world_size
        found += [("gradients", name, item) for name, item in self._sums.compared(terms, self.skipped)]
        try:
            found += [("loss", "loss", item) for item in self._compare_loss()]
        except torch.OutOfMemoryError:  # for copies of a large output embedding
            self.skipped["loss"] = "there is no memory for it"
        numbers = torch.stack([item for *_, item in found]).tolist() if found else []
        rows = [Row(check, name, *pair) for (check, name, _), pair in zip(found, numbers, strict=True)]
        rows[first:first] = between
        return [*rows, *(Row("gradients", name, 1.0, 0.0) for name in dict.fromkeys(self._without))]

    def _draw(self) -> dict[str, nn.Module]:
        self._kinds = kinds = find_regions(self._engine.model)
        regions = self._engine.regions
        found: dict[str, nn.Module] = {}
        if regions is not None:
            self.skipped["manifest"] = "in their dtypes only linear layers and norms are compared, and none in FP8"
        attentions = [name for name, kind in kinds.items() if kind == "attention"]
        blocks = list(dict.fromkeys(name.rpartition(".")[0] for name in attentions))
        turns = range(self._turn * _BLOCKS, (self._turn + 1) * _BLOCKS) if blocks else ()
        # the last block first, the others spread out: what differs in some layers is not met layer by layer
        spread = [*blocks[-1:], *(blocks[at] for at in sorted(range(len(blocks) - 1), key=lambda n: n * 0.618034 % 1))]
        drawn = {spread[number % len(blocks)] for number in turns}
        self._of_samples = {*blocks, *attentions}
        named = dict(self._engine.model.named_modules())
        after = {name: item for name, item in named.items() if is_norm(item) and not re.search(r"\.\d+\.", name)}
        self._stations = {name: named[name] for name in blocks} | after
        self._waiting = tuple(f"{block}." for block in blocks if block not in drawn)
        for name, module in self._engine.model.named_modules():
            leaf = next(module.children(), None) is None
            if module in self._hidden or not (leaf or name in drawn or name.rpartition(".")[0] in drawn):
                continue
            inside = [key for key in kinds if f"{key}.".startswith(f"{name}.")]
            attention = self._resolved.config.model.attention
            if any("expert" in key or kinds[key] == "functional" for key in inside):
                self.skipped["experts"] = "the run itself routes their tokens"
            elif module.training and (is_random(module) or has_noise(module)):
                self.skipped["dropout"] = "modules with dropout or noise are not compared"
            elif name in self._of_samples and (attention not in ("sdpa", "eager") or self._resolved.batch.sequence > 1):
                self.skipped["attention"] = f"{attention}, or ranks that share sequences, cannot be recomputed"
            else:
                found[name] = module
        return found

    def _draw_followed(self) -> dict[str, nn.Module]:
        """The modules whose parameter gradients are compared."""
        regions = self._engine.regions
        eight_bit = regions.names_in("fp8") if regions is not None else ()
        return {
            name: module
            for name, module in self._engine.model.named_modules()
            if can_follow(module) or (is_norm(module) and name in self._modules and not name.startswith(self._waiting))
            if module not in self._hidden
            and name not in eight_bit
            and "expert" not in name
            and not (self._judges_loss and module is self._head)
        }

    def _begin(self, module: nn.Module, args: Any) -> None:
        self._micro += _in_forward()

    def _enter_block(self, name: str, module: nn.Module, args: Any) -> Any:
        """The block's inputs, the first in a view, since other modules may add to the gradient of what they share."""
        due = _in_forward() and self._micro == self._drawn and name not in self._calls
        if not (due and args and args[0].requires_grad):
            return None
        seen, kept = args[0].view_as(args[0]), self._back.setdefault(name, {})
        seen.register_hook(lambda came: kept.update(given=came.detach()[self._row :][:1]))
        return seen, *args[1:]

    def _leave(self, name: str, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        if not _in_forward():  # a recomputation, or a pass of a reference
            return
        if name in self._followed and not output.requires_grad and any(p.requires_grad for p in module.parameters()):
            self._without.append(name)
        elif name in self._followed and len(args) + len(kwargs) == 1:
            with unseen(output.device.type):  # observers of dtypes would count this check's products
                self._sums.follow(module, args[0] if args else next(iter(kwargs.values())), output)
        if self._micro != self._drawn or name not in self._modules or name in self._calls:
            return
        alone = name not in self._of_samples and not kwargs and [*map(torch.is_tensor, (*args, output))] == [True, True]
        call = _of_tokens(args[0].detach(), output.detach(), self._turn) if alone else None
        self._calls[name] = call or _of_one_sample(self._row, args, kwargs, output)
        if name in self._back and torch.is_tensor(output):
            output.register_hook(lambda came: self._back[name].update(output=came.detach()[self._row :][:1]))

    def _compare(self, name: str, module: Any, weights: Any, call: _Call) -> list[tuple[str, torch.Tensor]]:
        """Compare a module's outputs, and the gradient of a block's input for one sample, recomputed from that of its
        output."""
        if any(tensor._version != version for tensor, version in call.versions):
            raise ValueError("its inputs are changed in place")
        if any(isinstance(item, nn.Module) for item in tree_leaves((call.args, call.kwargs))):  # as DoRA's magnitudes
            raise ValueError("it is given modules, which compute in the run's dtypes")
        regions, attention = self._engine.regions, self._resolved.config.model.attention
        made, gradients = list[list[torch.Tensor]](), list[torch.Tensor]()
        planned = None if regions is None else DTYPES.get(regions.dtypes.get(name, ""))
        in_its_dtype = regions is None or (planned is not None and self._kinds[name] in ("matmul", "norm"))
        came = self._back.pop(name, {}) if regions is None else {}
        back = len(came) == 2
        dtypes = (planned or DTYPES[self._engine.compute], *(item.dtype for item in call.outputs))
        u = max(map(unit_roundoff, dtypes))
        wide = torch.float64 if in_its_dtype and u == unit_roundoff(torch.float32) else torch.float32
        for dtype in (planned, wide) if in_its_dtype else (wide,):
            (args, kwargs), own = _inputs(module, call, dtype), in_dtype(weights, dtype)
            given: Any = args[0].requires_grad_() if back else None
            with torch.set_grad_enabled(back), torch.autocast(self._engine.world.device.type, enabled=False):
                output = plain(module, own, dtype, attention)(*args, **kwargs)
            if back:
                gradients += torch.autograd.grad(output, given, came["output"].to(output.dtype))
            made.append(_rows_of(output, call))
        found = list[tuple[str, torch.Tensor]]()
        if in_its_dtype:
            # a correct kernel may round both halves of a linear layer's sum, their sum, and that plus the bias
            kernel = IN_HALVES if any(isinstance(item, nn.Linear) for item in module.modules()) else OTHER_KERNEL
            three = zip(call.outputs, *made, strict=False)
            rows = [distance(run, plan.to(run.dtype), exact, roundoff=u, kernel=kernel) for run, plan, exact in three]
            found += [("modules", row) for row in rows]
        if back:
            of_input = [_some_rows(item) for item in (came["given"], *gradients)]
            row = distance(*of_input, roundoff=unit_roundoff(came["output"].dtype), kernel=IN_HALVES)
            found.append(("backward", row))
        if wide == torch.float32:
            plan = made[0] if in_its_dtype else call.outputs
            three = zip(self._code_in_fp32(module, own, call), plan, made[-1], strict=False)
            found += [("code", distance_in_fp32(*each, roundoff=u)) for each in three]
        return found

    def _code_in_fp32(self, module: Any, weights: Any, call: _Call) -> list[torch.Tensor]:
        """Results of the run's own code of a module in FP32; empty if it cannot compute there. weights: in FP32."""
        if self._resolved.config.model.compile:
            return []
        regions = self._engine.regions
        args, kwargs = _inputs(module, call, torch.float32)
        in_fp32 = nullcontext() if regions is None else regions.in_fp32()
        try:
            with in_fp32, torch.autocast(self._engine.world.device.type, enabled=False):
                output = own_code(module, weights, args, kwargs)
        except Exception:  # a kernel for 16 bits only, whatever it raises
            return []
        return _rows_of(output, call)

    @property
    def _head_dtype(self) -> str:
        """The dtype in which the output embedding computes."""
        regions = self._engine.regions
        return self._engine.compute if regions is None else regions.dtypes.get(self._head_name, "fp32")

    def _can_judge_loss(self) -> bool:
        model: Any = self._engine.model
        factors = (getattr(model.config.get_text_config(), name, None) for name in _FACTORS)
        bias = getattr(model, "final_logits_bias", None)  # of BART's family, outside of its head
        beside = model.get_submodule(self._head_name.rpartition(".")[0])._parameters.get("bias")  # as in ESM
        if type(self._engine.objective) is not LabelPrediction or self._resolved.batch.sequence > 1:
            self.skipped["loss"] = "it is not a cross-entropy of whole sequences"
        elif not isinstance(self._head, nn.Linear):
            self.skipped["loss"] = "its output embedding is not a linear layer"
        elif (
            any(factor not in (None, 1.0) for factor in factors)
            or (bias is not None and bool(bias.any()))
            or not (beside is None or beside is self._head.bias)
        ):
            self.skipped["loss"] = "the model changes its logits"
        return "loss" not in self.skipped

    def _enter_head(self, module: nn.Module, args: Any) -> Any:
        if not (_in_forward() and args[0].requires_grad):
            return None
        args = args[0].view_as(args[0]), *args[1:]  # a prediction of later tokens may have the same input
        labels = self._batch.labels[self._micro].flatten()
        counted = (labels != IGNORED_LABEL).nonzero().flatten()
        counted = counted[_spread(len(counted), max(1, _TOKENS // len(self._batch.labels)), self._turn)]
        places = counted.to(args[0].device)

        def of_labels(values: torch.Tensor) -> torch.Tensor:
            return values.detach().reshape(-1, values.shape[-1])[places]

        kept = [labels[counted].to(args[0].device), of_labels(args[0])]
        self._of_loss.append(kept)
        args[0].register_hook(lambda came: kept.append(of_labels(came)))
        with unseen(args[0].device.type):
            self._add_loss(args[0].detach().flatten(0, -2), labels.to(args[0].device), module)
        return args

    def _add_loss(self, hidden: torch.Tensor, labels: torch.Tensor, head: Any) -> None:
        """Add a micro-batch's loss and its contribution to the head's gradient, of all its labels."""
        dtype = DTYPES[self._head_dtype]
        u, weight, bias = unit_roundoff(dtype), head.weight.to(dtype), head.bias
        bias = None if bias is None else bias.to(dtype)
        chunk = max(_LOGITS // len(head.weight), 1)
        for given, own in zip(hidden.to(dtype).split(chunk), labels.split(chunk), strict=True):
            logits, bent = functional.linear(given, weight, bias), None
            # without chunks the model caps them in its dtype, where little is left of 1 - tanh^2 near 0
            logits = logits.to(self._sums.wide) if self._engine.loss_path.chunked else logits
            if self._cap:
                bent = torch.tanh(logits / self._cap)
                logits, bent = bent * self._cap, bent.to(self._sums.wide)
            logits = logits.to(self._sums.wide)
            counted, rows = (own != IGNORED_LABEL)[:, None], own.clamp(min=0)[:, None]
            logs = logits.log_softmax(-1)
            losses, largest = -logs.gather(1, rows) * counted, logits.abs().amax(-1, keepdim=True) * counted
            self._total += torch.stack([losses.double().sum(), (u * largest.double()).square().sum()])
            came = logs.exp_().scatter_add_(1, rows, -torch.ones_like(losses)) * (counted * self._factor.to(logs))
            came = came if bent is None else came * (1 - bent.square())
            self._sums.add(head, self._sums.operand(head, given), came)

    def recorded(self, outcome: Outcome) -> list[Row]:
        """Comparisons of this rank's recorded loss, bounded by the rounding of logits, and of the label count."""
        if not self._judges_loss:
            return []
        total, squares, count, loss, divisor = torch.stack(
            [*self._total, self._count.clamp(min=1.0), outcome.loss_sum, outcome.label_tokens]
        ).tolist()
        size = max(total, torch.finfo(torch.float32).tiny)
        bound = 6 * squares**0.5 + 8 * unit_roundoff(torch.float32) * total
        labels = Row("loss", "labels of the step", abs(divisor - count) / count, 1e-9)
        return [Row("loss", "recorded loss", abs(loss - total) / size, bound / size), labels]

    def _compare_loss(self) -> list[torch.Tensor]:
        made: list[torch.Tensor] = []
        seen = [kept for kept in self._of_loss if len(kept) == 3]
        weights = weights_of(self._engine, self._head) if self._judges_loss else {}
        if not seen or not sum(len(labels) for labels, *_ in seen):
            return []
        labels, hidden, came = (torch.cat(items) for items in zip(*seen, strict=True))
        planned = DTYPES[self._head_dtype]
        u = max(unit_roundoff(planned), unit_roundoff(came.dtype))
        wide = torch.float64 if u == unit_roundoff(torch.float32) else torch.float32
        for dtype in (planned, wide):
            given, own = hidden.to(dtype).requires_grad_(), in_dtype(weights, dtype)
            with torch.enable_grad():
                logits = functional.linear(given, own["weight"], own.get("bias"))
                if self._engine.loss_path.chunked:  # otherwise the model caps them in its dtype
                    logits = logits.to(wide)
                logits = self._cap * torch.tanh(logits / self._cap) if self._cap else logits
                loss = functional.cross_entropy(logits.to(wide), labels, reduction="sum") * self._factor.to(wide)
            made += torch.autograd.grad(loss, given)
        return [distance(came, made[0].to(came.dtype), made[1], roundoff=u, kernel=2.0)]


def _in_forward() -> bool:
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1


def _spread(count: int, wanted: int, turn: int) -> slice:
    """At most `wanted` of `count` indices, evenly spaced, others in each turn."""
    every = max(1, count // wanted)
    return slice(turn % every, turn % every + every * wanted, every)


def _of_tokens(given: torch.Tensor, output: torch.Tensor, turn: int) -> _Call | None:
    """The call for some of its tokens; None if its output does not have one row per token."""
    width = given.shape[-1:] if given.is_floating_point() else ()
    if output.shape[:-1] != given.shape[: given.dim() - len(width)]:
        return None
    rows = _spread(output.shape[:-1].numel(), _TOKENS, turn)
    few = (values.reshape(-1, *last)[rows].clone() for values, last in ((given, width), (output, output.shape[-1:])))
    return _Call((next(few),), {}, [*few], [])


def _row_of(batch: Batch, micro: int, turn: int) -> int:
    """The compared sample of a micro-batch: each with labels in turn, and every other time the one with the most
    documents, or else with the most labels."""
    labels = batch.labels[micro]
    if labels.shape != batch.input_ids[micro].shape:
        return 0
    counted = labels != IGNORED_LABEL
    starts = counted & (batch.position_ids[micro] == 0) if batch.position_ids is not None else counted
    filled: list[int] = counted.any(-1).nonzero().flatten().tolist() or [0]
    most = starts.sum(-1) * labels.shape[-1] + counted.sum(-1)
    return int(most.argmax()) if turn % 2 else filled[turn // 2 % len(filled)]


def _of_one_sample(row: int, args: Any, kwargs: dict[str, Any], output: Any) -> _Call:
    tensors = [item for item in tree_leaves((args, kwargs)) if isinstance(item, torch.Tensor)]
    samples = next((len(item) for item in tensors if item.dim() > 1), 1)

    def one(value: torch.Tensor) -> torch.Tensor:
        return value[row : row + 1] if value.dim() > 1 and len(value) == samples else value

    args, kwargs = tree_map_only(torch.Tensor, one, (args, kwargs))
    outputs = [_some_rows(one(item)).clone() for item in _floats(output)]
    return _Call(args, kwargs, outputs, [(item, item._version) for item in tensors])


def _inputs(module: Any, call: _Call, dtype: torch.dtype | None) -> tuple[Any, dict[str, Any]]:
    args, kwargs = in_dtype((call.args, call.kwargs), dtype)
    if type(module) is nn.Linear and not call.versions:  # DeepSpeed's rounds differently for a matrix
        args = (args[0][None],)
    return args, kwargs


def _rows_of(output: Any, call: _Call) -> list[torch.Tensor]:
    return [_some_rows(item) if call.versions else item.flatten(0, -2) for item in _floats(output)]


def _some_rows(values: torch.Tensor) -> torch.Tensor:
    flat = values.detach().reshape(-1, values.shape[-1])
    return flat[_spread(len(flat), _TOKENS, 0)]


def _floats(tree: Any) -> list[torch.Tensor]:
    return [item for item in tree_leaves(tree) if isinstance(item, torch.Tensor) and item.is_floating_point()]
