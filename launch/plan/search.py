"""What fits: every ZeRO stage and micro-batch on the devices asked for, and the run on 1 to 1,024 of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from config.batch import divisors
from config.deepspeed.combinations import OFFLOADS, STAGES, Combination, refusal
from launch.plan.devices import Device
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
    """A model and a device, and how both become options."""

    shape: Shape
    device: Device
    usable: float
    """[bytes] Of a device, for what is planned here."""
    process: float
    """[bytes] Of the process itself, for ranks on a CPU."""
    speed: Callable[[Layout], Speed]

    def option(self, layout: Layout) -> Option:
        """The layout with what it needs and how fast it is."""
        memory = peak_memory(self.shape, layout, process=self.process)
        return Option(layout, memory, self.speed(layout), memory.total <= self.usable)

    def largest_micro(self, layout: Layout) -> Option | None:
        """The largest micro-batch with which `layout` fits, its global batch as it is; None where not even 1 does."""
        each = layout.micro * layout.accumulation
        for micro in reversed(divisors(each)):
            option = self.option(replace(layout, micro=micro, accumulation=each // micro))
            if option.fits:
                return option
        return None

    def stages(self, layout: Layout) -> dict[int, Option | None]:
        """ZeRO stage to the layout with the largest micro-batch that fits, or None; without refused stages."""
        found = {}
        for stage in STAGES:
            path, compute = ("manifest", "mixed") if layout.manifest else ("cast", layout.compute)
            refused = refusal(Combination(path, compute, stage, layout.offload))
            if layout.offload in OFFLOADS[stage] and refused is None:
                found[stage] = self.largest_micro(replace(layout, stage=stage))
        return found

    def smallest(self, layout: Layout) -> Option | None:
        """The lowest ZeRO stage that fits, with its largest micro-batch: what moves the fewest bytes."""
        return next((option for option in self.stages(layout).values() if option), None)

    def scaling(self, layout: Layout) -> list[Option]:
        """The layout's stage on each of WORLDS, with its micro-batch or the largest smaller one that divides its share.

        The global batch stays what it is as long as every device has a sequence of it; beyond, it is one each.
        """
        sequences = layout.micro * layout.accumulation * layout.world
        options = []
        for world in WORLDS:
            each = max(1, sequences // world)
            micro = max(size for size in divisors(each) if size <= max(layout.micro, 1))
            options.append(self.option(replace(layout, world=world, micro=micro, accumulation=each // micro)))
        return options


def dominated_from(options: list[Option]) -> int | None:
    """[devices] The fewest of `options` on which the network takes longer than the matmuls, or None."""
    slow = (item.layout.world for item in options if item.speed.communication_seconds > item.speed.compute_seconds)
    return next(slow, None)
