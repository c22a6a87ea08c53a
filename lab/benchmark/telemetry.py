"""The cost of telemetry, one of its figures, an observation of dtypes, a save or the checks for silent corruption.

    deepspeed --num_gpus 2 --module lab.benchmark.telemetry --config config/recipes/demo.yaml [--pairs 30]
        [--of telemetry|attention|channels|adam|observation|save|checks] [--every 100] [--steps 8] [--json FILE]
        [key.sub=value ...]

Steps with and without it alternate on one engine (`lab.benchmark.harness`). The cost is the median difference of a
pair, as a share of the median step without; amortised is that share over `--every` steps. `attention`, `channels` and
`adam` are figures of telemetry (docs/early-warnings.md): the steps without them have the rest of it. `save` and
`checks` time blocks of `--steps` steps. A save is started before the first; its cost is that of the block. The checks
look at every step of a block; they are those of docs/corruption.md where nothing else is set. Exit code 3: the
amortised cost is surely above 0.5%.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from config.cli import entry_point
from config.command_line import read_command_line
from config.options import positive_int
from config.schema import PrecisionSection, TelemetrySection
from lab.benchmark.harness import SHARES, WARM_UP_STEPS, alternate, conclude, estimate, paired_options, seconds_of
from lab.benchmark.overhead import GuardedLoop, open_parts
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
"""[steps] Default of --every, the interval between two; a save has no such default, and checks are in every step of
their block."""
WARM_UP_BLOCKS: dict[Kind, int] = {"save": 1, "checks": 1}
"""Works that are timed in blocks of several steps, and how many blocks come before the first pair."""
CHECKS = ("guard.replica_checks=100", "guard.update_checks=65536", "guard.reexecute=suspicious")
"""The checks as docs/corruption.md sets them."""


def time_pairs(parts: Parts, *, pairs: int, of: Kind = "telemetry", steps: int = 1) -> np.ndarray:
    """(pairs, 2) float64: seconds of a block of steps without it, and of one with it. A collective."""
    loop, (without, with_it) = GuardedLoop(parts), _both(parts, of)

    def seconds(chosen: Parts) -> float:
        def block() -> None:
            if of == "save" and chosen is with_it:
                chosen.checkpoints.start_save(chosen.engine, chosen.state_dict(loop.progress))
            for _ in range(steps):
                loop.step()

        loop.use(chosen)
        if chosen.checks is not None:
            chosen.checks.forget()  # steps without them have changed what they kept
        taken = seconds_of(block, parts.engine.world.device)
        for outcome in chosen.checkpoints.outcomes():  # waits for the save, which the next block must not have
            if not isinstance(outcome, Saved):
                raise outcome
        return taken

    first, second = (lambda: seconds(without)), (lambda: seconds(with_it))
    alternate(second, first, pairs=WARM_UP_BLOCKS.get(of, WARM_UP_STEPS))
    return np.array(alternate(first, second, pairs=pairs))


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
    """The same parts, with dtypes observed every `every` steps."""
    config = parts.resolved.config
    precision = dataclasses.replace(config.precision, verify_every_steps=every)
    resolved = dataclasses.replace(parts.resolved, config=dataclasses.replace(config, precision=precision))
    return dataclasses.replace(parts, resolved=resolved)


def shares_of_a_step(seconds: np.ndarray) -> np.ndarray:
    """The median difference of a pair as a share of the median block without. seconds: (..., pairs, 2)."""
    return np.median(seconds[..., 1] - seconds[..., 0], axis=-1) / np.median(seconds[..., 0], axis=-1)


def report(seconds: np.ndarray, *, every: int, of: Kind = "telemetry", steps: int = 1, file: Path | None = None) -> int:
    """Print what was measured, and write it into a file; the exit code."""
    cost, low, high = (steps * share for share in estimate(shares_of_a_step, seconds))
    without, more = np.median(seconds[:, 0]) / steps, np.median(seconds[:, 1] - seconds[:, 0])
    lines = [
        f"{len(seconds)} pairs of {'steps' if steps == 1 else f'blocks of {steps} steps'} without and with {of}",
        f"{'step':<11}{without * 1e3:9.2f} ms without (median)",
        f"{of:<11}{more * 1e3:9.2f} ms more {'in a block' if of in WARM_UP_BLOCKS else 'on a measured step'}",
        f"{'cost':<11}{cost:9.2%} of a step [{low:.2%} to {high:.2%}]",
        f"{'amortised':<11}{cost / every:9.3%} at one step in {every} [{low / every:.3%} to {high / every:.3%}]",
        f"below {ALLOWED:.1%} from one step in {max(1, int(np.ceil(cost / ALLOWED)))} on",
    ]
    sizes = {"pairs": len(seconds), "steps": steps, "step_seconds": without, "more_seconds": more}
    ratio = np.median(seconds[:, 1] / seconds[:, 0])
    found = {"of": of, "ratio": ratio, "cost": (cost, low, high), "every": every, **sizes}
    surely = low / every > ALLOWED
    wrong = f"{of} costs more than {ALLOWED:.1%} for certain: {low / every:.3%}" if surely else None
    return conclude(lines, found, file, wrong=wrong)


@entry_point(launched=True)
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = paired_options("telemetry", __doc__, pairs=30)
    parser.add_argument("--of", choices=list(USUALLY_EVERY), default="telemetry", help="what is timed (telemetry)")
    usually = ", ".join(f"{kind} {every}" for kind, every in USUALLY_EVERY.items() if every)
    parser.add_argument("--every", type=positive_int, help=f"steps between two ({usually}, checks --steps)")
    parser.add_argument("--steps", type=positive_int, default=8, help="steps of a block, for save and checks (8)")
    options, rest = parser.parse_known_args(arguments)
    of, pairs = options.of, options.pairs
    steps, warm_up = (options.steps, WARM_UP_BLOCKS[of]) if of in WARM_UP_BLOCKS else (1, WARM_UP_STEPS)
    rest = [*(CHECKS if of == "checks" else ()), *rest]
    total = 2 * steps * (warm_up + pairs)
    resolved = read_command_line([*rest, f"run.steps={total}", "telemetry.every_steps=1"])
    with session(resolved, shares=SHARES) as opened, open_parts(opened) as parts:
        seconds = time_pairs(parts, pairs=pairs, of=of, steps=steps)
    if resolved.rank != 0:
        return 0
    every = options.every or USUALLY_EVERY[of] or steps
    return report(seconds, every=every, of=of, steps=steps, file=options.json)


if __name__ == "__main__":
    sys.exit(main())
