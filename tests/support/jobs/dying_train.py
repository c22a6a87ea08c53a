"""train.py that dies on purpose, as run.hypothesis=HOW,RANK,STEP,MARK says.

HOW is the name of a signal, or `error` for an exception. That rank dies when it has made that step and rank 0 has
recorded it, and leaves the file MARK; where the file is, it lives. Without a MARK it dies each time.
"""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import train
from tests.support.jobs.launches import wait_until
from tracking.status import newest_session
from training import loop
from training.session import run_dir_of


def _recorded(events: Path, step: int) -> bool:
    _, newest = newest_session(events)
    return newest is not None and newest["step"] >= step


def main(arguments: list[str]) -> int:
    """Run the job."""
    train_step = loop.train_step

    def die(parts: Any, progress: Any) -> Any:
        how, rank, step, mark = parts.resolved.config.run.hypothesis.split(",")
        made = train_step(parts, progress)
        if (parts.engine.world.rank, made[0].step) == (int(rank), int(step)) and not (mark and Path(mark).exists()):
            events = run_dir_of(parts.resolved).events  # ranks end a step together, but rank 0 writes a moment later
            wait_until(lambda: _recorded(events, int(step)), why=lambda: f"step {step} was not recorded: {events}")
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
    train.leave(main(sys.argv[1:]))  # as train.py does, past threads of gloo
