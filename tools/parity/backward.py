"""Recomputes the backward pass of a step's first micro-batch module by module, and that of the loss.

Once the pass is over, each module of the reference is called as in `tools.parity.signature`, and differentiated with
the gradients that arrived at the run's module. Compared are the gradients of its inputs, of the outputs of its
submodules, and of its own parameters. Submodules contribute what they did in the run: their outputs, and the gradients
that they computed for their inputs.

The loss is one more module, `(loss)`: the model's own code after its output embedding, and the objective. If the engine
computes it in chunks, the embedding is part of it, since no logits are kept.

Parameter gradients are those of the whole micro-batch, so parameters shared by several modules, or used in several
calls, are left out. Everything recorded is kept until the pass is over: about as much memory as the activations of the
micro-batch take without recomputation, and their gradients.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from config.errors import one_line
from modeling.objectives.label_prediction import LabelPrediction
from modeling.objectives.objective import Objective, Scored
from precision.manifest import is_router
from precision.tolerance import expected
from tools.parity.own_code import own_code
from tools.parity.partial_sums import Walk, walks
from tools.parity.recompute import (
    COMPUTED_IN,
    Call,
    Kernel,
    Leaves,
    Plan,
    Redrawn,
    again,
    as_fp64,
    bias_last,
    by_halves,
    fewer_outputs,
    fewer_rows,
    leaves_of,
    map_floats,
    products_in_fp32,
    rounded,
    row_of,
    terms_of,
)
from tools.parity.rounding import GRADIENT, Kind, further_off, sums_of
from tools.parity.slices import Slices
from training.engine.tensor_slices import joined_in

LOSS = "(loss)"
_Gradients = dict[str, torch.Tensor]


OwnLoss = Callable[..., Scored]
"""(inputs, labels, gradient that the loss will receive, forward=pass of its model) -> a run's loss of a micro-batch."""


class Backward:
    """Records a run's backward pass through the calls passed to `enter` and `leave`."""

    def __init__(self, plan: Plan, candidate: torch.nn.Module, slices: Slices) -> None:
        self._plan, self._slices = plan, slices
        self._candidate = dict(candidate.named_modules())
        named = list(candidate.named_parameters(remove_duplicate=False))
        owners = Counter(id(parameter) for _, parameter in named)
        self._trained = {name: item for name, item in named if item.requires_grad}
        self._shared = {name for name, item in named if owners[id(item)] > 1}
        self._uses: Counter[str] = Counter()
        self._calls: list[Call] = []
        self._of_parameters: _Gradients = {}
        self._began = False
        self._whole: Call | None = None
        self._loss: tuple[Objective, dict[str, Any], torch.Tensor] | None = None
        self._own_loss: OwnLoss | None = None
        self._made_loss: torch.Tensor | None = None
        self._of_loss: dict[int, torch.Tensor] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context manager around the passes."""
        with ExitStack() as stack:
            for name, parameter in self._trained.items():
                stack.enter_context(parameter.register_hook(partial(self._of_parameter, name)))
            yield

    def use(self, name: str) -> None:
        """Count a call of a module, recorded or not: its parameters' gradients are sums over all calls."""
        self._uses[name] += torch.is_grad_enabled() and not self._began

    def enter(self, call: Call) -> None:
        """Replace a call's inputs with views, whose gradients are this call's alone."""
        if not torch.is_grad_enabled():
            return
        call.followed = True
        call.args, call.kwargs = self._views((call.args, call.kwargs), call.made)

    def leave(self, call: Call) -> None:
        """Replace a call's outputs with views too, since the module may use some of them itself."""
        if not any(value.requires_grad for value in leaves_of(call.output)):
            return
        call.output = self._views(call.output, call.came)
        call.versions = call.now()
        if call.name:
            self._calls.append(replace(call))
        else:
            self._whole = replace(call)

    def watch_loss(
        self, objective: Objective, inputs: dict[str, Any], labels: torch.Tensor, own: OwnLoss | None = None
    ) -> Callable[[Any], None]:
        """The function to call with the candidate's loss before its backward pass, so that it is compared as `(loss)`.

        objective: the reference's. inputs, labels: of the first micro-batch. own: how the candidate computes its loss;
        None if its code must not be called in FP32.
        """
        self._loss, self._own_loss = (objective, inputs, labels), own

        def watch(loss: torch.Tensor) -> None:
            if self._made_loss is None:
                self._made_loss = loss.detach()
                loss.register_hook(partial(self._keep, self._of_loss, 0))

        return watch

    def compared(self) -> tuple[list[dict[str, Any]], dict[str, str]]:
        """Rows for `tools.parity.rounding.pooled`, and by unmeasured module the reason. Discards what was recorded."""
        rows: list[dict[str, Any]] = []
        blind: dict[str, str] = {}
        calls, self._calls = self._calls, []
        if not calls and self._trained:
            blind["(backward pass)"] = "the first pass through the modules had no gradients"
        made, group = self._of_parameters, self._slices.group
        trained = ((name, item) for name, item in self._trained.items() if name in made)  # alike on all ranks
        self._of_parameters = {name: joined_in(group, made[name], item) for name, item in trained}
        for call in map(self._slices.call, calls):
            try:
                rows += self._compare(call)
            except Exception as error:  # a module that cannot be differentiated again is left out, by name
                blind[call.name] = f"backward: {one_line(error, 200)}"
        if self._loss is not None and self._of_loss:
            head = self._chunked_head()
            if head is not None:
                blind[head] = "computed with the loss, some tokens at a time; see (loss)"
            try:
                rows += self._compare_loss(*self._loss)
            except Exception as error:  # as above
                blind[LOSS] = one_line(error, 200)
        self._whole = None
        self._of_parameters.clear()
        return rows, blind

    def _views(self, tree: Any, gradients: dict[int, torch.Tensor]) -> Any:
        """A copy of the tree whose float tensors are views; their gradients are kept by number when they arrive."""
        numbers = itertools.count()

        def view(value: torch.Tensor) -> torch.Tensor:
            number = next(numbers)
            if not value.requires_grad:
                return value
            seen = value.view_as(value)
            seen.register_hook(partial(self._keep, gradients, number))
            return seen

        return map_floats(view, tree)

    def _keep(self, found: dict[int, torch.Tensor], number: int, gradient: torch.Tensor) -> None:
        self._began = True
        found[number] = gradient.detach().clone()

    def _of_parameter(self, name: str, gradient: torch.Tensor) -> None:
        if name not in self._of_parameters:  # ignores later micro-batches
            self._of_parameters[name] = gradient.detach().clone()

    def _compare(self, call: Call) -> list[dict[str, Any]]:
        if not call.came or call.name == self._chunked_head():  # nothing trained used its output; or see the loss
            return []
        _require_unchanged(call)
        if is_router(self._plan.modules[call.name]):
            raise ValueError("it chooses experts: a near tie that FP64 decides differently is no rounding")
        kind = self._plan.kind(call.name)
        if kind == "functional":  # implementations may call submodules any number of times
            call.inside = []
        small, run = fewer_rows(call) if kind == "linear" and not call.inside else call, self._of_run(call)
        rows: list[dict[str, Any]] = []
        if small is not call:  # its parameters' gradients are sums over all rows
            rows = self._of_large_weight(call, run)
            run = {_INPUT: small.made[0]} if 0 in small.made else {}
        if not run:  # such as an embedding with a tied weight
            return rows
        planned, in_fp32, exact = (self._again(small, dtype, run) for dtype in COMPUTED_IN)
        module, output = self._plan.modules[call.name], leaves_of(small.output)[0]
        in_halves = kind == "linear" and isinstance(module, torch.nn.Linear)
        if in_halves or call.inside:
            u = self._plan.roundoff_of_gradient(call.name, output)
            known = [part for part in run if part in planned and part in exact]
            if any(further_off(run[part], planned[part], exact[part], u) for part in known):
                with self._plan.computed_by(call.name, by_halves) if in_halves else nullcontext():
                    planned = self._again(small, None, run, in_turn=not in_halves)
        tokens = output.numel() // output.shape[-1]
        terms = max(terms_of(kind, small), tokens)
        moved: dict[str, float] = {}
        if kind == "attention":
            moved = self._moved(small, exact, torch.float64)
        elif _is_far(in_fp32, exact, expected(terms, torch.float32)):
            moved = self._moved(small, in_fp32, torch.float32)
        of_sums = walks(module, call, exact.get(f"{GRADIENT}weight"))
        of_parts = {f"{GRADIENT}{key}": walk for key, walk in of_sums.items()}
        came, computed = max(map(_mean_square, call.came.values())), (planned, in_fp32, exact)
        return rows + self._rows(
            call.name, kind, terms, run, computed, tokens=tokens, came=came, walks=of_parts, moved=moved
        )

    def _of_large_weight(self, call: Call, run: _Gradients) -> list[dict[str, Any]]:
        """The rows of a few of a large linear layer's outputs, whose gradients of the weight are sums over all tokens.
        run: the run's own gradients."""
        part, module = f"{GRADIENT}weight", self._plan.modules[call.name]
        if part not in run or type(module) is not torch.nn.Linear or not self._plan.in_16_bits:
            return []
        few, chosen = fewer_outputs(call)
        weight, values = module.weight.detach()[chosen], run[part][chosen]
        tokens, u = few.output.numel() // few.output.shape[-1], self._plan.roundoff_of_gradient(call.name, few.output)

        def computed(dtype: torch.dtype, kernel: Kernel) -> _Gradients:
            leaf = weight.to(few.output.dtype).to(dtype).requires_grad_()
            with torch.enable_grad(), products_in_fp32():
                made = kernel({"weight": leaf}, few.args[0].to(dtype))
                return {part: torch.autograd.grad(made, leaf, few.came[0].to(dtype))[0]}

        found = [computed(dtype, bias_last) for dtype in (few.output.dtype, torch.float32, torch.float64)]
        if further_off(values, found[0][part], found[-1][part], u):
            found[0] = computed(few.output.dtype, by_halves)
        of_sums = {part: walks(module, few, found[-1][part])["weight"]}
        came = _mean_square(few.came[0])
        return self._rows(call.name, "linear", tokens, {part: values}, found, tokens=tokens, came=came, walks=of_sums)

    def _compare_loss(self, objective: Objective, inputs: dict[str, Any], labels: torch.Tensor) -> list[dict[str, Any]]:
        whole, head = self._whole and self._slices.call(self._whole), self._chunked_head()
        if whole is None or not isinstance(objective, LabelPrediction):
            raise ValueError("only the cross-entropy of labels is recomputed")
        if head is not None and not self._plan.computes_as_default(head):
            raise ValueError("chunked, under a manifest that gives the output embedding a dtype of its own")
        _require_unchanged(whole)
        call = replace(whole, inside=[inner for inner in whole.inside if inner.name != head], came={})
        assert self._made_loss is not None
        run, computed = {_OUTPUT: self._made_loss, **self._of_run(call)}, []
        for dtype in COMPUTED_IN:
            leaves = Leaves()
            with torch.enable_grad():
                output = again(self._plan, call, dtype, leaves)["output"]
            # not around the call: its weights are rounded as the plan says
            with torch.enable_grad(), as_fp64() if dtype is torch.float64 else nullcontext():
                loss = objective.score(lambda output=output, **_: output, inputs, labels).loss
            found = self._gradients(call, leaves, [(loss, self._of_loss[0])], run)
            computed.append({_OUTPUT: loss.detach(), **found})
        own = self._own_code_of_loss(call, inputs, labels, run)
        logits = computed[0][_OUTPUT] if head is not None else self._made_loss
        vocabulary = self._plan.modules[self._plan.head or ""].weight.shape[0]
        rows = self._rows(LOSS, "loss", max(int(vocabulary), labels.numel()), run, computed, own=own)
        for row in rows:
            if row["part"] == _OUTPUT and head is not None:  # computed from rounded logits
                row["roundoff"] = self._plan.roundoff(head, logits)
            elif row["part"] == _OUTPUT and self._rounds_logits(whole):  # rounded once more, as by a logit cap
                row["roundoff"] = self._plan.roundoff("", leaves_of(whole.output)[0])
        return rows

    def _own_code_of_loss(
        self, call: Call, inputs: dict[str, Any], labels: torch.Tensor, parts: Collection[str]
    ) -> _Gradients:
        """The results of the run's own model and loss in FP32; empty if they cannot be computed."""
        came, leaves = self._of_loss[0], Leaves()
        if self._own_loss is None or self._slices.group is not None:
            return {}

        def forward(**_: Any) -> Any:
            found = own_code(self._plan, self._candidate, call, leaves)
            if found is None:
                raise ValueError("its code cannot be called in FP32")
            return found["output"]

        try:
            with torch.enable_grad():
                loss = self._own_loss(inputs, labels, came, forward=forward).loss
            return {_OUTPUT: loss.detach(), **self._gradients(call, leaves, [(loss, came)], parts)}
        except Exception:  # as for modules
            return {}

    def _rounds_logits(self, whole: Call) -> bool:
        """Whether the model's own code processes the output embedding's result before the loss does."""
        heads = [leaves_of(inner.output)[0] for inner in whole.inside if inner.name == self._plan.head]
        made = leaves_of(whole.output)[0].data_ptr()
        return bool(heads) and all(head.data_ptr() != made for head in heads)

    def _chunked_head(self) -> str | None:
        """The output embedding if it returned the loss and no logits; else None."""
        inside = self._whole.inside if self._whole is not None else []
        return next((call.name for call in inside if call.name == self._plan.head and call.output.numel() == 1), None)

    def _again(
        self, call: Call, dtype: torch.dtype | None, parts: Collection[str], *, in_turn: bool = False
    ) -> _Gradients:
        """Gradients of these parts, recomputed. in_turn: as in `_gradients`."""
        leaves = Leaves()
        with torch.enable_grad():
            output = again(self._plan, call, dtype, leaves)["output"]
        made = leaves_of(output)
        ends = [(made[number], came) for number, came in call.came.items()]
        return self._gradients(call, leaves, ends, parts, in_turn=in_turn)

    def _moved(self, call: Call, made: _Gradients, dtype: torch.dtype) -> dict[str, float]:
        """Sum of squared changes of gradients, by part, when all inputs and results are off by FP32's rounding.

        made: those in this dtype. FP64 skips casts to fewer bits inside the module; in FP32 they stay as they are.
        """
        with Redrawn(dtype):
            found = self._again(rounded(call), dtype, made)
        there = ((part, values) for part, values in made.items() if part in found)
        return {part: float((found[part] - values).double().square().sum()) for part, values in there}

    def _gradients(
        self,
        call: Call,
        leaves: Leaves,
        ends: Sequence[tuple[torch.Tensor, torch.Tensor]],
        parts: Collection[str],
        *,
        in_turn: bool = False,
    ) -> _Gradients:
        """Gradients of these parts. ends: the outputs, each with its incoming gradient.

        in_turn: whether contributions of the outputs, and of each submodule, are added in the order in which the run's
        backward pass reaches them. Otherwise torch first adds up what submodules hand back, and that sum is rounded
        more finely than one that includes the gradient bypassing them.
        """
        pairs = list(ends)
        for place, handed in reversed(leaves.handed.items()):  # as the backward pass reaches them
            got = leaves_of(handed)
            pairs += [(got[number], made) for number, made in call.inside[place].made.items()]
        pairs = [(tensor, gradient.to(tensor.dtype)) for tensor, gradient in pairs if tensor.requires_grad]
        wanted = {_numbered(_INPUT, number): leaf for number, leaf in enumerate(leaves.inputs)}
        for place, returned in leaves.returned.items():
            wanted |= {_numbered(_returned(call, place), number): leaf for number, leaf in enumerate(returned)}
        wanted |= {f"{GRADIENT}{key}": leaf for key, leaf in leaves.own.items()}
        wanted = {name: leaf for name, leaf in wanted.items() if leaf.requires_grad and name in parts}
        if not pairs or not wanted:
            return {}
        found: _Gradients = {}
        for few in [[pair] for pair in pairs] if in_turn else [pairs]:
            outputs, gradients = zip(*few, strict=True)
            options = {"allow_unused": True, "retain_graph": in_turn}
            made = torch.autograd.grad(outputs, list(wanted.values()), gradients, **options)
            for name, item in zip(wanted, made, strict=True):
                if item is not None:
                    found[name] = found[name] + item if name in found else item
        return found

    def _of_run(self, call: Call) -> _Gradients:
        """The run's own gradients, under the same names."""
        found = {_numbered(_INPUT, number): made for number, made in call.made.items()}
        for place, inner in enumerate(call.inside):
            if not inner.followed and any(value.requires_grad for value in leaves_of(inner.output)):
                raise ValueError(f"{inner.name} is called more than once")
            found |= {_numbered(_returned(call, place), number): came for number, came in inner.came.items()}
        for key, _ in self._parameters(call.name):
            full = f"{call.name}.{key}" if call.name else key
            once = self._uses[full.rpartition(".")[0]] <= 1 and full not in self._shared
            if once and full in self._of_parameters:
                found[f"{GRADIENT}{key}"] = self._of_parameters[full]
        return found

    def _parameters(self, name: str) -> list[tuple[str, torch.Tensor]]:
        """Parameters of a module and its children; none for names that are not modules, such as the loss."""
        module = self._plan.modules.get(name)
        return [] if module is None else list(module.named_parameters(remove_duplicate=False))

    def _rows(
        self,
        name: str,
        kind: Kind,
        terms: int,
        run: _Gradients,
        computed: Sequence[_Gradients],
        *,
        tokens: int = 1,
        came: float = 0.0,
        walks: Mapping[str, Walk] | None = None,
        moved: Mapping[str, float] | None = None,
        own: Mapping[str, torch.Tensor] | None = None,
    ) -> list[dict[str, Any]]:
        """tokens: terms of a parameter's gradient. came: mean square of the incoming gradients, 0 if unknown. By part,
        walks: of the partial sums; moved: as `_moved`; own: what the run's own code computes in FP32, if known."""
        rows = []
        of_parameters = {f"{GRADIENT}{key}" for key, _ in self._parameters(name)}
        for part, values in run.items():
            if not all(part in found for found in computed):
                continue
            plan, fp32, exact = (found[part] for found in computed)
            width = 1 if exact.dim() < 2 else self._plan.width(name)  # each value of a vector is a separate sum
            times = 1.0
            if kind not in ("linear", "embedding"):  # whose products are rounded first of all
                in_sum = part in of_parameters
                times = tokens if in_sum else max(1.0, _mean_square(exact) / came) if came else 1.0
            walk, roundoff = (walks or {}).get(part, Walk(0.0, False)), self._plan.roundoff_of_gradient(name, plan)
            sizes: Any = {"walk": walk.squares * walk.in_plan, "walk_fp32": walk.squares, "floor_times": times}
            sizes |= {"moved": (moved or {}).get(part, 0.0), "own": (own or {}).get(part)}
            sums = sums_of(values, plan, fp32, exact, roundoff=roundoff, width=width, **sizes)
            rows += row_of(name, part, kind, roundoff, terms, sums)
        return rows


_INPUT, _OUTPUT = f"{GRADIENT}its input", "output"


def _is_far(found: _Gradients, exact: _Gradients, bound: float) -> bool:
    """Whether any gradient's relative distance from FP64's exceeds the bound."""
    return any(
        bool((found[part].double() - values.double()).norm() > bound * values.double().norm())
        for part, values in exact.items()
        if part in found
    )


def _returned(call: Call, place: int) -> str:
    """Name of the part that a submodule returned."""
    inner = call.inside[place]
    before = sum(other.name == inner.name for other in call.inside[:place])
    name = f"{GRADIENT}what {inner.name.removeprefix(f'{call.name}.')} returned"
    return f"{name} #{before + 1}" if before else name


def _numbered(part: str, number: int) -> str:
    return f"{part}, {number}" if number else part


def _mean_square(values: torch.Tensor) -> float:
    return float(values.double().square().mean()) if values.numel() else 0.0


def _require_unchanged(call: Call) -> None:
    """Raises ValueError if an input or output was changed in place since the call."""
    changed = next((one.name for one in (call, *call.inside) if one.versions != one.now()), None)
    if changed is not None:
        raise ValueError(f"what {changed or 'the model'} got or returned was changed in place")
