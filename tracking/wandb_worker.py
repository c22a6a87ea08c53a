"""The process that owns wandb: follows `events.jsonl` and logs it, until told to end or training is gone.

Started by `tracking.wandb_sink`, never by hand. Standard input brings one line of JSON (the job) and later the line
"end"; standard output takes one-line messages: "tell: ..." for the user, "failed: ..." as last words.

wandb's own step counter is the line number of the event in `events.jsonl`. It never goes back, also not over resumed
sessions, so wandb drops nothing; the charts are drawn over our `step`.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from tracking.events import COMMON_FIELDS, Event
from tracking.jsonl import decode

POLL_S = 0.5

_OWN_CHARTS = frozenset({"scale", "eval", "checkpoint", "incident", "nonfinite"})
_STEP_FIELDS = (
    "loss",
    "grad_norm",
    "clip_coefficient",
    "lr",
    "loss_scale",
    "skipped_total",
    "step_seconds",
    "tokens_per_second",
    "memory_bytes",
)


def chart_values(event: Event) -> dict[str, Any]:
    """What one event adds to the charts: `train/...` for a step, else a group of its own such as `scale/...`.

    Values that are not finite stay so (wandb shows them as such); what was not recorded (None) is left out.
    """
    kind = event["event"]
    if kind == "step":
        values = {f"train/{name}": event[name] for name in _STEP_FIELDS} | {"train/applied": int(event["applied"])}
    elif kind in _OWN_CHARTS:
        values = {f"{kind}/{name}": value for name, value in event.items() if name not in COMMON_FIELDS}
    elif kind == "telemetry":
        values = dict(_flatten(event))
    else:
        values = {f"session/{kind}": 1}
    kept = {name: value for name, value in values.items() if isinstance(value, int | float | str)}
    return kept | {"step": event["step"], "tokens": event["tokens"]}


def histograms(event: Event) -> dict[str, Any]:
    """The gradient values of a telemetry event by power of two, as a wandb histogram."""
    exponents = event.get("gradient_exponents")
    if not exponents or not exponents["counts"]:
        return {}
    import numpy as np
    import wandb

    counts = np.array(exponents["counts"])
    histogram = wandb.Histogram(np_histogram=(counts, exponents["lowest"] + np.arange(len(counts) + 1)))
    return {"telemetry/log2_gradient": histogram}


def _flatten(event: Event) -> Iterator[tuple[str, Any]]:
    """`telemetry/<measure>/<module>` for each number of a telemetry event."""
    yield "telemetry/update_ratio", event["update_ratio"]
    for name, value in (event["drift"] or {}).items():
        yield f"telemetry/drift/{name}", value
    for name, value in event["activation_max"].items():
        yield f"telemetry/activation_max/{name}", value
    for group in ("gradients", "probe"):
        for module, measures in event[group].items():
            for measure, value in measures.items():
                yield f"telemetry/{group}_{measure}/{module}", value


class Follower:
    """Reads the whole lines of a growing file, each with its line number counted from 1."""

    def __init__(self, path: Path, skip_bytes: int) -> None:
        """skip_bytes: lines that end within these first bytes belong to earlier sessions and are only counted."""
        self._path = path
        self._skip = skip_bytes
        self._file: BinaryIO | None = None
        self._number = 0

    def new_lines(self) -> list[tuple[int, bytes]]:
        """The lines that were completed since the last call."""
        if self._file is None:
            if not self._path.exists():
                return []
            self._file = self._path.open("rb")
        lines: list[tuple[int, bytes]] = []
        while True:
            start = self._file.tell()
            line = self._file.readline()
            if not line.endswith(b"\n"):
                self._file.seek(start)  # still being written: wait for the rest
                return lines
            self._number += 1
            if self._file.tell() > self._skip:
                lines.append((self._number, line))


def start_run(job: dict[str, Any]) -> Any:
    """Start the wandb run, offline when online cannot be had."""
    import wandb

    settings = wandb.Settings(
        silent=True,
        console="off",
        # The raw command line, git remotes and the user's e-mail stay out; our config says what matters.
        disable_git=True,
        disable_code=True,
        x_disable_meta=True,
        x_save_requirements=False,
        init_timeout=job["init_timeout_s"],
        login_timeout=job["init_timeout_s"],
        finish_timeout=job["finish_timeout_s"],
        finish_timeout_raises=True,
    )
    run = None
    if job["mode"] == "online":
        try:
            if not wandb.login(prompt=False):
                raise RuntimeError("no login: run `wandb login` or set WANDB_API_KEY")
            run = wandb.init(mode="online", settings=settings, **job["init"])
        except Exception as error:  # every way of not reaching the server ends in an offline run
            say("tell", f"wandb is recorded offline, since online failed: {one_line(error)}")
    if run is None:
        run = wandb.init(mode="offline", settings=settings, **job["init"])
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return run


def follow(run: Any, job: dict[str, Any]) -> None:
    """Log events as they come; returns when training said "end" or is gone and every event is logged."""
    follower = Follower(Path(job["events"]), job["skip_bytes"])
    exit_code: int | None = None
    last_round = False
    while not last_round:
        ready, _, _ = select.select([sys.stdin], [], [], POLL_S)
        last_round = bool(ready) or os.getppid() != job["training_pid"]
        for number, line in follower.new_lines():
            event = decode(line)
            if event is None:
                continue  # a damaged line is the readers' to report, not a reason to lose the rest
            if event["event"] == "run_end":
                exit_code = event["exit_code"]
            if event["event"] != "step" or event["step"] % job["log_every_steps"] == 0 or not event["applied"]:
                run.log(chart_values(event) | histograms(event), step=number)
    run.finish(exit_code=1 if exit_code is None else exit_code)


def say(kind: str, text: str) -> None:
    """One line to training; it may be gone already, and that is no trouble."""
    try:
        print(f"{kind}: {text}", flush=True)
    except BrokenPipeError:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115, PTH123 - keeps the interpreter from failing at exit


def one_line(error: BaseException) -> str:
    """The error's text on one line of at most 200 characters."""
    return (" ".join(str(error).split()) or type(error).__name__)[:200]


def main() -> int:
    """Read the job, run it; 1 after any failure, whose traceback goes to standard error (the run's wandb.log)."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a scheduler signals the whole job; the events are still to be delivered
    job = json.loads(sys.stdin.readline())
    try:
        follow(start_run(job), job)
    except Exception as error:
        traceback.print_exc()
        say("failed", one_line(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
