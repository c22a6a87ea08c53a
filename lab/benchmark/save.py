"""How long a checkpoint takes, and for how much of that time training waits.

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
from pathlib import Path
from statistics import median
from typing import Literal

from config.cli import Arguments, entry_point
from config.command_line import read_command_line
from config.resolved import Resolved
from lab.benchmark.overhead import SHARES
from training.build import open_checkpoints
from training.checkpoint.outcome import Saved
from training.distributed import World
from training.engine import Engine
from training.progress import Progress
from training.session import session

Mode = Literal["always", "never"]


def measure(resolved: Resolved, engine: Engine, folder: Path, world: World, *, saves: int) -> dict[Mode, list[Saved]]:
    """The outcome of each save, by mode; the modes alternate. A collective."""
    found: dict[Mode, list[Saved]] = {"always": [], "never": []}
    step = 0
    for _ in range(saves):
        for mode, outcomes in found.items():
            section = replace(resolved.config.checkpoint, background=mode, keep=1)
            chosen = replace(resolved, config=replace(resolved.config, checkpoint=section))
            checkpoints = open_checkpoints(chosen, folder, world, identity={})
            step += 1
            checkpoints.start_save(engine, {"progress": Progress(step=step).state_dict()})
            while not checkpoints.save_ended:  # training would continue meanwhile; to join the save would be a stall
                time.sleep(0.002)
            outcome = checkpoints.outcomes()[-1]
            if not isinstance(outcome, Saved):
                raise outcome
            outcomes.append(outcome)
    return found


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
            batch = opened.batches.next_step()
            engine.step(engine.health(engine.forward_backward(batch, step=1)), 0.0)
            found = measure(resolved, engine, folder, world, saves=options.saves)
        finally:
            if world.is_main:
                shutil.rmtree(folder, ignore_errors=True)
    for mode, saves in found.items() if resolved.rank == 0 else ():
        seconds = median(save.seconds for save in saves)
        stall = median(save.stall_seconds for save in saves)
        size = saves[0].bytes
        print(
            f"checkpoint.background={mode:<7} {size / 1e6:,.1f} MB in {seconds:.2f} s "
            f"({size / seconds / 1e6:,.0f} MB/s), training waits for {stall:.2f} s"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
