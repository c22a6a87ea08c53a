"""A launcher that trains nothing: `pretend_trial.py train.py --config FILE key=value ...` writes a run's events.

The loss of a step is 1 + |log10(learning rate) + 3| + 9 / step, so 1e-3 is best. What else happens is set by other
keys of the run config: optimizer.eps is the seconds of a step, of the first start only; run.hypothesis is `crash`,
`diverge`, `refuse`, `late` (a crash once, after the first save), `time` (run.max_minutes is up after the first save),
`resume` (a crash when it would resume), `silent` (as `late`, with exit code 0), `deaf` (SIGUSR1 is ignored) or
`leave` (a process is left behind).
"""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import yaml

sys.path.insert(0, str(Path(__file__).parents[3]))
from tracking.events import REQUIRED_FIELDS


def main() -> int:
    """Run the pretended trial; its exit code."""
    settings, folder, asked = opened()
    saved = folder / "checkpoints" / "step-1"
    first = not saved.exists()
    with (folder / "starts").open("a") as starts:
        variables = {name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MASTER_PORT")}
        starts.write(json.dumps({"time": time.time(), "resume": settings.get("run.resume"), **variables}) + "\n")
    how = settings.get("run.hypothesis", "")
    if how == "refuse":
        print("error: nothing here is right", file=sys.stderr)
        return 2
    if how == "crash" or (how == "resume" and not first):
        raise ValueError("a bug of its own")
    write(folder, "run_start", 0, world_size=1, resumed_from=None if first else "step-1")
    if how == "leave":
        leave(folder)
    for step in range(1 if first else 2, int(settings["run.steps"]) + 1):
        time.sleep(float(settings.get("optimizer.eps", 0)) if first else 0)
        rate = float(yaml.safe_load(settings["optimizer.learning_rate"]))
        loss = 1 + abs(math.log10(rate) + 3) + 9 / step
        write(folder, "step", step, loss="nan" if how == "diverge" else loss, applied=True, tokens_per_second=1000.0)
        saved.mkdir(parents=True, exist_ok=True)
        if how in ("late", "silent") and first:
            return int(how == "late")
        if how == "time":
            return end(folder, step, "preempted", 75, "run.max_minutes is up")
        if asked and how != "deaf":
            return end(folder, step, "preempted", 75, "asked to stop by SIGTERM or SIGUSR1")
    if how == "diverge":
        return end(folder, step, "aborted", 3, "the loss is not a number")
    if "evaluate.every_steps" in settings:
        write(folder, "eval", step, loss=loss)
    return end(folder, step, "done", 0, "")


def opened() -> tuple[dict[str, str], Path, list[int]]:
    """The overrides, the run folder, and the signals that have asked the run to stop, so far none."""
    settings = dict(word.split("=", 1) for word in sys.argv if "=" in word)
    folder = Path(settings["run.dir"]) / settings["run.name"]
    folder.mkdir(parents=True, exist_ok=True)
    asked: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: asked.append(number))
    return settings, folder, asked


def leave(folder: Path) -> None:
    """Start a process that outlives this one."""
    left = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    (folder / "left").write_text(str(left.pid))


def end(folder: Path, step: int, status: str, code: int, reason: str) -> int:
    """Say how the run ended; the exit code."""
    write(folder, "run_end", step, status=status, exit_code=code, reason=reason)
    return code


def write(folder: Path, event: str, step: int, **fields: object) -> None:
    """Write an event; what the caller leaves out of its fields is null."""
    with (folder / "events.jsonl").open("a") as file:
        where = {"event": event, "step": step, "tokens": 8 * step, "time": time.time()}
        file.write(json.dumps(dict.fromkeys(REQUIRED_FIELDS[event]) | where | fields) + "\n")


if __name__ == "__main__":
    sys.exit(main())
