"""Judges single steps: does half precision compute what FP32 does, and if not, which module does not?

Steps are compared from the same masters on the same micro-batches, before differences can grow, so this is the sharper
evidence, and it names modules. Whole runs are judged in `tools.parity.judge_runs`. Pure functions of what
`tools.parity.steps` measured.
"""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

from config.printable import first_of
from config.schema import ParitySection
from precision.statistics import NEGLIGIBLE
from precision.tolerance import relative
from tools.parity.rounding import findings, pooled, resolutions

COMPARED = "step compared:"
"""Start of the line that `tools.parity.steps` prints for each step it has compared."""
RECORDED = ("lr", "position", "sample_ids_sha256")
"""Fields of a `step` event that a restored run repeats, as it counts updates and batches."""
MOST_NAMED = 8
"""Largest number of modules that a check names."""
SAME_LOSS = 1e-5
"""Relative difference up to which a loss counts as repeated after a restore; 0 on a CPU."""
NORM_ROUNDING = 1e-4
"""Relative difference up to which a reported gradient norm equals that of the reduced gradient: both sum the same FP32
values, so that leaving out a share of 1.4% of the norm shows."""

FP8_MARGIN = 1.5
"""[factor] Largest ratio of an error to that of plain torch with only FP8's rounding. The run's other roundings tip
some values to another FP8 number, so its errors are of similar size but not equal."""

PLAIN_MARGIN = 1.5
"""[factor] Largest ratio of a gradient's error to that of plain torch in the run's dtype, if it exceeds the common
bound; more if sound alternatives are further apart. Both errors come from the same roundings in a different order:
similar in size but not equal. In a pretrained model one token can hold nearly all of it, and ratios scatter: of
SmolLM2's 272 gradients 4% are more than 1.5 apart. The run and the alternatives are draws from the same distribution,
so either may have the larger maximum, by this factor."""
PLAIN_MOST = 0.5
"""[fraction] Up to this relative error of plain torch's gradient, at most `PLAIN_MARGIN` times as much is explained,
however far sound alternatives are apart: less than 1, the error of a lost gradient. Beyond it the dtype itself loses
most of the gradient: in Gemma 3 in BF16, 0.66 of one norm's in plain torch and 0.38 in a sound run."""

IN_A_STEP = (
    *("weight_drift", "fp8_products", "module_error", "accumulation_error", "weighting_error", "gradient_error"),
    *("gradient_excess", "gradient_cosine", "sign_agreement", "grad_norm_error", "update_error", "update_rounding"),
)
"""The checks of single steps, in the order in which a step computes what they check."""
_Values = Callable[[Mapping[str, Any]], Iterable[tuple[str, float]]]
"""Maps a measured step to its modules, each with its value."""
WHOLE_GRADIENT = "(gradient norm)"
"""The name used if the norm over all modules is wrong."""
WHOLE_LOSS = "(loss)"
"""The name used if the reported loss is wrong."""


_IF_ANY = math.nan
"""Floor of a check that only some steps or optimizers measure."""


def lengths(points: Sequence[int], most: int) -> list[int]:
    """Applied steps to compare at each point: `most` at the first and the last, one at those between."""
    return [most if point in (points[0], points[-1]) else 1 for point in points]


@dataclass(frozen=True)
class Check:
    """One bound, and what was measured against it."""

    name: str
    """Key of the `parity:` section, or another name."""
    measured: float
    bound: float
    passed: bool
    at_least: bool = False
    """Whether it is a lower bound."""
    where: str = ""
    """Module and step of the worst value; may be empty."""
    modules: tuple[str, ...] = ()
    """Modules beyond the bound, worst first, at most MOST_NAMED."""
    note: str = ""


@dataclass(frozen=True)
class Walk:
    """Steps measured from one point of a run; see `tools.parity.steps` for the fields of a step."""

    point: int
    restored: bool
    steps: Sequence[Mapping[str, Any]]
    recorded_loss: float | None = None
    """Loss that the run itself recorded on the first of these steps."""
    why: str = ""
    """Why the point was not restored."""
    recorded_scale: float | None = None
    """Loss scale that the run itself recorded on the first of these steps."""
    recorded: Mapping[str, Any] = field(default_factory=dict)
    """The values of RECORDED that the run itself recorded on the first of these steps."""


def judge_steps(walks: Sequence[Walk], bounds: ParitySection) -> list[Check]:
    """The checks of single steps."""
    attempted = [step for walk in walks for step in walk.steps]
    taken = [step for step in attempted if step["applied"]]
    planned = [float(error) for step in attempted for error in step.get("planned_error", {}).values()]
    read_back, asked = _constants(taken, "constants"), _constants(attempted, "other_constants")
    others, note = _alternatives(attempted)
    margin = PLAIN_MARGIN * max(1.0, others)
    most_excess = max(bounds.gradient_excess, PLAIN_MARGIN * others)

    over = partial(_over, bounds)
    checks = [
        over(attempted, "module_error", module_errors, note=_fp8_note(planned)),
        over(attempted, "accumulation_error", _figures("accumulation_error"), floor=_IF_ANY),
        over(attempted, "weighting_error", _figures("weighting_error"), floor=_IF_ANY),
        over(attempted, "loss_error", _of_loss("loss_error"), floor=_IF_ANY),
        over(attempted, "evaluation_error", _evaluation, bound=SAME_LOSS, floor=0.0),
        over(attempted, "dropout", _otherwise("dropped_otherwise"), bound=0.0, floor=0.0),
        over(attempted, "task_loss", lambda step: step.get("task_loss", {}).items(), bound=1.0, note=asked, floor=0.0),
        over(taken, "gradient_error", _gradients("relative_error", margin), note=_gradient_note(taken, margin)),
        over(taken, "gradient_excess", _excess, bound=most_excess, note=note, floor=0.0),
        over(taken, "gradient_cosine", _gradients("cosine", margin), at_least=True),
        over(taken, "sign_agreement", _gradients("sign_agreement", margin), at_least=True),
        over(taken, "update_error", _figures("update_error"), note=read_back),
        over(taken, "update_rounding", _figures("update_rounding"), note=read_back, floor=_IF_ANY),
        over(taken, "grad_norm_error", _norm_error, bound=min(NORM_ROUNDING, bounds.update_error)),
        over(attempted, "weight_drift", _figures("drift"), floor=0.0),
        judge_signatures(taken, bounds),
    ]
    if any(step.get("fp8_products") for step in taken):
        checks.insert(0, over(taken, "fp8_products", _fp8_products))
    stuck = [str(walk.point) for walk in walks if walk.restored and not any(step["applied"] for step in walk.steps)]
    if stuck:
        note = f"no step was applied after step {', '.join(stuck)}"
        checks.append(Check("applied_points", len(walks) - len(stuck), len(walks), False, at_least=True, note=note))
    return [*checks, _restored(walks, bounds)]


def judge_signatures(steps: Sequence[Mapping[str, Any]], bounds: ParitySection) -> Check:
    """Modules whose errors rounding does not explain (`tools.parity.rounding`), over all applied steps together.

    Covers their own errors, those of the gradients they compute, and the loss's. Findings in one rank's own sums in a
    step count too, since sums over all ranks may hide them; a finding names its ranks unless all have it.
    """
    measured = [step["signature"] for step in steps]
    found: dict[str, list[str]] = {}
    parts = pooled(measured)
    for item in findings(parts):
        found.setdefault(item.module, []).append(f"{item.module} ({item.part}): {item.why}")
    wrong: dict[str, set[int]] = {}
    for rank, own in (pair for step in measured for pair in enumerate(step["ranks"])):
        for name, why in own.items():
            wrong.setdefault(name, set()).add(rank)
            found.setdefault(name, []).append(f"{name}: {why}")
    ranks = max((len(step["ranks"]) for step in measured), default=1)
    named = tuple(found)[:MOST_NAMED]
    notes = [f"{_on_ranks(wrong.get(name, set()), ranks)}{found[name][0]}" for name in named]
    if len(found) > MOST_NAMED:
        notes.append(f"and {len(found) - MOST_NAMED} more")
    if not found and resolutions(parts):
        listed = _listed(resolutions(parts))
        backward = _listed(resolutions(parts, backward=True))
        notes.append(f"a constant wrong by more than this would be named: {listed}")
        notes += [f"in the backward pass: {backward}"] if backward else []
    blind = {name: why for step in measured for name, why in step["not_measured"].items()}
    notes += [f"not measured: {name}: {why}" for name, why in list(blind.items())[:MOST_NAMED]]
    seen = any(step["parts"] for step in measured)
    count = len(found) if seen else math.nan
    passed = seen and len(found) <= bounds.unexplained
    return Check("unexplained", count, bounds.unexplained, passed, modules=named, note="; ".join(notes))


def _on_ranks(wrong: set[int], ranks: int) -> str:
    """The prefix `on rank 3, ` if only some ranks are wrong; ranks that share samples count as one."""
    if not 0 < len(wrong) < ranks:
        return ""
    return f"on rank{'s' * (len(wrong) > 1)} {', '.join(map(str, sorted(wrong)))}, "


def _listed(resolved: Mapping[str, float]) -> str:
    return ", ".join(f"{kind} {value:.1e}" for kind, value in resolved.items())


def judge_dtypes(seen: Sequence[Mapping[str, Any]], bounds: ParitySection) -> Check:
    """Modules with a part, such as a softmax or the residual stream, seen in a lower dtype than promised.

    seen: `InnerDtypes.report` of each observed step. Such a defect may well leave a short run and its single steps
    within all other bounds, so no effect is required.
    """
    found: dict[str, dict[str, None]] = {}
    for report in seen:
        for entry in report["lower"]:
            found.setdefault(f"{entry['what']} in {entry['computed']}", {}).update(dict.fromkeys(entry["modules"]))
    named = list(dict.fromkeys(name for modules in found.values() for name in modules))
    notes = [f"{what}: {first_of(list(modules), MOST_NAMED)}" for what, modules in found.items()]
    blind = list(dict.fromkeys(f"{entry['what']}: {entry['why']}" for report in seen for entry in report["unobserved"]))
    notes += [f"not observable: {'; '.join(blind)}"] if blind else []
    passed = bool(seen) and len(named) <= bounds.lower_dtypes
    measured = len(named) if seen else math.nan
    note = "; ".join(notes) if seen else "no step was observed"
    return Check("lower_dtypes", measured, bounds.lower_dtypes, passed, modules=tuple(named[:MOST_NAMED]), note=note)


def first_divergence(walks: Sequence[Walk], bounds: ParitySection) -> dict[str, Any] | None:
    """The first module, in the order of execution, whose own error exceeds the bound, at the first step it shows."""
    for walk in walks:
        for step in walk.steps:
            for name in step["order"]:
                if not _own_error(step, name) <= bounds.module_error:
                    return {"step": step["step"], "module": name, "own_error": step["own_error"][name]}
    return None


def blamed(checks: Sequence[Check]) -> tuple[str, ...]:
    """The modules to blame for single steps beyond a bound: those of the first failed check, in the order in which a
    step computes (weights, outputs, gradients, update), that names any. Empty if that is every module."""
    failed = {check.name: check for check in checks if not check.passed and check.modules}
    first = next((failed[name] for name in IN_A_STEP if name in failed), None)
    if first is None or first.note.startswith("all ") or first.modules == (WHOLE_GRADIENT,):
        return ()
    return first.modules


def _over(
    bounds: ParitySection,
    steps: Sequence[Mapping[str, Any]],
    name: str,
    values: _Values,
    *,
    bound: float | None = None,
    at_least: bool = False,
    note: str = "",
    floor: float | None = None,
) -> Check:
    """The check of the worst value over modules and steps.

    bound: None: that of `bounds`. floor: initial value; None: something must be measured; _IF_ANY: where nothing is, it
    passes as not measured.
    """
    bound = getattr(bounds, name) if bound is None else bound
    worse, nan = (operator.lt, -math.inf) if at_least else (operator.gt, math.inf)
    measured, where = floor, ""
    seen: set[str] = set()
    beyond: dict[str, float] = {}
    for step in steps:
        for module, found in values(step):
            value = nan if math.isnan(found) else float(found)
            seen.add(module)
            if measured is None or math.isnan(measured) or worse(value, measured):
                measured, where = value, f"{module} at step {step['step']}"
            if worse(value, beyond.get(module, bound)):
                beyond[module] = value
    order = sorted(beyond, key=lambda module: beyond[module], reverse=not at_least)
    if 1 < len(order) == len(seen) or len(order) > MOST_NAMED:
        count = f"all {len(order)}" if len(order) == len(seen) else f"{len(order)} of {len(seen)}"
        note = "; ".join(filter(None, (f"{count} modules", note)))
    passed, named = measured is not None and not beyond, tuple(order[:MOST_NAMED])
    return Check(name, math.nan if measured is None else measured, bound, passed, at_least, where, named, note)


def module_errors(step: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    """Each module's own error in a step, in excess of FP8's rounding error where the plan has FP8."""
    return [(name, _own_error(step, name)) for name in step["own_error"]]


def _own_error(step: Mapping[str, Any], name: str) -> float:
    return _beyond(float(step["own_error"][name]), float(step.get("planned_error", {}).get(name, 0.0)))


def _beyond(value: float, planned: float) -> float:
    """Error in excess of FP8_MARGIN times the rounding error of FP8 alone."""
    return value if math.isnan(value) else max(0.0, value - FP8_MARGIN * planned) if planned else value


def _gradient_note(steps: Sequence[Mapping[str, Any]], margin: float) -> str:
    planned = [found for step in steps for found in step.get("planned", {}).values()]
    fp8 = _fp8_note([float(found["relative_error"]) for found in planned])
    notes = _scale_note(steps), fp8, _plain_note(steps, margin)
    return "; ".join(filter(None, notes))


def _plain_note(steps: Sequence[Mapping[str, Any]], margin: float) -> str:
    """Note on gradients left out because plain torch's are no closer to FP32's."""
    names = {
        name: float(plain["relative_error"])
        for step in steps
        for name, plain in step.get("plain", {}).items()
        if _is_plain("relative_error", step["parameters"][name], plain, margin)
    }
    if not names:
        return ""
    worst = sorted(names, key=lambda name: -names[name])
    return f"without {first_of(worst, 1)}, whose error in plain torch is {names[worst[0]]:.2g} in this dtype"


def _fp8_note(planned: Sequence[float]) -> str:
    """Note on the largest error subtracted from values before they were judged."""
    return f"beyond {FP8_MARGIN:g} times what FP8's rounding alone makes, up to {max(planned):.2e}" if planned else ""


def _fp8_products(step: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    """Each layer's worst distance of its three products from FP8's definition, in units of what rounding explains."""
    found: dict[str, float] = {}
    for row in step["fp8_products"]:
        value = relative(float(row["off"]), float(row["allowed"]))
        found[row["module"]] = max(found.get(row["module"], 0.0), value)
    return found.items()


def worst_of(steps: Sequence[Mapping[str, Any]], values: _Values) -> dict[str, float]:
    """Each module's worst value over steps, for a check to compare with its bound; nan counts as inf."""
    found: dict[str, float] = {}
    for step in steps:
        for name, value in values(step):
            found[name] = max(found.get(name, 0.0), math.inf if math.isnan(value) else value)
    return found


def _gradients(what: str, margin: float = PLAIN_MARGIN) -> _Values:
    """Worst agreement of a module's gradients, among those beyond noise and beyond rounding in their dtype.

    margin: how many times plain torch's error they may have.
    """

    def values(step: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
        planned, plain, found = step.get("planned", {}), step.get("plain", {}), step["parameters"]
        agreement = {
            name: _agreement(what, found[name], planned.get(name), plain.get(name), margin)
            for name in more_than_noise(step)
        }
        return _by_module(agreement, worst=max if what == "relative_error" else min).items()

    return values


gradient_errors = _gradients("relative_error")
"""The worst relative error of each module's gradients in a step, for those that are more than noise."""


def beyond_bounds(step: Mapping[str, Any], bounds: ParitySection) -> list[str]:
    """Parameters, by name, whose gradient is more than noise and disagrees with FP32's by more than `bounds`."""
    found = {name: step["parameters"][name] for name in more_than_noise(step)}
    return [
        name
        for name, agreement in found.items()
        if not (
            agreement["relative_error"] <= bounds.gradient_error
            and agreement["cosine"] >= bounds.gradient_cosine
            and agreement["sign_agreement"] >= bounds.sign_agreement
        )
    ]


def _excess(step: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    """Each module's gradient error, minus one rounding, in units of plain torch's in the run's dtype."""
    found = {}
    for name in more_than_noise(step):
        if name in step.get("plain_error", {}):
            plain = {"relative_error": step["plain_error"][name]}
            found[name] = excess_of(step["parameters"][name], plain, step["roundoff"])
    return _by_module(found).items()


def excess_of(found: Mapping[str, Any], plain: Mapping[str, Any], roundoff: float) -> float:
    """A gradient's error, minus one rounding, in units of plain torch's; 0 if plain torch's explains nothing."""
    error, of_plain = float(found["relative_error"]) - roundoff, float(plain["relative_error"])
    if not of_plain <= PLAIN_MOST:
        return 0.0
    return error if math.isnan(error) else relative(max(0.0, error), of_plain)


def more_than_noise(step: Mapping[str, Any]) -> list[str]:
    """Names of parameters whose gradient is not negligible relative to the largest."""
    norms = {name: float(norm) for name, norm in step["reference_norms"].items()}
    floor = NEGLIGIBLE * max(norms.values(), default=0.0)
    return [name for name in step["parameters"] if norms[name] > floor]


def _is_plain(what: str, found: Mapping[str, Any], plain: Mapping[str, Any], margin: float) -> bool:
    """Whether plain torch in the run's dtype agrees with FP32 no better, as when a gradient's terms cancel.

    1 minus a cosine, and so its margin, scales with the square of an error.
    """
    error = float(plain["relative_error"])
    margin = min(margin, PLAIN_MARGIN * max(1.0, relative(PLAIN_MOST, error)))
    if what == "relative_error":
        return float(found[what]) <= margin * float(plain[what])
    return 1.0 - float(found[what]) <= (margin**2 if what == "cosine" else margin) * (1.0 - float(plain[what]))


def _agreement(
    what: str,
    found: Mapping[str, Any],
    planned: Mapping[str, Any] | None,
    plain: Mapping[str, Any] | None,
    margin: float,
) -> float:
    """A parameter's agreement with FP32, corrected for FP8's rounding; perfect if plain torch agrees no better."""
    if plain is not None and _is_plain(what, found, plain, margin):
        return 0.0 if what == "relative_error" else 1.0
    value = float(found[what])
    if planned is None:
        return value
    if what == "relative_error":
        return _beyond(value, float(planned[what]))
    margin = FP8_MARGIN**2 if what == "cosine" else FP8_MARGIN
    return min(1.0, value + margin * (1.0 - float(planned[what])))


def _by_module(values: Mapping[str, float], worst: Callable[..., float] = max) -> dict[str, float]:
    """Parameter name to value -> module name to the worst of its parameters, which nan is."""
    found: dict[str, float] = {}
    for name, value in values.items():
        module = name.rpartition(".")[0]
        found[module] = value if math.isnan(value) else worst(found.get(module, value), value)  # nan stays if first
    return found


def _figures(key: str) -> _Values:
    """The worst value of each module's parameters under this key of a step; empty if it was not measured."""
    return lambda step: _by_module(step.get(key, {})).items()


def _of_loss(key: str) -> _Values:
    return lambda step: [(WHOLE_LOSS, step[key])] if key in step else []


def _otherwise(key: str) -> _Values:
    """1 for each module that does otherwise than it should, with how it does."""
    return lambda step: [(f"{name} {how}", 1.0) for name, how in step.get(key, {}).items()]


def _evaluation(step: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    return [*_of_loss("evaluation_error")(step), *_otherwise("evaluated_otherwise")(step)]


def _alternatives(steps: Sequence[Mapping[str, Any]]) -> tuple[float, str]:
    """The largest gradient error of sound alternatives, in units of plain torch's; and a note."""
    found: dict[str, float] = {}
    for step in steps:
        found |= {what: max(value, found.get(what, 0.0)) for what, value in step.get("alternatives", {}).items()}
    listed = ", ".join(f"{what} {value:.3g}" for what, value in found.items())
    return max(found.values(), default=0.0), f"sound alternatives on this machine: {listed}" if listed else ""


def _constants(steps: Sequence[Mapping[str, Any]], key: str) -> str:
    """Note on constants whose recovered values differ from the config's, the most frequent first."""
    texts: Counter[str] = Counter()
    for step in steps:
        found = step.get(key, ())
        texts.update(text for text in (found.values() if isinstance(found, Mapping) else found) if text)
    return "; ".join(text for text, _ in texts.most_common(3))


def _norm_error(step: Mapping[str, Any]) -> Iterable[tuple[str, float]]:
    """The norm that the run reports, compared with that of the gradient it reduced."""
    own = step["own_grad_norm"]
    yield WHOLE_GRADIENT, abs(step["grad_norm"] - own) / own if own else abs(step["grad_norm"])


def _scale_note(steps: Sequence[Mapping[str, Any]]) -> str:
    """Note on a factor on all gradients, as from a wrong loss scale or a lost micro-batch."""
    ratios = [step["own_grad_norm"] / step["reference_grad_norm"] for step in steps if step["reference_grad_norm"]]
    ratio = median(ratios) if ratios else 1.0
    return f"the whole gradient's norm is {ratio:.3f} of FP32's" if abs(ratio - 1) > 0.05 else ""


def _restored(walks: Sequence[Walk], bounds: ParitySection) -> Check:
    bad = []
    for walk in walks:
        known = walk.recorded_loss
        first = walk.steps[0] if walk.steps else {"loss": math.nan}
        loss = first.get("loss_with_dropout", first["loss"])
        if not walk.restored:
            bad.append(f"step {walk.point}: {walk.why}")
        elif known is not None and not abs(loss - known) <= SAME_LOSS * abs(known):
            bad.append(f"step {walk.point}: loss {loss:.6f} after restoring, {known:.6f} in the run")
        elif walk.recorded_scale is not None and first.get("loss_scale", walk.recorded_scale) != walk.recorded_scale:
            scales = f"{first['loss_scale']:g} after restoring, {walk.recorded_scale:g} in the run"
            bad.append(f"step {walk.point}: loss scale {scales}")
        else:
            for key in [key for key, value in walk.recorded.items() if first.get(key, value) != value][:1]:
                bad.append(f"step {walk.point}: {key} {first[key]} after restoring, {walk.recorded[key]} in the run")
    share = 1 - len(bad) / max(len(walks), 1)
    passed = share >= bounds.restored_share
    return Check("restored_share", share, bounds.restored_share, passed, at_least=True, note="; ".join(bad))
