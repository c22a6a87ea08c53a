"""Where a defect is planted: in the engine as soon as it is built, or in a module's names while the run takes place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from training import session
from training.distributed import World
from training.engine import Engine

LAYER = "model.layers.1"
ATTENTION, NORM, MLP = f"{LAYER}.self_attn", f"{LAYER}.input_layernorm", f"{LAYER}.mlp"
LINEAR = "model.layers.0.mlp.down_proj"
EMBEDDING, HEAD, ROTARY = "model.embed_tokens", "lm_head", "model.rotary_emb"
BAD_RANK = 1
"""Where a defect of one rank is."""


class Site:
    """One rank's run."""

    def __init__(self, world: World, size: float, stack: ExitStack) -> None:
        self.world, self.size = world, size
        self._stack = stack
        self._waiting: list[Callable[[Engine], None]] = []

    @property
    def is_bad_rank(self) -> bool:
        """Whether this is the rank that a defect of one rank is planted in."""
        return self.world.rank == BAD_RANK

    def when_built(self, plant: Callable[[Engine], None]) -> None:
        """Call it with each engine of the run: the one that trains, and the one whose single steps are compared."""
        self._waiting.append(plant)

    def patch(self, owner: Any, name: str, wrong: Any) -> None:
        """Replace an attribute of a module or class until the run has ended."""
        self._stack.enter_context(patch.object(owner, name, wrong))

    def built(self, engine: Engine) -> Engine:
        """The engine with everything that waited for it."""
        for plant in self._waiting:
            plant(engine)
        return engine


Plant = Callable[[Site], None]


def on_engine(plant: Callable[[Engine, float], None]) -> Plant:
    """A defect of the engine alone, from its size."""
    return lambda site: site.when_built(lambda engine: plant(engine, site.size))


@contextmanager
def planted(plant: Plant | None, world: World, size: float) -> Iterator[None]:
    """Inside, engines that sessions build have the defect."""
    with ExitStack() as stack:
        site, right = Site(world, size, stack), session.build_engine
        if plant is not None:
            plant(site)
        site.patch(session, "build_engine", lambda *args, **options: site.built(right(*args, **options)))
        yield


def replace_forward(engine: Engine, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
    """Give one module another forward; make: from the module, of which `forward` is still the right one."""
    module: Any = engine.model.get_submodule(name)
    module.forward = make(module)


def around(owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace a method of one object by what `make` makes of it."""
    setattr(owner, name, make(getattr(owner, name)))
