"""Functions that run in real processes for test_command.py."""

import os

from data.text.prepare import prepare
from lab.envelope.trials import Study, work
from training.distributed import World


def explore_study(world: World, *, study: Study) -> list[str]:
    """Run the trials of a study that are not there yet; what was said about each."""
    said: list[str] = []
    ran = work(study, prepare(study.first(os.environ).config.data, progress=False), world, log=said.append)
    assert world.gather_objects(ran) == [ran] * world.world_size
    assert len(said) == (ran if world.is_main else 0)
    return said
