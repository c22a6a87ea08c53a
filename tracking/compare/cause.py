"""Why two runs part where they part, in plain words, from what both recorded. The first rule that fits answers.

The rules go from what was seen to happen in one run only (a fault, a promotion) over what drives a step from outside
(data order, learning rate, loss scale) to what only the settings can explain. Where nothing recorded explains it, the
answer says so and names what differed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from tracking.compare.differences import Difference, side_by_side
from tracking.compare.divergence import Parting, near
from tracking.events import Event
from tracking.run_facts import RunFacts

_ORDER_KEYS = ("run.seed", "data.", "batch.", "(fingerprint)", "tokenizer")
_RATE_KEYS = ("schedule.", "optimizer.learning_rate", "run.steps", "batch.")
_SCALE_KEYS = ("precision.loss_scale",)
_MODEL_KEYS = ("model.", "(model)", "(parameters)")
_GRADIENT_KEYS = (
    *("precision.path", "precision.manifest", "precision.compute", "(compute)", "(dtype)", "precision."),
    *("(zero_stage)", "(accumulation)", "batch.micro_size", "model.", "processes"),
)
_UPDATE_KEYS = ("optimizer.",)
_MOST_KEYS = 4
_NO_DIFFERENCE = "no setting, version or machine differs as far as recorded, so some of the work is not repeatable"
_SAME_SPEED = 1.05
"""Median step times whose ratio is below this are told as the same speed; chosen, not measured."""


def cause(parting: Parting, found: Sequence[Difference]) -> str:
    """One sentence: why the runs part at `parting.step`, or how they differ when their numbers never do."""
    if parting.first_step is None:
        return "the runs have no step in common"
    if parting.step is None:
        return f"same numbers to step {parting.last_step}{_speed(parting, found)}"
    return next(answer for rule in _RULES if (answer := rule(parting, parting.step, found)))


def beyond_cause(parting: Parting) -> str:
    """One sentence on what happened between the first difference and the first one beyond the tolerance."""
    if parting.beyond is None or parting.step is None or parting.beyond == parting.step:
        return ""
    turns = [
        f"{_NAMES[name]} part at step {step}"
        for name, step in sorted(parting.firsts.items(), key=lambda item: item[1])
        if name in ("order", "tokens", "applied", "lr", "loss_scale") and parting.step < step <= parting.beyond
    ]
    since = f"{parting.beyond - parting.step} steps after the first difference"
    return f"{since}; between them {', '.join(turns)}" if turns else f"{since}, which grew"


_NAMES = {
    "order": "data orders",
    "tokens": "tokens a step",
    "applied": "skipped steps",
    "lr": "learning rates",
    "loss_scale": "loss scales",
}


def _fault(parting: Parting, step: int, found: Sequence[Difference]) -> str:
    for run, event in _one_sided(parting, "fault", step - 1, step):
        where = f" in {event['module']}" if event.get("module") else ""
        return f"step {event['step']}: a planted fault ({event['kind']}) struck{where} in {run.label} only"
    return ""


def _order(parting: Parting, step: int, found: Sequence[Difference]) -> str:
    if parting.firsts.get("order") != step:
        return ""
    reasons = _settings(found, _ORDER_KEYS)
    for run in (parting.baseline, parting.run):
        backs = [event for event in run.marks.get("incident", ()) if event["verdict"] == "ROLLBACK"]
        if any(event.get("rolled_back_to", step) < step <= event["step"] + 1 for event in backs):
            reasons.insert(0, f"{run.label} rolled back and left batches out")
    shifted = _shift(parting, step)
    why = "; ".join([*reasons, *([shifted] if shifted else [])]) or "no recorded setting explains it"
    weights = " and other initial weights" if step == 1 and any(item.key == "run.seed" for item in found) else ""
    return f"the data order is another one from step {step} on{weights}: {why}"


def _shift(parting: Parting, step: int) -> str:
    """Whether the sequences that the run sees at `step` are those of another step of the baseline."""
    a, b = parting.baseline.columns, parting.run.columns
    wanted = b.order[np.searchsorted(b.step, step)]
    same = np.flatnonzero(a.order == wanted)
    if not same.size:
        return ""
    other = int(a.step[same[0]])
    return f"what {parting.run.label} sees at step {step}, {parting.baseline.label} sees at step {other}"


def _tokens(parting: Parting, step: int, found: Sequence[Difference]) -> str:
    if parting.firsts.get("tokens") != step:
        return ""
    keys = "; ".join(_settings(found, ("batch.", "data.sequence_length")))
    return f"another number of tokens from step {step} on: {keys or 'no recorded setting explains it'}"


def _applied(parting: Parting, step: int, found: Sequence[Difference]) -> str:
    if parting.firsts.get("applied") != step:
        return ""
    columns = parting.run.columns
    applied = bool(columns.applied[np.searchsorted(columns.step, step)])
    run, other = (parting.baseline, parting.run) if applied else (parting.run, parting.baseline)
    reasons = [_told(event) for event in near(run, step) if event["step"] == step and event["event"] in _REASONS]
    why = "; ".join(dict.fromkeys(filter(None, reasons))) or "no reason was recorded"
    return f"step {step} was skipped in {run.label} and applied in {other.label}: {why}"


_REASONS = ("fault", "nonfinite", "incident", "scale")


def _told(event: Event) -> str:
    match event["event"]:
        case "nonfinite":
            return f"{event['count']} {event['kind']} in the {event['tensor']} of {event['module']}"
        case "incident":
            return f"{event['verdict']}, {event['reason']}"
        case "scale":
            return f"loss scale {event['from']:g} -> {event['to']:g} ({event['reason']})"
        case "fault":
            return f"a planted fault ({event['kind']})"
    return ""


def _incident(parting: Parting, step: int, found: Sequence[Difference]) -> str:
    for run, event in _one_sided(parting, "incident", step - 1, step):
        modules = ", ".join(event.get("modules") or []) or "no module"
        match event["verdict"]:
            case "PROMOTE":
                return (
                    f"step {event['step']}: {modules} promoted to {event.get('promoted_to', '?')} in {run.label} only"
                )
            case "CUT_LR":
                return f"step {event['step']}: the learning rate was cut in {run.label} only ({event['reason']})"
            case "ROLLBACK":
                back = event.get("rolled_back_to", "?")
                return f"step {event['step']}: {run.label} rolled back to step {back} ({event['reason']})"
    return ""


def _resumed(parting: Parting, step: int, found: Sequence[Difference]) -> str:
    for run, event in _one_sided(parting, "run_start", step - 1, step - 1):
        if event.get("resumed_from"):
            count = event["world_size"]
            return f"{run.label} was resumed after step {event['step']}, with {count} process{'es' * (count > 1)}"
    return ""


def _loss_scale(parting: Parting, step: int, found: Sequence[Difference]) -> str:
    if parting.firsts.get("loss_scale") != step:
        return ""
    reasons = _settings(found, _SCALE_KEYS) or [
        f"{run.label} at step {event['step']}: {_told(event)}"
        for run, event in _one_sided(parting, "scale", step - 1, step)
    ]
    values = _pair(parting, "loss_scale", step)
    return f"the loss scale is another one from step {step} on ({values}): {'; '.join(reasons) or 'no reason recorded'}"


def _rate(parting: Parting, step: int, found: Sequence[Difference]) -> str:
    if parting.firsts.get("lr") != step or parting.firsts.get("loss") == step:
        return ""
    keys = "; ".join(_settings(found, _RATE_KEYS)) or "no recorded setting explains it"
    return f"the learning rate is another one from step {step} on ({_pair(parting, 'lr', step)}): {keys}"


def _first_step(parting: Parting, step: int, found: Sequence[Difference]) -> str:
    """From the start on: everything that was set differently and shapes a first loss."""
    if step != parting.first_step or parting.firsts.get("loss") != step:
        return ""
    order, keys = _order(parting, step, found), _settings(found, (*_MODEL_KEYS, *_GRADIENT_KEYS))
    if order:
        return f"{order}; and {_list(keys)}" if keys else order
    keys = _settings(found, ("run.seed",)) + keys or _anything(found)
    return f"apart from their first step on: {_list(keys)}"


def _gradient(parting: Parting, step: int, found: Sequence[Difference]) -> str:
    if parting.firsts.get("grad_norm") != step or parting.firsts.get("loss") == step:
        return ""
    keys = _settings(found, _GRADIENT_KEYS) or _anything(found)
    return f"same batch and loss at step {step}, but another gradient: {_list(keys)}"


def _update(parting: Parting, step: int, found: Sequence[Difference]) -> str:
    keys = _settings(found, _UPDATE_KEYS)
    if keys:
        return f"same batch, gradient norm and learning rate before step {step}, but another update: {_list(keys)}"
    keys = _anything(found)
    if keys:
        return f"nothing that was recorded before step {step} explains it; what differed: {_list(keys)}"
    return f"nothing that was recorded explains it: {_NO_DIFFERENCE}"


_RULES: tuple[Callable[[Parting, int, Sequence[Difference]], str], ...] = (
    *(_fault, _first_step, _order, _tokens, _applied, _incident, _resumed, _loss_scale, _rate, _gradient, _update),
)


def _one_sided(parting: Parting, kind: str, low: int, high: int) -> Iterator[tuple[RunFacts, Event]]:
    """Events of that kind within these steps that the other run has none like."""
    runs = (parting.baseline, parting.run)
    own = [[event for event in run.marks.get(kind, ()) if low <= event["step"] <= high] for run in runs]
    for run, events, others in zip(runs, own, reversed(own), strict=True):
        told = {_likeness(event) for event in others}
        yield from ((run, event) for event in events if _likeness(event) not in told)


def _likeness(event: Event) -> tuple[str, ...]:
    names = ("step", "verdict", "kind", "module", "modules", "from", "to", "reason" if "from" in event else "")
    return tuple(str(event.get(name)) for name in names)


def _pair(parting: Parting, name: str, step: int) -> str:
    columns = (parting.baseline.columns, parting.run.columns)
    values = [float(getattr(column, name)[np.searchsorted(column.step, step)]) for column in columns]
    return side_by_side(values)


def _settings(found: Sequence[Difference], prefixes: tuple[str, ...]) -> list[str]:
    """What differs among the keys that begin so, in the order of `prefixes`: what matters most comes first."""
    items = [item for prefix in prefixes for item in found if item.key.startswith(prefix) and item.told]
    return list(dict.fromkeys(f"{item.key} {side_by_side(item.values)}" for item in items))


def _anything(found: Sequence[Difference]) -> list[str]:
    """What differs and may change numbers; settings before code, code before versions and hardware."""
    return [f"{item.key} {side_by_side(item.values)}" for item in found if item.told]


def _list(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - _MOST_KEYS} more" if len(keys) > _MOST_KEYS else ""
    return "; ".join(keys[:_MOST_KEYS]) + more if keys else _NO_DIFFERENCE


def _speed(parting: Parting, found: Sequence[Difference]) -> str:
    """How the speeds compare, and what the difference may come from."""
    a, b = (_median(run, "step_seconds") for run in (parting.baseline, parting.run))
    if not (a > 0 and b > 0) or 1 / _SAME_SPEED < b / a < _SAME_SPEED:
        return ", same speed" if a > 0 and b > 0 else ""
    word = "slower" if b > a else "faster"
    text = f", {word}: {b:.3g} s a step against {a:.3g} s"
    waits = [_median(run, "data_seconds") for run in (parting.baseline, parting.run)]
    if all(math.isfinite(wait) for wait in waits):
        share = (waits[1] - waits[0]) / (b - a)
        part = f"data wait {waits[1]:.3g} s against {waits[0]:.3g} s"
        return f"{text}; {part}, {'most' if share > 0.5 else f'{share:.0%}'} of the difference"
    keys = _settings(found, ("data.workers", "processes", "accelerator", "cpu", "hostname", "$"))
    return f"{text}" + (f"; {_list(keys)}" if keys else "")


def _median(run: RunFacts, name: str) -> float:
    values = getattr(run.columns, name)
    values = values[np.isfinite(values)]
    return float(np.median(values)) if values.size else math.nan
