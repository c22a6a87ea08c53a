"""What runs in real processes for test_command.py."""

import os
from pathlib import Path

from data.text.prepare import prepare
from lab.envelope.worker import Study, work
from training.distributed import World


def explore_study(world: World, *, study: Path) -> list[str]:
    """Run the trials of a study that are not there yet; what was said about each."""
    read = Study.read(study)
    data = read.resolve(read.settings[0], read.rates[0], os.environ).config.data
    said: list[str] = []
    ran = work(read, prepare(data, progress=False), world, log=said.append)
    assert world.gather_objects(ran) == [ran] * world.world_size
    assert len(said) == (ran if world.is_main else 0)
    return said
