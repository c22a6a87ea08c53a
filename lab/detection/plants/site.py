"""Plants defects: in the engine as soon as it is built, or in a module's names while the run takes place."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from typing import Any
from unittest.mock import patch

import torch
from transformers import PreTrainedModel
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from config.resolved import Resolved
from training import session
from training.engine import Engine
from training.engine import engine as engine_module

LAYER = "model.layers.1"
ATTENTION, NORM, MLP = f"{LAYER}.self_attn", f"{LAYER}.input_layernorm", f"{LAYER}.mlp"
LINEAR = "model.layers.0.mlp.down_proj"
EMBEDDING, HEAD, ROTARY = "model.embed_tokens", "lm_head", "model.rotary_emb"
BAD_RANK = 1
"""The rank that has a defect of one rank."""


class Site:
    """One rank's run."""

    def __init__(self, rank: int, size: float, stack: ExitStack) -> None:
        self.rank, self.size = rank, size
        self._stack = stack
        self._before_regions: list[Callable[[PreTrainedModel], None]] = []
        self._waiting: list[Callable[[Engine], None]] = []

    def before_regions(self, plant: Callable[[PreTrainedModel], None]) -> None:
        """Call it with the model of each engine of the run, before its modules get their precision regions."""
        self._before_regions.append(plant)

    def when_built(self, plant: Callable[[Engine], None]) -> None:
        """Call it with each engine of the run: the one that trains, and the one whose single steps are compared."""
        self._waiting.append(plant)

    def patch(self, owner: Any, name: str, wrong: Any) -> None:
        """Replace an attribute of a module or class until the run has ended."""
        self._stack.enter_context(patch.object(owner, name, wrong))

    def build(self, right: Callable[..., Engine], resolved: Resolved, *args: Any) -> Engine:
        """An engine with everything that waited for it."""
        regions = engine_module.regions_of

        def planted_regions(model: PreTrainedModel, *given: Any, **options: Any) -> Any:
            for plant in self._before_regions:
                plant(model)
            return regions(model, *given, **options)

        with patch.object(engine_module, "regions_of", planted_regions):
            engine = right(resolved, *args)
        for plant in self._waiting:
            plant(engine)
        return engine


Plant = Callable[[Site], None]
EnginePlant = Callable[[Engine, float], None]
"""Plants a defect of some size into an engine."""
Change = Callable[[torch.Tensor], torch.Tensor]


def on_engine(plant: EnginePlant) -> Plant:
    """A defect of the engine alone, from its size."""
    return lambda site: site.when_built(lambda engine: plant(engine, site.size))


def on_bad_rank(plant: Plant) -> Plant:
    """A defect that only `BAD_RANK` has."""
    return lambda site: plant(site) if site.rank == BAD_RANK else None


@contextmanager
def planted(
    plant: Plant | None,
    *,
    rank: int,
    size: float = 0.0,
    wanted: Callable[[Resolved], bool] = lambda resolved: True,
) -> Iterator[None]:
    """Inside, engines that sessions build have the defect, those of configs that are `wanted`."""
    with ExitStack() as stack:
        site, right = Site(rank, size, stack), session.build_engine

        def build_engine(resolved: Resolved, *args: Any) -> Engine:
            return site.build(right, resolved, *args) if wanted(resolved) else right(resolved, *args)

        if plant is not None:
            plant(site)
        site.patch(session, "build_engine", build_engine)
        yield


def instead_of(name: str, *owners: Any) -> Callable[[Callable[..., Any]], Plant]:
    """Decorator of a function that is there instead of the right one until the run has ended, in modules or classes.

    It gets the right one before the arguments, and becomes the plant.
    """

    def decorate(wrong: Callable[..., Any]) -> Plant:
        @wraps(wrong)
        def plant(site: Site) -> None:
            right = getattr(owners[0], name)
            for owner in owners:
                site.patch(owner, name, lambda *args, **options: wrong(right, *args, **options))

        return plant

    return decorate


def around(owner: Any, name: str, wrong: Callable[..., Any]) -> None:
    """Replace a method of one object by `wrong`, which gets the right method before the arguments."""
    setattr(owner, name, partial(wrong, getattr(owner, name)))


def around_engine(method: str) -> Callable[[Callable[..., Any]], EnginePlant]:
    """Decorator of what an engine does instead of a method of its own: from engine, size, right method, arguments."""
    return lambda wrong: lambda engine, size: around(engine, method, partial(wrong, engine, size))


def replace_forward(engine: Engine, name: str, wrong: Callable[..., Any]) -> None:
    """Replace one module's forward by `wrong`, which gets the module before the arguments."""
    module: Any = engine.model.get_submodule(name)
    module.forward = partial(wrong, module)


def forward_of(name: str) -> Callable[[Callable[..., Any]], EnginePlant]:
    """Decorator of a forward pass that a module has instead of its own: from the module, the size and the arguments."""

    def decorate(wrong: Callable[..., Any]) -> EnginePlant:
        def plant(engine: Engine, size: float) -> None:
            replace_forward(engine, name, lambda module, *args, **options: wrong(module, size, *args, **options))

        return plant

    return decorate


def around_forward(engine: Engine, name: str, wrong: Callable[..., Any]) -> None:
    """Replace one module's forward by `wrong`, which gets the right forward before the arguments."""
    around(engine.model.get_submodule(name), "forward", wrong)


def replace_attention(engine: Engine, names: Iterable[str], wrong: Callable[..., Any]) -> None:
    """Give these attentions another function of the interface of transformers."""
    ALL_ATTENTION_FUNCTIONS["planted"] = wrong
    for name in names:
        module: Any = engine.model.get_submodule(name)
        module.config = copy.copy(module.config)
        module.config._attn_implementation = "planted"


def change_gradients(engine: Engine, change: Change, *, where: str = "") -> None:
    """Change the gradients of the parameters with `where` in their names as soon as a backward pass has them."""
    for name, parameter in engine.model.named_parameters():
        if where in name:
            parameter.register_hook(change)


def before_steps(engine: Engine, call: Callable[[int], None]) -> None:
    """Call it with the number of each attempted step before the passes of the step."""

    def forward_backward(right: Callable[..., Any], batch: Any, *, step: int, **options: Any) -> Any:
        call(step)
        return right(batch, step=step, **options)

    around(engine, "forward_backward", forward_backward)


class Counter:
    """The attempted step that an engine is in."""

    def __init__(self, engine: Engine) -> None:
        self.step = 0
        before_steps(engine, partial(setattr, self, "step"))
