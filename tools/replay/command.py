"""Repeat a step of a finished, crashed or running job, and print the causes of its non-finite values.

    python -m tools.replay runs/NAME --step N
    python -m tools.replay runs/NAME --step N --what-if key.sub=value ... [--steps M]
    python -m tools.replay runs/NAME --bisect

Restores the nearest checkpoint before step N (or starts from the seed), repeats the steps up to N on the run's samples,
and compares each with the run's record; on a CPU the numbers repeat bit for bit. Nothing is written into the run
folder. Exit code 0: reproduced; 3: a step differs (1 for a run of several processes, whose launcher turns every failure
into 1); 2: not possible. --what-if repeats these steps, and M after N, under another precision (any key of
`precision:`, and model.attention): 0: the run would have survived; 3 or 1: it would not. --bisect finds the first step
that departs from the FP32 twin by the bounds of `parity:`, and the first such module in it: 0: none does; 3 or 1: one
does.
"""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path

from config.batch import refuse_sharing
from config.cli import Arguments, entry_point, is_rank_0
from config.command_line import read_command_line
from config.errors import UserError
from config.launcher import as_launched, without_accelerate
from config.options import positive_int
from launch.job import job_command, visible_gpus
from tools.replay.recorded import last_step, read_recorded, require_layout, require_manifest
from tracking.compare.surviving import read_run_events
from tracking.run_dir import RunDir

AFTER = 8
"""[steps] Default of --steps: enough for a loss scale of 65536 to fall to 256."""


@entry_point(launched=True)
def main(arguments: list[str] | None = None) -> int:
    """Start as many processes as the run had, unless this is one of them, and replay."""
    parser = Arguments(prog="python -m tools.replay", description=__doc__, allow_abbrev=False)
    parser.add_argument("run", type=Path, help="run folder, such as runs/demo")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--step", type=int, help="attempted step, counted from 1")
    which.add_argument("--bisect", action="store_true", help="find the first step that departs from the FP32 twin")
    parser.add_argument("--what-if", nargs="+", action="extend", metavar="key.sub=value", help="another precision")
    parser.add_argument("--steps", type=positive_int, help=f"with --what-if: steps after N, {AFTER} unless given")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # the deepspeed launcher passes it
    options = parser.parse_args(arguments)
    if options.steps is not None and not options.what_if:
        raise UserError("command line: --steps belongs to --what-if; leave it out, or give an override")
    if options.what_if and options.bisect:
        raise UserError("command line: --what-if tries one step, which --step names; leave out --bisect")
    run_dir = RunDir(options.run)
    # without telemetry, most of what a long run of a large model records
    events = [event for event in read_run_events(run_dir.events) if event["event"] != "telemetry"]
    recorded = read_recorded(events, last_step(events) if options.bisect else options.step)
    processes = recorded.session["world_size"]
    launches = "RANK" not in os.environ and processes > 1
    environment = without_accelerate(os.environ) | (as_launched(processes) if launches else {})
    resolved = read_command_line(["--config", str(run_dir.config)], environment, started=True)
    require_layout(recorded.session, resolved)
    refuse_sharing(resolved.batch, but=("sequence", "tensor", *([] if options.bisect else ["expert"])))
    other = None
    if options.what_if:
        from tools.replay.what_if import under

        other = under(resolved, options.what_if, environment)
    else:
        require_manifest(recorded.session, resolved)
    if launches:
        given = sys.argv[1:] if arguments is None else arguments
        again = ["-m", "tools.replay", *given]
        gpus = 0 if os.environ.get("DS_ACCELERATOR") == "cpu" else len(visible_gpus())
        if 0 < gpus < processes:
            raise UserError(
                f"{options.run}: made by {processes} processes, and {gpus} GPUs are visible here; start the replay as "
                f"the run was, such as deepspeed --hostfile HOSTS --module {shlex.join(again[1:])}"
            )
        os.execv(sys.executable, job_command(again, processes=processes))
    log = print if is_rank_0() else lambda text: None
    if other is not None:
        from tools.replay.what_if import what_if

        return what_if(run_dir, other, recorded, options.what_if, log, after=options.steps or AFTER)
    if options.bisect:
        from tools.replay.bisect import bisect

        return bisect(run_dir, resolved, recorded, log)
    from tools.replay.repeat import repeat

    return repeat(run_dir, resolved, recorded, log)
