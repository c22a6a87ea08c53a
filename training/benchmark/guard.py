"""What Mantissa's care for a healthy step costs: guarded steps against bare ones, in turn, on the same engine and data.

    python -m training.benchmark.guard --config config/recipes/demo.yaml [--pairs 20] [--steps 5] [key.sub=value ...]
    deepspeed --num_gpus 2 --module training.benchmark.guard --config ...

A bare step is what a plain DeepSpeed loop does: forward and backward of each micro-batch, gradient norm, clipping and
optimizer step. A guarded one adds the health gather, the guard with spike detection on, the snapshot of the random
generators, and all tracking that the config asks for: `events.jsonl`, the console, wandb. Blocks of `--steps` steps
alternate, bare and guarded; the ratio is taken pair by pair, so that a machine whose speed drifts disturbs both alike.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from config.cli import Arguments, entry_point
from config.command_line import read_command_line
from tracking.run_dir import RunDir
from training.build import assemble
from training.parts import Parts
from training.progress import Progress
from training.session import Session, session
from training.sinks import open_record
from training.step import train_step

WARM_UP_STEPS = 5


def bare_step(parts: Parts) -> None:
    """Gradients, norm, clipping, optimizer step: nothing judged, nothing recorded."""
    batch = parts.batches.next_step()
    parts.engine.forward_backward(batch, step=batch.position + 1)
    parts.engine.gradients.norm()
    parts.engine.gradients.apply()


def seconds_per_step(step: Callable[[], None], steps: int) -> float:
    """Mean wall-clock seconds of `steps` calls."""
    started = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - started) / steps


def compare(parts: Parts, *, pairs: int, steps: int) -> list[tuple[float, float]]:
    """(bare, guarded) seconds a step of each pair of blocks. A collective."""
    progress = Progress()

    def guarded() -> None:
        nonlocal progress
        progress, _, _ = train_step(parts, progress)

    for _ in range(WARM_UP_STEPS):
        guarded()
        bare_step(parts)
    measured = []
    for pair in range(pairs):
        blocks = [lambda: bare_step(parts), guarded]
        order = (0, 1) if pair % 2 == 0 else (1, 0)  # whoever comes second finds warmer caches
        taken = {which: seconds_per_step(blocks[which], steps) for which in order}
        measured.append((taken[0], taken[1]))
    return measured


@contextmanager
def open_parts(opened: Session) -> Iterator[Parts]:
    """What a run of the config has, its run folder a temporary one, with nothing restored and nothing to be saved."""
    resolved, engine, place = opened.resolved, opened.engine, opened.place
    with tempfile.TemporaryDirectory() as folder:
        run_dir = RunDir.create(Path(folder), resolved.config.run.name, fresh=False)
        record = open_record(resolved, opened.corpus, engine, run_dir, place)
        checkpoints = opened.saved_checkpoints(run_dir.checkpoints)
        parts, _ = assemble(resolved, engine, opened.batches, record=record, checkpoints=checkpoints)
        yield parts
        record.close()


@entry_point(launched=True)
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison and print medians and the spread of the ratio."""
    parser = Arguments(prog="python -m training.benchmark.guard", description=__doc__)
    parser.add_argument("--pairs", type=int, default=20, help="pairs of blocks")
    parser.add_argument("--steps", type=int, default=5, help="steps in a block")
    options, rest = parser.parse_known_args(arguments)
    resolved = read_command_line([*rest, "guard.spike_sigmas=6"])
    with session(resolved) as opened, open_parts(opened) as parts:
        measured = compare(parts, pairs=options.pairs, steps=options.steps)
    if resolved.rank == 0:
        ratios = sorted(guarded / bare for bare, guarded in measured)
        print(f"bare    {median(bare for bare, _ in measured) * 1e3:9.2f} ms a step (median of {options.pairs} blocks)")
        print(f"guarded {median(guarded for _, guarded in measured) * 1e3:9.2f} ms a step")
        print(
            f"ratio   {median(ratios):9.4f} (quartiles {ratios[len(ratios) // 4]:.4f} to "
            f"{ratios[3 * len(ratios) // 4]:.4f})"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
