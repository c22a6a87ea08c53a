"""Plan a run config on a number of devices: memory, speed, hours, cost, and the smallest setting that fits."""

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

from config.batch import divisors
from config.command_line import read_command_line
from config.errors import UserError
from config.hub import settle_hub
from config.launcher import as_launched
from config.resolved import Resolved
from launch.plan.devices import GIB, Device, find_device
from launch.plan.layout import Layout, layout_of
from launch.plan.memory import Memory, peak_memory
from launch.plan.model import Shape, read_shape
from launch.plan.speed import Speed, matmul_peak, mfu_of, speed
from launch.plan.stages import check_manifest, layouts_at
from launch.plan.timed import Lever, Timed, levers, time_of

PROCESS_BYTES = 476 * 2**20
"""Memory of Python, torch, DeepSpeed and gloo in one rank on a CPU, as measured in docs/plan.md."""


WORLDS = tuple(2**power for power in range(11))
"""[devices] World sizes of the scaling table, 1 to 1,024."""


@dataclass(frozen=True)
class Option:
    """One way to run the config."""

    layout: Layout
    memory: Memory
    speed: Speed
    fits: bool


@dataclass(frozen=True)
class Planner:
    """Evaluates layouts of one model on one device."""

    shape: Shape
    usable: float
    """[bytes] Memory of a device, minus --reserve."""
    process: float
    """[bytes] Memory of the process itself, for ranks on a CPU."""
    speed: Callable[[Layout], Speed]

    def option(self, layout: Layout) -> Option:
        memory = peak_memory(self.shape, layout, process=self.process)
        return Option(layout, memory, self.speed(layout), memory.total <= self.usable)

    def largest_micro(self, layout: Layout) -> Option | None:
        """The layout with the largest micro-batch that fits, at the same global batch; None if not even 1 fits."""
        each = layout.micro * layout.accumulation
        for micro in reversed(divisors(each)):
            option = self.option(replace(layout, micro=micro, accumulation=each // micro))
            if option.fits:
                return option
        return None

    def stages(self, layouts: Mapping[int, Layout]) -> dict[int, Option | None]:
        """ZeRO stage to its option with the largest micro-batch that fits, or None. layouts: those of `layouts_at`."""
        return {stage: self.largest_micro(layout) for stage, layout in layouts.items()}

    def scaling(self, layout: Layout) -> list[Option]:
        """The layout's stage on each of WORLDS, with its micro-batch or the largest smaller one that divides its share.

        The global batch is constant as long as every device gets a sequence; beyond that it is one per device. With
        sequence or tensor parallelism, "device" means a group of devices.
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
    """[devices] Smallest number at which communication takes longer than compute, or None."""
    slow = (item.layout.world for item in options if item.speed.communication_seconds > item.speed.compute_seconds)
    return next(slow, None)


@dataclass(frozen=True)
class Plan:
    resolved: Resolved
    shape: Shape
    device: Device
    usable: float
    mfu: float
    mfu_source: str
    configured: Option
    stages: dict[int, Option | None]
    smallest: Option | None
    scaling: list[Option]
    token_budget: float
    price: float | None
    """[money] Price per device-hour; None if not given."""
    planner: Planner
    layouts: dict[int, Layout]
    """ZeRO stage to the configured layout at that stage."""

    @cached_property
    def timed(self) -> Timed | None:
        """Modelled time of the configured step by item; None if its operators could not be counted."""
        return self._timed(self.configured)

    @cached_property
    def changed(self) -> list[tuple[str, Timed, bool]]:
        """(what is changed, modelled step time, whether it fits), for each possible change alone."""
        layout = self.configured.layout
        tried = [*levers(self.shape, layout)] if self.timed else []
        if tried and layout.stage:
            others = ((stage, other) for stage, other in self.layouts.items() if stage and other is not layout)
            tried += [Lever(f"deepspeed.stage={stage}", other) for stage, other in others]
        options = [(lever, self.planner.option(lever.layout)) for lever in tried]
        found = [(lever.name, self._timed(option, lever.without), option.fits) for lever, option in options]
        return [(name, timed, fits) for name, timed, fits in found if timed is not None]

    def _timed(self, option: Option, without: Sequence[str] = ()) -> Timed | None:
        sent = option.speed.communication_seconds
        return time_of(self.shape, option.layout, self.device, communication=sent, without=without)

    @property
    def model_mfu(self) -> float:
        """[fraction] Model FLOPs utilisation over the whole step."""
        layout = self.configured.layout
        flops = self.shape.flops_per_token(layout.sequence) * self.configured.speed.tokens_per_second
        return flops / layout.world / matmul_peak(layout, self.device)

    def modelled_mfu(self, timed: Timed) -> float:
        """[fraction] `model_mfu` at a modelled step time."""
        layout = self.configured.layout
        tokens = layout.tokens * layout.accumulation / layout.tensor
        flops = self.shape.flops_per_token(layout.sequence) * tokens / timed.seconds
        return flops / matmul_peak(layout, self.device)

    def hours(self, option: Option) -> float:
        """[hours] Time to process the token budget."""
        return self.token_budget / option.speed.tokens_per_second / 3600

    def cost(self, option: Option) -> float | None:
        """[money] Cost to process the token budget; None without a price."""
        return None if self.price is None else self.hours(option) * option.layout.world * self.price


def make_plan(options: argparse.Namespace, arguments: Sequence[str]) -> Plan:
    """The plan of a command line. arguments: for train.py. Raises UserError, or SystemExit 2 for a wrong config."""
    device = _device(options)
    on_one = min(options.gpus, options.gpus if device.is_cpu else device.per_node)
    environment = as_launched(options.gpus) | {"LOCAL_WORLD_SIZE": str(on_one)}
    resolved = read_command_line(arguments, environment)
    settle_hub(resolved.config)
    check_manifest(resolved)
    if not resolved.config.run.steps and not options.tokens:
        problem = "the number of steps is known once the data are prepared"
        raise UserError(f"run.epochs = {resolved.config.run.epochs:g}: {problem}; give --tokens, or run.steps")
    layout = layout_of(resolved, world=options.gpus, on_cpu=device.is_cpu)
    shape = read_shape(resolved.config, layout)
    mfu, fill, source = options.mfu, 1.0, "assumed"
    if options.measured is not None:
        mfu, fill = _measured(Path(options.measured), device)
        source = f"measured in {options.measured}"
    usable = device.memory * (1 - options.reserve)
    process = PROCESS_BYTES if device.is_cpu else 0.0
    reached = {"mfu": mfu, "fill": fill, "efficiency": options.efficiency, "latency": options.latency_us * 1e-6}
    planner = Planner(shape, usable, process, partial(speed, shape, device=device, **reached))
    configured = planner.option(layout)
    layouts = layouts_at(layout, arguments, resolved, environment)
    stages = planner.stages(layouts)
    return Plan(
        resolved=resolved,
        shape=shape,
        device=device,
        usable=usable,
        mfu=mfu,
        mfu_source=source,
        configured=configured,
        stages=stages,
        smallest=next((option for option in stages.values() if option), None),
        scaling=planner.scaling(layout),
        token_budget=options.tokens or resolved.config.run.steps * configured.speed.tokens_per_step,
        price=options.price,
        planner=planner,
        layouts=layouts,
    )


def _device(options: argparse.Namespace) -> Device:
    device = find_device(options.device)
    given = {
        "memory": options.memory and options.memory * GIB,
        "link": options.link and options.link * 1e9,
        "network": options.network and options.network * 1e9,
        "per_node": options.per_node,
    }
    if device.is_cpu:
        device = replace(device, memory=device.memory / options.gpus)
    shares = dict(zip(("matmul", "attention", "bandwidth"), options.reached or (), strict=False))
    device = replace(device, reached=replace(device.reached, **shares))
    return replace(device, **{name: value for name, value in given.items() if value})


def _measured(folder: Path, device: Device) -> tuple[float, float]:
    """Share of the peak that a run reached, from its median speed without the first tenth of steps, and the share of
    its rows' places that held tokens, which padding keeps below 1."""
    from tracking.run_facts import median  # imports orjson, which is not needed to start
    from tracking.summary import read_run

    try:
        run = read_run(folder)
    except UserError as error:
        raise UserError(f"command line: --measured {folder}: {error}") from error
    rates, seconds = run.columns.tokens_per_second, run.columns.step_seconds
    after = slice(max(1, len(rates) // 10), None)
    rate = median(rates[after])
    if not rate > 0:
        raise UserError(f"command line: --measured {folder}: has no two steps to measure; let it run a little longer")
    resolved = read_command_line(["--config", str(folder / "config.yaml")], as_launched(run.world_size), started=True)
    layout = layout_of(resolved, world=run.world_size, on_cpu=device.is_cpu)
    found = mfu_of(rate, read_shape(resolved.config, layout), layout, device)
    if found > 1:
        raise UserError(f"command line: --measured {folder}: is faster than the peak of --device {device.name}")
    places = layout.tokens * layout.accumulation * layout.zero_ranks
    return found, min(1.0, median(rates[after] * seconds[after]) / places)
