"""What telemetry costs, timed beside steps without it on one engine.

    deepspeed --num_gpus 2 --module training.benchmark.telemetry --config config/recipes/demo.yaml [--pairs 30]
        [--every 100] [key.sub=value ...]

Steps with and without telemetry alternate, and which kind comes first changes from pair to pair. The cost is the median
difference of a pair, as a share of the median step without; its interval is that of 2,000 bootstrap resamples of the
pairs, 2.5 to 97.5%. Amortised is that share over `--every` steps; the shortest interval at which it is below 0.5% is
printed too. Exit code 3: the amortised cost is surely above 0.5%.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence

import numpy as np
import torch

from config.cli import Arguments, entry_point, positive_int
from config.command_line import read_command_line
from config.schema import TelemetrySection
from training.benchmark.command import FAILED
from training.benchmark.overhead import WARM_UP_STEPS, GuardedLoop, alternate, open_parts
from training.parts import Parts
from training.session import session

ALLOWED = 0.005
"""Share of a step that telemetry may cost where it is on by default, amortised."""


def time_pairs(parts: Parts, *, pairs: int) -> np.ndarray:
    """(pairs, 2) float64: seconds of a step without telemetry, and of one with it. A collective."""
    device = parts.engine.world.device
    loop = GuardedLoop(parts)
    without = dataclasses.replace(parts, telemetry=None)

    def seconds(chosen: Parts) -> float:
        loop.use(chosen)
        started = time.perf_counter()
        loop.step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - started

    for _ in range(WARM_UP_STEPS):
        seconds(parts)
        seconds(without)
    return np.array(alternate(lambda: seconds(without), lambda: seconds(parts), pairs=pairs))


def cost(seconds: np.ndarray) -> tuple[float, float, float]:
    """The cost of a measured step as a share of one that is not, and the ends of its bootstrap interval."""
    drawn = np.random.default_rng(0).integers(0, len(seconds), size=(2000, len(seconds)))
    more = seconds[:, 1] - seconds[:, 0]
    shares = np.median(more[drawn], axis=1) / np.median(seconds[:, 0][drawn], axis=1)
    low, high = np.quantile(shares, [0.025, 0.975])
    return float(np.median(more) / np.median(seconds[:, 0])), float(low), float(high)


def report(seconds: np.ndarray, *, every: int) -> int:
    """Print what was measured; the exit code."""
    found, low, high = cost(seconds)
    print(f"\n{len(seconds)} pairs of steps without and with telemetry")
    print(f"step       {np.median(seconds[:, 0]) * 1e3:9.2f} ms without (median)")
    print(f"telemetry  {np.median(seconds[:, 1] - seconds[:, 0]) * 1e3:9.2f} ms more on a measured step")
    print(f"cost       {found:9.2%} of a step [{low:.2%} to {high:.2%}]")
    print(f"amortised  {found / every:9.3%} at one step in {every} [{low / every:.3%} to {high / every:.3%}]")
    print(f"below {ALLOWED:.1%} from one step in {max(1, int(np.ceil(found / ALLOWED)))} on")
    if low / every > ALLOWED:
        print(f"error: telemetry costs more than {ALLOWED:.1%} for certain: {low / every:.3%}", file=sys.stderr)
        return FAILED
    return 0


@entry_point(launched=True)
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = Arguments("training.benchmark.telemetry", __doc__)
    parser.add_argument("--pairs", type=positive_int, default=30, help="pairs of steps")
    usual = TelemetrySection().every_steps
    parser.add_argument(
        "--every", type=positive_int, default=usual, help=f"steps between two that are measured ({usual})"
    )
    options, rest = parser.parse_known_args(arguments)
    total = 2 * (WARM_UP_STEPS + options.pairs)
    resolved = read_command_line([*rest, f"run.steps={total}", "telemetry.every_steps=1"])
    with session(resolved) as opened, open_parts(opened) as parts:
        seconds = time_pairs(parts, pairs=options.pairs)
    return report(seconds, every=options.every) if resolved.rank == 0 else 0


if __name__ == "__main__":
    sys.exit(main())
