"""The goals for one GPU, and what was measured for each."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lab.gpu_check.measure import Figures
from tracking.pages.markdown import Table, text

HOLDS, MISSED, UNSURE, STATED = "holds", "**missed**", "**not sure**: it held in one measurement", "stated"
NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Goal:
    """A bound that a figure has to meet."""

    part: int
    items: tuple[str, ...]
    """Names of the items that measure it; each of them has to meet it."""
    what: str
    read: Callable[[Figures], Any]
    """Its value among an item's figures: a number, whether it is so, or words. Raises KeyError or TypeError: none is
    there."""
    least: float | None = None
    most: float | None = None
    """Bounds, where the value is a number; without one it is only stated."""

    @property
    def bound(self) -> str:
        """The human-readable bound."""
        if self.least is not None:
            return f">= {self.least:g}"
        return f"<= {self.most:g}" if self.most is not None else "yes" if self.what.endswith("?") else "to be stated"

    def holds(self, value: Any) -> bool | None:
        """Whether a value is within the bound; None where there is none."""
        if isinstance(value, bool):
            return value
        if self.least is not None:
            return bool(value >= self.least)
        return bool(value <= self.most) if self.most is not None else None


def rate(mine: str, other: str, figure: str = "tokens/s") -> Callable[[Figures], float]:
    """A figure of one contestant over another's, where both trained the same."""

    def read(figures: Figures) -> float:
        if not (figures[mine]["trains the same"] and figures[other]["trains the same"]):
            raise KeyError("losses differ")
        return float(figures[mine][figure] / figures[other][figure])

    return read


def largest(figures: Figures) -> str:
    """Size and speed of the deepest model that trained."""
    row = figures[f"{figures['largest']} layers"]
    return f"{row['parameters'] / 1e9:.2f} billion parameters, {row['tokens/s']:,.0f} tokens/s"


def resumes(figures: Figures) -> bool:
    """Whether the resumed run has the undisturbed one's bits, or differs no more than two runs on this device do.

    Attention's backward pass sums in no fixed order on a GPU. The difference grows with the steps: tenfold is allowed.
    """
    after, before = figures["largest difference after it"], figures["and before it, of two runs"]
    return bool(figures["bit-equal"] or after <= 10 * before)


AT_2048, OVER = ("peers-2048", "peers-2048-again"), "mantissa over "
GOALS = (
    Goal(1, ("replay",), "a planted NaN: is its module named?", lambda f: f["named the right module"]),
    Goal(1, ("replay",), "is its step reproduced by replay?", lambda f: f["reproduced"]),
    Goal(1, ("resume",), "does a killed run resume as two runs agree?", resumes),
    Goal(2, ("nan-compile",), "in compiled blocks, is the module named?", lambda f: f["named the right module"]),
    Goal(2, ("nan-liger",), "with Liger's kernels, is the module named?", lambda f: f["named the right module"]),
    Goal(2, ("parity-160m",), "does BF16 train like FP32?", lambda f: f["verdict"] == "parity"),
    Goal(3, AT_2048, "MFU, of the data sheet's peak", lambda f: f["mantissa"]["MFU"], least=0.5),
    Goal(3, AT_2048, OVER + "bare DeepSpeed, tokens/s", rate("mantissa", "bare"), least=0.99),
    Goal(3, AT_2048, "with torch's kernels over bare DeepSpeed", rate("mantissa-torch", "bare"), least=0.99),
    Goal(3, AT_2048, OVER + "the Trainer with DeepSpeed", rate("mantissa", "trainer"), least=1.3),
    Goal(3, ("peers-2048",), OVER + "torchtitan", rate("mantissa", "torchtitan"), least=1.0),
    Goal(3, ("peers-2048",), OVER + "torchtitan, compiled", rate("mantissa", "torchtitan-compile"), least=1.0),
    Goal(3, ("peers-4096",), "MFU with 4,096 tokens", lambda f: f["mantissa"]["MFU"], least=0.5),
    Goal(3, ("peers-4096",), OVER + "the Trainer with 4,096 tokens", rate("mantissa", "trainer"), least=1.3),
    Goal(3, ("peers-4096",), OVER + "torchtitan with 4,096 tokens", rate("mantissa", "torchtitan"), least=1.0),
    Goal(3, ("peers-4096",), OVER + "torchtitan, compiled, 4,096 tokens", rate("mantissa", "torchtitan-compile"), 1.0),
    Goal(4, ("dtypes",), "BF16 over FP32 (TF32 off), tokens/s", rate("mantissa-bf16", "mantissa-fp32"), least=2.0),
    Goal(4, ("dtypes",), "BF16 over FP32, memory", rate("mantissa-bf16", "mantissa-fp32", "memory GiB"), most=0.8),
    Goal(4, ("dtypes", "dtypes-again"), "FP16 over BF16, tokens/s", rate("mantissa-fp16", "mantissa-bf16"), least=0.97),
    Goal(4, ("manifest",), "manifest path over cast path", rate("mantissa-manifest", "mantissa-bf16"), least=0.95),
    Goal(5, ("offload",), "largest model with ZeRO-3 and CPU offload", largest),
    Goal(5, ("on-device",), "largest model on the device alone", largest),
    Goal(6, ("guard",), "guarded steps over a plain loop's, tokens/s", lambda f: f["tokens/s over a plain loop"], 0.99),
    Goal(6, ("telemetry",), "telemetry, share of a step, amortised", lambda f: f["amortised"], most=0.005),
    Goal(6, ("observation",), "observation, share of a step, amortised", lambda f: f["amortised"], most=0.005),
)
"""The goals of docs/performance.md and docs/gpu-check.md, and further ones that the parts should meet."""


def verdict(goal: Goal, found: list[Any], tiny: bool) -> str:
    """Whether a goal is reached, by all that was measured for it. A rehearsal reaches none."""
    if not found:
        return NOT_MEASURED
    if tiny:
        return "a rehearsal"
    held = [goal.holds(value) for value in found]
    if held[0] is None:
        return STATED
    return HOLDS if all(held) else UNSURE if any(held) else MISSED


def goals_table(part: int, results: Mapping[str, Mapping[str, Any] | None], *, tiny: bool) -> Table:
    """A part's goals: each with its bound, what was measured, and whether that is enough; empty without a goal.

    results: by item, or None.
    """
    table = Table(["goal", "bound", "measured", "outcome"])
    for goal in GOALS:
        if goal.part == part:
            found = [value for name in goal.items if (value := _value(goal, results.get(name))) is not None]
            table.add(text(goal.what), text(goal.bound), text(_shown(found, goal, results)), verdict(goal, found, tiny))
    return table


def _value(goal: Goal, result: Mapping[str, Any] | None) -> Any:
    try:
        return None if result is None else goal.read(result["figures"])
    except (KeyError, TypeError):
        return None


def _shown(found: list[Any], goal: Goal, results: Mapping[str, Mapping[str, Any] | None]) -> str:
    if found:
        return "; ".join(_words(value) for value in found)
    tried = [result for name in goal.items if (result := results.get(name)) is not None]
    return tried[0]["error"] or "losses differ, or it took no part" if tried else f"{goal.items[0]} was not run"


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, (int, float)) else str(value)
