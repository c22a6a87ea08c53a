"""The measures of speed, memory, cost and loss: most are compared with a baseline."""

from __future__ import annotations

import math

import numpy as np

from tracking.console import format_seconds, human
from tracking.report.context import (
    SAME_DATA,
    SAME_MEMORY,
    SAME_SPEED,
    MeasureContext,
    Measured,
    NotMeasured,
    Run,
    comparable_baseline,
)
from tracking.run_facts import RunFacts

_MILLION = 1_000_000
_FEWEST_NORMS = 20


def epoch_time(context: MeasureContext) -> Measured:
    """Time per epoch against the baseline's."""
    tokens, what = _amount(context.run)
    how = f"seconds for {what} ({tokens:,} tokens) at the median tokens/s of all steps, against the baseline's speed"
    if context.run.epoch_tokens is None:
        how += "; how many tokens an epoch has was not recorded, the ratio is the same as for an epoch"
    speed = context.run.tokens_per_second
    if not speed > 0:
        raise NotMeasured("no step was recorded", how)
    own = f"{format_seconds(tokens / speed)} for {what}"
    baseline = comparable_baseline(context, same=SAME_SPEED, how=how, shown=own)
    base = baseline.tokens_per_second
    if not base > 0:
        raise NotMeasured(f"{baseline.name} recorded no step", how, own)
    shown = f"{base / speed:.3f}x ({own}; baseline {format_seconds(tokens / base)})"
    return Measured(base / speed, shown, how)


def utilisation(context: MeasureContext) -> Measured:
    """Share of the device's peak FLOP/s that the model uses."""
    run = context.run
    how = (
        "model FLOPs utilisation (PaLM, appendix B): tokens/s of one device x (6 x parameters + 12 x layers x hidden "
        "size x sequence length), over the device's dense 16-bit peak; recomputed activations do not count"
    )
    parameters = int(run.facts.start["parameters"])
    trained = int(run.facts.start.get("trained_parameters", parameters))
    if trained < parameters:
        how += f"; {parameters - trained:,} frozen parameters count 4, since nobody needs gradients of them"
    peak = context.peak or peak_flops(run.device)
    if peak is None:
        no_peak = (
            "the peak FLOP/s of a CPU are unknown" if run.device == "cpu" else f"no peak FLOP/s known for {run.device}"
        )
        raise NotMeasured(f"{no_peak}; give --peak-tflops", how)
    if run.low_precision is None:
        raise NotMeasured("the run computes in FP32, whose peak depends on TF32", how)
    if not run.tokens_per_second > 0:
        raise NotMeasured("no step was recorded", how)
    layers, hidden = run.setting("model.config.num_hidden_layers"), run.setting("model.config.hidden_size")
    length = run.setting("data.sequence_length")
    attention = 0 if None in (layers, hidden, length) else 12 * layers * hidden * length
    if not attention:
        how += "; the attention term is left out, since the config does not name layers and hidden size"
    flops = run.tokens_per_second / run.facts.world_size * (4 * parameters + 2 * trained + attention)
    return Measured(flops / peak, f"{flops / peak:.1%} ({flops / 1e12:.3g} TFLOP/s a device)", how)


def peak_memory(context: MeasureContext) -> Measured:
    """Peak memory against the baseline's."""
    how = "peak of the largest rank: device memory allocated by torch, or the process's resident set on a CPU"
    own = context.run.facts.peak_memory_bytes
    if not own > 0:
        raise NotMeasured("no step recorded its memory", how)
    baseline = comparable_baseline(context, same=SAME_MEMORY, how=how, shown=_gib(own))
    base = baseline.facts.peak_memory_bytes
    if not base > 0:
        raise NotMeasured(f"{baseline.name} recorded no memory", how, _gib(own))
    return Measured(own / base, f"{own / base:.3f}x ({_gib(own)}; baseline {_gib(base)})", how)


def _gib(value: float) -> str:
    return f"{value / 2**30:.2f} GiB"


def validation_delta(context: MeasureContext) -> Measured:
    """Validation loss against the baseline's at equal tokens."""
    how = "validation loss over the baseline's, at the most tokens at which both were evaluated, interpolated between"
    _, tokens, _, losses = context.run.facts.evaluations
    if not len(losses):
        raise NotMeasured("no evaluation was recorded", how)
    unit = context.run.facts.start.get("loss_unit", "nats")
    unit = f" {unit}" if unit else ""
    own = f"{losses[-1]:.4f}{unit} at {human(tokens[-1])} tokens"
    baseline = comparable_baseline(context, same=SAME_DATA, how=how, shown=own)
    _, its_tokens, _, its_losses = baseline.facts.evaluations
    if not len(its_losses):
        raise NotMeasured(f"{baseline.name} recorded no evaluation", how, own)
    place = min(tokens[-1], its_tokens[-1])
    if place < max(tokens[0], its_tokens[0]):
        raise NotMeasured(f"{baseline.name} has no evaluation within the range of the run's", how, own)
    mine, base = float(np.interp(place, tokens, losses)), float(np.interp(place, its_tokens, its_losses))
    delta = mine / base - 1 if base else math.nan
    shown = f"{delta:+.3%} ({mine:.4f}, baseline {base:.4f}{unit} at {human(place)} tokens)"
    return Measured(delta, shown, how)


def norm_variance(context: MeasureContext) -> Measured:
    """Relative variance of gradient norms against the baseline's."""
    how = "variance of the finite gradient norms over their squared mean, over the second half of the applied steps"
    own, count = _relative_variance(context.run.facts)
    if count < _FEWEST_NORMS:
        reason = f"the second half of the run has {count} applied steps; {_FEWEST_NORMS} are the fewest"
        raise NotMeasured(reason, how)
    same = (*SAME_DATA, "number of parameters")
    baseline = comparable_baseline(context, same=same, how=how, shown=f"{own:.3g}")
    base, its = _relative_variance(baseline.facts)
    if its < _FEWEST_NORMS or not base > 0:
        raise NotMeasured(f"{baseline.name} has too few applied steps", how, f"{own:.3g}")
    return Measured(own / base, f"{own / base:.3f}x ({own:.3g}; baseline {base:.3g})", how)


def _relative_variance(facts: RunFacts) -> tuple[float, int]:
    columns = facts.columns
    norms = columns.grad_norm[columns.applied & np.isfinite(columns.grad_norm)]
    half = norms[norms.size // 2 :]
    if half.size < 2 or not half.mean() > 0:
        return math.nan, 0
    return float(half.var(ddof=1) / half.mean() ** 2), half.size


def epoch_cost(context: MeasureContext) -> Measured:
    """Cost per epoch against the baseline's."""
    tokens, what = _amount(context.run)
    how = (
        f"price x devices x hours for {what}; hours are those of all sessions, with evaluations, saves and steps done "
        "again, over the tokens that count"
    )
    own = _hours_a_token(context.run) * tokens
    if not own > 0:
        raise NotMeasured("no step was recorded", how)
    price = context.price
    shown = f"{own:.3g} device hours" if price is None else f"{own * price:.4g}"
    shown += f" for {what}"
    same = ("number of parameters", "sequence length", "device")
    hint = "" if price is not None else "; --price gives money"
    baseline = comparable_baseline(context, same=same, how=how, shown=shown, hint=hint)
    base = _hours_a_token(baseline) * tokens
    if not base > 0:
        raise NotMeasured(f"{baseline.name} recorded no step", how, shown)
    if price is None:
        how += "; without --price, hours stand for money"
    its = f"{base * (price or 1.0):.3g}"
    return Measured(own / base, f"{own / base:.3f}x ({shown}; baseline {its})", how)


def _hours_a_token(run: Run) -> float:
    tokens = run.facts.columns.tokens
    return run.facts.wall_seconds / 3600 * run.facts.world_size / float(tokens[-1]) if len(tokens) else math.nan


def _amount(run: Run) -> tuple[int, str]:
    """Tokens that times and costs are given for: those of an epoch, where they were recorded."""
    return (run.epoch_tokens, "an epoch") if run.epoch_tokens else (_MILLION, "a million tokens")


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
"""Words of the device's name as the driver reports it, and its dense (not sparse) FP16 tensor-core peak with FP32
accumulation in TFLOP/s, equal to BF16's where there is BF16; the first match counts."""


def peak_flops(device: str) -> float | None:
    """Dense 16-bit matmul FLOP/s of one `device`; None for one that is not in the table."""
    words = set(device.replace("-", " ").split())
    return next((tflops * 1e12 for name, tflops in _PEAK_TFLOPS if words.issuperset(name.split())), None)
