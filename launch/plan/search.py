"""Search for what fits: ZeRO stages and micro-batches on the devices asked for, and the run on 1 to 1,024."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from config.batch import divisors
from config.deepspeed.combinations import OFFLOADS, STAGES, Combination, refusal
from launch.plan.layout import Layout
from launch.plan.memory import Memory, peak_memory
from launch.plan.model import Shape
from launch.plan.speed import Speed

WORLDS = tuple(2**power for power in range(11))
"""[devices] 1 to 1,024."""


@dataclass(frozen=True)
class Option:
    """One way to run it."""

    layout: Layout
    memory: Memory
    speed: Speed
    fits: bool


@dataclass(frozen=True)
class Planner:
    """Evaluates layouts of one model on one device."""

    shape: Shape
    usable: float
    """[bytes] Memory of a device, without --reserve."""
    process: float
    """[bytes] Memory of the process itself, for ranks on a CPU."""
    speed: Callable[[Layout], Speed]

    def option(self, layout: Layout) -> Option:
        """The layout with its memory and speed."""
        memory = peak_memory(self.shape, layout, process=self.process)
        return Option(layout, memory, self.speed(layout), memory.total <= self.usable)

    def largest_micro(self, layout: Layout) -> Option | None:
        """The layout with the largest micro-batch that fits, at the same global batch; None when not even 1 does."""
        each = layout.micro * layout.accumulation
        for micro in reversed(divisors(each)):
            option = self.option(replace(layout, micro=micro, accumulation=each // micro))
            if option.fits:
                return option
        return None

    def stages(self, layout: Layout) -> dict[int, Option | None]:
        """ZeRO stage to its option with the largest micro-batch that fits, or None; refused stages are left out."""
        found = {}
        for stage in STAGES:
            path, compute = ("manifest", "mixed") if layout.manifest else ("cast", layout.compute)
            refused = refusal(Combination(path, compute, stage, layout.offload))
            if layout.offload in OFFLOADS[stage] and refused is None:
                found[stage] = self.largest_micro(replace(layout, stage=stage))
        return found

    def scaling(self, layout: Layout) -> list[Option]:
        """The layout's stage on each of WORLDS, with its micro-batch or the largest smaller one that divides its share.

        The global batch stays the same as long as every device gets a sequence of it; beyond that it is one per device.
        Where devices share sequences or matrices, read their groups for devices.
        """
        sequences = layout.global_size
        options = []
        for world in WORLDS:
            together = layout.sharing * layout.tensor
            if world % together or world % layout.expert:
                continue
            each = max(1, sequences * together // world)
            micro = max(size for size in divisors(each) if size <= max(layout.micro, 1))
            options.append(self.option(replace(layout, world=world, micro=micro, accumulation=each // micro)))
        return options


def communication_bound_from(options: list[Option]) -> int | None:
    """[devices] The smallest number at which communication takes longer than computing, or None."""
    slow = (item.layout.world for item in options if item.speed.communication_seconds > item.speed.compute_seconds)
    return next(slow, None)
