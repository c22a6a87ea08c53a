"""Compare a run's first steps with FP32, start the whole run only if they agree, and watch it.

python -m launch.canary --config FILE [--processes N] [--launch "deepspeed --hostfile hosts"] [key.sub=value ...]

The first `canary.steps` steps run beside their FP32 twin and are judged by `tools.parity`. If they agree,
the whole run continues from their state under `launch.supervise`, while its checkpoints are compared with FP32. If one
fails, the run goes back to the last that passed and continues with `canary.fallback`.

Exit code 0: the whole run is done; 2: the config or the command line is wrong; 3: no parity, so nothing was started, or
the run stopped on numerics and no fallback is left; 75: a stop was requested (SIGTERM, SIGUSR1 or Ctrl-C), and the run
saved; the same command continues it. Any other code is the run's.
"""

import shlex
import subprocess
import sys
from collections.abc import Sequence

from config.cli import DONE, REPOSITORY, Arguments, entry_point
from config.errors import UserError
from launch.canary.gate import run_gate
from launch.canary.monitor import RunMonitor
from launch.canary.plan import Plan, read_plan
from launch.canary.record import Journal, log
from launch.job import add_processes_option


@entry_point()
def main(arguments: Sequence[str] | None = None) -> int:
    parser = Arguments("python -m launch.canary", __doc__)
    parser.add_argument("--config", required=True, help="config of the whole run")
    add_processes_option(parser)
    own = "(default: torchrun on this machine)"
    parser.add_argument(
        "--launch", type=shlex.split, default="", help=f"launcher of the whole run, with its number of processes {own}"
    )
    parser.add_argument("--check-launch", type=shlex.split, default="", help=f"launcher of the checks {own}")
    parser.add_argument("overrides", nargs="*", help="key.sub=value")
    options = parser.parse_intermixed_args(arguments)
    launchers = {"launch": options.launch, "check_launch": options.check_launch}
    plan = read_plan(options.config, options.overrides, processes=options.processes, **launchers)
    journal = _open(plan)
    gate = journal.last("gate")
    if gate is None or gate.get("verdict") != "parity":
        code = run_gate(plan, journal)
        if code != DONE:
            return code
    else:
        log(f"the canary was judged before: {gate['text']}")
    code = RunMonitor(plan, journal).run()
    _report(plan)
    return code


def _open(plan: Plan) -> Journal:
    """The canary's journal. Raises UserError if a run of that name exists that no canary started."""
    fresh = not (plan.folder / "canary.jsonl").exists()
    if fresh and (plan.run_folder / "events.jsonl").exists():
        problem = "was started without a canary; give another run.name, or resume it with train.py"
        raise UserError(f"run.name: {plan.run_folder} {problem}")
    try:
        return Journal.read(plan.folder, plan.run_folder.name)
    except OSError as error:
        problem = f"cannot make {plan.folder} ({error.strerror})"
        raise UserError(f"run.dir: {problem}; choose a folder you may write") from error


def _report(plan: Plan) -> None:
    command = [sys.executable, "-m", "tracking.report", str(plan.run_folder)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, encoding="utf-8", errors="replace", check=False)
    if done.returncode:
        log(f"no report: {' '.join(command[1:])} ended with exit code {done.returncode}: {done.stderr.strip()[-200:]}")
