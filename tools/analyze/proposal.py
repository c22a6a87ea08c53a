"""Proposes a precision manifest from measurements: the dtype of each region and its measured reason. No model needed.

docs/analyze.md has the rules ("How it is decided"). One loss scale serves all regions: of the powers of two at which
regions with the most FLOPs fit, the largest, because a dynamic scale grows to the end of the range. Errors of regions
are independent roundings, so their squares add up (Higham 2002, section 2.8); a region's share of the sum is its
sensitivity. Values passed between regions in the ambient dtype belong to none of them, so the ambient dtype is FP16
only if no region's range exceeds FP16's.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from precision.manifest import Compute
from tools.analyze.ranges import Spread

FP16_LARGEST = 65504.0
SCALED = ("gradients", "weight_gradients")
_USUAL: tuple[Compute, ...] = ("fp8", "fp16", "bf16", "fp32")
"""Dtypes that a rule may set; the first wins where equally many regions of a pattern have different ones."""
_NOT_FP8 = "FP8 is for linear layers other than the output embedding"
_LOST_BELOW = -25
"""FP16 rounds magnitudes up to 2^-25 to zero; a histogram bin lies either below it or not."""
_SCALES = range(41)


@dataclass(frozen=True)
class Limits:
    """Conditions that a region has to satisfy for a dtype."""

    headroom: float = 16.0
    """[factor] Distance of the largest value from FP16's largest; training continues after the survey."""
    flushed: float = 0.01
    """[fraction] Share of the non-zero values of a kind that FP16 may round to zero."""
    pays: float = 2.0
    """[factor] Smallest ratio of BF16's error to FP16's for which FP16 is chosen."""
    demands: float = 2.0
    """[factor] Smallest ratio of error share to FLOPs share that makes a region a candidate for FP32."""
    noticed: float = 0.05
    """[fraction] Share of the error below which no region is promoted."""
    floor: float = 0.9
    """[fraction] Share of the matmul FLOPs that must stay in 16 bits, of those that could be."""
    fp8: float = 0.0
    """[fraction] Gradient error up to which regions compute in FP8; 0: none do."""


@dataclass(frozen=True)
class Unit:
    """Regions that were measured together: one region, or all of one pattern."""

    names: tuple[str, ...]
    flops: int
    """FLOPs of one forward pass, all its regions together."""
    errors: Mapping[str, float]
    """bf16 and fp16, and fp8 where it was measured, to the relative error of the whole gradient when only this unit
    computes in it; inf: not finite."""


@dataclass(frozen=True)
class Choice:
    """The chosen dtype of one region."""

    compute: Compute
    reason: str
    sensitivity: float
    """[fraction] Its unit's share of the squared error when everything is in BF16."""
    error: float
    """[fraction] Relative gradient error of its unit alone in the chosen dtype; 0 in FP32."""


@dataclass(frozen=True)
class Proposal:
    """A manifest with the choices behind it."""

    manifest: dict[str, Any]
    """The JSON of the manifest."""
    choices: dict[str, Choice]
    loss_scale: float | None
    """A power of two that the ranges allow; None without FP16."""
    low_precision_share: float
    """[fraction] Share of a forward pass's matmul FLOPs in 16 bits or fewer."""
    fp8_share: float
    """[fraction] Share of a forward pass's matmul FLOPs in FP8."""


def pattern_of(name: str) -> str:
    """The name with `*` for every part that is a number: the same module in all layers."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def fp16_obstacle(spreads: Mapping[str, Spread], scale: float, limits: Limits) -> tuple[str, bool] | None:
    """Why a region's numbers do not fit FP16 at a loss scale, and whether they overflow (else they flush).

    spreads: kind to spread, gradients unscaled. None if everything fits.
    """
    for kind, spread in spreads.items():
        factor = scale if kind in SCALED else 1.0
        if spread.nonfinite or spread.maximum * factor * limits.headroom > FP16_LARGEST:
            at = f" at loss scale {scale:g}" if kind in SCALED else ""
            reach = f"{kind.replace('_', ' ')} to {spread.maximum:.3g}"
            return f"{reach}{at} leave no {limits.headroom:g}x headroom in FP16", True
    for kind, spread in spreads.items():
        lost = flushed_share(spread, scale if kind in SCALED else 1.0)
        if lost > limits.flushed:
            at = f" at loss scale {scale:g}" if kind in SCALED else ""
            return f"FP16 would round {lost:.1%} of its {kind.replace('_', ' ')} to zero{at}", False
    return None


def flushed_share(spread: Spread, scale: float) -> float:
    """Share of the non-zero values that FP16 rounds to zero after multiplication by `scale`, a power of two."""
    lost = max(_LOST_BELOW - round(math.log2(scale)) - spread.lowest, 0)
    return sum(spread.counts[:lost]) / max(spread.values, 1)


def largest_scale(spreads: Mapping[str, Mapping[str, Spread]], limits: Limits) -> float:
    """The largest power of two, at least 1, at which no gradient of any region leaves its headroom."""
    found = (spread.maximum for kinds in spreads.values() for kind, spread in kinds.items() if kind in SCALED)
    return scale_for(max(found, default=0.0), limits)


def scale_for(largest: float, limits: Limits) -> float:
    """The largest power of two, at least 1, at which a gradient of this size keeps its headroom."""
    if not largest:
        return 1.0
    room = FP16_LARGEST / limits.headroom / largest
    return float(2 ** min(max(math.floor(math.log2(room)), 0), _SCALES[-1]))


def choose_scale(units: Sequence[Unit], spreads: Mapping[str, Mapping[str, Spread]], limits: Limits) -> float:
    """The largest power of two among those at which the regions that fit FP16 have the most FLOPs."""

    def fitting(scale: float) -> int:
        return sum(
            unit.flops for unit in units if all(not fp16_obstacle(spreads[n], scale, limits) for n in unit.names)
        )

    return max((float(2**power) for power in _SCALES), key=lambda scale: (fitting(scale), scale))


def sensitivities(units: Sequence[Unit]) -> dict[str, float]:
    """Region to its unit's share of the squared error when everything computes in BF16; 1 for a non-finite error."""
    squares = [unit.errors["bf16"] ** 2 for unit in units]
    total = sum(squares)
    shares = [
        (1.0 if math.isinf(square) else 0.0) if math.isinf(total) else square / (total or 1.0) for square in squares
    ]
    return {name: share for unit, share in zip(units, shares, strict=True) for name in unit.names}


def propose(
    units: Sequence[Unit],
    spreads: Mapping[str, Mapping[str, Spread]],
    *,
    other_flops: int,
    limits: Limits,
    promote: bool = True,
    ambient: Compute | None = None,
    otherwise: Compute = "bf16",
    casts: Mapping[str, Mapping[str, str]] | None = None,
) -> Proposal:
    """The manifest for these measurements.

    units: every matmul region in exactly one. spreads: region to kind to spread. other_flops: matmul FLOPs outside of
    all regions, FP32. promote: whether sensitive regions go to FP32. ambient: the manifest's default instead of the one
    that the ranges suggest. otherwise: the dtype of regions whose range does not fit FP16. casts: region to assigned
    16-bit dtype to the dtype it was seen to compute in, where that differs.
    """
    scale = choose_scale(units, spreads, limits)
    shares = sensitivities(units)
    choices: dict[str, Choice] = {}
    for unit in units:
        for name in unit.names:
            wanted = _sixteen_bits(unit, spreads[name], scale, limits, otherwise)
            compute, reason = _held(*wanted, (casts or {}).get(name, {}))
            choices[name] = Choice(compute, reason, shares[name], unit.errors.get(compute, 0.0))
    total = sum(unit.flops for unit in units) + other_flops
    if promote:
        _promote(units, choices, total, limits)
    default: Compute = ambient or _ambient(choices, spreads, scale, limits)
    uses_fp16 = default == "fp16" or any(choice.compute == "fp16" for choice in choices.values())
    return _proposal(units, choices, default, total, scale if uses_fp16 else None)


def propose_fp8(
    units: Sequence[Unit],
    *,
    other_flops: int,
    largest_error: float,
    casts: Mapping[str, Mapping[str, str]] | None = None,
) -> Proposal:
    """A manifest with some regions in FP8, and BF16 everywhere else.

    Units measured in FP8 are added in order of squared error per FLOP, as long as their errors add up to at most
    largest_error [fraction of the gradient]. inf: every unit with a finite error. casts: as for `propose`.
    """
    shares, errors = sensitivities(units), {unit.names: unit.errors["bf16"] for unit in units}
    total = max(sum(unit.flops for unit in units) + other_flops, 1)
    bearing = [unit for unit in units if math.isfinite(unit.errors.get("fp8", math.inf))]
    everywhere = sum(unit.errors["fp8"] ** 2 for unit in bearing) or 1.0
    choices: dict[str, Choice] = {}
    for unit in sorted(bearing, key=lambda unit: unit.errors["fp8"] ** 2 / max(unit.flops, 1)):
        with_it = errors | {unit.names: unit.errors["fp8"]}
        of_flops, of_error = unit.flops / total, unit.errors["fp8"] ** 2 / everywhere
        measured = f"{of_error:.1%} of FP8's squared gradient error at {of_flops:.1%} of the FLOPs: {_fp8_errors(unit)}"
        bears = math.hypot(*with_it.values()) <= largest_error
        for name in unit.names:
            if bears:
                choices[name] = Choice("fp8", f"tolerates FP8: {measured}", shares[name], unit.errors["fp8"])
            else:
                choices[name] = Choice("bf16", f"too sensitive for FP8: {measured}", shares[name], unit.errors["bf16"])
        errors = with_it if bears else errors
    for unit in units:
        why = f"not finite in FP8: {_fp8_errors(unit)}" if "fp8" in unit.errors else _NOT_FP8
        for name in unit.names:
            compute, reason = _held("bf16", why, (casts or {}).get(name, {}))
            choices.setdefault(name, Choice(compute, reason, shares[name], unit.errors.get(compute, 0.0)))
    choices = {name: choices[name] for unit in units for name in unit.names}
    return _proposal(units, choices, "bf16", total, None)


def _proposal(
    units: Sequence[Unit], choices: dict[str, Choice], default: Compute, total: int, loss_scale: float | None
) -> Proposal:
    """The manifest of these choices. total: FLOPs of which the shares are."""
    scale = {} if loss_scale is None else {"loss_scale": int(loss_scale)}
    low = sum(unit.flops * _low_share(unit, choices) for unit in units)
    in_fp8 = sum(unit.flops for unit in units if choices[unit.names[0]].compute == "fp8")
    manifest = {"default": default, **scale, "rules": rules_for(choices)}
    return Proposal(manifest, choices, loss_scale, low / max(total, 1), in_fp8 / max(total, 1))


def _fp8_errors(unit: Unit) -> str:
    return f"gradient error {unit.errors['fp8']:.2g} alone in FP8, {unit.errors['bf16']:.2g} in BF16"


def rules_for(choices: Mapping[str, Choice]) -> list[dict[str, str]]:
    """Manifest rules that give every region its choice: one per pattern, exceptions below it, none without effect.

    Every region is named by a rule, so that each has its reason in the manifest, whatever the default.
    """
    grouped: dict[str, list[str]] = {}
    for name in choices:
        grouped.setdefault(pattern_of(name), []).append(name)
    general, exceptions = [], []
    for pattern, names in grouped.items():
        counts = {compute: sum(choices[n].compute == compute for n in names) for compute in _USUAL}
        usual = max(counts, key=lambda compute: counts[compute])
        alike = [name for name in names if choices[name].compute == usual]
        match = _escaped(pattern) if len(names) > 1 else _escaped(names[0], stars=True)
        general.append(_rule(match, choices, alike))
        exceptions += [name for name in names if choices[name].compute != usual]
    # `*` crosses dots, so `a.*.proj` also matches `a.*.attn.proj`. Of two such patterns one matches all that the other
    # does: the wider goes first, and each keeps its own regions.
    general.sort(key=lambda rule: -sum(fnmatchcase(name, rule["match"]) for name in choices))
    return general + [_rule(_escaped(name, stars=True), choices, [name]) for name in exceptions]


def _sixteen_bits(
    unit: Unit, spreads: Mapping[str, Spread], scale: float, limits: Limits, otherwise: Compute
) -> tuple[Compute, str]:
    """The 16-bit dtype that the measurements suggest, and the reason. otherwise: if the range does not fit FP16."""
    bf16, fp16 = unit.errors["bf16"], unit.errors["fp16"]
    errors = f"gradient error {fp16:.2g} alone in FP16, {bf16:.2g} in BF16"
    obstacle = fp16_obstacle(spreads, scale, limits)
    if obstacle is not None:
        return otherwise, f"{obstacle[0]}; {errors}"
    if fp16 * limits.pays > bf16:
        return "bf16", f"FP16's extra bits do not help: {errors}"
    reach = max((found.maximum for kind, found in spreads.items() if kind not in SCALED), default=0.0)
    scaled = max((found.maximum for kind, found in spreads.items() if kind in SCALED), default=0.0) * scale
    return "fp16", f"fits FP16: values to {reach:.3g}, gradients to {scaled:.3g} at loss scale {scale:g}; {errors}"


def _held(compute: Compute, reason: str, casts: Mapping[str, str]) -> tuple[Compute, str]:
    """The dtype if the region really computes in it, else one that it does compute in."""
    if compute not in casts:
        return compute, reason
    seen = " and ".join(name.upper() for name in casts[compute].split(" and "))
    why = f"given {compute.upper()} it computed in {seen}: its module or kernel casts by itself"
    if "bf16" not in casts:
        return "bf16", f"{why}; {reason}"
    return "fp32", f"{why}; see Verification in docs/manifest.md"


def _promote(units: Sequence[Unit], choices: dict[str, Choice], total: int, limits: Limits) -> None:
    squares = {unit.names: _error(unit, choices) ** 2 for unit in units}
    whole = sum(squares.values())
    low = sum(unit.flops * _low_share(unit, choices) for unit in units)
    possible = total - sum(unit.flops for unit in units) + low
    for unit in sorted(units, key=lambda unit: -squares[unit.names] / max(unit.flops, 1)):
        share = 1.0 if math.isinf(squares[unit.names]) else squares[unit.names] / (whole or 1.0)
        of_flops, its = unit.flops / max(total, 1), unit.flops * _low_share(unit, choices)
        if share < limits.noticed or share < limits.demands * of_flops or (low - its) / possible < limits.floor:
            continue
        low -= its
        for name in unit.names:
            was = choices[name]
            reason = (
                f"sensitive: {share:.0%} of the squared gradient error at {of_flops:.1%} of the FLOPs when in "
                f"{was.compute.upper()} (error {was.error:.2g} alone)"
            )
            choices[name] = Choice("fp32", reason, was.sensitivity, 0.0)


def _ambient(
    choices: Mapping[str, Choice], spreads: Mapping[str, Mapping[str, Spread]], scale: float, limits: Limits
) -> Compute:
    if not any(choice.compute == "fp16" for choice in choices.values()):
        return "bf16"
    obstacles = [fp16_obstacle(spreads[name], scale, limits) for name in choices]
    return "bf16" if any(found and found[1] for found in obstacles) else "fp16"


def _error(unit: Unit, choices: Mapping[str, Choice]) -> float:
    """The largest error over a unit's regions, which may differ in dtype: the unit was measured as a whole."""
    return max(choices[name].error for name in unit.names)


def _low_share(unit: Unit, choices: Mapping[str, Choice]) -> float:
    return sum(choices[name].compute != "fp32" for name in unit.names) / len(unit.names)


def _rule(match: str, choices: Mapping[str, Choice], names: list[str]) -> dict[str, str]:
    worst = max(names, key=lambda name: choices[name].sensitivity)
    about = f"{worst}, the most sensitive of {len(names)}: " if len(names) > 1 else ""
    return {"match": match, "compute": choices[worst].compute, "reason": about + choices[worst].reason}


def _escaped(name: str, *, stars: bool = False) -> str:
    """A glob that matches this name literally; stars: its `*` included."""
    special = "[?*" if stars else "[?"
    return "".join(f"[{letter}]" if letter in special else letter for letter in name)
