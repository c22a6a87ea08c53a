"""Ground that any user may walk on, and the run of an ordinary machine to compare with."""

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from config.cli import REPOSITORY
from tests.support.jobs.launches import finish
from tests.support.machines.strange import MORE, Place, look_at, losses_of


@pytest.fixture(scope="session")
def ground() -> Iterator[Path]:
    """A folder that every user may enter, unlike pytest's own; removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix="mantissa-machines-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def ordinary(ground: Path) -> Place:
    """The folder where the demo ran uninterrupted on this machine as it is."""
    place = Place(ground / "ordinary")
    line = place.command(f"run.steps={MORE}")
    output = finish(["python", *line[line.index(str(REPOSITORY / "train.py")) :]], ranks=2)
    look_at(place.run, output, losses_of(place.run))
    return place


@pytest.fixture(scope="session")
def losses(ordinary: Place) -> list[float]:
    """Losses of that run."""
    return losses_of(ordinary.run)
