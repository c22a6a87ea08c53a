"""Target figures for one GPU, checked against the measurements."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lab.benchmark.report import TOLERANCE
from lab.gpu_check.items import PARTS
from lab.gpu_check.measure import Figures
from tracking.pages.markdown import Table, text

HOLDS, MISSED, UNSURE, STATED = "holds", "**missed**", "**not sure**: it held in one measurement", "stated"
NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Goal:
    """A target for one figure."""

    part: int
    items: tuple[str, ...]
    """Items that measure the figure; all of them have to meet the target."""
    what: str
    read: Callable[[Figures], Any]
    """Extracts the value from an item's figures: a number, bool or string. Raises KeyError or TypeError if missing."""
    least: float | None = None
    most: float | None = None
    """Bounds on a number; a value without either is only reported."""
    against: str | None = None
    """Item whose losses those of the others are compared with, in place of `read`."""

    @property
    def bound(self) -> str:
        """The bound as text."""
        if self.least is not None:
            return f">= {self.least:g}"
        return f"<= {self.most:g}" if self.most is not None else "yes" if self.what.endswith("?") else "to be stated"

    def holds(self, value: Any) -> bool | None:
        """Whether a value meets the bound; None without a bound."""
        if isinstance(value, bool):
            return value
        if self.least is not None:
            return bool(value >= self.least)
        return bool(value <= self.most) if self.most is not None else None


def rate(mine: str, other: str, figure: str = "tokens/s") -> Callable[[Figures], float]:
    """Reader of the ratio of two contestants' figures, if their losses agree."""

    def read(figures: Figures) -> float:
        if not (figures[mine]["trains the same"] and figures[other]["trains the same"]):
            raise KeyError("losses differ")
        return float(figures[mine][figure] / figures[other][figure])

    return read


def largest(figures: Figures) -> str:
    """Parameter count and throughput of the deepest model that trained."""
    row = figures[f"{figures['largest']} layers"]
    return f"{row['parameters'] / 1e9:.2f} billion parameters, {row['tokens/s']:,.0f} tokens/s"


def resumes(figures: Figures) -> bool:
    """Whether the resumed run is bitwise equal to the uninterrupted one, or differs no more than two runs do anyway.

    Attention's backward pass is nondeterministic on a GPU. The difference grows over the steps, so 10x is allowed.
    """
    after, before = figures["largest difference after it"], figures["and before it, of two runs"]
    return bool(figures["bit-equal"] or after <= 10 * before)


def loss_difference(mine: Sequence[Any], other: Sequence[Any]) -> float:
    """Largest relative difference of two runs' losses in a step; infinite if they cannot be compared."""
    if len(mine) != len(other) or any(isinstance(loss, str) for loss in (*mine, *other)):
        return math.inf  # one is not finite
    return max(abs(a / b - 1) for a, b in zip(mine, other, strict=True))


def as_expected(figures: Figures) -> bool:
    """Whether no cell of the precision matrix differs from its table."""
    return not figures["not as expected"]


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
    *(Goal(2, (f"matrix-zero{stage}",), f"ZeRO-{stage}: are cells as expected?", as_expected) for stage in range(4)),
    *(
        Goal(
            *(number, (item.name,), f"losses of {item.name} from those of {item.against}", lambda f: f["losses"]),
            most=TOLERANCE.get(item.name.rpartition("-")[2], TOLERANCE["bf16"]),
            against=item.against,
        )
        for number, part in PARTS.items()
        for item in part.items
        if item.against
    ),
)
"""Targets of docs/performance.md and docs/gpu-check.md, and a few more."""


def verdict(goal: Goal, found: list[Any], tiny: bool) -> str:
    """Outcome of a goal over all its measurements. A rehearsal (`tiny`) never meets one."""
    if not found:
        return NOT_MEASURED
    if tiny:
        return "a rehearsal"
    held = [goal.holds(value) for value in found]
    if held[0] is None:
        return STATED
    return HOLDS if all(held) else UNSURE if any(held) else MISSED


def goals_table(part: int, results: Mapping[str, Mapping[str, Any] | None], *, tiny: bool) -> Table:
    """A part's goals with bound, measured value and outcome; empty for a part without goals. results: by item name."""
    table = Table(["goal", "bound", "measured", "outcome"])
    for goal in GOALS:
        if goal.part == part:
            found = [value for name in goal.items if (value := _value(goal, name, results)) is not None]
            table.add(text(goal.what), text(goal.bound), text(_shown(found, goal, results)), verdict(goal, found, tiny))
    return table


def _value(goal: Goal, name: str, results: Mapping[str, Mapping[str, Any] | None]) -> Any:
    result, reference = results.get(name), results.get(goal.against or "")
    try:
        found = None if result is None else goal.read(result["figures"])
        if goal.against is None or found is None:
            return found
        return None if reference is None else loss_difference(found, reference["figures"]["losses"])
    except (KeyError, TypeError):
        return None


def _shown(found: list[Any], goal: Goal, results: Mapping[str, Mapping[str, Any] | None]) -> str:
    if found:
        return "; ".join(_words(value) for value in found)
    if goal.against and results.get(goal.against) is None:
        return f"{goal.against} was not run"
    tried = [result for name in goal.items if (result := results.get(name)) is not None]
    return tried[0]["error"] or "losses differ, or it took no part" if tried else f"{goal.items[0]} was not run"


def _words(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, (int, float)) else str(value)
