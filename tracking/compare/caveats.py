"""Why runs are not directly comparable: what differs between them, and what their events show."""

from collections.abc import Iterator, Sequence

import numpy as np

from tracking.compare.differences import Difference
from tracking.compare.divergence import Divergence
from tracking.run_facts import RunFacts


def caveats(
    runs: Sequence[RunFacts], found: Sequence[Difference], divergences: Sequence[Divergence]
) -> list[tuple[str, tuple[str, ...]]]:
    """Reasons why these runs are not directly comparable; empty when they are.

    divergences: of each run from the baseline. Each reason, such as "different tokenizer: ...", comes with the keys of
    the measures it invalidates.
    """
    known: list[tuple[str, tuple[str, ...]]] = []
    for keys, consequence, voids in _CONSEQUENCES:
        hit = [
            item for key in keys for item in found if item.key == key or key.endswith(".") and item.key.startswith(key)
        ]
        if hit:
            known.append((f"{consequence}: {'; '.join(map(str, hit))}", voids))
    rates = [item for item in found if item.key in _RATES]
    if rates and not rates_are_compared(found):
        text = "different learning rate: losses reflect the rates as well as the other differences"
        known.append((f"{text}: {'; '.join(map(str, rates))}", ()))
    scheduled = rates or any(item.key.startswith(("schedule.", "run.steps", "batch.")) for item in found)
    return known + [(text, ()) for text in _event_caveats(runs, divergences, scheduled=bool(scheduled))]


_RATES = ("optimizer.learning_rate", "optimizer.groups")


def rates_are_compared(found: Sequence[Difference]) -> bool:
    """Whether only the learning rate differs (the seed may too), so that the runs compare learning rates."""
    settings = {item.key for item in compared_settings(found)}
    return bool(settings) and settings <= {*_RATES}


def compared_settings(found: Sequence[Difference]) -> list[Difference]:
    """Settings other than the seed that differ and may explain different results."""
    return [item for item in found if item.group in ("config", "data") and item.may_explain and item.key != "run.seed"]


_VALIDATION = ("validation_at_equal_tokens", "validation_at_equal_time", "best_validation")
_LOSSES = ("loss_at_equal_tokens", "loss_at_equal_time", "seconds_to_baseline", *_VALIDATION)
_TIMES = ("loss_at_equal_time", "validation_at_equal_time", "seconds_to_baseline")
_CONSEQUENCES: tuple[tuple[tuple[str, ...], str, tuple[str, ...]], ...] = (
    (
        ("data.tokenizer", "(vocab_size)"),
        "different tokenizer: a loss is in nats per token, and the tokens are different pieces of text",
        (*_LOSSES, "tokens_per_second", "cost_per_million_tokens"),
    ),
    (
        ("(fingerprint)", "data.source", "data.path", "data.name", "data.validation_fraction"),
        "different data: training and validation losses are on different text",
        _LOSSES,
    ),
    (
        (
            *("task", "sft.loss", "classify.", "mlm.", "(loss_unit)", "(headline)"),
            *(f"preference.{key}" for key in ("loss", "beta", "label_smoothing", "sft_weight")),
            *(f"distill.{key}" for key in ("teacher", "loss", "beta", "temperature", "ce_weight")),
        ),
        "different objective: a loss is of another quantity",
        _LOSSES,
    ),
    (("data.sequence_length",), "different sequence length: longer contexts have lower losses", _LOSSES),
    (("batch.global_size",), "different batch: steps are not comparable, compare at equal tokens", ("skipped",)),
    (
        ("(parameters)", "model.name_or_path", "model.architecture"),
        "different model: compare at equal time and cost",
        ("loss_at_equal_tokens", "validation_at_equal_tokens", "tokens_per_second", "memory_bytes"),
    ),
    (
        ("precision.compute", "(compute)", "precision.path", "precision.manifest", "precision.reduce"),
        "different precision: losses differ by rounding from the first step",
        (),
    ),
    (("run.steps", "schedule."), "different schedule: at equal tokens the learning rates differ", ()),
    (
        ("evaluate.batches",),
        "different share of the validation set: validation losses are on different text",
        _VALIDATION,
    ),
    (
        ("processes", "accelerator.device", "cpu.model", "cpu.usable_cores"),
        "different hardware: losses at equal time compare the machines",
        _TIMES,
    ),
)


def _event_caveats(runs: Sequence[RunFacts], divergences: Sequence[Divergence], *, scheduled: bool) -> Iterator[str]:
    """Caveats that only the events show (data order, learning rates, tokens seen), and missing configs.

    scheduled: whether a setting that determines the learning rates differs.
    """
    for divergence in divergences:
        first, run = divergence.baseline, divergence.run
        if (step := divergence.first_differences.get("order")) is not None:
            yield f"different data order: {run.label} sees other sequences than {first.label} from step {step}"
        step = None if scheduled else _other_rate(first, run)
        if step is not None:
            yield f"different learning rate: {run.label} differs from {first.label} from step {step}"
    for run in runs:
        if cut := [event["step"] for event in run.rare_events.get("incident", ()) if event["verdict"] == "CUT_LR"]:
            yield f"different learning rate: that of {run.label} was cut after step {cut[0]}"
        if run.verdict.word in ("diverged", "not learning"):
            yield f"{run.label} went wrong: {run.verdict.text}"
        if not run.config:
            yield f"the config of {run.label} is unknown"
    reaching, short = split_early(runs)
    for run in short[:MOST_EARLY]:
        came = f"{'ended at' if run.verdict.over else 'has come to'} step {int(run.columns.step[-1]):,}"
        yield f"{run.label} {came} ({last_tokens(run):,.0f} tokens), before the others: its losses are compared there"
    if len(short) > MOST_EARLY:
        yield f"{len(short) - MOST_EARLY} more runs did not get as far as the others"
    tokens = [last_tokens(run) for run in reaching]
    if len(set(tokens)) > 1:
        seen = ", ".join(f"{run.label} {count:,.0f}" for run, count in zip(reaching, tokens, strict=True))
        yield f"different numbers of tokens seen: {seen}; equal tokens means the smallest of these"


MOST_EARLY = 4
"""Maximum number of runs behind the others that get measures and a caveat of their own."""
FAR = 0.9
"""Runs below this share of the second-longest run's tokens do not limit the comparison; chosen, not measured."""


def split_early(runs: Sequence[RunFacts]) -> tuple[list[RunFacts], list[RunFacts]]:
    """(runs that determine how far all are compared, runs that are too short for that, longest first)."""
    ends = sorted((last_tokens(run) for run in runs if len(run.columns)), reverse=True)
    enough = FAR * ends[1] if len(ends) > 1 else 0.0
    short = [run for run in runs if len(run.columns) and last_tokens(run) < enough]
    return [run for run in runs if run not in short], sorted(short, key=last_tokens, reverse=True)


def last_tokens(run: RunFacts) -> float:
    """Tokens that a run has seen."""
    return float(run.columns.tokens[-1]) if len(run.columns) else 0.0


def _other_rate(first: RunFacts, other: RunFacts) -> int | None:
    """First common step at which the recorded learning rates differ; None when there is none.

    They are compared only while both runs have skipped equally many steps: schedules count applied steps.
    """
    a, b = first.columns, other.columns
    steps, left, right = np.intersect1d(a.step, b.step, assume_unique=True, return_indices=True)
    as_many = np.cumsum(~a.applied)[left] == np.cumsum(~b.applied)[right]
    recorded = np.isfinite(a.lr[left]) & np.isfinite(b.lr[right])
    differing = np.flatnonzero((a.lr[left] != b.lr[right]) & recorded & as_many)
    return int(steps[differing[0]]) if differing.size else None
