"""Called by launch/slurm/train.sbatch before and after a run: is the config right, and should Slurm requeue the job?

    python -m launch.slurm.restart begin --restarts 0 --first FILE -- --config FILE [key=value ...]
    python -m launch.slurm.restart end --mark 12:3400 --code 75 -- --config FILE [key=value ...]

`begin` prints where the run's events end now, and on a restart of a job that has saved, `run.resume=auto`. `end` prints
the run's exit code, `requeue` or `end`, and why.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from config.cli import DONE, PREEMPTED, Arguments, entry_point
from config.machine.processes import describe_exit
from launch.supervise import FINAL, Run, Session


def requeue_decision(session: Session, code: int, max_minutes: float | None = None) -> tuple[int, bool, str]:
    """(the run's exit code, whether to requeue the job, why).

    session: what this start wrote into events.jsonl. code: srun's exit code, the highest of all tasks; under torchrun
    it is 1 for every failure, so the run's own run_end event takes precedence.
    """
    code = session.exit_code or code
    if session.exit_code == DONE != code:  # a rank that died at teardown: there is nothing left to train
        return code, False, f"done, then ended with exit code {code}"
    if code == DONE or code in FINAL:
        return code, False, f"{FINAL.get(code, 'done')} (exit code {code})"
    if code == PREEMPTED:
        again = not session.is_out_of_time(max_minutes)
        return code, again, f"{session.reason or 'preempted'} (exit code {code})"
    how = describe_exit(128 - code if 128 < code < 160 else code)
    if session.saved < 0:
        return code, False, f"the job {how} and saved no checkpoint since its start: a restart would not get further"
    return code, True, f"the job {how} after it saved step {session.saved}"


def _session_since(run: Run, mark: str) -> Session:
    inode, size = map(int, mark.split(":"))
    return run.session_since((inode, size))


@entry_point()
def main(arguments: Sequence[str]) -> int:
    parser = Arguments("python -m launch.slurm.restart", __doc__)
    parser.add_argument("question", choices=("begin", "end"))
    parser.add_argument("--restarts", type=int, default=0, help="how often Slurm has requeued the job")
    parser.add_argument("--first", type=Path, help="file that keeps the mark of the job's first start")
    parser.add_argument("--mark", default="0:0", help="what `begin` printed first")
    parser.add_argument("--code", type=int, default=0, help="srun's exit code")
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:split])
    run = Run.of_command(["train.py", *arguments[split + 1 :]])
    if options.question == "begin":
        mark = ":".join(map(str, run.events_end()))
        if not options.restarts:
            options.first.write_text(mark, encoding="utf-8")
        # Not whether there are checkpoints: they may be an earlier run's, which run.resume=never or PATH does not
        # continue, or lie in checkpoint.dir.
        first = options.first.read_text(encoding="utf-8") if options.first.exists() else parser.get_default("mark")
        saved = options.restarts > 0 and _session_since(run, first).saved >= 0
        print(mark, *(["run.resume=auto"] if saved else []))
        return 0
    session = _session_since(run, options.mark)
    code, again, why = requeue_decision(session, options.code, run.config.run.max_minutes)
    print(code, "requeue" if again else "end", why)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
