"""The process that runs wandb.

wandb's step counter is the line number of the event in `events.jsonl`, which never goes back, so that wandb drops
nothing. wandb's files of a session in RUN/wandb are either complete, or removed and rebuilt from the events: a file is
truncated if wandb's process or the machine dies, and `wandb sync` stops at a truncated file.
"""

import json
import shlex
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

from config.cli import REPOSITORY
from config.errors import one_line
from config.files import write_atomically
from config.redact import redact
from tracking.jsonl import Follower
from tracking.trackers.delivery import Delivered, log_traceback, report, run_client
from tracking.wandb.charts import AXIS
from tracking.wandb.upload import NoSpaceLeft, WandbDelivery

ATTEMPTS = 3


def begin_session(folder: Path) -> Path:
    """Remove what an unfinished session left in RUN/wandb, and create the mark for a new one.

    The mark is a file with the names of all earlier sessions; remove it once wandb has finished.
    """
    folder.mkdir(exist_ok=True)
    mark, sessions = folder / "unfinished", [path for path in folder.glob("*run-[0-9]*") if path.is_dir()]
    if not mark.exists():
        write_atomically(mark, "\n".join(path.name for path in sessions).encode())
        return mark
    kept = mark.read_text(encoding="utf-8").splitlines()
    for path in sessions:
        if path.name not in kept:
            shutil.rmtree(path, ignore_errors=True)  # wandb's helper may still be writing: retried next time
    return mark


def shown_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config as shown in wandb's columns: `optimizer.learning_rate` and `run.steps`, not `run.run.steps`.

    Includes the content of its precision manifest as `manifest`; None if there is none or it cannot be read.
    """
    run = config.get("run") or {}
    rest = {name: value for name, value in config.items() if name not in ("run", "deepspeed")}
    path, manifest = (run.get("precision") or {}).get("manifest"), None
    with suppress(OSError, ValueError):
        manifest = json.loads((REPOSITORY / path).read_text(encoding="utf-8")) if path else None
    return redact({**run, **rest, "ds_config": config.get("deepspeed") or {}, "manifest": manifest})


def start_run(job: dict[str, Any]) -> Any:
    """Start the wandb run, falling back to offline if online fails."""
    import wandb

    settings = wandb.Settings(
        silent=True,
        console="off",
        # Do not send command line, git remotes or the user's e-mail; our config has what matters.
        disable_git=True,
        disable_code=True,
        x_disable_meta=True,
        x_save_requirements=False,
        init_timeout=job["init_timeout_s"],
        login_timeout=job["init_timeout_s"],
        finish_timeout=job["finish_timeout_s"],
        finish_timeout_raises=True,
    )
    run, init = None, job["init"] | {"config": shown_config(job["config"])}
    if job["mode"] == "online":
        try:
            if not wandb.login(prompt=False):
                raise RuntimeError("no login: run `wandb login` or set WANDB_API_KEY")
            run = wandb.init(mode="online", settings=settings, reinit="create_new", **init)
        except Exception as error:  # whatever the reason, start an offline run instead
            report("log", f"wandb is recorded offline, since online failed: {one_line(error, 200)}")
    if run is None:
        run = wandb.init(mode="offline", settings=settings, reinit="create_new", **init)
    for place in (AXIS, "step", "applied", "tokens"):
        run.define_metric(place, hidden=True)  # axes, which would otherwise be the first charts
    run.define_metric("*", step_metric=AXIS)
    return run


def deliver(job: dict[str, Any]) -> None:
    """Follow the events; restart wandb if it dies.

    wandb's helper exits on the SIGTERM that a scheduler or launcher sends to the whole job, long before training ends.
    """
    import wandb

    delivered, folder = Delivered(Path(job["delivered"])), Path(job["init"]["dir"]) / "wandb"
    if delivered.lines > sum(1 for _ in Follower(Path(job["events"])).lines()):
        delivered.save(0)  # a wrong count, above the number of lines: deliver all of them again
    for left in reversed(range(ATTEMPTS)):
        mark = begin_session(folder)
        delivery = WandbDelivery(start_run(job), job, delivered.lines)
        try:
            delivery.follow(job)
            break
        except Exception as error:
            log_traceback()
            with suppress(Exception):  # expected, since it is dead
                wandb.teardown(exit_code=1)  # allows a restart
            if left == 0 or isinstance(error, NoSpaceLeft):
                begin_session(folder)
                raise
    mark.unlink()
    delivered.save(delivery.line)
    new = f"{max(0, delivery.line - delivery.earlier):,} new events"
    if delivery.url is None:
        report("wrote", f"{new}, offline; upload them: wandb sync {shlex.quote(job['init']['dir'] + '/wandb')}")
    else:
        report("sent", f"{new} to {delivery.url}")


if __name__ == "__main__":
    sys.exit(run_client(deliver))
