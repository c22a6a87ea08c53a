"""The product's findings in a run: the gate's checks, the oracle, the corruption events; nothing of its own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from config.errors import UserError
from config.resolved import Resolved
from config.schema import ParitySection
from tools.parity.every_step import judge_every_step
from tools.parity.gate import by_rule, outside
from tools.parity.jobs import Run, inner_dtypes, trajectory, walks_of
from tools.parity.judge_runs import Runs, judge_whole
from tools.parity.judge_steps import Check, Walk, judge_dtypes, judge_steps
from tools.parity.oracle.judge import judge
from tracking.compare.surviving import read_events
from tracking.run_dir import RunDir


def judged(
    run_dir: RunDir,
    twin: RunDir,
    measured: Sequence[dict[str, Any]],
    resolved: Resolved,
    whole: Sequence[Check],
    *,
    code: int,
    recomputed: int,
    points: Sequence[int] | None,
) -> dict[str, Any]:
    """{"found_by", "modules", "ranks", "said", "oracle", "chaotic"} of a finished run.

    whole: its checks `of_whole_runs`. code: its exit code; unless 0, a check that compared nothing finds nothing.
    recomputed: first steps that `--oracle` recomputes; 0: none.
    points: attempted steps after which the gate's oracle recomputes one of the twin; None: the twin is not recomputed.
    found_by: names of checks, `oracle: quantity`, or `corruption`. said: a line each. oracle: why it was not asked.
    """
    run, bounds = Run(run_dir, code == 0, "", None), resolved.config.parity
    checks = [
        Check("finished_runs", float(code == 0), 1.0, code == 0, at_least=True),
        *whole,
        *judge_steps(walks_of(measured, run), bounds),
        judge_dtypes(inner_dtypes(run), bounds),
        judge_every_step([run_dir.events], bounds.whole_steps),
        by_rule(run_dir.events, resolved.config),
        *outside(run, _silent, "evaluation"),
    ]
    if points is not None:
        other = Run(twin, True, "", None)
        checks += outside(other, _silent, "fp32_evaluation", steps=bounds.oracle_steps, points=points)
    found = _of_checks(check for check in checks if code == 0 or check.modules or not math.isnan(check.measured))
    found["chaotic"] = [check.name for check in checks if check.note.startswith("not judged: chaotic")]
    for event in read_events(run_dir.events):
        if event["event"] in ("corruption", "reexecution"):
            found["found_by"].append("corruption")
            parameters = event["modules"] if "modules" in event else [event["module"]]
            found["modules"] += [name.rpartition(".")[0] for name in parameters]
            found["ranks"] += event["ranks"]
            found["said"].append(event.get("text") or f"{event['outcome']}: {event['why']}")
    found["oracle"] = ""
    try:
        compared = judge(run_dir.path, steps=recomputed, log=_silent).comparisons if recomputed else []
    except UserError as problem:
        compared, found["oracle"] = [], str(problem)
    for each in compared:
        if not each.holds:
            found["found_by"].append(f"oracle: {each.what}")
            found["said"].append(f"oracle: {each.what}: {each.largest:.2e}, bound {each.bound:.2e}, {each.where}")
    return {key: _once(value) if isinstance(value, list) else value for key, value in found.items()}


def said_by_itself(events: Path, code: int) -> list[str]:
    """The findings that a run which nobody judges reported: its own checks, and how it ended if not well."""
    found = [f"exit code {code}"] if code else []
    for event in read_events(events):
        if event["event"] == "warning" and event["signal"] == "self_check":
            found.append(event["reason"])
        elif event["event"] in ("corruption", "reexecution"):
            found.append(event.get("text") or f"{event['outcome']}: {event['why']}")
    return _once(found)


def of_whole_runs(
    mine: RunDir, twin: RunDir, bounds: ParitySection, apart: Sequence[Path], again: Sequence[Path]
) -> list[Check]:
    """The checks of a whole run. apart, again: FP32 runs and runs like it from perturbed weights."""
    half, fp32, *others = (
        trajectory(Run(run, True, "", None)) for run in (mine, twin, *map(RunDir, apart), *map(RunDir, again))
    )
    bits, more = others[: len(apart)], others[len(apart) :]
    return judge_whole(Runs([half], [fp32]), bounds, apart=bits, again=more)


def _silent(line: str) -> None:
    pass


def judged_steps(measured: Sequence[dict[str, Any]], resolved: Resolved) -> dict[str, Any]:
    """The same from single steps alone."""
    walks = [Walk(each["point"], each["restored"], each["steps"]) for each in measured]
    return _of_checks(judge_steps(walks, resolved.config.parity))


def _of_checks(checks: Iterable[Check]) -> dict[str, Any]:
    failed = [check for check in checks if not check.passed]
    return {
        "found_by": [check.name for check in failed],
        "modules": [module for check in failed for module in check.modules],
        "ranks": [],
        "said": [
            f"{check.name}: {check.measured:.3g}, bound {check.bound:g}; "
            f"{check.where} {', '.join(check.modules[:3])} {check.note}"[:300]
            for check in failed
        ],
    }


def _once(values: Iterable[Any]) -> list[Any]:
    return list(dict.fromkeys(values))
