"""Before money is spent: memory, speed, hours and cost of a run config on a number of devices, and what would fit.

    python -m launch.plan --config config/recipes/llama_8b_8gpu.yaml --gpus 8 --device h100 [--price 2.5]

Needs no accelerator and no weights. docs/plan.md has the formulas, where they come from, and how they were checked.
Exit code 0; 2 when the config or the command line is wrong; 3 when no ZeRO stage and no micro-batch fits.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from config.cli import Arguments
from config.command_line import CONFIG_ERROR, Resolved, read_command_line
from config.errors import UserError
from config.launcher import as_launched
from launch.plan_devices import DEVICES, GIB, Device, find_device
from launch.plan_memory import layout_of
from launch.plan_model import Shape, read_shape
from launch.plan_search import Option, Planner, dominated_from
from launch.plan_time import DEFAULT_MFU, LATENCY_SECONDS, mfu_of, speed, traffic

NOTHING_FITS = 3
PROCESS_BYTES = 576 * 2**20
"""Python, torch, DeepSpeed and gloo in one rank on a CPU, as docs/plan.md measured it."""


@dataclass(frozen=True)
class Plan:
    """Everything that is shown."""

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
    """[money] Of one device for one hour; None: not told."""

    @property
    def model_mfu(self) -> float:
        """[fraction] Of the peak that model FLOPs reach in the whole step."""
        layout = self.configured.layout
        peak = self.device.peak_fp32 if layout.compute == "fp32" and not layout.manifest else self.device.peak
        flops = self.shape.flops_per_token(layout.sequence) * self.configured.speed.tokens_per_second
        return flops / layout.world / peak

    def hours(self, option: Option) -> float:
        """[hours] To the token budget."""
        return self.token_budget / option.speed.tokens_per_second / 3600

    def cost(self, option: Option) -> float | None:
        """[money] To the token budget."""
        return None if self.price is None else self.hours(option) * option.layout.world * self.price


def make_plan(options: argparse.Namespace, arguments: Sequence[str]) -> Plan:
    """The plan of a command line. arguments: what train.py would be given.

    Raises UserError: a device, a number or a model that cannot be planned. SystemExit 2: the config is wrong.
    """
    resolved = read_command_line(arguments, as_launched(options.gpus))
    device = _device(options)
    layout = layout_of(resolved, world=options.gpus, on_cpu=device.is_cpu)
    shape = read_shape(resolved.config)
    mfu, source = options.mfu, "assumed"
    if options.measured is not None:
        mfu, source = _measured_mfu(Path(options.measured), device)
    usable = device.memory * (1 - options.reserve)
    process = PROCESS_BYTES if device.is_cpu else 0.0
    timed = partial(
        speed, shape, device=device, mfu=mfu, efficiency=options.efficiency, latency=options.latency_us * 1e-6
    )
    planner = Planner(shape, device, usable, process, timed)
    configured = planner.option(layout)
    stages = planner.stages(layout)
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
    )


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan in plain types; bytes, seconds, tokens and the price's own money."""
    moved = traffic(plan.shape, plan.configured.layout)
    return {
        "config": str(plan.resolved.config_path),
        "device": plan.device.name,
        "model": {
            "architecture": plan.shape.architecture,
            "parameters": plan.shape.parameters,
            "flops_per_token": plan.shape.flops_per_token(plan.configured.layout.sequence),
        },
        "memory": {
            "device": plan.configured.memory.device,
            "host": plan.configured.memory.host,
            "peak": plan.configured.memory.total,
            "at": plan.configured.memory.moment,
            "usable": plan.usable,
        },
        "traffic": {"gradients": moved.gradients, "parameters": moved.parameters, "collectives": moved.collectives},
        "mfu": {"assumed" if plan.mfu_source == "assumed" else "measured": plan.mfu, "model": plan.model_mfu},
        "token_budget": plan.token_budget,
        "configured": _option_json(plan, plan.configured),
        "smallest": _option_json(plan, plan.smallest) if plan.smallest else None,
        "stages": {stage: _option_json(plan, option) if option else None for stage, option in plan.stages.items()},
        "scaling": [_option_json(plan, option) for option in plan.scaling],
        "communication_dominates_from": dominated_from(plan.scaling),
    }


def main(argv: Sequence[str]) -> int:
    """The command line; its exit code."""
    try:
        options, arguments = _parse(argv)
        plan = make_plan(options, arguments)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return CONFIG_ERROR
    if options.json:
        print(json.dumps(as_json(plan), indent=2))
    else:
        from launch.plan_text import show

        show(plan)
    return 0 if plan.smallest is not None else NOTHING_FITS


def _parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    assert __doc__ is not None
    parser = Arguments(
        prog="python -m launch.plan",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        epilog="--config, --deepspeed_config and key.sub=value are those of train.py.",
    )
    parser.add_argument("--gpus", type=_whole, default=1, help="devices to train on (1)")
    parser.add_argument("--device", default="h100", help=f"{', '.join(DEVICES)} or cpu (h100)")
    parser.add_argument("--price", type=_positive, help="price of one device for one hour")
    parser.add_argument("--tokens", type=_positive, help="tokens to train on (run.steps of the config)")
    parser.add_argument(
        "--mfu",
        type=_share,
        default=DEFAULT_MFU,
        help=f"share of the peak that matmuls reach while computing, recomputed ones included ({DEFAULT_MFU})",
    )
    parser.add_argument("--measured", metavar="RUN", help="take --mfu from a run folder that ran on such devices")
    parser.add_argument("--memory", type=_positive, help="GiB of one device")
    parser.add_argument("--reserve", type=_share, default=0.1, help="share of it for CUDA, NCCL and gaps (0.1)")
    parser.add_argument("--link", type=_positive, help="GB/s in one direction from device to device in a node")
    parser.add_argument(
        "--network", type=_positive, help="GB/s in one direction out of one node, all adapters together"
    )
    parser.add_argument("--per-node", type=_whole, help="devices in a node")
    parser.add_argument("--efficiency", type=_share, default=0.8, help="share of both that collectives reach (0.8)")
    parser.add_argument(
        "--latency-us",
        type=_positive,
        default=LATENCY_SECONDS * 1e6,
        help="microseconds of one hop of a collective (5)",
    )
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    return parser.parse_known_args(list(argv))


def _device(options: argparse.Namespace) -> Device:
    device = find_device(options.device)
    given = {
        "memory": options.memory and options.memory * GIB,
        "link": options.link and options.link * 1e9,
        "network": options.network and options.network * 1e9,
        "per_node": options.per_node,
    }
    if device.is_cpu:
        given = {"memory": device.memory / options.gpus, **{name: value for name, value in given.items() if value}}
    return replace(device, **{name: value for name, value in given.items() if value is not None})


def _measured_mfu(folder: Path, device: Device) -> tuple[float, str]:
    """The share of the peak that a run reached: the median of its steps without the first tenth."""
    try:
        lines = (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise UserError(f"command line: --measured {folder}: {error.strerror}; give a run's folder") from error
    events = [json.loads(line) for line in lines if line.endswith("}")]
    world = next((event["world_size"] for event in reversed(events) if event["event"] == "run_start"), 0)
    rates = [float(event["tokens_per_second"]) for event in events if event["event"] == "step"]
    rates = rates[max(1, len(rates) // 10) :]
    if not rates or not world:
        raise UserError(f"command line: --measured {folder}: has no two steps to measure; let it run a little longer")
    resolved = read_command_line(["--config", str(folder / "config.yaml")], as_launched(world))
    layout = layout_of(resolved, world=world, on_cpu=device.is_cpu)
    found = mfu_of(median(rates), read_shape(resolved.config), layout, device)
    if found > 1:
        raise UserError(f"command line: --measured {folder}: is faster than the peak of --device {device.name}")
    return found, f"measured in {folder}"


def _option_json(plan: Plan, option: Option) -> dict[str, Any]:
    return {
        "devices": option.layout.world,
        "zero_stage": option.layout.stage,
        "micro_size": option.layout.micro,
        "accumulation": option.layout.accumulation,
        "peak_bytes": option.memory.total,
        "fits": option.fits,
        "step_seconds": option.speed.step_seconds,
        "compute_seconds": option.speed.compute_seconds,
        "communication_seconds": option.speed.communication_seconds,
        "tokens_per_second": option.speed.tokens_per_second,
        "hours": plan.hours(option),
        "cost": plan.cost(option),
    }


def _whole(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number < float("inf"):
        raise ValueError(text)
    return number


def _share(text: str) -> float:
    number = float(text)
    if not 0 <= number <= 1:
        raise ValueError(text)
    return number


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
