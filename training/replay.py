"""Run a step of a finished, crashed or running job again, and print the causes of its non-finite values.

    python -m training.replay runs/NAME --step N

Restores the nearest checkpoint before step N (or starts from the seed), repeats the steps up to N on the samples that
the run took, compares every step with the run's record, and prints the causes found at N. On a CPU the numbers repeat
bit for bit. Nothing is written into the run folder. Exit code 0: reproduced; 3: a step is different (1 for a run of
several processes, whose launcher turns every failure into 1); 2: it cannot be done.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from config.cli import Arguments, entry_point, is_rank_0
from config.command_line import read_command_line
from config.errors import UserError
from config.launcher import without_accelerate
from config.printable import line
from config.resolved import Resolved
from tracking.jsonl import read_events
from tracking.record import Record
from tracking.run_dir import RunDir

REPRODUCED, DIFFERENT = 0, 3
_COMPARED = ("loss", "grad_norm", "loss_scale", "lr", "applied", "sample_ids_sha256")


class Collector:
    """A sink that keeps events in memory."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []

    def write(self, event: dict[str, Any]) -> None:
        """Keep one event."""
        self.events.append(event)

    def close(self) -> None:
        """Nothing to do."""

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """The events of one kind so far."""
        return [event for event in self.events if event["event"] == kind]


def attempt_to_replay(events: list[dict[str, Any]], step: int) -> list[dict[str, Any]]:
    """The `step` events of the attempt that reached `step`, from the run's first step on.

    A run that rolled back or was resumed attempts a step more than once; the attempt with an incident is chosen, or
    else the last. Raises UserError when the run never attempted the step.
    """
    reached = [i for i, event in enumerate(events) if event["event"] == "step" and event["step"] == step]
    if not reached:
        raise UserError(f"--step {step}: the run has no such step; its events end at step {_last_step(events)}")
    bad = [i for i in reached if any(e["event"] == "incident" and e["step"] == step for e in events[i : i + 30])]
    index = (bad or reached)[-1]
    chain: list[dict[str, Any]] = []
    for event in reversed(events[: index + 1]):
        wanted = chain[-1]["step"] - 1 if chain else step
        if event["event"] == "step" and event["step"] == wanted:
            chain.append(event)
    return chain[::-1]


def session_of(events: list[dict[str, Any]], step: dict[str, Any]) -> dict[str, Any]:
    """The `run_start` of the session that made `step`, one of `events`: a run may resume in another layout."""
    at = next(index for index, event in enumerate(events) if event is step)
    return next(event for event in reversed(events[:at]) if event["event"] == "run_start")


def require_layout(session: dict[str, Any], resolved: Resolved) -> None:
    """Raises UserError where the run folder's config is from a later session with another layout than the step's."""
    then = {"zero_stage": session["zero_stage"], "compute": session["compute"]}
    now = {"zero_stage": resolved.zero_stage, "compute": resolved.compute}
    if then != now:
        raise UserError(
            f"{resolved.config_path}: is from a later session, ZeRO-{now['zero_stage']} in {now['compute']}; the step "
            f"was made at ZeRO-{then['zero_stage']} in {then['compute']}, and with another config it is another step"
        )


def replay(run_dir: RunDir, resolved: Resolved, recorded: list[dict[str, Any]], log: Any) -> int:
    """Repeat the steps up to the last of `recorded`, and report. A collective over the run's processes."""
    from training.build import assemble
    from training.checkpoint.manifest import newest_before
    from training.session import session
    from training.step import train_step

    target, collector = recorded[-1]["step"], Collector()
    with session(resolved) as opened:
        found = opened.world.from_main(newest_before(run_dir.checkpoints, target) if opened.world.is_main else None)
        checkpoints = opened.saved_checkpoints(run_dir.checkpoints)
        parts, progress = assemble(
            resolved,
            opened.engine,
            opened.batches,
            record=Record([collector]),
            checkpoints=checkpoints,
            state=checkpoints.load(found, opened.engine) if found else None,
        )
        log(f"from {found or 'the seed'}, {target - progress.step} steps to go")
        same = True
        for expected in recorded[progress.step :]:
            progress = replace(progress, position=expected["position"])
            parts.batches.restore(progress.position)
            progress, _, _ = train_step(parts, progress)
            same &= _compare(collector.of_kind("step")[-1], expected, log)
        for cause in [event for event in collector.of_kind("nonfinite") if event["step"] == target]:
            log(_describe(cause))
    log("reproduced" if same else "not reproduced: see the steps marked above")
    return REPRODUCED if same else DIFFERENT


def _compare(now: dict[str, Any], then: dict[str, Any], log: Any) -> bool:
    """Compare a step with the record, and print both; NaN equals NaN."""
    different = [key for key in _COMPARED if repr(now[key]) != repr(then[key])]
    verdict = "as recorded" if not different else "recorded: " + ", ".join(f"{k} {then[k]!r}" for k in different)
    log(
        f"step {now['step']}: loss {now['loss']!r}, grad norm {now['grad_norm']!r}, applied {now['applied']}; {verdict}"
    )
    return not different


def _describe(cause: dict[str, Any]) -> str:
    largest = f", largest finite value {cause['largest_finite']:.4g}" if cause["largest_finite"] is not None else ""
    return line(
        f"cause: rank {cause['rank']}, {cause['module']}: {cause['count']} {cause['kind']} in its {cause['tensor']}"
        f"{largest} (micro-batch {cause['micro_batch']}; {cause['seen']})"
    )


def _last_step(events: list[dict[str, Any]]) -> int:
    return max((event["step"] for event in events if event["event"] == "step"), default=0)


@entry_point(launched=True)
def main(arguments: list[str] | None = None) -> int:
    """Start as many processes as the run had, unless this is one of them, and replay."""
    parser = Arguments(prog="python -m training.replay", description=__doc__)
    parser.add_argument("run", type=Path, help="run folder, such as runs/demo")
    parser.add_argument("--step", type=int, required=True, help="attempted step, counted from 1")
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # the deepspeed launcher passes it
    options = parser.parse_args(arguments)
    run_dir = RunDir(options.run)
    events = list(read_events(run_dir.events))
    recorded = attempt_to_replay(events, options.step)
    session = session_of(events, recorded[-1])
    processes = session["world_size"]
    if "RANK" not in os.environ and processes > 1:
        launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
        again = ["-m", "training.replay", str(options.run), "--step", str(options.step)]
        os.execv(sys.executable, [sys.executable, *launch, *again])
    resolved = read_command_line(["--config", str(run_dir.config)], without_accelerate(os.environ))
    require_layout(session, resolved)
    return replay(run_dir, resolved, recorded, print if is_rank_0() else _silent)


def _silent(text: str) -> None:
    """For ranks other than 0."""


if __name__ == "__main__":
    sys.exit(main())
