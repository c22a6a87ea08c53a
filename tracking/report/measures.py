"""The twelve measures of a mixed-precision run, each with a verdict, from its run folder alone.

Relative measures are compared with a baseline, the same run in FP32. If inputs were not recorded or the baseline is not
comparable, the measure is reported as not measured, with the reason. Nothing is guessed.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tracking.heatmap.still import still_of_run
from tracking.numbers import change, human, loss, mib, number, percent, precise_duration
from tracking.report.context import Finding, MeasureContext, NotMeasured, find
from tracking.run_dir import setting
from tracking.run_facts import WIDE, RunFacts

GOOD_ENDINGS = frozenset({"healthy", "finished with warnings", "stopped"})
"""Verdicts of runs that ended as they should: all steps done, or stopped on request with the state saved."""

_FEWEST_NORMS = 20


def all_measures(context: MeasureContext) -> list[Finding]:
    """All twelve findings, in the order of `LIMITS`."""
    return [find(measure, context) for measure in _MEASURES]


def count_verdicts(findings: Sequence[Finding]) -> str:
    """One sentence with the numbers of measures that passed, failed and were not measured."""
    count = Counter(finding.verdict for finding in findings)
    failed = f"{count['fail']} failed" if count["fail"] else "none failed"
    return f"{count['pass']} of {len(findings)} measures pass, {failed}, {count['not measured']} not measured"


def caveats(context: MeasureContext) -> list[str]:
    """Sentences that qualify the verdicts: the run hardly moves, or the baseline is not in FP32 or has not ended."""
    still = still_of_run(context.run)
    found = [still] if still else []
    baseline = context.baseline
    if baseline is None:
        return found
    if baseline.low_precision is not None:
        found.append(f"the baseline {baseline.label} computes in {baseline.low_precision}, not in FP32")
    if baseline.end is None:
        found.append(f"the baseline {baseline.label} has not ended")
    return found


def comparable_baseline(context: MeasureContext, same: tuple[str, ...], hint: str = "") -> RunFacts:
    """The baseline. Raises NotMeasured if there is none, or if it differs from the run in one of `same`."""
    baseline = context.baseline
    if baseline is None:
        raise NotMeasured(f"no baseline; give one with --baseline{hint}")
    for what in same:
        mine, its = _COMPARED[what](context.run), _COMPARED[what](baseline)
        if mine is not None and its is not None and mine != its:
            raise NotMeasured(f"{baseline.label} has a different {what}: {its}, not {mine}{hint}")
    return baseline


_COMPARED: dict[str, Callable[[RunFacts], Any]] = {
    "number of parameters": lambda run: run.start.get("parameters"),
    "training set": lambda run: (run.environment.get("data") or {}).get("fingerprint"),
    "sequence length": lambda run: setting(run.config, "data.sequence_length"),
    "micro-batch": lambda run: setting(run.config, "batch.micro_size"),
    "number of processes": lambda run: run.world_size,
    "device": lambda run: run.environment.get("accelerator") and _device(run),
}
SAME_SPEED = ("number of parameters", "sequence length", "number of processes", "device")
SAME_MEMORY = (*SAME_SPEED, "micro-batch")
SAME_DATA = ("training set", "sequence length")


def epoch_time(context: MeasureContext, found: Finding) -> float:
    """Seconds for an epoch, against the baseline's speed."""
    tokens, what = _amount(context.run)
    speed = f"seconds for {what} ({tokens:,} tokens) at the median tokens/s of all steps, against the baseline's speed"
    unknown = "; the tokens per epoch were not recorded, the ratio is the same as for an epoch"
    found.how = speed if what == "an epoch" else speed + unknown
    own = _positive(context.run.tokens_per_second, "no step was recorded")
    found.shown = f"{precise_duration(tokens / own)} for {what}"
    baseline = comparable_baseline(context, SAME_SPEED)
    base = _positive(baseline.tokens_per_second, f"{baseline.label} recorded no step")
    found.shown = f"{base / own:.3f}x ({found.shown}; baseline {precise_duration(tokens / base)})"
    return base / own


def utilisation(context: MeasureContext, found: Finding) -> float:
    """Model FLOPs utilisation (PaLM, appendix B): tokens/s of one device x (6 x active parameters + 12 x layers x
    hidden size x sequence length), over the device's dense 16-bit peak; recomputed activations do not count."""
    run = context.run
    whole = int(run.start["parameters"])
    parameters = int(run.start.get("active_parameters", whole))
    trained = int(run.start.get("active_trained_parameters") or run.start.get("trained_parameters", whole))
    if parameters < whole:
        found.how += f"; {whole - parameters:,} parameters of experts that a token does not use count 0"
    if trained < parameters:
        found.how += f"; {parameters - trained:,} frozen parameters count 4, since they need no gradients"
    peak, device = context.peak or peak_flops(_device(run)), _device(run)
    if peak is None:
        no_peak = "the peak FLOP/s of a CPU are unknown" if device == "cpu" else f"no peak FLOP/s known for {device}"
        raise NotMeasured(f"{no_peak}; give --peak-tflops")
    if run.low_precision is None:
        raise NotMeasured("the run computes in FP32, whose peak depends on TF32")
    speed = _positive(run.device_speed, "no step was recorded")
    keys = ("model.config.num_hidden_layers", "model.config.hidden_size", "data.sequence_length")
    layers, hidden, length = (setting(run.config, key) for key in keys)
    attention = 0 if None in (layers, hidden, length) else 12 * layers * hidden * length
    if not attention:
        found.how += "; the attention term is left out, since the config does not name layers and hidden size"
    flops = speed * (4 * parameters + 2 * trained + attention)
    found.shown = f"{percent(flops / peak, 3)} ({number(flops / 1e12, 3)} TFLOP/s a device)"
    return flops / peak


def peak_memory(context: MeasureContext, found: Finding) -> float:
    """Peak of the largest rank: device memory allocated by torch, or the process's resident set on a CPU."""
    own = _positive(context.run.peak_memory_bytes, "no step recorded its memory")
    found.shown = mib(own)
    baseline = comparable_baseline(context, SAME_MEMORY)
    base = _positive(baseline.peak_memory_bytes, f"{baseline.label} recorded no memory")
    found.shown = f"{own / base:.3f}x ({mib(own)}; baseline {mib(base)})"
    return own / base


def validation_delta(context: MeasureContext, found: Finding) -> float:
    """Validation loss over the baseline's, at the most tokens at which both were evaluated, interpolated between."""
    _, tokens, _, losses = context.run.evaluations
    if not len(losses):
        raise NotMeasured("no evaluation was recorded")
    unit = context.run.start.get("loss_unit", "nats")
    unit = f" {unit}" if unit else ""
    found.shown = f"{loss(losses[-1])}{unit} at {human(tokens[-1])} tokens"
    baseline = comparable_baseline(context, SAME_DATA)
    _, its_tokens, _, its_losses = baseline.evaluations
    if not len(its_losses):
        raise NotMeasured(f"{baseline.label} recorded no evaluation")
    place = min(tokens[-1], its_tokens[-1])
    if place < max(tokens[0], its_tokens[0]):
        raise NotMeasured(f"{baseline.label} has no evaluation within the range of the run's")
    mine, base = float(np.interp(place, tokens, losses)), float(np.interp(place, its_tokens, its_losses))
    delta = (mine - base) / abs(base) if base else math.nan
    found.shown = f"{change(delta)} ({loss(mine)}, baseline {loss(base)}{unit} at {human(place)} tokens)"
    return delta


def norm_variance(context: MeasureContext, found: Finding) -> float:
    """Variance of the finite gradient norms over their squared mean, over the second half of the applied steps."""
    own, count = _relative_variance(context.run)
    if count < _FEWEST_NORMS:
        raise NotMeasured(f"the second half of the run has {count} applied steps; {_FEWEST_NORMS} are the fewest")
    found.shown = number(own, 3)
    baseline = comparable_baseline(context, (*SAME_DATA, "number of parameters"))
    base, its = _relative_variance(baseline)
    if its < _FEWEST_NORMS or not base > 0:
        raise NotMeasured(f"{baseline.label} has too few applied steps")
    found.shown = f"{own / base:.3f}x ({number(own, 3)}; baseline {number(base, 3)})"
    return own / base


def _relative_variance(facts: RunFacts) -> tuple[float, int]:
    columns = facts.columns
    norms = columns.grad_norm[columns.applied & np.isfinite(columns.grad_norm)]
    half = norms[norms.size // 2 :]
    if half.size < 2 or not half.mean() > 0:
        return math.nan, 0
    return float(half.var(ddof=1) / half.mean() ** 2), half.size


def epoch_cost(context: MeasureContext, found: Finding) -> float:
    """Price x devices x hours for an epoch, relative to the baseline's."""
    tokens, what = _amount(context.run)
    found.how = (
        f"price x devices x hours for {what}; hours are those of all sessions, with evaluations, saves and steps done "
        "again, over the tokens that count"
    )
    own = _positive(_hours_a_token(context.run) * tokens, "no step was recorded")
    price = context.price
    found.shown = f"{number(own, 3)} device hours" if price is None else number(own * price)
    found.shown += f" for {what}"
    same = ("number of parameters", "sequence length", "device")
    baseline = comparable_baseline(context, same, hint="" if price is not None else "; --price gives money")
    base = _positive(_hours_a_token(baseline) * tokens, f"{baseline.label} recorded no step")
    if price is None:
        found.how += "; without --price, hours stand for money"
    found.shown = f"{own / base:.3f}x ({found.shown}; baseline {number(base * (price or 1.0), 3)})"
    return own / base


def _positive(value: float, otherwise: str) -> float:
    """The value; raises NotMeasured with `otherwise` as the reason if it is 0 or nan."""
    if not value > 0:
        raise NotMeasured(otherwise)
    return value


def _hours_a_token(run: RunFacts) -> float:
    tokens = run.columns.tokens
    return run.device_hours / float(tokens[-1]) if len(tokens) else math.nan


def _amount(run: RunFacts) -> tuple[int, str]:
    """Tokens for which time and cost are given, and their name: an epoch if recorded, else a million tokens."""
    tokens = (run.environment.get("data") or {}).get("train_tokens")
    return (tokens, "an epoch") if tokens else (1_000_000, "a million tokens")


def _device(run: RunFacts) -> str:
    """Name of the accelerator, `cpu`, or `unknown`."""
    return str((run.environment.get("accelerator") or {}).get("device", "unknown"))


_PEAK_TFLOPS = (
    ("B200", 2250.0),
    ("H200", 989.4),
    ("GH200", 989.4),
    ("H100 NVL", 835.5),
    ("H100 PCIe", 756.5),
    ("H100", 989.4),
    ("A100", 312.0),
    ("L40S", 362.05),
    ("A10G", 70.0),
    ("V100 SXM2", 125.0),
    ("V100 PCIE", 112.0),
    ("T4", 65.0),
)
"""(words in the device name reported by the driver, dense (not sparse) FP16 tensor-core peak with FP32 accumulation in
TFLOP/s, the same as for BF16 if supported); the first match counts."""


def peak_flops(device: str) -> float | None:
    """Dense 16-bit matmul FLOP/s of one `device`; None if it is not in the table."""
    words = set(device.replace("-", " ").split())
    return next((tflops * 1e12 for name, tflops in _PEAK_TFLOPS if words.issuperset(name.split())), None)


def nonfinite(context: MeasureContext, found: Finding) -> float:
    """Attempted steps whose loss or gradient norm was not finite, over all sessions, except overflows: steps with a
    finite loss that the dynamic loss scale handled."""
    run = context.run
    if not run.counts["step"]:
        raise NotMeasured("no step was recorded")
    for first in run.nonfinite[:1]:
        found.reason = f"the first: step {first.step}{first.cause and f': {first.cause}'}"
    found.shown = f"{len(run.nonfinite):,}"
    return len(run.nonfinite)


def restore_success(context: MeasureContext, found: Finding) -> float:
    """Rollbacks, and sessions that had a checkpoint to resume from; one succeeds that resumes from the newest without
    skipping a damaged one or another run's. A start that fails before its first event is not seen."""
    restored, due = context.run.restores
    if not due:
        raise NotMeasured("nothing had to be restored")
    found.shown = f"{percent(restored / due, 3)} ({restored} of {due})"
    return restored / due


def overflow_rate(context: MeasureContext, found: Finding) -> float:
    """Attempts whose overflow the dynamic loss scale handled, or that no scale helps, over all attempts at a step."""
    run, attempts = context.run, context.run.counts["step"]
    if not attempts:
        raise NotMeasured("no step was recorded")
    if not run.scaled:
        raise NotMeasured("the loss is not scaled")
    overflows = sum(attempt.handled or attempt.overflowed for attempt in run.broken)
    found.shown = f"{percent(overflows / attempts, 3)} ({overflows:,} of {attempts:,})"
    return overflows / attempts


def job_success(context: MeasureContext, found: Finding) -> float:
    """The run's verdict (docs/verdict.md): how it ended, and what became of its loss."""
    verdict, end, (*before, _) = context.run.verdict, context.run.end, context.run.sessions
    if not verdict.over:
        raise NotMeasured(f"it has not ended: {verdict.text}")
    lost = sum(session.crashed for session in before)
    earlier = f"; {lost} of {len(before)} earlier sessions crashed" if lost else ""
    code = f" (exit code {end['exit_code']})" if end is not None else ""
    found.shown, found.reason = f"{verdict.word}{code}{earlier}", verdict.cause
    return float(verdict.word in GOOD_ENDINGS)


def low_precision(context: MeasureContext, found: Finding) -> float:
    """Share of the forward pass's matmul FLOPs that were computed below FP32, from the newest precision event. The rest
    fell back to FP32, or is configured to stay there."""
    if context.run.low_precision is None:
        raise NotMeasured("the run is configured to compute in FP32")
    seen = [event["flop_share"] for event in context.run.rare_events.get("precision", []) if event["flop_share"]]
    if not seen:
        raise NotMeasured("no precision event was recorded")
    share = 1.0 - sum(part for dtype, part in seen[-1].items() if dtype in WIDE)
    parts = ", ".join(f"{dtype} {percent(part, 3)}" for dtype, part in seen[-1].items())
    found.shown = f"{percent(share, 3)} ({parts})"
    return share


def drift(context: MeasureContext, found: Finding) -> float:
    """Largest relative distance of a 16-bit parameter from its master rounded to 16 bits, over all telemetry events."""
    samples, largest = context.run.heat.drift
    if not samples and context.run.start.get("compute") in WIDE:
        raise NotMeasured("the parameters are the FP32 masters themselves")
    if not samples:
        raise NotMeasured("no telemetry event has it; set telemetry.every_steps")
    found.shown = f"{number(largest, 3)} ({samples:,} samples)"
    found.reason = "16-bit parameters are not their rounded masters"
    return largest


_MEASURES: tuple[Callable[[MeasureContext, Finding], float], ...] = (
    *(epoch_time, utilisation, peak_memory, nonfinite, validation_delta, epoch_cost),
    *(restore_success, overflow_rate, norm_variance, job_success, low_precision, drift),
)
