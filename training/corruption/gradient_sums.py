"""Check of a step's reduced gradients: weight gradients recomputed from layer inputs and gradients of layer outputs.

A gradient G is a sum over tokens, micro-batches and ranks. What is compared is v G u for random signs u and v
(Freivalds 1979): its mean square is |G|^2, so every value of G counts, at the cost of a few columns of a product.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from precision.dtypes import DTYPES
from precision.tolerance import unit_roundoff
from training.corruption.plain import plain
from training.engine import Engine
from training.engine.tensors import local_gradient, shape_of, shard_of

_SIGNS = 8  # pairs of random signs u and v for each parameter


@dataclass
class _Sum:
    """The contributions of this rank's calls to one parameter's gradient."""

    name: str
    modules: list[str]
    """Names of its users: two of a tied embedding."""
    v: torch.Tensor
    u: torch.Tensor
    came: list[torch.Tensor] = field(default_factory=list)
    roundings: torch.Tensor | float = 1.0
    """Factor on the rounding error of a kernel that adds tokens one by one in the run's dtype."""
    rounded: int = 1
    """Numbers in a term that are each rounded before they are added: the products of a norm's tokens."""
    linear: bool = False
    """Whether it is the weight of a linear layer, whose rounding errors have no direction."""


class GradientSums:
    """The sums of one step: `follow` each call of the modules, then call `compared` between backward and step."""

    def __init__(
        self, engine: Engine, modules: Mapping[str, Any], *, turn: int, history: dict[str, torch.Tensor] | None = None
    ) -> None:
        """modules: by name, all of which `can_follow`; parameters shared with others are left out. turn: seed of the
        signs, the same on all ranks. history: sums over the steps compared until now, by parameter; updated."""
        self._engine, self._history = engine, {} if history is None else history
        users: dict[Any, set[nn.Module]] = defaultdict(set)
        for module in engine.model.modules():
            for parameter in module._parameters.values():
                users[parameter].add(module)
        self._sums: dict[Any, _Sum] = {}
        for name, module in modules.items():
            for key, parameter in module._parameters.items():
                trained = parameter is not None and parameter.requires_grad
                if parameter in self._sums:
                    self._sums[parameter].modules.append(name)
                elif trained and users[parameter] <= {*modules.values()}:
                    dice = torch.Generator().manual_seed(1_000_003 * turn + len(self._sums))
                    sizes = (1, *shape_of(parameter))[-2:]
                    signs = torch.randint(2, (sum(sizes), _SIGNS), generator=dice).mul_(2).sub_(1)
                    v, u = signs.to(engine.world.device, self.wide).split(sizes)
                    linear = key == "weight" and type(module) in (nn.Linear, Conv1D)
                    self._sums[parameter] = _Sum(f"{name}.{key}", [name], v, u, linear=linear)

    @property
    def wide(self) -> torch.dtype:
        """Dtype of the sums, in which rounding is negligible beside the run's."""
        return torch.float64 if self._engine.compute == "fp32" else torch.float32

    @torch.no_grad()
    def follow(self, module: Any, given: torch.Tensor, output: torch.Tensor) -> None:
        """Record one call of a module, before its output is used."""
        if any(parameter in self._sums for parameter in module._parameters.values()):
            try:
                operand = self.operand(module, given.detach())
            except Exception:  # a norm that is not just a normalisation times a weight
                for parameter in module._parameters.values():
                    self._sums.pop(parameter, None)
                return
            output.register_hook(lambda came: self.add(module, operand, came))

    def operand(self, module: Any, given: torch.Tensor) -> torch.Tensor:
        """(tokens, ...) what a call's input contributes to the weight gradient, to be multiplied by the gradient of the
        call's output."""
        # not `module.weight`: at ZeRO-3 reading the attribute gathers it and registers it with the parent
        weight = module._parameters.get("weight")
        own = self._sums.get(weight)
        if is_norm(module):  # the output is linear in the weight
            shape, wide = shape_of(weight), given.reshape(-1, given.shape[-1]).to(self.wide)
            one, zero = ({key: wide.new_full(shape, value) for key in module._parameters} for value in (1.0, 0.0))
            made = [plain(module, weights | {"bias": zero["weight"]}, self.wide, "") for weights in (one, zero)]
            return made[0](wide) - made[1](wide)
        if own is None:  # its bias alone is trained
            return given.new_zeros(0)
        if given.is_floating_point():
            signs = own.u if type(module) is nn.Linear else own.v
            return _times(given.reshape(-1, given.shape[-1]).to(self.wide), signs)
        ids = given.flatten()
        counts = ids.bincount().double()
        own.roundings = (1 + counts.square().sum() / counts.sum() / 2).sqrt()
        factor = torch.as_tensor(getattr(module, "embed_scale", 1.0)).to(weight.dtype).to(self.wide)
        padding = -1 if module.padding_idx is None else module.padding_idx
        return own.v[ids] * factor * (ids != padding)[:, None]

    @torch.no_grad()
    def add(self, module: Any, operand: torch.Tensor, came: torch.Tensor) -> None:
        """Add the contribution of one call. came: gradient of its output."""
        came = came.detach().reshape(-1, came.shape[-1]).to(self.wide)
        norm = torch.linalg.vector_norm(came)
        for key, parameter in module._parameters.items():
            own = self._sums.get(parameter)
            if own is None:
                continue
            size = len(came) ** 0.5 if key == "bias" else torch.linalg.vector_norm(operand)
            if key == "bias":
                sums = _times(came, own.u).double().sum(0)
            elif is_norm(module):
                sums = _times(came * operand, own.u).double().sum(0)
            else:
                signs = own.v if type(module) is nn.Linear else own.u
                sums = (_times(came, signs).double() * operand.double()).sum(0)
            if is_norm(module):
                own.rounded = 1 + len(came)
            sums = sums * own.v[0].double() if key == "bias" or is_norm(module) else sums
            own.came.append(torch.cat([sums, sums.square().mean()[None], (norm * size).double()[None]]))
            if isinstance(module, nn.LayerNorm):
                own.roundings = (1 + len(came) / 2) ** 0.5

    def compared(self, terms: int, skipped: dict[str, str]) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, (2,) error and bound) of each parameter, relative to its gradient. Allowed are four roundings of each
        of the `terms` of the sum over micro-batches and ranks, subnormal ones too, added in quadrature, and FP32's over
        tokens. Linear layers' errors are also pooled over the steps compared, since rounding has no direction and a
        wrong factor has one. A collective."""
        engine, regions, ranks = self._engine, self._engine.regions, self._engine.world.world_size
        if not self._sums:
            return
        table = torch.zeros(len(self._sums), 2 * _SIGNS + 4, dtype=torch.float64, device=engine.world.device)
        for row, (parameter, own) in zip(table, self._sums.items(), strict=True):
            row[: _SIGNS + 1] = self._reduced(parameter, own) / (1 if engine.stage else ranks)
            if own.came:
                row[_SIGNS + 1 : -1] = torch.stack(own.came).sum(0) / ranks
                row[-3] /= ranks
                row[-1] = own.roundings / ranks
        engine.world.sum(table)
        for row, (parameter, own) in zip(table, self._sums.items(), strict=True):
            if not own.came:  # Mamba's dt_proj, for one
                skipped[own.modules[0]] = "its weight is used without a call of the layer"
                continue
            kept = [engine.compute if regions is None else regions.dtypes.get(name, "fp32") for name in own.modules]
            u = max(unit_roundoff(DTYPES[dtype]) for dtype in kept)
            mine, square, expected, sizes = row.split([_SIGNS, 1, _SIGNS, 3])
            # the signed sums may nearly cancel; the norm of the gradient itself does not
            size = torch.maximum(sizes[0], square[0]).sqrt()
            rounded = shape_of(parameter).numel() * terms * own.rounded
            tiny = torch.finfo(torch.float16).smallest_normal * u * rounded**0.5
            bound = 4 * (u * size * sizes[2] + tiny) + 8 * unit_roundoff(torch.float32) * sizes[1]
            error = ((mine - expected).norm() / _SIGNS**0.5).nan_to_num(torch.inf)
            least = size.clamp_min(torch.finfo(torch.float64).tiny)
            yield own.name, torch.stack([error, bound]) / least
            if own.linear and kept != ["fp32"]:
                yield from self._over_steps(own.name, (mine - expected) / least, expected / least, u, tiny / least)

    def _over_steps(
        self, name: str, error: torch.Tensor, expected: torch.Tensor, u: float, tiny: torch.Tensor
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The part of the error that is a multiple of the gradient, with six of its standard errors and a fifth of a
        rounding as bound, once that is known from four steps."""
        parts = [(error * expected).sum(), expected.square().sum(), error.square().sum()]
        total = torch.stack([*parts, error.new_tensor(float(len(error)))]).nan_to_num(torch.inf)
        self._history[name] = total = total + self._history.get(name, torch.zeros_like(total))
        along, square, errors, count = total
        if count >= 4 * _SIGNS:
            other = (errors - along.square() / square).clamp_min(0.0)
            bound = 0.2 * u + tiny + 6 * (other / square / count).sqrt()
            yield name, torch.stack([(along / square).abs(), bound])

    def _reduced(self, parameter: Any, own: _Sum) -> torch.Tensor:
        """(_SIGNS + 1,) float64: v G u of this rank's part of a reduced gradient, and its norm squared."""
        found = torch.zeros(_SIGNS + 1, dtype=torch.float64, device=self._engine.world.device)
        shard = shard_of(self._engine, parameter)
        if shard is None or (gradient := local_gradient(parameter, shard, self._engine.stage)) is None:
            return found
        first, before = divmod(shard.start, len(own.u))
        after = -(before + shard.length) % len(own.u)
        rows = functional.pad(gradient.to(found.device, self.wide), (before, after)).view(-1, len(own.u))
        found[:-1] = (_times(rows, own.u).double() * own.v[first : first + len(rows)].double()).sum(0)
        found[-1] = torch.linalg.vector_norm(rows, dtype=torch.float64).square()
        return found


def _times(rows: torch.Tensor, signs: torch.Tensor) -> torch.Tensor:
    """rows @ signs. For so few columns CPUs compute the product of the transposes two to four times as fast."""
    return (signs.t() @ rows.t()).t()


def can_follow(module: nn.Module) -> bool:
    """Whether `GradientSums` supports the module, norms aside (`is_norm`)."""
    scaled = isinstance(module, nn.Embedding) and hasattr(module, "embed_scale")
    return type(module) in (nn.Linear, Conv1D, nn.Embedding) or scaled


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm with one weight per channel."""
    weight = module._parameters.get("weight")
    return "Norm" in type(module).__name__ and weight is not None and len(shape_of(weight)) == 1
