"""train.py that dies on purpose, as run.hypothesis=HOW,RANK,STEP,MARK says.

HOW is the name of a signal, or `error` for an exception. That rank dies when it has made that step and rank 0 has
recorded it, and leaves the file MARK; where the file is, it lives. Without a MARK it dies each time.
"""

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import train
from tracking.status import newest_session
from training import loop
from training.session import run_dir_of

_WAIT_SECONDS = 30.0


def _await_record(events: Path, step: int) -> None:
    """Wait until the step is recorded: ranks end a step together, but only rank 0 writes, a moment later."""
    ends = time.monotonic() + _WAIT_SECONDS
    while time.monotonic() < ends:
        _, newest = newest_session(events)
        if newest is not None and newest["step"] >= step:
            return
        time.sleep(0.01)
    raise AssertionError(f"step {step} was not recorded within {_WAIT_SECONDS} s: {events}")


def main(arguments: list[str]) -> int:
    """Run the job."""
    train_step = loop.train_step

    def die(parts: Any, progress: Any) -> Any:
        how, rank, step, mark = parts.resolved.config.run.hypothesis.split(",")
        made = train_step(parts, progress)
        if (parts.engine.world.rank, made[0].step) == (int(rank), int(step)) and not (mark and Path(mark).exists()):
            _await_record(run_dir_of(parts.resolved).events, int(step))
            if mark:
                Path(mark).touch()
            if how == "error":
                raise ValueError("a bug of our own")
            os.kill(os.getpid(), signal.Signals[how])
            signal.pause()  # SIGSTOP comes back here
        return made

    loop.train_step = die
    return train.main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
