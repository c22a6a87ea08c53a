"""Check of the code between blocks: masks, positions and hidden states as the model's own forward passes them on.

That forward runs again on one sample, with stand-ins for the blocks that return their input. Where it hands the
output of a block, a norm or the embedding straight to the next, the run must too, which is compared on some rows.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map_only

from modeling.embedding_noise import has_noise
from training.corruption.gradient_sums import is_norm
from training.corruption.plain import drops, plain, weights_of
from training.engine import Engine

_ROWS = 16  # rows kept of a module's input and output


class Between:
    """Checks one forward pass: run it inside `watching`, then call `compared`."""

    def __init__(self, engine: Engine, stations: Mapping[str, nn.Module], attention: str, *, row: int = 0) -> None:
        """stations: the model's blocks, and the norms and the output embedding after them. row: the sample."""
        self._engine, self._stations, self._attention, self._row = engine, stations, attention, row
        self._inside = tuple(f"{name}." for name in stations)
        named = engine.model.named_modules()
        outside = [item for name, item in named if not f"{name}.".startswith(self._inside)]
        self._draws = any(item.training and (drops(item) or has_noise(item)) for item in outside)
        self._given: Any = None
        self._plain, self._forwards = True, 0
        self._handed: dict[str, dict[str, torch.Tensor]] = {}
        self._rows: dict[str, list[torch.Tensor]] = {}

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context that records the first micro-batch of the passes inside it."""
        with ExitStack() as stack:
            stack.callback(self._engine.model.register_forward_pre_hook(self._begin, with_kwargs=True).remove)
            for name, module in self._stations.items():
                hook = module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True)
                stack.callback(hook.remove)
                stack.callback(module.register_forward_hook(partial(self._leave, name)).remove)
            yield

    @torch.no_grad()
    def compared(self) -> list[str]:
        """Names of the modules with other inputs than the model's own forward gives them. A collective at ZeRO-3.
        Raises an exception if the model's blocks exchange more than hidden states."""
        if not self._plain:
            raise TypeError("its blocks exchange more than hidden states")
        model: Any = self._engine.model
        weights = weights_of(self._engine, model, leaving=self._inside)
        copied, kept = plain(model, weights, None, self._attention), dict[str, Any]()
        for name, module in self._stations.items():
            owner, _, own = name.rpartition(".")
            copied.get_submodule(owner)._modules[own] = _Handing(module, partial(kept.__setitem__, name))
        args, kwargs = self._given
        copied(*args, **kwargs)
        wrong, before, draws = [], None, self._draws
        for name, (hidden, further) in kept.items():
            mine = self._handed[name]
            same = all(_alike(mine[key], value) for key, value in _tensors(further, 0).items() if key in mine)
            got, _ = self._rows[name]
            if before is None:
                same = same and (draws or _alike(got, _some(hidden, 0)))
            elif torch.equal(hidden, kept[before][0]) and not draws:
                same = same and torch.equal(got, self._rows[before][1])
            draws = draws and is_norm(self._stations[name])  # values are dropped before the first block
            wrong += [] if same else [name]
            before = name
        return wrong

    def _begin(self, module: Any, args: Any, kwargs: Any) -> None:
        self._forwards += 1
        if self._given is None:
            self._given = tree_map_only(torch.Tensor, partial(_one, row=self._row), (args, kwargs))

    def _enter(self, name: str, module: Any, args: Any, kwargs: Any) -> None:
        again = name in self._handed and self._forwards == 1 and torch._C._current_graph_task_id() == -1
        if again or not args:  # called twice, or with hidden states by keyword, which no stand-in hands on
            self._plain = False
        elif name not in self._handed:
            self._handed[name] = _tensors(kwargs, self._row)
            self._rows[name] = [_some(args[0], self._row)]

    def _leave(self, name: str, module: Any, args: Any, output: Any) -> None:
        if len(self._rows.get(name, ())) == 1:
            self._plain = self._plain and torch.is_tensor(output)
            self._rows[name].append(_some(output if torch.is_tensor(output) else output[0], self._row))


class _Handing(nn.Module):
    """Stand-in for a module that records its inputs and returns the first one unchanged."""

    def __init__(self, module: nn.Module, keep: Any) -> None:
        super().__init__()
        self._keep = keep
        for name, value in vars(module).items():  # such as a block's kind of attention
            if not name.startswith("_") and name not in ("training", "forward"):
                setattr(self, name, value)

    def forward(self, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._keep((hidden, kwargs))
        return hidden


def _one(value: torch.Tensor, row: int) -> torch.Tensor:
    """One sample; of what all share, such as a rotary table, the only one."""
    return value[min(row, len(value) - 1) :][:1] if value.dim() > 1 else value


def _tensors(tree: Any, row: int) -> dict[str, torch.Tensor]:
    found, _ = tree_flatten_with_path(tree)
    return {keystr(path): _one(value, row).detach() for path, value in found if torch.is_tensor(value)}


def _some(values: torch.Tensor, row: int) -> torch.Tensor:
    rows = _one(values.detach(), row).reshape(-1, values.shape[-1])
    return rows[:: max(1, len(rows) // _ROWS)][:_ROWS].clone()


def _alike(run: torch.Tensor, plan: torch.Tensor) -> bool:
    """Whether values agree to within four units in the last place; a mask's are minus infinity in any dtype."""
    if not run.is_floating_point() or run.shape != plan.shape:
        return torch.equal(run, plan)
    tolerance, most = 4 * torch.finfo(run.dtype).eps, torch.finfo(torch.float16).max
    own, other = (values.double().clamp(-most, most) for values in (run, plan))
    return torch.allclose(own, other, rtol=tolerance, atol=tolerance)
