"""The job of `tools.analyze`: train in FP32, measure every region before, in the middle and after, propose, validate.

Measured at each point, on one batch and the current masters: ranges (ranges.py), largest stored values (stored.py), and
the error of the whole gradient against FP32's when one region alone computes in BF16, FP16 or FP8 (gradients.py).
Everything uses DeepSpeed's own backward pass and reduction, so it works at every ZeRO stage.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from config.cli import CONFIG_ERROR, Arguments, entry_point
from config.command_line import read_command_line
from config.errors import UserError
from config.resolved import Resolved
from data.batches.loader import Batch, Batches
from data.text.tokenizer import load_tokenizer
from tools.analyze.gradients import Candidate, on_the_cast_path, under_manifest, validate
from tools.analyze.proposal import FP16_LARGEST, SCALED, Limits, Proposal, propose, propose_fp8, scale_for
from tools.analyze.regions import measure, summary, units_of
from tools.analyze.stored import Stored, first_beyond, largest, largest_of_each
from training.engine import Engine
from training.schedule import scheduled_rate
from training.session import session

WORTHWHILE = 0.95
"""A costlier manifest is chosen only if its error is below this factor times the cheaper one's."""
FP8_ATTEMPTS = (1.5, 1.2, 1.0, 0.8, 0.6, 0.4)
"""Factors on the allowed gradient error for which FP8 proposals are made: errors of regions together differ from the
sum of each alone, so the first proposal whose measured error is within the limit is taken."""
FP8_HELD_OUT = 0.9
"""Share of the allowed gradient error that a proposal may use on its own batch; on held-out batches, all of it."""

ErrorsOf = Callable[[Mapping[str, Candidate]], dict[str, float]]
"""Measures the gradient error of each candidate on one batch."""


class Hopeless(Exception):
    """There is nothing to propose: FP32 itself is not finite, or the FP16 that the config requests cannot work."""


def first_sequences(batch: Batch, sequences: int) -> Batch:
    """The first sequences of a rank's first micro-batch as a batch of their own."""
    labels, counts = batch.labels[:1, :sequences], batch.counted[:1, :sequences]
    return replace(
        batch,
        input_ids=batch.input_ids[:1, :sequences],
        labels=labels,
        label_tokens=int(counts.sum()),
        label_tokens_of_all=None,
        counts=counts,
        position_ids=None if batch.position_ids is None else batch.position_ids[:1, :sequences],
        source_names=(),
        labels_by_source=None,
        sources=None,
        counts_by_source=(),
        further={name: values[:1, :sequences] for name, values in batch.further.items()},
    )


@dataclass(frozen=True)
class Plan:
    """The extent of the measurements."""

    steps: int
    """FP32 training steps. Measured before the first, in the middle and after the last."""
    sequences: int
    """Sequences per process in one measurement; held-out batches are used whole."""
    most_regions: int
    """Number of regions above which sensitivity is measured per pattern instead of per region."""
    held_out: int
    """Number of global batches to validate the proposal on."""
    compute: str
    """The dtype that the config itself computes in."""
    limits: Limits


def survey(
    engine: Engine, batches: Batches, resolved: Resolved, plan: Plan, text_of: Callable[[int], str]
) -> dict[str, Any]:
    """Train, measure, propose and validate; plain types for the analysis file. A collective.

    text_of: the text of a token. Raises Hopeless.
    """
    units = units_of(engine, plan.most_regions)
    assert engine.regions is not None
    engine.regions.fp8 = replace(engine.regions.fp8, kernel="emulate")  # no kernel has been compared with emulation yet
    points, losses = [], []
    judge = partial(_require_possible, compute=plan.compute)
    for step in range(plan.steps + 1):
        batch = batches.next_step()
        if step in (0, plan.steps // 2, plan.steps):
            part = first_sequences(batch, plan.sequences)
            points.append(measure(engine, part, units, step=step, limits=plan.limits, text_of=text_of, judge=judge))
            dtypes = "BF16, FP16 and FP8" if plan.limits.fp8 else "BF16 and FP16"
            if engine.world.is_main:
                print(f"measured {len(units)} regions in {dtypes} after {step} steps", flush=True)
        if step < plan.steps:
            losses.append(_train(engine, batch, resolved, step))
    ranges, stored = points[0].ranges, largest_of_each(point.stored for point in points)
    for point in points[1:]:
        ranges.add_all(point.ranges)
    spreads = ranges.spreads()
    casts: dict[str, dict[str, str]] = {}
    for point in points:
        for name, by_dtype in point.casts.items():
            casts.setdefault(name, {}).update(by_dtype)
    measured, other_flops = summary(units, points)
    given: dict[str, Any] = {"other_flops": other_flops, "casts": casts}
    cast = partial(on_the_cast_path, routers=resolved.config.precision.routers)
    uniform = {
        "uniform bf16": Candidate(partial(cast, compute="bf16")),
        "uniform fp16": Candidate(
            partial(cast, compute="fp16"), scale_for(largest(stored, *SCALED).value, plan.limits)
        ),
    }

    def errors_of(candidates: Mapping[str, Candidate]) -> dict[str, float]:  # on the batch of the last point
        return {name: float(found["error"]) for name, found in validate(engine, candidates, [part]).items()}

    if plan.limits.fp8:
        in_fp8 = partial(propose_fp8, measured, **given)
        uniform["all in fp8"] = _runnable(in_fp8(largest_error=math.inf))
        proposal, tried = _decide_fp8(in_fp8, errors_of, _regions_alone(uniform), plan.limits.fp8)
    else:
        proposed = partial(propose, measured, spreads, **given)
        proposal, tried = _decide(proposed, errors_of, _regions_alone(uniform), plan.limits)
    held_out = [batches.next_step() for _ in range(plan.held_out)]
    checked = validate(engine, {"proposal": _runnable(proposal), **uniform}, held_out)
    return {
        "limits": asdict(plan.limits),
        "proposal": asdict(proposal),
        "uniform": None if plan.limits.fp8 else _better_uniform(checked, stored, plan.limits),
        "uniform_fp16_scale": uniform["uniform fp16"].scale,
        "units": [asdict(unit) for unit in measured],
        "other_flops": other_flops,
        "spreads": {name: {kind: asdict(spread) for kind, spread in found.items()} for name, found in spreads.items()},
        "stored": {kind: {name: asdict(peak) for name, peak in peaks.items()} for kind, peaks in stored.items()},
        "casts": casts,
        "tried": tried,
        "validation": checked,
        "regions_alone": {
            dtype: sum(errors.get(dtype, 0.0) ** 2 for errors in points[-1].errors) ** 0.5
            for dtype in ("bf16", "fp16", *(["fp8"] if plan.limits.fp8 else []))
        },
        "losses": losses,
    }


def _require_possible(stored: Stored, *, compute: str) -> None:
    """Raises Hopeless for FP16 if no loss scale helps."""
    peak = first_beyond(stored, FP16_LARGEST)
    if compute == "fp16" and peak is not None:
        raise Hopeless(
            f"precision.compute = fp16 cannot work: {peak}, is beyond FP16's {FP16_LARGEST:,.0f} whatever the loss "
            "scale; set precision.compute=bf16"
        )


def _better_uniform(checked: Mapping[str, Any], stored: Stored, limits: Limits) -> str | None:
    """The best uniform dtype, unless the manifest is closer to FP32 by enough; then None.

    FP16 is considered only if everything that it would store has headroom.
    """
    room = largest(stored, "activations", "weights").value * limits.headroom <= FP16_LARGEST
    bearing = {dtype: checked[f"uniform {dtype}"]["error"] for dtype in ("bf16", *(["fp16"] if room else []))}
    best = min(bearing, key=lambda dtype: bearing[dtype])
    return None if checked["proposal"]["error"] < WORTHWHILE * bearing[best] else best


def _train(engine: Engine, batch: Batch, resolved: Resolved, step: int) -> float:
    outcome = engine.forward_backward(batch, step=step + 1)
    health = engine.health(outcome)
    if not health.finite:
        raise Hopeless(f"FP32 itself is not finite at step {step + 1}: loss {health.loss}")
    engine.step(health, scheduled_rate(resolved.config, step))
    return health.loss


def _decide(
    proposed: Callable[..., Proposal], errors_of: ErrorsOf, uniform: dict[str, Candidate], limits: Limits
) -> tuple[Proposal, dict[str, float]]:
    """The best of a few proposals, on a batch that was measured before; their errors and those of uniform dtypes.

    Promotions to FP32 cost FLOPs, so they stay only if they lower the error by five percent. An FP32 ambient dtype
    costs memory, so it is chosen only if a 16-bit one is no better than a uniform dtype; FP16 wherever nothing
    overflows and FP32 elsewhere is then tried, too, if enough FLOPs stay in 16 bits. proposed: `propose` with all
    measurements.
    """
    named = {
        "16 bits": proposed(limits=limits, promote=False),
        "promoted": proposed(limits=limits),
        "promoted, FP32 ambient": proposed(limits=limits, ambient="fp32"),
    }
    in_fp16 = proposed(limits=replace(limits, flushed=1.0), promote=False, ambient="fp32", otherwise="fp32")
    if in_fp16.low_precision_share >= limits.floor * named["16 bits"].low_precision_share:
        named["FP16 or FP32"] = in_fp16
    errors = errors_of({name: _runnable(one) for name, one in named.items()} | uniform)
    best = "promoted" if errors["promoted"] < WORTHWHILE * errors["16 bits"] else "16 bits"
    if errors[best] >= WORTHWHILE * min(errors["uniform bf16"], errors["uniform fp16"]):
        wider = [name for name in named if named[name].manifest["default"] == "fp32"]
        best = min(best, *wider, key=lambda name: errors[name])
    return named[best], errors


def _decide_fp8(
    proposed: Callable[..., Proposal], errors_of: ErrorsOf, uniform: dict[str, Candidate], allowed: float
) -> tuple[Proposal, dict[str, float]]:
    """The proposal with the most FP8 whose measured error is allowed, on a batch measured before (the last one if none
    is), and all measured errors. proposed: `propose_fp8` with all measurements."""
    errors = errors_of(uniform)
    for share in FP8_ATTEMPTS:
        proposal = proposed(largest_error=share * allowed)
        name = f"fp8 for an error of {share * allowed:.3g}"
        errors |= errors_of({name: _runnable(proposal)})
        if errors[name] <= FP8_HELD_OUT * allowed:
            break
    return proposal, errors


def _runnable(proposal: Proposal) -> Candidate:
    return Candidate(partial(under_manifest, manifest=proposal.manifest), proposal.loss_scale or 1.0)


def _regions_alone(uniform: dict[str, Candidate]) -> dict[str, Candidate]:
    """The uniform dtypes, and each of them in every region with FP32 between regions."""
    found = dict(uniform)
    for dtype in ("bf16", "fp16"):
        every = {"match": "*", "reason": "every region, nothing else", "compute": dtype}
        tree = {"default": "fp32", "rules": [every]}
        scale = uniform[f"uniform {dtype}"].scale
        found[f"uniform {dtype}, FP32 ambient"] = Candidate(partial(under_manifest, manifest=tree), scale)
    return found


@entry_point(launched=True)
def main(arguments: Sequence[str] | None = None) -> int:
    """One process of the job that `tools.analyze` starts; the main one writes the result."""
    parser = Arguments("python -m tools.analyze.survey", __doc__)
    parser.add_argument("--result", type=Path, required=True, help="JSON file to write")
    parser.add_argument("--plan", type=json.loads, required=True, help="JSON of the plan")
    options, rest = parser.parse_known_args(arguments)
    resolved = read_command_line(rest)
    plan = Plan(**options.plan | {"limits": Limits(**options.plan["limits"])})
    try:
        with session(resolved) as opened:
            tokenizer = load_tokenizer(opened.corpus.tokenizer_folder)
            result = survey(opened.engine, opened.batches, resolved, plan, lambda token: str(tokenizer.decode([token])))
    except UserError as error:
        result = {"error": str(error)}
    except Hopeless as error:
        result = {"failed": str(error)}
    if resolved.rank == 0:
        options.result.write_text(json.dumps(result), encoding="utf-8")
    return CONFIG_ERROR if "error" in result else 0


if __name__ == "__main__":
    sys.exit(main())
