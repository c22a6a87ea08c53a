"""The process that runs wandb: follows `events.jsonl` and logs it until training says "end" or is gone.

Started by `tracking.wandb.sink`, never by hand. Standard input brings one line of JSON (the job) and later the line
"end"; standard output carries one-line messages: "log: ..." for the user, "failed: ..." before it exits.

wandb's own step counter is the line number of the event in `events.jsonl`. It never goes back, also not over resumed
sessions, so wandb drops nothing. The axis of the charts is in `tracking.wandb.charts`.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
from pathlib import Path
from typing import Any

from config.errors import one_line
from tracking.wandb.charts import AXIS
from tracking.wandb.follow import Delivered, Follower, exclusive_lock
from tracking.wandb.models import log_artifact
from tracking.wandb.transaction_log import IncompleteFile, repair_all
from tracking.wandb.upload import Delivery, log_traceback, report

POLL_S = 0.5
ATTEMPTS = 3


def start_run(job: dict[str, Any]) -> Any:
    """Start the wandb run, offline when online fails."""
    import wandb

    settings = wandb.Settings(
        silent=True,
        console="off",
        # Command line, git remotes and the user's e-mail stay out; our config has what matters.
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
            run = wandb.init(mode="online", settings=settings, reinit="create_new", **job["init"])
        except Exception as error:  # whatever the reason, an offline run is started instead
            report("log", f"wandb is recorded offline, since online failed: {one_line(error, 200)}")
    if run is None:
        run = wandb.init(mode="offline", settings=settings, reinit="create_new", **job["init"])
    run.define_metric(AXIS)
    run.define_metric("*", step_metric=AXIS)
    return run


def follow(run: Any, delivery: Delivery, job: dict[str, Any]) -> None:
    """Log events as they come; returns when training said "end" or is gone and every event is logged."""
    follower = Follower(Path(job["events"]))
    last_round = False
    while not last_round:
        ready, _, _ = select.select([sys.stdin], [], [], POLL_S)
        last_round = bool(ready) or os.getppid() != job["training_pid"]
        while lines := follower.new_lines():
            for line in lines:
                delivery.add(line)
        delivery.tables()
    for facts in job["models"]:
        log_artifact(run, facts)
    delivery.finish()


def follow_with_retries(job: dict[str, Any]) -> None:
    """Follow the events; when wandb dies, start it again after the last saved line.

    wandb's helper ends at the SIGTERM that a scheduler or launcher sends to the whole job, long before training does.
    """
    newest, delivered = repair_all(Path(job["init"]["dir"]) / "wandb"), Delivered(Path(job["delivered"]))
    if 0 < newest < delivered.lines:
        delivered.save(newest)  # a power failure lost what was not yet on the disk
    if delivered.lines > _lines_in(Path(job["events"])):
        delivered.save(0)  # damaged: more than there are; what wandb has already it takes again
    for left in reversed(range(ATTEMPTS)):
        run = start_run(job)
        delivery = Delivery(run, job)
        try:
            follow(run, delivery, job)
            return
        except Exception as error:
            log_traceback()
            reset_wandb()
            delivery.save_after_failure()
            if left == 0 or isinstance(error, IncompleteFile):
                raise


def _lines_in(events: Path) -> int:
    try:
        with events.open("rb") as file:
            return sum(1 for _ in file)
    except OSError:
        return 0


def reset_wandb() -> None:
    """Reset wandb, so that it can be started again."""
    import wandb

    try:
        wandb.teardown(exit_code=1)
    except Exception:
        log_traceback()  # expected: it is dead


def main() -> int:
    """Read the job, run it; 1 after any failure, whose traceback goes to standard error (the run's wandb.log)."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # a scheduler signals the whole job; the last events are still to come
    job = json.loads(sys.stdin.readline())
    try:
        with exclusive_lock(Path(job["lock"]), job["finish_timeout_s"]):
            follow_with_retries(job)
    except Exception as error:
        log_traceback()
        report("failed", one_line(error, 200))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
