"""Does rounding explain a module's error? It has a signature: a size that follows the dtype, and no direction.

A module is computed four times on the same inputs and the same rounded weights (`tools.parity.signature`): by the run,
by the same module in plain torch in the planned dtype, in FP32, and in FP64, which counts as exact. Let r be the error
of one of them and x the exact values, with tokens as rows:

- *size*: E = |r| / |x|, in units of the unit roundoff u.
- *bias*: b = <r, x> / <x, x>, how much larger all values are. Independent roundings of mean zero leave it at zero
  within their standard error; a wrong constant does not, however small it is beside u.
- *coherence*: the sum of squares of <r, x> by row over its value for independent errors within a row, 1. A
  statistic of the row that was rounded, such as a norm's variance or a softmax's sum, moves its values together.

In a pretrained model one token can hold nearly all of a tensor's energy (Sun et al. 2024, "Massive activations in large
language models"), and its few roundings, which have no scatter to be judged by, would dominate the tensor's bias and
size. So when the run is compared with the plan's dtype, r and x are first divided by the expected error of each value,
e^2 = (u x)^2 + m^2, m the root mean square of the plan's errors in its row, or in a typical row if that is larger
(`_expected`): weighted least squares, in which a value counts by how well it is known, but never by more than 1 / u^2.

In verdicts no error is small enough to be ignored:

1. *Against the plan's dtype.* The run may have no larger E and no larger coherence than plain torch in the plan's
   dtype, beyond what n rows leave to chance (`_chance`), and its bias must lie between zero and that one's. Products
   of 8-bit numbers near a power of two are not rounded symmetrically: BF16's own bias in a norm is 0.1 u, so it is
   measured there rather than assumed to be zero.
2. *By the unit roundoff.* FP32's error must shrink with u as well: E_fp32 / u_fp32 is at most lambda sqrt(n) times
   E_plan / u_plan, n the roundings on the way (Higham and Mary 2019, theorem 2.4: n independent roundings reach
   lambda sqrt(n) u, and the condition is the same in both). And E_plan is at most lambda sqrt(k) u times FP32's
   condition, k the roundings to the plan's dtype that the module's kind has (`ROUNDINGS`). This is what finds a cast
   inside the architecture's own code, which all of them share.

   The run's own module is also called in FP32, if possible (`tools.parity.own_code`), and judged by FP32's
   bound. Errors hidden by 16 bits show there: a constant or an angle that is wrong by less than their roundings.

   A parameter's gradient is a sum over all positions, and torch's LayerNorm and embedding on a CPU keep that sum in the
   parameter's dtype. Recursive summation rounds each partial sum T_k once: its error is the sum of d_k T_k, |d_k| <= u
   (Higham 2002, section 4.2), which for independent d_k of mean zero stays under lambda u sqrt(sum of T_k^2), by the
   inequality of Hoeffding that theorem 2.4 of Higham and Mary rests on. FP32's error is no measure of it: sums of a few
   hundred 11-bit numbers are exact in 24 bits. So the T_k themselves, computed in FP64, are added to k in quadrature
   (`walk`), and to FP32's n roundings, for a sum whose terms nearly cancel, as behind a softmax (`walk_fp32`). Of n
   terms of either sign that is about sqrt(n / 2) u, of one sign sqrt(n / 3) u. Where n u > 1 a sum of one sign stops
   growing, an error that is not of mean zero, and is not explained.

Below FP16's smallest normal number the spacing shrinks no further: rounding there is off by up to half of it (`floor`),
once for each value; if the terms of a sum are rounded before they are added, once for each term; and if a module
multiplies its input, as a norm does by one over a small root mean square, times that factor.

Sums are additive over ranks and steps, so that a verdict covers everything measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from precision.tolerance import CONFIDENCE, unit_roundoff

Who = Literal["run", "plan"]
Kind = Literal["linear", "norm", "attention", "embedding", "rotary", "activation", "functional", "composite", "loss"]

ROUNDINGS: dict[str, int] = {
    "linear": 2,  # the product and the sum with the bias; the sums within are FP32
    "norm": 3,  # the normalised value, times the weight, plus the bias
    "attention": 10,  # query and key rotated in three each, scores, probabilities, their product with the values
    "embedding": 2,  # nothing, or a factor that is rounded itself
    "rotary": 2,
    "activation": 10,  # GPT-2's tanh approximation written out
    "functional": 10,  # fused experts: two products, an activation, a gate and the weighted sum
    "composite": 10,  # the code between submodules: residuals, gates
    "loss": 2,  # its gradient at the logits; if chunked, also the logits and the product with the head
}
"""Roundings to the plan's dtype on the longest path through a module of that kind, in the code of transformers 5."""
ROUNDOFF_FP8 = 2.0**-4
"""u of E4M3, which has three mantissa bits."""
SURE = 6.0
"""Standard errors beyond which chance is no explanation: 2 exp(-6^2 / 2) is 3e-8 for one module (as in `tolerance`)."""
FEWEST_ROWS = 30
"""Fewest rows whose scatter shows the effect of chance; a bias over fewer is not judged."""
OTHER_KERNEL = 0.15
"""[fraction] Tolerated excess of E and coherence for a kernel with the same roundings in another order."""
ROUNDED_SCORES = 1.25
"""[factor] Tolerated excess of coherence within a head where an attention kernel rounds the scores, as
eager attention does: measured against sdpa's, 1.06 times beyond chance at most."""
ONE_ROUNDING = 3**-0.5
"""Largest root mean square of the error of one rounding to nearest, in u: that of values just above a power of two."""
GRADIENT = "gradient of "
"""Prefix of the parts of the backward pass."""
FIELDS = (
    *("rows", "values", "xx", "run_rr", "plan_rr", "fp32_rr"),
    *("weighted_xx", "weighted_x4"),
    *(f"{who}_{what}" for who in ("run", "plan") for what in ("weighted_rr", "rx2", "rx", "rx_rx", "rx_xx")),
    "run_plan",
    *("walk", "walk_fp32", "floor", "moved"),
    *("own_rr", "own_xx"),
)
"""The sums of a part. xx: of x^2; rr: of r^2. The next ones are of values divided by their expected error; by row i: a
= <r, x>, q = <x, x>. weighted_xx: of q; weighted_x4: of q^2; weighted_rr: of r^2; rx2: of r^2 x^2 by value; rx: of a;
rx_rx: of a^2; rx_xx: of a q; run_plan: of the products of both a. walk: of the squares of all partial sums that are
rounded to the plan's dtype on the way to a value; walk_fp32: of those that FP32 rounds; floor: of the squares of the
largest error in rounding a subnormal number; moved: of the squared changes of the exact values if each number that they
are computed from is off by FP32's u, 0 if not requested. own_rr, own_xx: rr of the run's own code in FP32, and xx where
it was computed."""
FEWEST_VALUES = 16
"""Rows with at least this many values have their own root mean square error; shorter rows use the tensor's."""
HALF_OF_SMALLEST = torch.finfo(torch.float16).smallest_normal * 2.0**-11
"""Half of FP16's smallest number: the largest error of rounding to nearest among subnormal numbers."""
_MASKED = 1e30
"""Magnitudes from this on stand for minus infinity in an attention mask."""


def sums_of(
    run: torch.Tensor,
    plan: torch.Tensor,
    fp32: torch.Tensor,
    exact: torch.Tensor,
    *,
    roundoff: float,
    width: int = 0,
    walk: float = 0.0,
    walk_fp32: float = 0.0,
    floor_times: float = 1.0,
    moved: float = 0.0,
    own: torch.Tensor | None = None,
) -> list[float]:
    """FIELDS of one tensor, computed four times. All of the same shape.

    roundoff: u of the planned dtype. width: number of values that share a statistic, whose errors may correlate; if it
    is 0 or does not divide the last dimension, that dimension. walk, walk_fp32, moved: as in FIELDS. floor_times: how
    often a value is rounded where it may be subnormal. own: the result of the run's own code in FP32; None if unknown.
    """
    last = exact.shape[-1] if exact.dim() else 1
    width = width if width and last % width == 0 else last
    x = exact.double().reshape(-1, width)
    judged = x.abs() < _MASKED
    all_judged = bool(judged.all())  # usually; copies would take as long as the sums
    x = x if all_judged else torch.where(judged, x, 0.0)

    def error(values: torch.Tensor) -> torch.Tensor:
        r = values.double().reshape(-1, width) - x
        return r if all_judged else torch.where(judged, r, 0.0)

    floor = floor_times * exact.numel() * HALF_OF_SMALLEST**2 if plan.dtype == torch.float16 else 0.0
    off, in_fp32 = [error(run), error(plan)], [0.0, 0.0]
    if own is not None:
        in_fp32 = [float(_dot(error(own))), float(_dot(x))]
    found = [(x != 0).any(1).sum(), judged.sum(), _dot(x), *map(_dot, (*off, error(fp32)))]
    known = _expected(x, off[1], roundoff, floor / max(1, x.numel())).reciprocal_()
    weighted, along = x * known, []
    square = weighted.square()
    q = square.sum(1)
    found += [q.sum(), q @ q]
    for r in off:
        r = r.mul_(known)
        a = torch.linalg.vecdot(r, weighted)
        along.append(a)
        squared = r.square_()
        found += [squared.sum(), _dot(squared, square), a.sum(), a @ a, a @ q]
    found.append(along[0] @ along[1])
    return [*torch.stack([item.double() for item in found]).tolist(), walk, walk_fp32, floor, moved, *in_fp32]


def _dot(values: torch.Tensor, other: torch.Tensor | None = None) -> torch.Tensor:
    """The sum of products of values, or of their squares."""
    return torch.dot(values.flatten(), (values if other is None else other).flatten())


def further_off(run: torch.Tensor, plan: torch.Tensor, exact: torch.Tensor, roundoff: float) -> bool:
    """Whether the run's error of a tensor is larger than the plan's by more than `OTHER_KERNEL`.

    False if the run computed something else, such as a head that returns the loss.
    """
    if run.shape != exact.shape:
        return False
    x = exact.double().reshape(-1, exact.shape[-1] if exact.dim() else 1)
    mine, planned = (values.double().reshape(x.shape) - x for values in (run, plan))
    expected = _expected(x, planned, roundoff, 0.0)
    return bool(mine.div_(expected).norm() > (1 + OTHER_KERNEL) * planned.div_(expected).norm())


def _expected(x: torch.Tensor, off: torch.Tensor, roundoff: float, floor: float) -> torch.Tensor:
    """The expected error of each value of x, (rows, width) float64, none of them 0; off: the plan's errors of them.

    floor: the mean square of the largest error in rounding a subnormal number.
    """
    square = off.square()
    mean = square.mean()
    if x.shape[1] >= FEWEST_VALUES:  # a row exact only because it cancels would outweigh all
        rows = square.mean(1, keepdim=True)
        mean = torch.maximum(rows, rows.median())
    mean = mean + floor
    expected = (roundoff * x).square_().add_(mean)
    if bool((mean > 0).all()):
        return expected.sqrt_()
    least = roundoff**2 * x.square().mean()  # for values that are 0, like the plan's errors in their row
    return torch.where(expected > 0, expected, torch.where(least > 0, least, 1.0)).sqrt()


@dataclass(frozen=True)
class Part:
    """One tensor that a module computes: an output, an input of a submodule, or a gradient."""

    module: str
    part: str
    """`output`, the submodule that receives it, or what it is the GRADIENT of."""
    kind: str
    roundoff: float
    """u of the planned dtype."""
    terms: int
    """Number of terms of the longest sum."""
    sums: Mapping[str, float]


@dataclass(frozen=True)
class Finding:
    """An error in one part that rounding does not explain."""

    module: str
    part: str
    why: str
    excess: float
    """[factor] Distance beyond what rounding explains; findings are sorted by it."""


@dataclass(frozen=True)
class Figures:
    """Error figures of one computation of a part."""

    size: float
    """E of the values divided by their expected errors, relative."""
    bias: float
    coherence: float
    """nan if there is no error."""


def pooled(steps: Iterable[Mapping[str, Any]]) -> list[Part]:
    """The parts with their sums over all steps. steps: each as measured by `tools.parity.signature`."""
    rows = summed(row for step in steps for row in step["parts"])
    return [Part(**{**row, "sums": dict(zip(FIELDS, row["sums"], strict=True))}) for row in rows]


def summed(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows with the sums of each part added up, over ranks or steps."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        known = found.setdefault((row["module"], row["part"]), {**row, "sums": [0.0] * len(FIELDS)})
        known["sums"] = [float(a) + float(b) for a, b in zip(known["sums"], row["sums"], strict=True)]
    return list(found.values())


def size_of(part: Part, who: Literal["run", "plan", "fp32"]) -> float:
    """E of one of the computations, relative."""
    rr, xx = part.sums[f"{who}_rr"], part.sums["xx"]
    return math.sqrt(rr / xx) if xx else math.inf if rr else 0.0


def figures(part: Part, who: Who) -> Figures:
    """Weighted size, bias and coherence of one of the computations."""
    sums = part.sums
    if not sums["weighted_xx"]:
        return Figures(math.inf if sums[f"{who}_rr"] else 0.0, 0.0, math.nan)
    bias = sums[f"{who}_rx"] / sums["weighted_xx"]
    apart, alone = _scatter(sums, who, bias), sums[f"{who}_rx2"]
    size = math.sqrt(sums[f"{who}_weighted_rr"] / sums["weighted_xx"])
    return Figures(size, bias, apart / alone if alone else math.nan)


def findings(parts: Sequence[Part]) -> list[Finding]:
    """Errors that rounding does not explain, the worst first."""
    found = [item for part in parts for item in _unexplained(part)]
    return sorted(found, key=lambda item: -item.excess)


def resolution(part: Part) -> float:
    """The relative size of the smallest wrong constant in the part that would be reported."""
    return abs(figures(part, "plan").bias) + SURE * _standard_error(part, "plan")


def resolutions(parts: Sequence[Part], *, backward: bool = False) -> dict[str, float]:
    """Coarsest `resolution` among the modules of each kind.

    A module's is that of its coarsest part; backward: of its finest gradient, since a wrong constant there is in all
    gradients.
    """
    modules: dict[tuple[str, str], float] = {}
    for part in parts:
        if part.part.startswith(GRADIENT) == backward and figures(part, "plan").size:
            key, found = (part.kind, part.module), resolution(part)
            modules[key] = (min if backward else max)(found, modules.get(key, found))
    kinds: dict[str, float] = {}
    for (kind, _), found in modules.items():
        kinds[kind] = max(found, kinds.get(kind, found))
    return kinds


def roundoff_of(part: Part) -> float:
    """u combined with the rounding of subnormal numbers relative to the values' root mean square."""
    size = part.sums["xx"]
    return math.hypot(part.roundoff, math.sqrt(part.sums["floor"] / size) if size else 0.0)


def largest_in_plan(part: Part) -> float:
    """[roundings] The error explained in the plan's dtype: the kind's roundings times FP32's condition, and the sum's.

    The sum's, squared: the squares of all its rounded partial sums, relative to those of the values.
    """
    condition = max(1.0, size_of(part, "fp32") / unit_roundoff(torch.float32))
    return CONFIDENCE * math.sqrt(ROUNDINGS[part.kind] * condition**2 + _walk(part, "walk"))


def _walk(part: Part, which: str) -> float:
    """A sum of squares, relative to that of the values."""
    return part.sums[which] / part.sums["xx"] if part.sums["xx"] else 0.0


def _unexplained(part: Part) -> list[Finding]:
    run, plan = figures(part, "run"), figures(part, "plan")
    in_plan, in_fp32 = size_of(part, "plan"), size_of(part, "fp32")
    if not all(math.isfinite(value) for value in part.sums.values()):
        return [Finding(part.module, part.part, "its values are not finite where FP64's are", math.inf)]
    found = []

    def name(why: str, excess: float) -> None:
        found.append(Finding(part.module, part.part, why, excess))

    chance = 1 + OTHER_KERNEL + _chance(part)
    in_another_order = CONFIDENCE * math.sqrt(part.terms) * unit_roundoff(torch.float32)  # FP32's roundings within
    allowed = chance * plan.size + in_another_order
    if run.size > allowed:
        name(f"error {run.size:.2e}, where the plan's dtype makes {plan.size:.2e}", run.size / allowed)
    beyond = _beyond_chance(part, run, plan)
    if beyond > 1:
        name(f"{run.bias:+.2e} of itself too large, where the plan's dtype makes {plan.bias:+.2e}", beyond)
    usual = max(1.0, 0.0 if math.isnan(plan.coherence) else plan.coherence)
    usual *= ROUNDED_SCORES if part.kind == "attention" else 1.0
    if run.coherence > chance**2 * usual and run.size > plan.size:
        why = f"errors of a row go together, {run.coherence:.1f} times as in the plan's dtype ({usual:.1f})"
        name(why, run.coherence / (chance**2 * usual))
    u = unit_roundoff(torch.float32)
    condition = max(1.0, in_plan / roundoff_of(part)) ** 2 + _walk(part, "moved") / u**2
    roundings = (part.terms + ROUNDINGS[part.kind]) * condition
    largest = CONFIDENCE * u * math.sqrt(roundings + _walk(part, "walk_fp32"))
    if in_fp32 > largest:
        why = f"in FP32 its error is {in_fp32:.2e}, {in_fp32 / u:.0f} roundings; it does not shrink with the precision"
        name(why, in_fp32 / largest)
    size = math.sqrt(part.sums["own_rr"] / part.sums["own_xx"]) if part.sums["own_xx"] else 0.0
    if size > max(largest, (1 + OTHER_KERNEL) * in_fp32):
        why = f"the run's own code is {size:.2e} off in FP32, too; it does not shrink with the precision"
        name(why, size / largest)
    largest, roundings = largest_in_plan(part), in_plan / roundoff_of(part)
    if roundings > largest:
        why = f"the module's own code is {in_plan:.2e} off in the plan's dtype, {roundings:.0f} roundings"
        name(why, roundings / largest)
    return found


def _beyond_chance(part: Part, run: Figures, plan: Figures) -> float:
    """The bias in units of what is explained: by zero, by the bias of the plan's dtype, or by chance around either."""
    if part.sums["rows"] < FEWEST_ROWS or min(0.0, plan.bias) <= run.bias <= max(0.0, plan.bias):
        return 0.0
    from_none = abs(run.bias) / (SURE * _standard_error(part, "run"))
    sums = part.sums
    bias = run.bias - plan.bias
    # for the difference of both, whose sums follow from theirs
    between = sums["run_rx_rx"] + sums["plan_rx_rx"] - 2 * sums["run_plan"]
    crossed = sums["run_rx_xx"] - sums["plan_rx_xx"]
    apart = max(0.0, between - 2 * bias * crossed + bias**2 * sums["weighted_x4"])
    error = max(math.sqrt(apart) / sums["weighted_xx"], _least_error(part))
    return min(from_none, abs(bias) / (SURE * error))


def _standard_error(part: Part, who: Who) -> float:
    """Standard error of a bias over rows, taken as independent; at least that of one rounding per value."""
    size = part.sums["weighted_xx"]
    apart = _scatter(part.sums, who, part.sums[f"{who}_rx"] / size) if size else 0.0
    return max(math.sqrt(apart) / size if size else 0.0, _least_error(part))


def _scatter(sums: Mapping[str, float], who: Who, bias: float) -> float:
    """Sum over rows of (a - bias q)^2."""
    return max(0.0, sums[f"{who}_rx_rx"] - 2 * bias * sums[f"{who}_rx_xx"] + bias**2 * sums["weighted_x4"])


def _least_error(part: Part) -> float:
    """The standard error of a bias if each value is off by one rounding at most."""
    size = part.sums["weighted_xx"]
    return ONE_ROUNDING / math.sqrt(size) if size else math.inf


def _chance(part: Part) -> float:
    """Relative scatter of a root mean square over this many independent rows, SURE times."""
    return SURE / math.sqrt(2 * max(1.0, part.sums["rows"]))
