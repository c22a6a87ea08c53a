"""Explain in plain words why two runs diverge at a step, from what both recorded. The first rule that matches wins.

Roughly, the rules go from what happened in one run only (a fault, a promotion) through the inputs of a step (data
order, learning rate, loss scale) to settings. If nothing recorded explains the divergence, the answer says so and lists
what differs.
"""

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tracking.compare.differences import Difference, side_by_side
from tracking.compare.divergence import COMPARED, Divergence, events_near
from tracking.events import Event, describe_event, restored_step
from tracking.numbers import number, percent
from tracking.run_facts import RunFacts, median

_ORDER_KEYS = ("run.seed", "data.", "batch.", "(fingerprint)", "tokenizer")
_RATE_KEYS = ("schedule.", "optimizer.learning_rate", "run.steps", "batch.")
_SCALE_KEYS = ("precision.loss_scale",)
_MODEL_KEYS = ("model.", "(model)", "(parameters)")
_GRADIENT_KEYS = (
    *("precision.path", "precision.manifest", "precision.compute", "(compute)", "(dtype)", "precision."),
    *("(zero_stage)", "(accumulation)", "batch.micro_size", "model.", "processes"),
)
_UPDATE_KEYS = ("optimizer.",)
_MAX_SETTINGS = 4
_UNEXPLAINED = "no recorded setting, version or machine differs, so some of the computation is not deterministic"
_SAME_SPEED = 1.05
"""Median step times whose ratio is below this count as the same speed; chosen, not measured."""


def cause(divergence: Divergence, found: Sequence[Difference]) -> str:
    """One sentence: why the runs diverge at `divergence.step`, or how their speeds compare when they never do."""
    if divergence.first_step is None:
        return "the runs have no step in common"
    if divergence.step is None:
        return f"same numbers to step {divergence.last_step}{_describe_speed(divergence, found)}"
    turned = {name for name, first in divergence.first_differences.items() if first == divergence.step}
    rules = (rule for column, rule in _RULES if not column or column in turned)
    return next(answer for rule in rules if (answer := rule(divergence, divergence.step, found)))


def tolerance_cause(divergence: Divergence) -> str:
    """One sentence on what happened between the first difference and the first loss beyond the tolerance."""
    beyond, step = divergence.beyond_tolerance, divergence.step
    if beyond is None or step is None or beyond == step:
        return ""
    turns = [
        f"{COMPARED[name]} from step {first}"
        for name, first in sorted(divergence.first_differences.items(), key=lambda item: item[1])
        if name not in ("loss", "grad_norm") and step < first <= beyond
    ]
    since = f"{beyond - step} step{'s' * (beyond - step > 1)} after the first difference"
    return f"{since}; between them other {', '.join(turns)}" if turns else f"{since}, which grew"


def _fault(divergence: Divergence, step: int, found: Sequence[Difference]) -> str:
    for run, event in _only_in_one_run(divergence, "fault", step - 1, step):
        where = f" in {event['module']}" if event.get("module") else ""
        return f"step {event['step']}: an injected fault ({event['kind']}){where} in {run.label} only"
    return ""


def _order(divergence: Divergence, step: int, found: Sequence[Difference]) -> str:
    reasons = _settings(found, _ORDER_KEYS)
    for run in (divergence.baseline, divergence.run):
        rollbacks = [event for event in run.rare_events.get("incident", ()) if event["verdict"] == "ROLLBACK"]
        if any(restored_step(event) < step <= event["step"] + 1 for event in rollbacks):
            reasons.insert(0, f"{run.label} rolled back and skipped batches")
    why = "; ".join(filter(None, [*reasons, _shift(divergence, step)])) or "no recorded setting explains it"
    weights = ", and so do the initial weights" if step == 1 and any(item.key == "run.seed" for item in found) else ""
    return f"the data order differs from step {step}{weights}: {why}"


def _shift(divergence: Divergence, step: int) -> str:
    """Clause naming the baseline step that used the sequences of the run's `step`; empty if there is none."""
    a, b = divergence.baseline.columns, divergence.run.columns
    wanted = b.order[np.searchsorted(b.step, step)]
    same = np.flatnonzero(a.order == wanted)
    if not same.size:
        return ""
    other = int(a.step[same[0]])
    return f"what {divergence.run.label} sees at step {step}, {divergence.baseline.label} sees at step {other}"


def _tokens(divergence: Divergence, step: int, found: Sequence[Difference]) -> str:
    keys = "; ".join(_settings(found, ("batch.", "data.sequence_length")))
    return f"the number of tokens differs from step {step}: {keys or 'no recorded setting explains it'}"


def _applied(divergence: Divergence, step: int, found: Sequence[Difference]) -> str:
    columns = divergence.run.columns
    applied = bool(columns.applied[np.searchsorted(columns.step, step)])
    run, other = (divergence.baseline, divergence.run) if applied else (divergence.run, divergence.baseline)
    kinds = ("fault", "nonfinite", "incident", "scale")
    events = [event for event in events_near(run, step) if event["step"] == step and event["event"] in kinds]
    why = "; ".join(dict.fromkeys(map(describe_event, events))) or "no reason was recorded"
    return f"step {step} was skipped in {run.label} and applied in {other.label}: {why}"


def _incident(divergence: Divergence, step: int, found: Sequence[Difference]) -> str:
    for run, event in _only_in_one_run(divergence, "incident", step - 1, step):
        at, reason = event["step"], event["reason"]
        match event["verdict"]:
            case "PROMOTE":
                modules = ", ".join(event.get("modules") or []) or "no module"
                return f"step {at}: {modules} promoted to {event.get('promoted_to', '?')} in {run.label} only"
            case "CUT_LR":
                return f"step {at}: the learning rate was cut in {run.label} only ({reason})"
            case "ROLLBACK":
                return f"step {at}: {run.label} rolled back to step {restored_step(event)} ({reason})"
    return ""


def _resumed(divergence: Divergence, step: int, found: Sequence[Difference]) -> str:
    for run, event in _only_in_one_run(divergence, "run_start", step - 1, step - 1):
        if event.get("resumed_from"):
            count = event["world_size"]
            return f"{run.label} was resumed after step {event['step']}, with {count} process{'es' * (count > 1)}"
    return ""


def _loss_scale(divergence: Divergence, step: int, found: Sequence[Difference]) -> str:
    reasons = _settings(found, _SCALE_KEYS) or [
        f"{run.label} at step {event['step']}: {describe_event(event)}"
        for run, event in _only_in_one_run(divergence, "scale", step - 1, step)
    ]
    values = _both_values(divergence, "loss_scale", step)
    return f"the loss scale differs from step {step} ({values}): {'; '.join(reasons) or 'no reason recorded'}"


def _rate(divergence: Divergence, step: int, found: Sequence[Difference]) -> str:
    if divergence.first_differences.get("loss") == step:
        return ""
    keys = "; ".join(_settings(found, _RATE_KEYS)) or "no recorded setting explains it"
    return f"the learning rate differs from step {step} ({_both_values(divergence, 'lr', step)}): {keys}"


def _first_step(divergence: Divergence, step: int, found: Sequence[Difference]) -> str:
    """Cause for runs that differ from their first step on: every changed setting that affects the first loss."""
    if step != divergence.first_step:
        return ""
    keys = _settings(found, (*_MODEL_KEYS, *_GRADIENT_KEYS))
    if divergence.first_differences.get("order") == step:
        order = _order(divergence, step, found)
        return f"{order}; and {_join_settings(keys)}" if keys else order
    keys = _settings(found, ("run.seed",)) + keys or _all_differences(found)
    return f"different from the first step: {_join_settings(keys)}"


def _gradient(divergence: Divergence, step: int, found: Sequence[Difference]) -> str:
    if divergence.first_differences.get("loss") == step:
        return ""
    keys = _settings(found, _GRADIENT_KEYS) or _all_differences(found)
    return f"same batch and loss at step {step}, but a different gradient: {_join_settings(keys)}"


def _update(divergence: Divergence, step: int, found: Sequence[Difference]) -> str:
    keys = _settings(found, _UPDATE_KEYS)
    if keys:
        same = f"same batch, gradient norm and learning rate before step {step}"
        return f"{same}, but a different update: {_join_settings(keys)}"
    keys = _all_differences(found)
    if keys:
        return f"nothing recorded before step {step} explains it; what differs: {_join_settings(keys)}"
    return f"nothing recorded explains it: {_UNEXPLAINED}"


_RULES: tuple[tuple[str, Callable[[Divergence, int, Sequence[Difference]], str]], ...] = (
    *(("", _fault), ("loss", _first_step), ("order", _order), ("tokens", _tokens), ("applied", _applied)),
    *(("", _incident), ("", _resumed), ("loss_scale", _loss_scale), ("lr", _rate), ("grad_norm", _gradient)),
    ("", _update),
)
"""(column that has to differ first at this step, or empty; rule), in order."""


def _only_in_one_run(divergence: Divergence, kind: str, low: int, high: int) -> Iterator[tuple[RunFacts, Event]]:
    """Events of one kind in steps `low` to `high` without a counterpart in the other run."""
    runs = (divergence.baseline, divergence.run)
    own = [[event for event in run.rare_events.get(kind, ()) if low <= event["step"] <= high] for run in runs]
    for run, events, others in zip(runs, own, reversed(own), strict=True):
        shared = {_event_key(event) for event in others}
        yield from ((run, event) for event in events if _event_key(event) not in shared)


def _event_key(event: Event) -> tuple[str, ...]:
    names = ("step", "verdict", "kind", "module", "modules", "from", "to", "reason" if "from" in event else "")
    return tuple(str(event.get(name)) for name in names)


def _both_values(divergence: Divergence, name: str, step: int) -> str:
    columns = (divergence.baseline.columns, divergence.run.columns)
    return side_by_side([float(getattr(column, name)[np.searchsorted(column.step, step)]) for column in columns])


def _settings(found: Sequence[Difference], prefixes: tuple[str, ...]) -> list[str]:
    """Differences in keys with these prefixes, in the order of `prefixes`, most important first."""
    items = [item for prefix in prefixes for item in found if item.key.startswith(prefix)]
    return list(dict.fromkeys(_all_differences(items)))


def _all_differences(found: Sequence[Difference]) -> list[str]:
    """Differences that may change numerical results: settings, then code, then versions and hardware."""
    return [str(item) for item in found if item.may_explain]


def _join_settings(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - _MAX_SETTINGS} more" if len(keys) > _MAX_SETTINGS else ""
    return "; ".join(keys[:_MAX_SETTINGS]) + more if keys else _UNEXPLAINED


def _describe_speed(divergence: Divergence, found: Sequence[Difference]) -> str:
    """Compare the speeds and name a likely source of the difference."""
    runs = (divergence.baseline.columns, divergence.run.columns)
    a, b = (median(columns.step_seconds) for columns in runs)
    if not (a > 0 and b > 0) or 1 / _SAME_SPEED < b / a < _SAME_SPEED:
        return ", same speed" if a > 0 and b > 0 else ""
    text = f", {'slower' if b > a else 'faster'}: {number(b, 3)} s per step, baseline {number(a, 3)} s"
    base_wait, wait = (median(columns.data_seconds) for columns in runs)
    if math.isfinite(base_wait) and math.isfinite(wait):
        share = (wait - base_wait) / (b - a)
        amount = "most" if share > 0.5 else percent(share, 2)
        return f"{text}; data wait {number(wait, 3)} s, baseline {number(base_wait, 3)} s: {amount} of the difference"
    keys = _settings(found, ("data.workers", "processes", "accelerator", "cpu", "hostname", "$"))
    return f"{text}; {_join_settings(keys)}" if keys else text
