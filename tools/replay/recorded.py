"""The record of an attempted step: the steps that led to it, its session, and its outcome."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice, takewhile, zip_longest

from config.cli import REPOSITORY
from config.errors import UserError
from config.resolved import Resolved
from tracking.events import Event


@dataclass(frozen=True)
class Recorded:
    """One attempt of a step, as recorded."""

    steps: list[Event]
    """The `step` events up to it, from the run's first step on."""
    after: list[Event]
    """The `step` events right after it, as long as they used the batches right after its own."""
    incident: Event | None
    """The guard's `incident` event, if the step was one."""
    session: Event
    """The `run_start` event of its session: a run may resume in another layout."""
    checked: Mapping[int, tuple[int, Event]]
    """For each of `steps` that the self-check compared, how many its session had compared before, and its event."""

    @property
    def step(self) -> int:
        """The attempted step."""
        return int(self.steps[-1]["step"])


def read_recorded(events: list[Event], step: int) -> Recorded:
    """The attempt of `step` that is replayed. Raises UserError if there is none, or its layout is unknown.

    A run that rolled back or was resumed attempts a step more than once; the attempt with an incident is chosen, or
    else the last.
    """
    reached = [i for i, event in enumerate(events) if event["event"] == "step" and event["step"] == step]
    if not reached:
        raise UserError(f"--step {step}: the run has no such step; its events end at step {last_step(events)}")
    at = ([i for i in reached if _incident(events, i)] or reached)[-1]
    starts = [event for event in events[:at] if event["event"] == "run_start"]
    if not starts:
        raise UserError(f"--step {step}: no run_start is recorded before it, so its layout is not known")
    backwards = [at]
    for i in range(at - 1, -1, -1):
        if events[i]["event"] == "step" and events[i]["step"] == events[backwards[-1]]["step"] - 1:
            backwards.append(i)
    further = [event for event in events[at + 1 :] if event["event"] == "step"]
    follows = takewhile(
        lambda pair: pair[1]["position"] == events[at]["position"] + pair[0] and pair[1]["step"] == step + pair[0],
        enumerate(further, start=1),
    )
    checks = _self_checks(events)
    return Recorded(
        steps=[events[i] for i in reversed(backwards)],
        after=[event for _, event in follows],
        incident=_incident(events, at),
        session=starts[-1],
        checked={events[i]["step"]: checks[i] for i in backwards if i in checks},
    )


def _self_checks(events: list[Event]) -> dict[int, tuple[int, Event]]:
    """By index of its `step` event, each step's `self_check` and how many came before it in its session."""
    found, turn, step = dict[int, tuple[int, Event]](), 0, -1
    for i, event in enumerate(events):
        if event["event"] == "run_start":
            turn = 0
        elif event["event"] == "step":
            step = i
        elif event["event"] == "self_check":
            if "evaluation" not in event["checks"]:
                found[step] = turn, event
            turn += 1
    return found


def _incident(events: list[Event], at: int) -> Event | None:
    """The incident of the step that was attempted at index `at`, if one follows before the next `step`."""
    until_next = takewhile(lambda event: event["event"] != "step", islice(events, at + 1, None))
    own = (event for event in until_next if event["event"] == "incident" and event["step"] == events[at]["step"])
    return next(own, None)


def require_layout(session: Event, resolved: Resolved) -> None:
    """Raises UserError if the run folder's config is from a later session with a layout other than the step's."""
    later, parallel = f"{resolved.config_path}: is from a later session", resolved.config.parallel
    if (session["zero_stage"], session["compute"]) != (resolved.zero_stage, resolved.compute):
        raise UserError(
            f"{later}, ZeRO-{resolved.zero_stage} in {resolved.compute}; the step was made at "
            f"ZeRO-{session['zero_stage']} in {session['compute']}, and another config makes another step"
        )
    for key, field, now, why in (
        *(
            (f"parallel.{key}", f"{key}_ranks", getattr(parallel, key), "adds up in another order")
            for key in ("sequence", "tensor", "expert")
        ),
        ("model.attention", "attention", resolved.config.model.attention, "rounds differently"),
    ):
        before = session.get(field, now)  # runs of earlier versions did not record it
        if before != now:
            raise UserError(f"{later}, with {key} = {now}; the step was made with {before}, which {why}")


def require_manifest(session: Event, resolved: Resolved) -> None:
    """Raises UserError if the run's manifest has been edited since the session that made the step read it."""
    name, before = resolved.config.precision.manifest, session.get("manifest")
    if name is None or before is None:  # runs of earlier versions did not record it
        return
    from precision.manifest import load_manifest  # needs torch

    now = load_manifest(REPOSITORY / name)
    keys = ("match", "module_class", "compute")  # a reason computes nothing
    rules = zip_longest(
        ([rule[key] for key in keys] for rule in before["rules"]),
        ([getattr(rule, key) for key in keys] for rule in now.rules),
    )
    wrong = "default" if now.default != before["default"] else ""
    wrong = wrong or next((f"rules[{number}]" for number, (then, here) in enumerate(rules) if then != here), "")
    if wrong:
        problem = f"{wrong} is not what the step was made with, and another manifest makes another step"
        raise UserError(f"{now.path}: {problem}; undo the edit, or try it by --what-if precision.manifest=ANOTHER")


def last_step(events: list[Event]) -> int:
    """The highest step that the run attempted; 0 if none."""
    return max((event["step"] for event in events if event["event"] == "step"), default=0)
