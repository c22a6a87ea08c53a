"""The time that Mantissa adds to a training step, measured against steps without it in the same processes.

    deepspeed --num_gpus 2 --module lab.benchmark.overhead --config FILE [--pairs 100] [--steps 1] [--json FILE]
        [--at-least 0.99 | --by-stage | --of WORK [--every 100]] [key.sub=value ...]

Blocks of `--steps` steps alternate, and which kind comes first changes from pair to pair, so that a drift in the
machine's speed affects both alike. The cost of a job's start and end is not measured. Exit code 3: a bound is not met.

**Against a plain loop.** Two engines start from the same weights and train on the same batches with the same learning
rates: one by `deepspeed.initialize` and the loop of its documentation, the other Mantissa's with everything that the
config requests. Ratios are of tokens per second, Mantissa's over the plain loop's: the median over pairs, and the ratio
of total seconds, which rare slow steps affect. Bounds: losses differ no more than `lab.benchmark` allows, and the
median's interval reaches `--at-least`.

**--by-stage.** Guarded and bare steps alternate on Mantissa's own engine. A bare step is forward, backward, gradient
norm, clipping and optimizer step. What a guarded step adds is timed directly: health (the numbers of the step, gathered
from all ranks), guard (the verdict, with spike detection on), record (the step event, to every sink) and other Python.

**--of WORK.** Steps with and without one kind of work alternate on one engine: telemetry, one of its figures
(attention, channels, adam; steps without it have the others), an observation of dtypes, a save, or the checks for
silent corruption. The cost is the median difference of a pair, relative to the median step without; amortised is that
share over `--every` steps, bounded by 0.5%. A save is started before the first of 8 steps, and its cost is that of the
block; the checks, by default those of docs/corruption.md, run in every step of their block.
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Literal, TypeVar

import deepspeed
import numpy as np
import torch

from config.batch import refuse_sharing
from config.cli import Arguments, entry_point
from config.command_line import read_command_line
from config.deepspeed.document import initializable
from config.errors import UserError
from config.options import positive_int
from config.resolved import Resolved
from config.schema import PrecisionSection, TelemetrySection
from data.batches.loader import Batches
from data.corpora.corpus import Corpus
from lab.benchmark.harness import ALL_HOLD, FAILED, SHARES, seconds_of, write_json
from lab.benchmark.report import TOLERANCE
from modeling.activation_checkpointing import apply_activation_checkpointing
from modeling.build import build_model, count_parameters
from precision.guard import Verdict
from tracking.pages.markdown import Table
from tracking.run_dir import RunDir
from tracking.tracing.follow import follow
from training.build import assemble
from training.checkpoint.outcome import Saved
from training.corruption.checks import Checks
from training.distributed import World
from training.engine.optimizer import build_optimizer
from training.parts import Parts
from training.progress import Progress
from training.schedule import scheduled_rate
from training.session import Session, batch_shape, session
from training.sinks import open_record
from training.step import train_step
from training.tasks.shape import shape_of_model
from training.telemetry import FIGURES, Figure, Telemetry

T = TypeVar("T")
Interval = tuple[float, float, float]
"""A figure, and the bounds of its interval."""
WARM_UP_STEPS = 5
"""[steps] Alternating untimed pairs before the timed ones."""
Work = Figure | Literal["telemetry", "observation", "save", "checks"]
ALLOWED = 0.005
"""Share of a step that telemetry may cost, amortised, with its default settings."""
USUALLY_EVERY: dict[Work, int] = {
    **dict.fromkeys(("telemetry", *FIGURES), TelemetrySection().every_steps),
    "observation": PrecisionSection().verify_every_steps,
    "save": 1000,
}
"""[steps] Default of --every, the interval between two runs of the work; checks run in every step of their block."""
IN_BLOCKS: tuple[Work, ...] = ("save", "checks")
"""Kinds of work that are timed in blocks of several steps, after one untimed block of each kind."""
CHECKS = ("guard.replica_checks=100", "guard.update_checks=65536", "guard.reexecute=suspicious")
"""The checks with the settings of docs/corruption.md."""
ADDED = ("health", "guard", "record", "other")


def alternate(first: Callable[[], T], second: Callable[[], T], *, pairs: int) -> list[tuple[T, T]]:
    """The results of both, by pair. Which goes first changes every time, since the second finds warmer caches."""
    return [(first(), second()) if pair % 2 == 0 else (second(), first())[::-1] for pair in range(pairs)]


def estimate(statistic: Callable[[np.ndarray], np.ndarray], seconds: np.ndarray) -> Interval:
    """A statistic of all pairs and its interval: the 2.5% and 97.5% quantiles of 2,000 bootstrap resamples.

    seconds: (pairs, 2). statistic: maps (..., pairs, 2) to (...).
    """
    drawn = np.random.default_rng(0).integers(0, len(seconds), size=(2000, len(seconds)))
    low, high = np.quantile(statistic(seconds[drawn]), [0.025, 0.975])
    return float(statistic(seconds)), float(low), float(high)


def median_ratio(seconds: np.ndarray) -> np.ndarray:
    """Median over pairs of the second kind's tokens per second over the first's. seconds: (..., pairs, 2)."""
    return np.median(seconds[..., 0] / seconds[..., 1], axis=-1)


def ratio_of_sums(seconds: np.ndarray) -> np.ndarray:
    """Tokens per second of the second kind over the first's, from the total seconds. seconds: (..., pairs, 2)."""
    return seconds[..., 0].sum(-1) / seconds[..., 1].sum(-1)


def added_share(seconds: np.ndarray) -> np.ndarray:
    """The median difference of a pair relative to the median block of the first kind. seconds: (..., pairs, 2)."""
    return np.median(seconds[..., 1] - seconds[..., 0], axis=-1) / np.median(seconds[..., 0], axis=-1)


class PlainLoop:
    """`deepspeed.initialize`, then forward, backward, step, on its own batches."""

    def __init__(self, resolved: Resolved, corpus: Corpus, world: World) -> None:
        config = resolved.config
        shape = shape_of_model(config, corpus)
        model = build_model(config.model, shape, seed=config.run.seed, gather=lambda _: nullcontext(True)).train()
        mode: Any = config.model.activation_checkpointing
        reentrant, every = config.model.checkpointing_reentrant, config.model.checkpointing_every
        apply_activation_checkpointing(model, mode, reentrant=reentrant, every=every)
        optimizer = build_optimizer(model, config.optimizer, offload=resolved.offload != "none", device=world.device)
        peak = config.optimizer.learning_rate
        rates = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: scheduled_rate(config, n) / peak)
        self._engine, *_ = deepspeed.initialize(
            model=model, optimizer=optimizer, lr_scheduler=rates, config=initializable(resolved.deepspeed)
        )
        self._device, self._share = world.device, 1.0 / resolved.batch.accumulation
        self.batches = Batches(corpus.train, seed=config.run.seed, **batch_shape(resolved, corpus))
        self.losses: list[torch.Tensor] = []

    def step(self) -> None:
        """One optimizer step."""
        loss = torch.zeros((), device=self._device)
        for inputs, labels in self.batches.next_step().micro_batches(self._device):
            one = self._engine(**inputs, labels=labels, shift_labels=labels, use_cache=False).loss
            self._engine.backward(one)
            self._engine.step()
            loss += one.detach() * self._share
        self.losses.append(loss)


class GuardedLoop:
    """Mantissa's own steps, one after another, with parts that may change in between."""

    def __init__(self, parts: Parts) -> None:
        self.parts, self.progress = parts, Progress()
        self.losses: list[float] = []

    def step(self) -> None:
        """One optimizer step. Raises UserError if the guard refuses it, since it then cannot be compared."""
        self.progress, judgement, health = train_step(self.parts, self.progress)
        if judgement.verdict is not Verdict.STEP and not judgement.routine:
            raise UserError(f"the guard refused step {self.progress.step}, so the timing stops: {judgement.reason}")
        self.losses.append(health.loss)


def bare_step(parts: Parts) -> None:
    """Gradients, norm, clipping, optimizer step: nothing judged, nothing recorded."""
    batch = parts.batches.next_step()
    parts.engine.forward_backward(batch, step=batch.position + 1)
    parts.engine.gradients.norm()
    parts.engine.gradients.apply()


@contextmanager
def open_parts(opened: Session) -> Iterator[Parts]:
    """Context manager: the parts of a run of the session's config, in a temporary folder, nothing restored."""
    resolved, engine, world = opened.resolved, opened.engine, opened.world
    root = Path(resolved.config.run.dir).expanduser()
    made = None
    if world.is_main:
        root.mkdir(parents=True, exist_ok=True)
        made = RunDir.create(root, Path(tempfile.mkdtemp(prefix="benchmark-", dir=root)).name, fresh=False)
    run_dir: RunDir = world.from_main(made)
    record = open_record(resolved, opened.corpus, engine, run_dir, world)
    try:
        checkpoints = opened.saved_checkpoints(run_dir.checkpoints)
        parts, _ = assemble(resolved, engine, opened.batches, record=record, checkpoints=checkpoints)
        yield parts
    finally:
        record.close()
        if world.is_main:
            shutil.rmtree(run_dir.path, ignore_errors=True)


# --- against a plain loop


def time_pairs(parts: Parts, plain: PlainLoop, *, pairs: int, steps: int) -> tuple[np.ndarray, float]:
    """Time blocks of both loops in turn. A collective.

    Returns (pairs, 2) float64 seconds per step of the plain loop and of Mantissa, and the largest relative difference
    of their losses in the same step.
    """
    guarded, world = GuardedLoop(parts), parts.engine.world
    alternate(plain.step, guarded.step, pairs=WARM_UP_STEPS)
    blocks = (partial(seconds_of, step, world.device, times=steps) for step in (plain.step, guarded.step))
    seconds = np.array(alternate(*blocks, pairs=pairs)) / steps
    # every rank has an equal share of label tokens, so the mean of the ranks' means is that of the global batch
    losses = world.gather(torch.stack(plain.losses).double()).mean(dim=0).cpu().numpy()
    return seconds, float(np.max(np.abs(losses / np.array(guarded.losses) - 1.0)))


def require_comparable(resolved: Resolved) -> None:
    """Raises UserError for settings that the plain loop lacks, or that two engines in one process cannot have."""
    model, data = resolved.config.model, resolved.config.data
    refuse_sharing(resolved.batch, but=("tensor",), why="the plain loop has {what} on each rank")
    for key, value, allowed in (
        ("task", resolved.config.task, ("pretrain",)),
        ("adapter.kind", resolved.config.adapter.kind, ("none",)),
        ("ZeRO stage", resolved.zero_stage, (0, 1, 2)),
        ("precision.path", resolved.config.precision.path, ("cast",)),
        ("model.activation_checkpointing", model.activation_checkpointing, ("none", "full", "selective")),
        ("data.document_masking", data.document_masking, (False,)),
        ("model.compile", model.compile, (False,)),
        ("model.balance_loss", model.balance_loss, (0.0,)),
        ("model.router_z_loss", model.router_z_loss, (0.0,)),
    ):
        if value not in allowed:
            wanted = ", ".join(map(str, allowed))
            raise UserError(f"{key} = {value}: the plain loop has {wanted} only; use --by-stage or lab.benchmark")


def report_ratio(
    seconds: np.ndarray, distance: float, *, steps: int, compute: str, at_least: float | None, file: Path | None = None
) -> int:
    """Print what `time_pairs` returned, and write it into a file; returns the exit code."""
    (bare, guarded), more = np.median(seconds, axis=0), np.median(seconds[:, 1] - seconds[:, 0])
    middle, total = (estimate(statistic, seconds) for statistic in (median_ratio, ratio_of_sums))
    lines = [
        f"{len(seconds)} pairs of {steps} steps; ratios of tokens/s, Mantissa's over bare [95% of resamples]",
        f"bare      {bare * 1e3:9.2f} ms a step (median)",
        f"mantissa  {guarded * 1e3:9.2f} ms a step, {more * 1e3:+.2f} (median of pairs)",
        "median    {:9.4f} [{:.4f} to {:.4f}]".format(*middle),
        "all       {:9.4f} [{:.4f} to {:.4f}]".format(*total),
        f"losses    {distance:9.1e} apart at most",
    ]
    found = {"pairs": len(seconds), "steps": steps, "median": middle, "all": total}
    found |= {"bare_seconds": bare, "mantissa_seconds": guarded, "loss_difference": distance}
    wrong = None
    if not distance <= TOLERANCE[compute]:
        wrong = f"losses differ by {distance:.1e}, more than {TOLERANCE[compute]:g}"
    elif at_least is not None and middle[2] < at_least:
        wrong = f"the median is below {at_least:g} for certain: at most {middle[2]:.4f}"
    return conclude(lines, found, file, wrong=wrong)


def against_plain_loop(arguments: Sequence[str], options: argparse.Namespace) -> int:
    """Time both loops and print the measurements on rank 0; returns the exit code."""
    steps = options.steps or 1
    resolved = read_command_line([*arguments, f"run.steps={WARM_UP_STEPS + options.pairs * steps}"])
    require_comparable(resolved)
    with session(resolved, shares=SHARES) as opened, open_parts(opened) as parts:
        plain = PlainLoop(resolved, opened.corpus, opened.world)
        seconds, distance = time_pairs(parts, plain, pairs=options.pairs, steps=steps)
        plain.batches.close()
    if resolved.rank != 0:
        return ALL_HOLD
    said = {"steps": steps, "compute": resolved.compute, "at_least": options.at_least}
    return report_ratio(seconds, distance, **said, file=options.json)


# --- by stage


def time_stages(parts: Parts, *, pairs: int, steps: int) -> dict[str, Any]:
    """Time bare and guarded steps in turn, stage by stage, on one engine. A collective.

    Returns the number of parameters, and milliseconds per step, each the median over the steps of its kind: `bare` is a
    whole bare step, `ADDED` the parts that a guarded one has in addition.
    """
    # Full windows from the start, with values far above every loss and norm, so that no step is a spike.
    window = {"values": [1e3 + number % 7 for number in range(parts.resolved.config.guard.spike_window)]}
    parts.guard.load_state_dict(parts.guard.state_dict() | {"loss": window, "log_norm": window})
    kinds = partial(bare_step, parts), GuardedLoop(parts).step
    alternate(*kinds, pairs=WARM_UP_STEPS)
    blocks = (lambda kind=kind: [stage_milliseconds(parts, kind) for _ in range(steps)] for kind in kinds)
    timed = alternate(*blocks, pairs=pairs)
    bare, guarded = ([step for pair in timed for step in pair[kind]] for kind in (0, 1))
    own = {stage: median(step[stage] for step in guarded) for stage in ADDED}
    return {
        "parameters": count_parameters(parts.engine.model),
        "bare": median(sum(step.values()) for step in bare),
        **own,
        "other": own["other"] - median(step["other"] for step in bare),
    }


class Stages:
    """Wall-clock time by stage; time in a nested stage counts for the inner one only."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._on_cuda, self._open = device.type == "cuda", ["other"]
        self._since = time.perf_counter()

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Context manager: counts the time inside for stage `name`."""
        self.switch()
        self._open.append(name)
        try:
            yield
        finally:
            self.switch()
            self._open.pop()

    def switch(self) -> None:
        """Count the time since the last switch for the innermost open stage."""
        if self._on_cuda:
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[self._open[-1]] += now - self._since
        self._since = now


def stage_milliseconds(parts: Parts, step: Callable[[], None]) -> dict[str, float]:
    """Milliseconds of one step by stage."""
    engine = parts.engine
    calls: list[tuple[Any, str, str]] = [
        (parts.batches, "next_step", "data"),
        (engine.loss_path, "score", "forward"),
        (engine, "backward", "backward"),
        (engine.gradients, "norm", "norm"),
        (engine.gradients, "apply", "step"),
        (engine, "health", "health"),
        (parts.guard, "judge", "guard"),
        (parts.guard, "note", "guard"),
        (parts.record, "event", "record"),
    ]
    stages = Stages(engine.world.device)
    undo = follow([(owner, name, partial(stages.of, stage), None) for owner, name, stage in calls])
    step()
    stages.switch()
    undo()
    return {stage: 1e3 * stages.seconds[stage] for stage in (*(stage for _, _, stage in calls), "other")}


def by_stage(arguments: Sequence[str], options: argparse.Namespace) -> int:
    """Time the stages of a step and print a table on rank 0; returns the exit code."""
    resolved = read_command_line([*arguments, "guard.spike_sigmas=6"])
    with session(resolved, shares=SHARES) as opened, open_parts(opened) as parts:
        row = time_stages(parts, pairs=options.pairs, steps=options.steps or 1)
    if resolved.rank != 0:
        return ALL_HOLD
    added = sum(row[stage] for stage in ADDED)
    cells = [f"{row['parameters']:,}", f"{row['bare']:.1f}", *(f"{row[stage]:.3f}" for stage in ADDED)]
    table = Table(
        ("parameters", "bare, ms", *ADDED, "added", "share"), [[*cells, f"{added:.3f}", f"{added / row['bare']:.2%}"]]
    )
    return conclude(table.lines(), row, options.json)


# --- one optional work


def time_work(parts: Parts, of: Work, *, pairs: int, steps: int = 1) -> tuple[np.ndarray, list[Saved]]:
    """(pairs, 2) float64 seconds of a block of steps without and with the work, and the saves. A collective."""
    loop, (without, with_it), saves = GuardedLoop(parts), _both(parts, of), []

    def seconds(chosen: Parts) -> float:
        def block() -> None:
            if of == "save" and chosen is with_it:
                chosen.checkpoints.start_save(chosen.engine, chosen.state_dict(loop.progress))
            for _ in range(steps):
                loop.step()

        loop.parts = chosen
        if chosen.checks is not None:
            chosen.checks.forget()  # steps without checks have changed the state they kept
        taken = seconds_of(block, parts.engine.world.device)
        for outcome in chosen.checkpoints.outcomes():  # waits for the save, which must not run into the next block
            if not isinstance(outcome, Saved):
                raise outcome
            saves.append(outcome)
        return taken

    kinds = partial(seconds, without), partial(seconds, with_it)
    alternate(*kinds[::-1], pairs=1 if of in IN_BLOCKS else WARM_UP_STEPS)
    return np.array(alternate(*kinds, pairs=pairs)), saves


def _both(parts: Parts, of: Work) -> tuple[Parts, Parts]:
    """The run's parts without the work and with it, with nothing else measured."""
    without = replace(_observing(parts, 0), telemetry=None)
    if of == "checks":
        return without, replace(without, checks=Checks(parts.engine, parts.resolved))
    if of == "telemetry" or of in FIGURES:
        probe = parts.resolved.config.telemetry.probe
        with_it = replace(without, telemetry=Telemetry(parts.engine, probe=probe))
        if of in FIGURES:
            others = [figure for figure in FIGURES if figure != of]
            without = replace(without, telemetry=Telemetry(parts.engine, probe=probe, figures=others))
        return without, with_it
    return without, _observing(without, 1 if of == "observation" else 0)


def _observing(parts: Parts, every: int) -> Parts:
    """The same parts, with dtypes observed every `every` steps."""
    config = parts.resolved.config
    config = replace(config, precision=replace(config.precision, verify_every_steps=every))
    return replace(parts, resolved=replace(parts.resolved, config=config))


def of_work(arguments: Sequence[str], options: argparse.Namespace) -> int:
    """Time blocks with and without the work and print its cost on rank 0; returns the exit code."""
    of, pairs = options.of, options.pairs
    steps, warm_up = (options.steps or 8, 1) if of in IN_BLOCKS else (1, WARM_UP_STEPS)
    given = [*(CHECKS if of == "checks" else ()), *arguments, f"run.steps={2 * steps * (warm_up + pairs)}"]
    resolved = read_command_line([*given, "telemetry.every_steps=1"])
    with session(resolved, shares=SHARES) as opened, open_parts(opened) as parts:
        seconds, saves = time_work(parts, of, pairs=pairs, steps=steps)
    if resolved.rank != 0:
        return ALL_HOLD
    every = options.every or USUALLY_EVERY.get(of, steps)
    cost, low, high = (steps * share for share in estimate(added_share, seconds))
    without, more = np.median(seconds[:, 0]) / steps, np.median(seconds[:, 1] - seconds[:, 0])
    lines = [
        f"{pairs} pairs of blocks of {steps} step{'s' if steps > 1 else ''} without and with {of}",
        f"{'step':<11}{without * 1e3:9.2f} ms without (median)",
        f"{of:<11}{more * 1e3:9.2f} ms more in a block",
        f"{'cost':<11}{cost:9.2%} of a step [{low:.2%} to {high:.2%}]",
        f"{'amortised':<11}{cost / every:9.3%} at one step in {every} [{low / every:.3%} to {high / every:.3%}]",
    ]
    if saves:
        whole, stall = (median(getattr(save, name) for save in saves) for name in ("seconds", "stall_seconds"))
        size = saves[0].bytes / 1e6
        lines.append(f"{size:,.1f} MB in {whole:.2f} s ({size / whole:,.0f} MB/s), training waits for {stall:.2f} s")
    found = {"of": of, "ratio": np.median(seconds[:, 1] / seconds[:, 0]), "cost": (cost, low, high), "every": every}
    found |= {"pairs": pairs, "steps": steps, "step_seconds": without, "more_seconds": more}
    surely = low / every > ALLOWED
    wrong = f"{of} costs more than {ALLOWED:.1%} for certain: {low / every:.3%}" if surely else None
    return conclude(lines, found, options.json, wrong=wrong)


# --- the command


def conclude(lines: Sequence[str], found: Any, file: Path | None, *, wrong: str | None = None) -> int:
    """Print the measurements, write them as JSON if a file is named, and return the exit code: 3 if `wrong`."""
    print("\n".join(["", *lines]))
    if file is not None:
        write_json(file, found)
    if wrong is None:
        return ALL_HOLD
    print(f"error: {wrong}", file=sys.stderr)
    return FAILED


@entry_point(launched=True)
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; arguments unknown here belong to the run config."""
    parser = Arguments("lab.benchmark.overhead", __doc__)
    parser.add_argument("--pairs", type=positive_int, default=100, help="pairs of blocks (100)")
    parser.add_argument("--steps", type=positive_int, help="steps in a block (1; 8 for a save and the checks)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there, too")
    parser.add_argument("--at-least", type=float, help="exit code 3 where tokens/s over bare is surely below")
    parser.add_argument("--by-stage", action="store_true", help="time what is added, stage by stage, on one engine")
    works = [*USUALLY_EVERY, "checks"]
    parser.add_argument("--of", choices=works, help="time steps with and without this, on one engine")
    usually = ", ".join(f"{work} {every}" for work, every in USUALLY_EVERY.items())
    parser.add_argument("--every", type=positive_int, help=f"with --of: steps between two ({usually})")
    options, rest = parser.parse_known_args(arguments)
    return (of_work if options.of else by_stage if options.by_stage else against_plain_loop)(rest, options)


if __name__ == "__main__":
    sys.exit(main())
