"""Checks of every step of the run that the gate judges, between the points at which single steps are compared.

The run performs them itself (`guard.gradient_checks`, `guard.replica_checks`, `guard.update_checks`): in each step
the gradients of all linear layers, the gradient norm, all copies of weights and a slice of the update; one random step
in `parity.whole_steps` is compared in full (docs/self-check.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from launch.job import refusal
from tools.parity.judge_steps import MOST_NAMED, Check
from tracking.compare.surviving import read_events
from tracking.run_dir import RunDir
from tracking.summary import read_inputs

_VALUES = 65536
"""Number of masters per rank whose update is recomputed in every step."""
_COMPARED = {"gradients": "gradient_checks", "norm": "gradient_checks", "copies": "replica_checks"}
_COMPARED |= dict.fromkeys(("modules", "loss", "updates"), "")
"""Names of comparisons, with the key of `guard` by which each step makes them."""
_USUAL = 400
"""[steps] Run length for which the power is given in addition to that of the actual run."""


def settings(arguments: Sequence[str], launched: Mapping[str, str], whole: int) -> list[str]:
    """Overrides that make a run compare its own steps, without those that its config refuses.

    whole: one step in this many is compared in full; 0: a run compares only what its config says.
    """
    wanted = [f"guard.self_check_every={whole}", "guard.gradient_checks=1", "guard.replica_checks=1"]
    found: list[str] = []
    for setting in [*wanted, f"guard.update_checks={_VALUES}"] if whole else []:
        if refusal([*arguments, *found, setting], launched) is None:  # such as copies if ranks hold slices
            found.append(setting)
    return found


def seldom(watching: Sequence[str], whole: int) -> list[str]:
    """`settings` for the FP32 twin: one step in `whole` compares gradients and copies as each step of the run does, so
    that both have steps whose times can be compared."""
    return [setting.replace("_checks=1", f"_checks={whole}") for setting in watching if "_checks=" in setting]


def compared_alike(events: Iterable[Mapping[str, Any]]) -> set[int]:
    """The steps in which a run compared its gradients but not the whole step."""
    checks = ((event["step"], event["checks"]) for event in events if event["event"] == "self_check")
    return {step for step, found in checks if "gradients" in found and "modules" not in found}


def judge_every_step(files: Sequence[Path], whole: int) -> Check:
    """The check of what runs reported about their own steps. files: their event files, in the run folders."""
    said: list[tuple[str, Sequence[str]]] = []
    steps, compared = 0, dict[str, int]()
    for event in (event for file in files for event in read_events(file)):
        kind = event["event"]
        if kind == "warning" and event["signal"] == "self_check":
            said.append((event["reason"], event["modules"]))
        elif kind == "corruption":
            said.append((f"step {event['step']}: {event['text']}", [event["module"]]))
        elif kind == "self_check" and "evaluation" not in event["checks"]:
            for name, found in event["checks"].items():
                compared[name] = min(compared.get(name, found["compared"]), found["compared"])
        steps = max(steps, event["step"]) if kind == "step" else steps
    modules = tuple(dict.fromkeys(name for _, names in said for name in names))[:MOST_NAMED]
    guard = read_inputs(RunDir(files[0].parent))["config"]["guard"]
    each, some = list[str](), list[str]()
    for name in filter(compared.get, _COMPARED):
        text = f"{compared[name]} {name}" if name == "gradients" else name
        (each if guard.get(_COMPARED[name]) == 1 else some).append(text)
    note = f"no step was compared for the gate: parity.whole_steps={whole}"
    if whole and (each or some):
        note = power_line(steps, whole, each, some)
    where = said[0][0] if said else ""
    return Check("every_step", float(len(said)), 0.0, not said, where=where, modules=modules, note=note)


def power(steps: int, every: int, chance: float) -> float:
    """Probability of finding an error made in one of `every` steps. chance: of finding it in such a step."""
    times = steps / every
    return times * chance if times < 1 else 1 - (1 - chance) ** int(times)


def power_line(steps: int, whole: int, each: Sequence[str], some: Sequence[str]) -> str:
    """Probabilities that comparing a run of `steps` finds an error. each: what every step compares; some: what only one
    in `whole` does."""
    lengths = sorted({steps, max(steps, _USUAL)})

    def found(every: int, chance: float) -> str:
        return " and ".join(f"{power(n, every, chance):.3g}" for n in lengths)

    odds = [
        f"with probability {found(8, chance)}, and one in 200 steps with {found(200, chance)}, in {', '.join(what)}"
        for what, chance in ((each, 1.0), (some, 1 / whole))
        if what
    ]
    lengths_said = " and in ".join(f"{n:,}" for n in lengths)
    return f"power in {lengths_said} steps: an error in every 8th step is found {'; '.join(odds)}"
