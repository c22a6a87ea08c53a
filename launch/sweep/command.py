"""Run a grid or list of config overrides from one file, on local slots or as a Slurm array.

    python -m launch.sweep launch/sweeps/learning_rate.yaml            run what has not ended, then rank
    python -m launch.sweep launch/sweeps/learning_rate.yaml --list     what would run; starts nothing
    python -m launch.sweep launch/sweeps/learning_rate.yaml --slurm [-- sbatch options]
    python -m launch.sweep --report runs/learning_rate                 rank what there is so far

Every trial's config is checked before the first one starts. A restarted sweep does not repeat trials that have ended,
and resumes the others from their checkpoints. SIGTERM, SIGUSR1 or Ctrl-C: all trials save and end with exit code 75; a
second one kills them. Exit code 0: all trials ended, including hopeless and diverged ones; 3: all of them on numerics;
2: the file is wrong, nothing was started; 1: some failed.
"""

import argparse
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from config.cli import PREEMPTED, REPOSITORY, Arguments, entry_point
from config.errors import UserError
from launch.job import visible_gpus
from launch.sweep.file import read_sweep
from launch.sweep.folder import ENDED, Plan, prepare, read_plan, write_json_atomically
from launch.sweep.slots import Slots, slot_environments
from launch.sweep.table import as_markdown, results_of
from launch.sweep.trial import log, run_trial
from tracking.file_lock import exclusive_lock

_SBATCH = REPOSITORY / "launch/slurm/sweep.sbatch"


@entry_point()
def main(arguments: Sequence[str]) -> int:
    split = list(arguments).index("--") if "--" in arguments else len(arguments)
    options = _parse(arguments[:split])
    if options.trial is not None:
        plan = read_plan(options.path)
        entry = next((entry for entry in plan.trials if entry.index == options.trial), None)
        if entry is None:
            last = len(plan.trials) - 1
            raise UserError(f"command line: --trial {options.trial}: {options.path} has the trials 0 to {last}")
        return run_trial(plan, entry)
    if options.report:
        report(read_plan(options.path))
        return 0
    sweep = read_sweep(options.path)
    if options.list:
        for trial in sweep.trials:
            print(trial.label)
        print(f"{len(sweep.trials)} trials of {sweep.processes} processes, {sweep.slots} at a time; {sweep.folder}")
        return 0
    try:
        sweep.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{options.path}: cannot make {sweep.folder} ({error.strerror}); change run.dir") from error
    with exclusive_lock(sweep.folder / ".lock", 0) as acquired:
        if not acquired:
            problem = f"another process runs this sweep in {sweep.folder}"
            raise UserError(f"{options.path}: {problem}; wait for it or stop it")
        plan, notes = prepare(sweep)
        for note in notes:
            log(note)
        if options.slurm:
            return _submit(plan, arguments[split + 1 :])
        ended = sum(plan.outcome(entry).status in ENDED for entry in plan.current)
        if ended:
            log(f"{ended} of {len(plan.current)} trials have ended before and are not repeated")
        code = Slots(plan, slot_environments(plan, visible_gpus())).run()
        report(plan)
        if code == PREEMPTED:
            log(f"to resume: python -m launch.sweep {shlex.quote(str(options.path))}")
        return code


def _submit(plan: Plan, options: Sequence[str]) -> int:
    """Submit one array task per trial that has not ended."""
    indices = [entry.index for entry in plan.current if plan.outcome(entry).status not in ENDED]
    if not indices:
        log("all trials have ended")
        report(plan)
        return 0
    array = f"--array={','.join(map(str, indices))}%{plan.slots}"
    command = ["sbatch", array, *options, str(_SBATCH), str(plan.folder)]
    log(shlex.join(command))
    try:
        code = subprocess.run(command, check=False).returncode
    except OSError as error:
        problem = f"cannot start sbatch ({error.strerror})"
        raise UserError(f"command line: {problem}; --slurm is for a Slurm login") from error
    if code == 0:
        log(f"when they have ended: python -m launch.sweep --report {shlex.quote(str(plan.folder))}")
    return code


def report(plan: Plan) -> None:
    """Rank and print the trials, and write sweep.md, results.json and, for two or more runs, compare.html."""
    from tracking.jsonl import plain  # imports orjson, which is not needed to start

    results = results_of(plan)
    text = as_markdown(results)
    sys.stdout.write(text)
    (plan.folder / "sweep.md").write_text(text, encoding="utf-8")
    write_json_atomically(plan.folder / "results.json", plain(results))
    runs = [str(plan.folder / trial["name"]) for trial in results["trials"] if trial["steps"]]
    if len(runs) < 2:
        return
    command = [sys.executable, "-m", "tracking.compare", *runs, "--html", str(plan.folder / "compare.html")]
    command += [] if plan.price is None else ["--price", f"{plan.price:g}"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, encoding="utf-8", errors="replace", check=False)
    if done.returncode:
        log(f"no page: {' '.join(command[1:])} ended with exit code {done.returncode}: {done.stderr.strip()[-200:]}")
    else:
        print(f"{plan.folder / 'sweep.md'}\n{plan.folder / 'compare.html'}", flush=True)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = Arguments("python -m launch.sweep", __doc__)
    parser.add_argument("path", type=Path, metavar="FILE", help="the sweep file; or a sweep's folder")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--list", action="store_true", help="check the file and show its trials; starts nothing")
    what.add_argument("--slurm", action="store_true", help="submit an array job; what follows -- goes to sbatch")
    what.add_argument("--report", action="store_true", help="rank the trials of a sweep's folder")
    what.add_argument("--trial", type=int, metavar="INDEX", help="run one trial of a sweep's folder, as array tasks do")
    return parser.parse_args(arguments)
