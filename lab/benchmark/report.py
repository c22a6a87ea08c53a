"""The report of `lab.benchmark`: medians over rounds, ratios round by round, and the Markdown page."""

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from lab.benchmark.contestants import OWN, Run
from tracking.pages import markdown
from tracking.pages.markdown import Table

TOLERANCE = {"fp32": 1e-4, "bf16": 5e-3, "fp16": 5e-3}
"""Largest relative difference of a step's loss, by dtype of forward and backward."""


def statistics_of(values: Sequence[float]) -> dict[str, Any]:
    """Median, extremes and all values, in the order of the rounds."""
    return {"median": median(values), "least": min(values), "most": max(values), "rounds": list(values)}


def loss_difference(losses: Sequence[float], expected: Sequence[float]) -> float:
    """Largest relative difference in any step; inf if a loss is not finite or the lengths differ."""
    if len(losses) != len(expected) or not all(map(math.isfinite, [*losses, *expected])):
        return math.inf
    return max(abs(mine - other) / abs(other) for mine, other in zip(losses, expected, strict=True))


def compare(
    runs: Mapping[str, Sequence[Run]],
    *,
    tokens: float,
    flops_per_token: float | None,
    peak: float | None,
    tolerance: float,
) -> dict[str, Any]:
    """Each contestant's measurements and its ratios to the baseline. runs: by contestant, in order of rounds.

    tokens: of a step, over all ranks. peak: [FLOP/s] of all devices. Baseline is the bare loop, else the first
    contestant. Losses are compared with the first Mantissa's, else the first contestant's; no ratio beyond `tolerance`.
    """
    baseline = "bare" if "bare" in runs else next(iter(runs))
    reference = next((name for name in runs if name in OWN), next(iter(runs)))
    expected = runs[reference][0].result.losses
    found: dict[str, Any] = {}
    for name, mine in runs.items():
        difference = max(loss_difference(run.result.losses, expected) for run in mine)
        rate = statistics_of([tokens / run.step_seconds for run in mine])
        found[name] = {
            "engine": mine[0].result.engine,
            "tokens_per_second": rate,
            "median_step_seconds": statistics_of([median(run.steps) for run in mine]),
            "first_step_seconds": statistics_of([run.first_step_seconds for run in mine]),
            "memory_bytes": max(run.result.memory_bytes for run in mine),
            "mfu": None if flops_per_token is None or peak is None else rate["median"] * flops_per_token / peak,
            "last_loss": mine[0].result.losses[-1],
            "loss_difference": difference,
            "trains_the_same": difference <= tolerance,
        }
    for mine in found.values():
        mine["ratio"] = None
        if mine["trains_the_same"] and found[baseline]["trains_the_same"]:
            mine["ratio"] = ratios(mine, found[baseline]) | {"to": baseline}
    return {"baseline": baseline, "loss_reference": reference, "loss_tolerance": tolerance, "contestants": found}


def ratios(mine: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """`mine` over `other`: tokens per second for each round that both have, and memory."""
    rates = zip(*(each["tokens_per_second"]["rounds"] for each in (mine, other)), strict=False)
    memory = mine["memory_bytes"] / other["memory_bytes"]
    return {"tokens_per_second": statistics_of([a / b for a, b in rates]), "memory_bytes": memory}


def bound(found: Mapping[str, Any], first: str, second: str, least: float) -> dict[str, Any]:
    """Whether the median ratio of two contestants' tokens per second reaches a bound; it fails without a ratio."""
    check: dict[str, Any] = {"of": f"{first}/{second}", "least": least, "value": None, "holds": False}
    lacking = [name for name in (first, second) if name not in found["contestants"]]
    if lacking:
        return check | {"why": f"{' and '.join(lacking)} did not finish a run"}
    mine, other = found["contestants"][first], found["contestants"][second]
    if not (mine["trains_the_same"] and other["trains_the_same"]):
        return check | {"why": "losses differ"}
    value = ratios(mine, other)["tokens_per_second"]["median"]
    return check | {"value": value, "holds": value >= least}


def page(found: Mapping[str, Any]) -> str:
    """The tables, in Markdown."""
    contestants, conditions = found["contestants"], found["conditions"]
    head = [
        *("", "tokens/s", f"over {found['baseline']}", "median step, ms", "launch to first step, s", "peak memory, MB"),
        *("MFU", f"loss difference from {found['loss_reference']}"),
    ]
    rows = [
        (
            name,
            _with_range(mine["tokens_per_second"], "{:,.0f}"),
            _with_range(mine["ratio"]["tokens_per_second"], "{:.3f}") if mine["ratio"] else "losses differ",
            _with_range(mine["median_step_seconds"], "{:,.1f}", 1e3),
            _with_range(mine["first_step_seconds"], "{:.1f}"),
            f"{mine['memory_bytes'] / 1e6:,.0f}",
            "-" if mine["mfu"] is None else f"{mine['mfu']:.1%}",
            f"{mine['loss_difference']:.1e}",
        )
        for name, mine in contestants.items()
    ]
    ranks = conditions.get("batch", {}).get("tensor", 1)
    shared = f", {ranks} to a matrix (parallel.tensor)" if ranks > 1 else ""
    work = (
        f"{conditions['task']}{conditions['adapter']}, {conditions['model']}, {conditions['parameters']:,} parameters; "
        f"ZeRO-{conditions['zero_stage']}, {conditions['compute']}, {conditions['processes']} processes"
        f"{shared}, {conditions['tokens']:,.0f} tokens a step; "
        f"{conditions['rounds']} rounds of {conditions['timed_steps']} timed steps after {conditions['warm_up']} "
        "others; medians of the rounds [least to most]."
    )
    missing = [f"{name}: not measured, {reason}." for name, reason in found["passed_over"].items()]
    missing += [f"{reason}." for reason in found["failed"].values()]
    bounds = [f"{check['of']} >= {check['least']}: {_verdict(check)}" for check in found["bounds"]]
    return markdown.page(work, _mfu(found), Table(head, rows), "\n".join(missing), "\n".join(bounds))


def _mfu(found: Mapping[str, Any]) -> str:
    if found["flops_per_token"] is None:
        return "tokens/s: inputs that are not padding, in the mean over the timed steps."
    return (
        f"MFU: tokens/s x {found['flops_per_token'] / 1e6:,.1f} MFLOP a token (6 a weight that multiplies a token, 4 a "
        "frozen one, and 12 x layers x heads x head size x sequence; nothing recomputed) over "
        f"{found['peak']['flops'] / 1e12:,.3f} TFLOP/s ({found['peak']['how']})."
    )


def _with_range(values: Mapping[str, Any], form: str, factor: float = 1.0) -> str:
    middle, least, most = (form.format(values[key] * factor) for key in ("median", "least", "most"))
    return middle if least == most else f"{middle} [{least} to {most}]"


def _verdict(check: Mapping[str, Any]) -> str:
    if check["value"] is None:
        return f"fails: {check['why']}"
    return f"{'holds' if check['holds'] else 'fails'} at {check['value']:.4f}"
