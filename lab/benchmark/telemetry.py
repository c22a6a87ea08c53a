"""What telemetry, one of its figures, an observation of dtypes, a save or the checks for silent corruption cost.

Beside steps without it on one engine:

    deepspeed --num_gpus 2 --module lab.benchmark.telemetry --config config/recipes/demo.yaml [--pairs 30]
        [--of telemetry|attention|channels|adam|observation|save|checks] [--every 100] [--steps 8] [--json FILE]
        [key.sub=value ...]

Steps with and without it alternate, and which kind comes first changes from pair to pair. The cost is the median
difference of a pair, as a share of the median step without; its interval is that of 2,000 bootstrap resamples of the
pairs, 2.5 to 97.5%. Amortised is that share over `--every` steps; the shortest interval at which it is below 0.5% is
printed too. `attention`, `channels` and `adam` are figures of telemetry (docs/early-warnings.md): the steps without
them have the rest of it. `save` and `checks` time blocks of `--steps` steps. A save is started before the first; its
cost is that of the block, as a share of one step. The checks look at every step of a block, over which their cost is
amortised, unless `--every` says otherwise; they are those of docs/corruption.md (guard.replica_checks=100,
guard.update_checks=65536, guard.reexecute=suspicious) where nothing else is set. Exit code 3: the amortised cost is
surely above 0.5%.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from config.cli import Arguments, entry_point, positive_int
from config.command_line import read_command_line
from config.schema import PrecisionSection, TelemetrySection
from lab.benchmark.command import FAILED
from lab.benchmark.overhead import SHARES, WARM_UP_STEPS, GuardedLoop, alternate, open_parts, write_json
from training.checkpoint.outcome import Saved
from training.corruption.checks import Checks
from training.parts import Parts
from training.session import session
from training.telemetry import FIGURES, Figure, Telemetry

ALLOWED = 0.005
"""Share of a step that telemetry may cost where it is on by default, amortised."""
Kind = Figure | Literal["telemetry", "observation", "save", "checks"]
USUALLY_EVERY: dict[Kind, int] = {
    "telemetry": TelemetrySection().every_steps,
    **dict.fromkeys(FIGURES, TelemetrySection().every_steps),
    "observation": PrecisionSection().verify_every_steps,
    "save": 1000,
    "checks": 0,
}
"""[steps] Between two, unless --every says otherwise; a save has no default interval, and checks are in every step of
their block."""
IN_BLOCKS = ("save", "checks")
"""Timed over several steps."""
CHECKS = ("guard.replica_checks=100", "guard.update_checks=65536", "guard.reexecute=suspicious")
"""Of docs/corruption.md."""


def time_pairs(parts: Parts, *, pairs: int, of: Kind = "telemetry", steps: int = 1) -> np.ndarray:
    """(pairs, 2) float64: seconds of a block of steps without it, and of one with it. A collective."""
    loop, (without, with_it) = GuardedLoop(parts), _both(parts, of)

    def seconds(chosen: Parts) -> float:
        loop.use(chosen)
        if chosen.checks is not None:
            chosen.checks.forget()  # steps without them have changed what they kept
        started = time.perf_counter()
        if of == "save" and chosen is with_it:
            chosen.checkpoints.start_save(chosen.engine, chosen.state_dict(loop.progress))
        for _ in range(steps):
            loop.step()
        if parts.engine.world.device.type == "cuda":
            torch.cuda.synchronize()
        taken = time.perf_counter() - started
        for outcome in chosen.checkpoints.outcomes():  # waits for the save, which the next block must not have
            if not isinstance(outcome, Saved):
                raise outcome
        return taken

    for _ in range(_warm_up(of)):
        seconds(with_it)
        seconds(without)
    return np.array(alternate(lambda: seconds(without), lambda: seconds(with_it), pairs=pairs))


def _warm_up(of: Kind) -> int:
    """[blocks]"""
    return 1 if of in IN_BLOCKS else WARM_UP_STEPS


def _both(parts: Parts, of: Kind) -> tuple[Parts, Parts]:
    """The run's parts without it and with it, nothing else measured."""
    without = dataclasses.replace(_observing(parts, 0), telemetry=None)
    if of == "checks":
        return without, dataclasses.replace(without, checks=Checks(parts.engine, parts.resolved))
    if of == "telemetry" or of in FIGURES:
        probe = parts.resolved.config.telemetry.probe
        with_it = dataclasses.replace(without, telemetry=Telemetry(parts.engine, probe=probe))
        if of in FIGURES:
            others = [figure for figure in FIGURES if figure != of]
            without = dataclasses.replace(without, telemetry=Telemetry(parts.engine, probe=probe, figures=others))
        return without, with_it
    return without, _observing(without, 1 if of == "observation" else 0)


def _observing(parts: Parts, every: int) -> Parts:
    """The same parts, of a run whose dtypes are observed every so many steps."""
    config = parts.resolved.config
    precision = dataclasses.replace(config.precision, verify_every_steps=every)
    resolved = dataclasses.replace(parts.resolved, config=dataclasses.replace(config, precision=precision))
    return dataclasses.replace(parts, resolved=resolved)


def cost(seconds: np.ndarray, *, steps: int = 1) -> tuple[float, float, float]:
    """The cost of a block with it as a share of one step without, and the ends of its bootstrap interval."""
    drawn = np.random.default_rng(0).integers(0, len(seconds), size=(2000, len(seconds)))
    more = steps * (seconds[:, 1] - seconds[:, 0])
    shares = np.median(more[drawn], axis=1) / np.median(seconds[:, 0][drawn], axis=1)
    low, high = np.quantile(shares, [0.025, 0.975])
    return float(np.median(more) / np.median(seconds[:, 0])), float(low), float(high)


def report(seconds: np.ndarray, *, every: int, of: Kind = "telemetry", steps: int = 1, file: Path | None = None) -> int:
    """Print what was measured, and write it into a file; the exit code."""
    found, low, high = cost(seconds, steps=steps)
    without, more = np.median(seconds[:, 0]) / steps * 1e3, np.median(seconds[:, 1] - seconds[:, 0]) * 1e3
    shortest = max(1, int(np.ceil(found / ALLOWED)))
    print(f"\n{len(seconds)} pairs of {'steps' if steps == 1 else f'blocks of {steps} steps'} without and with {of}")
    print(f"{'step':<11}{without:9.2f} ms without (median)")
    print(f"{of:<11}{more:9.2f} ms more {'in a block' if of in IN_BLOCKS else 'on a measured step'}")
    print(f"{'cost':<11}{found:9.2%} of a step [{low:.2%} to {high:.2%}]")
    print(f"{'amortised':<11}{found / every:9.3%} at one step in {every} [{low / every:.3%} to {high / every:.3%}]")
    print(f"below {ALLOWED:.1%} from one step in {shortest} on")
    sizes = {"pairs": len(seconds), "steps": steps, "step_seconds": without / 1e3, "more_seconds": more / 1e3}
    ratio = float(np.median(seconds[:, 1] / seconds[:, 0]))
    write_json(file, {"of": of, "ratio": ratio, "cost": (found, low, high), "every": every, **sizes})
    if low / every > ALLOWED:
        print(f"error: {of} costs more than {ALLOWED:.1%} for certain: {low / every:.3%}", file=sys.stderr)
        return FAILED
    return 0


@entry_point(launched=True)
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = Arguments("lab.benchmark.telemetry", __doc__)
    parser.add_argument("--of", choices=list(USUALLY_EVERY), default="telemetry", help="what is timed (telemetry)")
    parser.add_argument("--pairs", type=positive_int, default=30, help="pairs of steps, or of blocks")
    usually = ", ".join(f"{kind} {every}" for kind, every in USUALLY_EVERY.items() if every)
    parser.add_argument("--every", type=positive_int, help=f"steps between two ({usually}, checks --steps)")
    parser.add_argument("--steps", type=positive_int, default=8, help="steps of a block, for save and checks (8)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there, too")
    options, rest = parser.parse_known_args(arguments)
    steps = options.steps if options.of in IN_BLOCKS else 1
    rest = [*(CHECKS if options.of == "checks" else ()), *rest]
    total = 2 * steps * (_warm_up(options.of) + options.pairs)
    resolved = read_command_line([*rest, f"run.steps={total}", "telemetry.every_steps=1"])
    with session(resolved, shares=SHARES) as opened, open_parts(opened) as parts:
        seconds = time_pairs(parts, pairs=options.pairs, of=options.of, steps=steps)
    if resolved.rank != 0:
        return 0
    every = options.every or USUALLY_EVERY[options.of] or steps
    return report(seconds, every=every, of=options.of, steps=steps, file=options.json)


if __name__ == "__main__":
    sys.exit(main())
