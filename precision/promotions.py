"""Precision regions that were promoted to a wider dtype than their manifest's, and are on probation."""

from collections.abc import Sequence
from typing import Any

from precision.findings import Finding
from precision.guard import Guard
from precision.regions import Regions

_WIDTH = {"fp8": 0, "fp16": 1, "bf16": 2, "fp32": 3}
Causes = Sequence[tuple[int, Finding]]


class Promotions:
    """Promoted modules by the step refused for them."""

    def __init__(self) -> None:
        self.by_step: dict[int, list[str]] = {}

    def state_dict(self, regions: Regions | None) -> dict[str, Any]:
        """Plain types, for a checkpoint: the promotions, and dtypes of regions that are not the manifest's."""
        return {
            "by_step": [[step, list(modules)] for step, modules in self.by_step.items()],
            "regions": regions.state_dict() if regions is not None else None,
        }

    def load_state_dict(self, state: dict[str, Any], regions: Regions | None) -> None:
        """The inverse of `state_dict`: also puts the regions back into the dtypes they had."""
        self.by_step = {int(step): list(modules) for step, modules in state["by_step"]}  # older ones map to dtypes
        if regions is not None and state["regions"] is not None:
            regions.load_state_dict(state["regions"])


def promotable(regions: Regions | None, causes: Causes, *, to: str) -> tuple[list[str], str]:
    """The regions of the causes that are narrower than `to`, and the dtype to promote them to: BF16 for those in FP8,
    which go first. Without causes, as for an overflow that no rank could trace: the suspects."""
    if regions is None:
        return [], to
    dtypes = regions.dtypes
    # grpo.correction is among the names that can be changed, and has no width
    narrower = [name for name, compute in dtypes.items() if _WIDTH.get(compute, 9) < _WIDTH[to]]
    if not causes:
        return [name for name in narrower if name in regions.suspects], to
    causing = {finding.module for _, finding in causes}
    blamed = [name for name in narrower if any(_related(name, module) for module in causing)]
    eight_bit = [name for name in blamed if dtypes[name] == "fp8"]
    return (eight_bit, "bf16") if eight_bit else (blamed, to)


def promote(regions: Regions, promotions: Promotions, modules: Sequence[str], *, to: str, step: int) -> None:
    """Move `modules` to `to`."""
    promotions.by_step[step] = list(modules)
    for name in modules:
        regions.set(name, to)


def demote_due(regions: Regions | None, promotions: Promotions, guard: Guard) -> dict[str, str]:
    """Move the modules whose probation is over to the dtypes of the manifest, which may have been edited since their
    promotion; returns the changes, module to dtype."""
    changed: dict[str, str] = {}
    for step in guard.take_due_demotions():
        for name in promotions.by_step.pop(step, ()):
            if regions is not None:
                changed[name] = regions.usual(name)
                regions.set(name, changed[name])
    return changed


def _related(region: str, module: str) -> bool:
    """Whether a finding in `module` (a module or a parameter's full name) concerns the region."""
    return region == module or module.startswith(f"{region}.") or region.startswith(f"{module}.")
