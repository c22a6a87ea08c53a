"""Plants defects: in the engine as soon as it is built, or in a module's names while the run takes place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from transformers import PreTrainedModel

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

    def __init__(self, rank: int, ranks: int, size: float, stack: ExitStack) -> None:
        self.rank, self.ranks, self.size = rank, ranks, size
        self._stack = stack
        self._before_regions: list[Callable[[PreTrainedModel], None]] = []
        self._waiting: list[Callable[[Engine], None]] = []

    @property
    def is_bad_rank(self) -> bool:
        """Whether this is the rank that a defect of one rank is planted in."""
        return self.rank == BAD_RANK

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
        with ExitStack() as stack:
            regions = engine_module.regions_of

            def planted_regions(model: PreTrainedModel, *given: Any, **options: Any) -> Any:
                for plant in self._before_regions:
                    plant(model)
                return regions(model, *given, **options)

            stack.enter_context(patch.object(engine_module, "regions_of", planted_regions))
            engine = right(resolved, *args)
        for plant in self._waiting:
            plant(engine)
        return engine


Plant = Callable[[Site], None]


def on_engine(plant: Callable[[Engine, float], None]) -> Plant:
    """A defect of the engine alone, from its size."""
    return lambda site: site.when_built(lambda engine: plant(engine, site.size))


@contextmanager
def planted(
    plant: Plant | None,
    *,
    rank: int,
    ranks: int,
    size: float = 0.0,
    wanted: Callable[[Resolved], bool] = lambda resolved: True,
) -> Iterator[None]:
    """Inside, engines that sessions build have the defect, those of configs that are `wanted`."""
    with ExitStack() as stack:
        site, right = Site(rank, ranks, size, stack), session.build_engine

        def build_engine(resolved: Resolved, *args: Any) -> Engine:
            return site.build(right, resolved, *args) if wanted(resolved) else right(resolved, *args)

        if plant is not None:
            plant(site)
        site.patch(session, "build_engine", build_engine)
        yield


def replace_forward(engine: Engine, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
    """Give one module another forward; make: from the module, of which `forward` is still the right one."""
    module: Any = engine.model.get_submodule(name)
    module.forward = make(module)


def around(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a method of one object by what `make` makes of it."""
    setattr(owner, name, make(getattr(owner, name)))
