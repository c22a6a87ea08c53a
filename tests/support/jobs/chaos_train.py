"""train.py, killed on purpose: the first argument is PHASE:RANK:COUNT:STEP, the rest is train.py's own command line.

It dies when that rank reaches that phase for the COUNT-th time in the save of that step or of a later one.
"""

import sys
from typing import Any

import train
from tests.support.jobs.chaos import Kill, KilledCheckpoints
from training import build


def main(arguments: list[str]) -> int:
    """Run the job."""
    phase, rank, count, step = arguments[0].split(":")

    class KilledAtStep(KilledCheckpoints):
        def start_save(self, engine: Any, state: dict[str, Any], *further: Any) -> None:
            self.kill = Kill(phase, int(rank), int(count)) if state["progress"]["step"] >= int(step) else None
            super().start_save(engine, state, *further)

    build.Checkpoints = KilledAtStep  # type: ignore[misc]
    return train.main(arguments[1:])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
