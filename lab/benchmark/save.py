"""Duration of a checkpoint, and the share of it for which training waits.

    deepspeed --module lab.benchmark.save --config config/recipes/demo.yaml [--saves 5] [key.sub=value ...]

Trains one step, so that the optimizer has moments, then saves alternately in the background and in the foreground, to a
temporary folder in run.dir. With checkpoint.dir the uploads are included, and stay in the store.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from dataclasses import replace
from itertools import count
from pathlib import Path
from statistics import median
from typing import Literal

from config.cli import Arguments, entry_point
from config.command_line import read_command_line
from lab.benchmark.harness import SHARES, alternate
from training.build import open_checkpoints
from training.checkpoint.outcome import Saved
from training.progress import Progress
from training.session import Session, session


def measure(opened: Session, folder: Path, *, saves: int) -> list[tuple[Saved, Saved]]:
    """The outcomes of saves in the background and in the foreground, in pairs. A collective."""
    resolved, steps = opened.resolved, count(1)

    def save(background: Literal["always", "never"]) -> Saved:
        section = replace(resolved.config.checkpoint, background=background, keep=1)
        chosen = replace(resolved, config=replace(resolved.config, checkpoint=section))
        checkpoints = open_checkpoints(chosen, folder, opened.world, identity={})
        checkpoints.start_save(opened.engine, {"progress": Progress(step=next(steps)).state_dict()})
        while not checkpoints.save_ended:  # training would continue meanwhile; to join the save would be a stall
            time.sleep(0.002)
        outcome = checkpoints.outcomes()[-1]
        if not isinstance(outcome, Saved):
            raise outcome
        return outcome

    return alternate(lambda: save("always"), lambda: save("never"), pairs=saves)


@entry_point(launched=True)
def main(arguments: list[str] | None = None) -> int:
    """The command line."""
    parser = Arguments("python -m lab.benchmark.save", __doc__)
    parser.add_argument("--saves", type=int, default=5, help="saves of each kind")
    options, rest = parser.parse_known_args(arguments)
    resolved = read_command_line(rest)
    with session(resolved, shares=SHARES) as opened:
        engine, world = opened.engine, opened.world
        root = Path(resolved.config.run.dir).expanduser()
        root.mkdir(parents=True, exist_ok=True)
        folder = Path(world.from_main(tempfile.mkdtemp(prefix="benchmark-", dir=root) if world.is_main else None))
        try:
            engine.step(engine.health(engine.forward_backward(opened.batches.next_step(), step=1)), 0.0)
            found = measure(opened, folder, saves=options.saves)
        finally:
            if world.is_main:
                shutil.rmtree(folder, ignore_errors=True)
    for mode, saves in zip(("always", "never"), zip(*found, strict=True), strict=True) if resolved.rank == 0 else ():
        seconds, stall = (median(getattr(save, name) for save in saves) for name in ("seconds", "stall_seconds"))
        size = saves[0].bytes
        print(
            f"checkpoint.background={mode:<7} {size / 1e6:,.1f} MB in {seconds:.2f} s "
            f"({size / seconds / 1e6:,.0f} MB/s), training waits for {stall:.2f} s"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
