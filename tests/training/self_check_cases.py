"""Code run inside the processes of test_self_check.py: a short job with a defect planted into its engine, or sound."""

from collections.abc import Sequence
from typing import Any

from lab.detection.cells import defect_of
from lab.detection.plants.site import planted
from tests.training import observer_cases
from training.distributed import World


def job(world: World, *, folder: str, name: str, overrides: Sequence[str], defect: str | None = None) -> dict[str, Any]:
    """The job of `observer_cases`, checked in its first step. defect: its name in `lab.detection`."""
    known = defect_of(defect) if defect is not None else None
    plant, size = (known.plant, known.size) if known is not None else (None, 0.0)
    with planted(plant, rank=world.rank, ranks=world.world_size, size=size):
        return observer_cases.job(world, folder=folder, name=name, overrides=["guard.self_check_every=1", *overrides])
