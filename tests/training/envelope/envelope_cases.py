"""What runs in real processes for test_command.py."""

from __future__ import annotations

import os
from pathlib import Path

from data.prepare import prepare
from training.distributed import Place
from training.envelope.worker import Study, work


def explore_study(place: Place, *, study: Path) -> list[str]:
    """Run the trials of a study that are not there yet; what was said about each."""
    read = Study.read(study)
    data = read.resolve(read.settings[0], read.rates[0], os.environ).config.data
    said: list[str] = []
    ran = work(read, prepare(data, progress=False), place, log=said.append)
    assert place.gather_objects(ran) == [ran] * place.world_size
    assert len(said) == (ran if place.is_main else 0)
    return said
