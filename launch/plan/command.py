"""Predict memory, speed, hours and cost of a run config on N devices, and which ZeRO stages and batches fit.

    python -m launch.plan --config config/recipes/llama_8b_8gpu.yaml --gpus 8 --device h100 [--price 2.5]

Needs no accelerator and no weights. docs/plan.md has the formulas, their sources, and how they were checked.
Exit code 0; 2 when the config or the command line is wrong; 3 when no ZeRO stage and no micro-batch fits.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from config.cli import Arguments, entry_point
from config.options import positive_int, positive_number, positive_share, share_below_1
from launch.plan.devices import DEFAULT_MFU, DEVICES, LATENCY_SECONDS, Reached

if TYPE_CHECKING:
    from launch.plan.plan import Option, Plan
    from launch.plan.timed import Timed

NOTHING_FITS = 3


def as_json(plan: Plan) -> dict[str, Any]:
    """The plan as plain types, in bytes, seconds, tokens and the currency of --price."""
    from launch.plan.memory import checkpoint_bytes
    from launch.plan.plan import communication_bound_from
    from launch.plan.speed import traffic

    layout, memory = plan.configured.layout, plan.configured.memory
    return {
        "config": str(plan.resolved.config_path),
        "device": plan.device.name,
        "model": {
            "architecture": plan.shape.architecture,
            "parameters": plan.shape.parameters,
            "trained_parameters": plan.shape.trained_parameters,
            "flops_per_token": plan.shape.flops_per_token(layout.sequence),
        },
        "memory": {
            "device": memory.device,
            "host": memory.host,
            "peak": memory.total,
            "at": memory.moment,
            "usable": plan.usable,
        },
        "checkpoint_bytes": checkpoint_bytes(plan.shape, layout),
        "traffic": dataclasses.asdict(traffic(plan.shape, layout)),
        "mfu": {"assumed" if plan.mfu_source == "assumed" else "measured": plan.mfu, "model": plan.model_mfu},
        "modelled": plan.timed and _timed_json(plan, plan.timed),
        "changed": {name: _timed_json(plan, timed) | {"fits": fits} for name, timed, fits in plan.changed},
        "token_budget": plan.token_budget,
        "configured": _option_json(plan, plan.configured),
        "smallest": _option_json(plan, plan.smallest) if plan.smallest else None,
        "stages": {stage: _option_json(plan, option) if option else None for stage, option in plan.stages.items()},
        "scaling": [_option_json(plan, option) for option in plan.scaling],
        "communication_dominates_from": communication_bound_from(plan.scaling),
    }


@entry_point()
def main(argv: Sequence[str] | None = None) -> int:
    options, arguments = _parse(argv)
    from launch.plan.plan import make_plan

    plan = make_plan(options, arguments)
    if options.json:
        print(json.dumps(as_json(plan), indent=2))
    else:
        from launch.plan.text import print_plan

        print_plan(plan)
    return 0 if plan.smallest is not None else NOTHING_FITS


def _parse(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    epilog = "--config, --deepspeed_config and key.sub=value are those of train.py."
    parser = Arguments("python -m launch.plan", __doc__, allow_abbrev=False, epilog=epilog)
    parser.add_argument("--gpus", type=positive_int, default=1, help="devices to train on (1)")
    parser.add_argument("--device", default="h100", help=f"{', '.join(DEVICES)} or cpu (h100)")
    parser.add_argument("--price", type=positive_number, help="price of one device for one hour")
    parser.add_argument("--tokens", type=positive_number, help="tokens to train on (run.steps of the config)")
    of_peak = "share of the peak that matmuls reach, recomputed ones included (%(default)s)"
    parser.add_argument("--mfu", type=positive_share, default=DEFAULT_MFU, help=of_peak)
    parser.add_argument("--measured", metavar="RUN", help="take --mfu from the folder of a run on such devices")
    parser.add_argument("--memory", type=positive_number, help="GiB of one device")
    reserved = "share of it reserved for CUDA, NCCL and gaps (%(default)g)"
    parser.add_argument("--reserve", type=share_below_1, default=0.1, help=reserved)
    parser.add_argument("--link", type=positive_number, help="GB/s in one direction from device to device in a node")
    parser.add_argument("--network", type=positive_number, help="GB/s in one direction out of a node, by all adapters")
    parser.add_argument("--per-node", type=positive_int, help="devices in a node")
    of_both = "share of both that collectives reach (%(default)g)"
    parser.add_argument("--efficiency", type=positive_share, default=0.8, help=of_both)
    hop = "microseconds of one hop of a collective (%(default)g)"
    parser.add_argument("--latency-us", type=positive_number, default=LATENCY_SECONDS * 1e6, help=hop)
    assumed = " ".join(f"{value:.2f}" for value in (Reached.matmul, Reached.attention, Reached.bandwidth))
    reached = f"shares of the data sheet that the modelled time assumes ({assumed})"
    of_three = ("MATMUL", "ATTENTION", "BANDWIDTH")
    parser.add_argument("--reached", type=positive_share, nargs=3, metavar=of_three, help=reached)
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")
    return parser.parse_known_args(argv)


def _timed_json(plan: Plan, timed: Timed) -> dict[str, Any]:
    """Modelled step time in seconds; not measured."""
    return dataclasses.asdict(timed) | {"step_seconds": timed.seconds, "mfu": plan.modelled_mfu(timed)}


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
