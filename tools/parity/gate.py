"""Does half precision train the same model? Run a config and its FP32 twin, and compare them.

    python -m tools.parity --config config/recipes/demo.yaml [--steps N] [--report DIR] [key.sub=value ...]
    python -m tools.parity --config FILE --effect 0.5% [--power 0.9] [--report DIR]
    python -m tools.parity --oracle runs/NAME [--steps N]

Both run as real jobs through `train.py`: the same data, seed and schedule; the twin differs in precision only. Then
single steps of the half-precision run are compared with FP32 from the same masters (`tools.parity.steps`), and all
measurements are judged by the bounds in the config's `parity:` section. Tasks that sample answers have no twin, which
would sample others: single steps are compared on the answers that the run recorded. The report folder gets
`parity.json`, `parity.md` and plots. Exit code 0: parity; 3: no parity; 2: not possible.

With --effect nothing is run: from the scatter in an existing report it computes how many pairs detect that shift of the
validation loss with probability --power.

With --oracle the first steps of an existing run are recomputed in plain torch and FP64 from its config alone, and
compared with its record (`tools.parity.oracle`).
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import random
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from config.cli import DIVERGED, DONE, Arguments, entry_point
from config.errors import UserError, one_line
from config.options import positive_int
from config.redact import redact, redact_arguments
from config.schema import Config, LossScaleSection
from launch.job import add_processes_option
from precision.loss_scale import make_policy
from precision.tolerance import relative
from tools.parity.every_step import compared_alike, judge_every_step
from tools.parity.jobs import (
    Plan,
    References,
    Run,
    forks_for,
    inner_dtypes,
    plan,
    train_again,
    train_candidate,
    train_references,
    train_twin,
    trajectory,
    walk_steps,
)
from tools.parity.judge_runs import (
    AGAIN,
    MOST_APART,
    Runs,
    Trajectory,
    confidence,
    confidence_line,
    first_departure,
    in_doubt,
    judge_whole,
)
from tools.parity.judge_steps import Check, first_divergence, judge_dtypes, judge_steps
from tools.parity.oracle.comparison import Comparison
from tools.parity.oracle.judge import STEPS, Log, Unknown, judge, undisturbed
from tools.parity.oracle.rules import loss_scale
from tools.parity.power import MOST_PAIRS, POWER, pairs_needed
from tools.parity.report import verdict_lines, write_report
from tools.parity.room import estimates
from tracking.compare.surviving import read_events, surviving
from tracking.jsonl import encode
from tracking.run_facts import median
from tracking.summary import read_inputs
from training.corruption.rates import SAME_RATE, schedule

MAX_CURVE_POINTS = 2000


def gate(chosen: Plan, *, references: References | None = None, keep: bool = False) -> dict[str, Any]:
    """Run, compare, judge, and write the report; returns the content of parity.json.

    references: finished runs to share. keep: leave the checkpoints of the first half-precision run.
    """
    bounds = chosen.resolved.config.parity
    if (chosen.folder / "parity.json").exists():  # judged before: start over
        shutil.rmtree(chosen.folder / "runs", ignore_errors=True)
        (chosen.folder / "parity.json").unlink()
    shared = references is not None
    candidates = [train_candidate(chosen, seed) for seed in chosen.seeds]  # first: it may be refused
    references = references or train_references(chosen)
    twins, controls = references.twins, references.controls
    print(f"single steps after steps {', '.join(map(str, chosen.points))}")
    walks = walk_steps(chosen, candidates[0])
    half, fp32 = [trajectory(run) for run in candidates], [trajectory(run) for run in twins]
    nudged, whole = [trajectory(run) for run in controls], fp32[0] if twins else None
    for index, (seed, run) in enumerate(zip(chosen.seeds, half, strict=True)):
        if twins and run.settling is not None:
            fp32[index] = trajectory(train_twin(chosen, seed, lost=run.settling.steps))
    apart, again, of_runs = list[Trajectory](), list[Trajectory](), list[Check]()

    def whole_runs() -> list[Check]:
        return judge_whole(Runs(half, fp32, nudged, whole), bounds, apart=apart, again=again)

    if whole is not None:
        of_runs = whole_runs()
        for index, (seed, run) in enumerate(zip(chosen.seeds, half, strict=True)):
            if in_doubt(of_runs) and len(run.lost) > len(run.settling.steps if run.settling else ()):
                fp32[index] = trajectory(train_twin(chosen, seed, lost=run.lost))
        of_runs = whole_runs()
        while in_doubt(of_runs) and len(apart) < MOST_APART:  # by a defect, or by chaos alone
            apart.append(trajectory(train_twin(chosen, chosen.seeds[0], a_bit=len(apart))))
            of_runs = whole_runs()
        if in_doubt(of_runs) and candidates[0].finished:
            again = [trajectory(train_again(chosen, chosen.seeds[0], draw)) for draw in range(AGAIN)]
            of_runs = whole_runs()
    unfinished = [f"{run.folder.name}: {run.error_line}" for run in candidates if not run.finished]
    share = 1 - len(unfinished) / len(candidates)
    checks = [
        Check("finished_runs", share, 1.0, not unfinished, at_least=True, note="; ".join(unfinished)),
        *of_runs,
        *judge_steps(walks, bounds),
        judge_dtypes([report for run in candidates for report in inner_dtypes(run)], bounds),
        by_rule(candidates[0].folder.events, chosen.resolved.config),
        judge_every_step([run.folder.events for run in (*candidates, *twins)], bounds.whole_steps),
    ]
    checks += recomputed(chosen, candidates[0], twins[0] if twins else None, print)
    for judged in [*([] if keep else candidates[:1]), *([] if shared else twins[:1])]:
        shutil.rmtree(judged.folder.checkpoints, ignore_errors=True)
    failed = [check.name for check in checks if not check.passed]
    found = {
        "verdict": "no parity" if failed else "parity",
        "failed": failed,
        "checks": [dataclasses.asdict(check) for check in checks],
        "confidence": confidence(Runs(half, fp32, nudged, whole), bounds) if twins else None,
        "first_parting": first_divergence(walks, bounds),
        "first_departure": first_departure(half[0], whole, bounds.loss_gap) if whole else None,
        "bought": _resources(candidates[0], twins[:1], price=bounds.price_per_device_hour, devices=chosen.processes),
        "conditions": _conditions(chosen, candidates[0]),
        "trajectories": {"candidate": [_thinned(run) for run in half], "fp32": [_thinned(run) for run in fp32]},
        "walks": [dataclasses.asdict(walk) for walk in walks],
    }
    found = json.loads(encode(found))
    (chosen.folder / "parity.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    write_report(chosen.folder, found)
    return found


def by_rule(events: Path, config: Config) -> Check:
    """Compare learning rate and loss scale of every step with the config's rules, computed outside the engine.

    Measured is the largest relative difference up to the first incident, after which the guard changes both. The rule
    of the loss scale is also compared over more steps than most runs have.
    """
    found = surviving(read_events(events))
    start = next(event for event in found if event["event"] == "run_start")
    rate = schedule(config.schedule, peak=config.optimizer.learning_rate, total=config.scheduled_steps)
    scaled = "fp16" in {start["compute"], *(start["regions"] or {}).values()}
    scale = loss_scale(config.precision.loss_scale) if scaled else None
    note = f"loss scale not judged: policy {config.precision.loss_scale.policy}" if scaled and scale is None else ""
    applied, worst, where = 0, *(unlike_rule(config.precision.loss_scale) if scale is not None else (0.0, ""))
    for event in undisturbed(found)[0]:
        pairs = [("learning rate", event["lr"], rate(applied))]
        if scale is not None:
            pairs.append(("loss scale", event["loss_scale"], scale(not event["applied"])))
        for what, recorded, expected in pairs:
            off = relative(abs(recorded - expected), abs(expected))
            if not off <= worst:
                worst, where = off, f"{what} at step {event['step']}"
        applied += event["applied"]
    return Check("by_rule", worst, SAME_RATE, worst <= SAME_RATE, where=where, note=note)


def unlike_rule(section: LossScaleSection) -> tuple[float, str]:
    """How far the policy of the run is from its rule, and where, over 20 windows in which every other one overflows."""
    section = dataclasses.replace(section, window=min(section.window, 1000))
    policy, scale, dice = make_policy(section), loss_scale(section), random.Random(0)
    assert scale is not None
    for step in range(1, 20 * section.window + 1):
        overflow = dice.random() < 0.5 / section.window
        expected = scale(overflow)
        if policy.scale != expected:
            return relative(abs(policy.scale - expected), expected), f"loss scale at step {step} of a drawn pattern"
        policy.update(overflow)
    return 0.0, ""


def recomputed(chosen: Plan, candidate: Run, twin: Run | None, log: Log) -> list[Check]:
    """The checks of both records by the oracle. twin: whose steps it recomputes; None: those of the run itself."""
    most: dict[str, Any] = {"steps": chosen.resolved.config.parity.oracle_steps, "points": chosen.points[1:]}
    if not most["steps"]:
        return []
    if twin is None:
        return outside(candidate, log, "evaluation", **most)
    return [*outside(twin, log, "fp32_evaluation", **most), *outside(candidate, log, "evaluation")]


def outside(run: Run, log: Log, evaluation: str, *, steps: int = 0, points: Sequence[int] = ()) -> list[Check]:
    """The checks of a run's record, recomputed outside the engine: its order, its evaluations, and these steps if any.

    Measured is the largest difference in units of its bound; what the oracle does not support becomes a note, any other
    exception a failed check with its line.
    evaluation: name of the check. steps: number of first ones, besides those after `points`; 0: none.
    """
    log(f"{run.folder.name}: recomputed outside of the engine")
    began, of_steps = time.monotonic(), "oracle" if steps else "order"
    try:
        found = judge(run.folder.path, steps=steps, points=points if steps else (), log=log)
    except Unknown as problem:
        return [Check(what, math.nan, 1.0, True, note=f"not judged: {problem}") for what in (of_steps, evaluation)]
    except Exception as problem:  # all runs have been trained and judged
        return [Check(of_steps, math.inf, 1.0, False, note=one_line(problem))]
    of_evaluations = [each for each in found.comparisons if each.what.startswith("validation")]
    others = [each for each in found.comparisons if each not in of_evaluations]
    times = [event["time"] for event in read_events(run.folder.events)]
    took = time.monotonic() - began
    notes = "; ".join([*found.notes, f"in {took:.0f} s, {took / (times[-1] - times[0]):.2g} times the run's own"])
    return [
        _worst(of_steps, others, notes if steps else ""),
        _worst(evaluation, of_evaluations, "" if steps else notes),
    ]


def _worst(name: str, comparisons: Sequence[Comparison], note: str) -> Check:
    """The check of the comparison that is furthest beyond its bound, or closest to it."""
    if not comparisons:
        return Check(name, math.nan, 1.0, True, note=note)
    worst = max(comparisons, key=_in_bounds)
    shown = [each for each in comparisons if not each.holds] or [worst]
    where = "; ".join(f"{each.what} {each.largest:.2e}, bound {each.bound:.1e}, {each.where}" for each in shown)
    return Check(name, _in_bounds(worst), 1.0, all(each.holds for each in comparisons), where=where, note=note)


def _in_bounds(comparison: Comparison) -> float:
    if not comparison.bound:
        return 0.0 if comparison.holds else math.inf
    return math.inf if math.isnan(comparison.largest) else comparison.largest / comparison.bound


def _thinned(run: Trajectory) -> dict[str, Any]:
    every = max(1, math.ceil(len(run.steps) / MAX_CURVE_POINTS))
    curves = {name: list(getattr(run, name))[::every] for name in ("steps", "losses", "grad_norms")}
    return {**dataclasses.asdict(run), **curves}


def _resources(candidate: Run, twins: Sequence[Run], *, price: float, devices: int) -> dict[str, Any]:
    """Time, memory, energy and cost of both runs, and their ratios if both were measured.

    Times are those of steps in which both compared the same for the gate, since most steps of the twin compare nothing.
    """
    if not twins:
        return {}
    both = candidate, twins[0]
    alike = [np.isin(run.facts.columns.step, [*compared_alike(read_events(run.folder.events))]) for run in both]
    if not all(map(np.any, alike)):
        alike = [np.full(len(run.facts.columns), True) for run in both]
    mine, other = (
        {name: None if value is None or math.isnan(value) else value for name, value in _used(run, price * devices, of)}
        for run, of in zip(both, alike, strict=True)
    )
    return {
        name: {"candidate": a, "fp32": b, "ratio": a / b if a is not None and b else None}
        for (name, a), b in zip(mine.items(), other.values(), strict=True)
    }


def _used(run: Run, hourly: float, alike: np.ndarray) -> Iterator[tuple[str, float | None]]:
    """Medians over some steps, peak memory, energy, and the cost if an hour has a price. alike: which steps."""
    columns = run.facts.columns
    speed = median(columns.tokens_per_second[alike])
    yield "step_seconds", median(columns.step_seconds[alike])
    yield "tokens_per_second", speed
    yield "memory_bytes", run.facts.peak_memory_bytes
    yield "energy_joules", run.energy
    if hourly:
        yield "cost_per_million_tokens", hourly / 3600 * 1e6 / speed if speed else None


def _conditions(chosen: Plan, run: Run) -> dict[str, Any]:
    config, deepspeed, environment = read_inputs(run.folder).values()
    start, resolved, program = run.facts.start, chosen.resolved, ("python", "-m", "tools.parity")
    compute = resolved.config.precision.manifest or resolved.compute
    return {
        "hypothesis": redact(resolved.config.run.hypothesis),
        "command": shlex.join(redact_arguments([*chosen.launcher, *program, *chosen.arguments])),
        "compute": compute,
        "model": start["model"],
        "parameters": start["parameters"],
        "zero_stage": resolved.zero_stage,
        "offload": resolved.offload,
        "processes": chosen.processes,
        "steps": resolved.config.run.steps,
        "compared_after": chosen.points,
        "seeds": resolved.config.parity.seeds,
        "global_batch": resolved.batch.global_size,
        "accumulation": resolved.batch.accumulation,
        "sequence_length": resolved.config.data.sequence_length,
        "data": environment.get("data", {}).get("fingerprint"),
        "tokens": int(run.facts.columns.tokens.max(initial=0)),
        "epoch_tokens": environment.get("data", {}).get("train_tokens"),
        "bounds": config.get("parity", {}),
        "environment": {key: environment.get(key) for key in ("accelerator", "cpu", "versions", "git")},
    }


def _planned(report: Path, effect: float, power: float) -> str:
    """A sentence on how many pairs of runs find `effect`, given the scatter that a finished report measured."""
    fix = "run the gate first, with parity.seeds or parity.controls of 2 or more"
    try:
        known = json.loads(report.read_text(encoding="utf-8"))["confidence"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{report}: no report of the gate on how far runs scatter; {fix}") from None
    if known["scatter"] is None:
        raise UserError(f"{report}: one pair without controls says nothing about how far runs scatter; {fix}")
    scatter, controls = float(known["scatter"]), int(known["controls"])
    needed = pairs_needed(scatter, effect, controls=controls, power=power)
    shown = f"{report}: one delta scatters by {scatter:.3%} ({known['degrees']} degrees of freedom)"
    found = f"a shift of {effect:.3%} is found with probability {power:g}"
    if needed is None:
        return f"{shown}\n{found} by no number of pairs up to {MOST_PAIRS:,}"
    return f"{shown}\n{found} by parity.seeds={needed} parity.controls={controls}"


def _effect(text: str) -> float:
    """A share of the loss, written as 0.5% or 0.005."""
    return _between(text.removesuffix("%"), 0.0, 1.0, scale=100 if text.endswith("%") else 1)


def _between(text: str, low: float, high: float, *, scale: float = 1) -> float:
    try:
        number = float(text) / scale
    except ValueError:
        number = math.nan
    if not low < number < high:
        raise argparse.ArgumentTypeError(f"{text} is not between {low * scale:g} and {high * scale:g}")
    return number


@entry_point()
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = Arguments("python -m tools.parity", __doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--config", help="run config to judge")
    what.add_argument("--oracle", type=Path, metavar="RUN", help="recompute a run's first steps outside the engine")
    parser.add_argument(
        "--steps", type=positive_int, help=f"run this many steps; the warm-up shrinks with them (oracle: {STEPS})"
    )
    parser.add_argument("--report", type=Path, help="folder of the report (default: runs/parity-<config's name>)")
    add_processes_option(parser)
    without = "torchrun; without a GPU, forks of this process"
    parser.add_argument(
        "--launch", default="", help=f"launcher, such as 'deepspeed --hostfile hosts' (default: {without})"
    )
    parser.add_argument("--keep-checkpoints", action="store_true", help="keep the first candidate's, to resume from")
    parser.add_argument("overrides", nargs="*", help="key.sub=value")
    parser.add_argument(
        "--effect",
        type=_effect,
        help="print how many pairs detect a shift of the validation loss of this size, such as 0.5%%",
    )
    power = partial(_between, low=0.5, high=1.0)
    parser.add_argument("--power", type=power, default=POWER, help="probability of finding it (default: %(default)s)")
    options = parser.parse_intermixed_args(arguments)
    if options.oracle is not None:
        if options.overrides:
            raise UserError(f"{options.overrides[0]}: the oracle takes the run's own config; leave it out")
        found_by_oracle = judge(options.oracle, steps=options.steps or STEPS)
        print("\n".join(found_by_oracle.lines()))
        return DONE if found_by_oracle.holds else DIVERGED
    folder = options.report or Path("runs") / f"parity-{Path(options.config).stem}"
    if options.effect is not None:
        print(_planned(folder / "parity.json", options.effect, options.power))
        return DONE
    forks = forks_for(options.processes, options.launch)  # before anything is computed
    chosen = plan(
        options.config,
        options.overrides,
        folder=folder,
        steps=options.steps,
        processes=options.processes,
        launcher=shlex.split(options.launch),
        forks=forks,
    )
    for line in estimates(chosen):
        print(line, flush=True)
    found = gate(chosen, keep=options.keep_checkpoints)
    print("\n".join(verdict_lines(found)))
    if found["confidence"] is not None:
        print(confidence_line(found["confidence"]))
    print(next(check["note"] for check in found["checks"] if check["name"] == "every_step"))
    print(f"report   {folder / 'parity.md'}")
    return DIVERGED if found["failed"] else DONE
