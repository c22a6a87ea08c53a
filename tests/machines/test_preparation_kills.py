"""Each process of a preparation, killed at every phase: the others end, and the next start prepares."""

from pathlib import Path

import pytest

from tests.support.jobs import preparation_kills
from tests.support.jobs.dying_preparation import PHASES
from training.watchdog.watch import GRACE_SECONDS


@pytest.mark.machines
@pytest.mark.parametrize(("who", "phase"), [(who, phase) for who, phases in PHASES.items() for phase in phases])
def test_a_kill_while_the_data_are_prepared_ends_the_job(tmp_path: Path, who: str, phase: str) -> None:
    seconds = preparation_kills.check(tmp_path, who, phase, grace=GRACE_SECONDS)
    print(f"\n{who} killed at {phase}: all had ended {seconds:.0f} s after the start")
