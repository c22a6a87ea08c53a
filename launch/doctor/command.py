"""Check the machines of a job before it starts, and say how to fix what is wrong.

    python -m launch.doctor [--hostfile FILE] [--config FILE [key=value ...]] [--json]

green: fine. amber: may fail, or is slow. red: the job fails or computes wrong numbers.
Exit code 0; 1 with a red line (--strict: or an amber one); 2 for a mistake on the command line or in the config's keys.
"""

import argparse
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from config.cli import Arguments, entry_point
from config.deepspeed.choice import find_deepspeed_json
from config.deepspeed.document import check_document, offload, read_document
from config.deepspeed.resolve import check_choices, compute_dtype
from config.errors import UserError
from config.load import load_config
from config.optimizers import OPTIMIZERS
from config.options import port, positive_int
from config.schema import Config
from launch.doctor.examine import Scope, examine
from launch.doctor.hosts import HERE, Host
from launch.doctor.report import AMBER, GREEN, as_json, print_findings, worst
from launch.hosts import read_hostfile

FOUND = 1


def read_scope(options: argparse.Namespace) -> Scope:
    """The hosts and checks requested on the command line. Raises UserError."""
    # the deepspeed launcher starts the job of a single machine here, under any name
    slots = read_hostfile(Path(options.hostfile)) if options.hostfile else {HERE: None}
    hosts = [Host(name, count, local=len(slots) == 1) for name, count in slots.items()]
    if options.overrides and not options.config:
        raise UserError(f"command line: {options.overrides[0]} changes a config; add --config FILE")
    config, of_run = Config(), {}
    if options.config:
        config = load_config(Path(options.config), options.overrides, options.deepspeed_config)
        of_run = _of_run(config, options)
    folders = {"run": str(Path(config.run.dir) / config.run.name), "data cache": config.data.cache_dir}
    folders = {role: path if path.startswith("~") else str(Path(path).absolute()) for role, path in folders.items()}
    return Scope(hosts, folders, options, **of_run)


def _of_run(config: Config, options: argparse.Namespace) -> dict[str, Any]:
    """Fields of Scope that come from a run config."""
    path, saves = Path(options.config), config.checkpoint
    given_json = ["--deepspeed_config", options.deepspeed_config] if options.deepspeed_config is not None else []
    json_path = find_deepspeed_json(config.deepspeed.config, path, first=bool(given_json))
    document = read_document(json_path)
    check_document(json_path, document)
    check_choices(config, json_path, document)
    return {
        "compute": compute_dtype(config, json_path, document),
        "offload": offload(document),
        "optimizer": OPTIMIZERS[config.optimizer.name],
        "wandb": config.tracking.wandb if "wandb" in config.tracking.sinks else "disabled",
        "run": {
            "key": saves.encryption_key,
            "store": f"{saves.dir.rstrip('/')}/{config.run.name}" if saves.dir else None,
            "storage_options": saves.storage_options,
            "config": ["--config", str(path.absolute()), *given_json, *options.overrides],
            "count": offload(document) != "none",
        },
    }


def _parser() -> argparse.ArgumentParser:
    parser = Arguments("python -m launch.doctor", __doc__)
    parser.add_argument("--hostfile", metavar="FILE", help="DeepSpeed hostfile; without it, this machine alone")
    parser.add_argument("--config", metavar="FILE", help="the run's config: folders, dtype, offload, store, key, wandb")
    parser.add_argument("--deepspeed_config", "--deepspeed-config", metavar="FILE", help="as for train.py")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="as for train.py")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of lines")
    parser.add_argument("--strict", action="store_true", help="exit with 1 also on amber lines")
    parser.add_argument("--quick", action="store_true", help="skip device, ops, store, key and all-reduce (no torch)")
    parser.add_argument("--port", type=port, default=29500, help="launcher port on the first host (29500)")
    parser.add_argument("--processes", type=positive_int, metavar="N", help="per host (default: slots, GPU count or 2)")
    parser.add_argument("--all-reduce", type=float, default=64.0, metavar="MIB", help="all-reduce size (%(default)g)")
    parser.add_argument("--expect", type=float, default=0.0, metavar="GB/S", help="amber below this bus bandwidth")
    parser.add_argument("--ssh", type=shlex.split, default="ssh", metavar="COMMAND", help="such as 'ssh -F file' (ssh)")
    return parser


@entry_point()
def main(arguments: Sequence[str] | None = None) -> int:
    began = time.monotonic()
    try:
        options = _parser().parse_intermixed_args(arguments)
        scope = read_scope(options)
        findings = examine(scope)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    seconds = time.monotonic() - began
    if options.json:
        print(as_json(findings, seconds))
    else:
        print_findings(findings, [host.name for host in scope.hosts], seconds, sys.stdout)
    return 0 if worst(findings) in ((GREEN,) if options.strict else (GREEN, AMBER)) else FOUND
