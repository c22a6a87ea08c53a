"""The process that runs wandb.

wandb's own step counter is the line number of the event in `events.jsonl`, which never goes back, so wandb drops
nothing. What wandb keeps of a session in RUN/wandb is whole, or it is removed and made again from the events: wandb's
file is torn when its process or the machine dies, and `wandb sync` stops at a torn one.
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
    """Remove what a session has left in RUN/wandb that wandb did not finish, and mark the next one.

    The mark, which is returned and to be removed when wandb has finished, has the names of the sessions before it.
    """
    folder.mkdir(exist_ok=True)
    mark, sessions = folder / "unfinished", [path for path in folder.glob("*run-[0-9]*") if path.is_dir()]
    if not mark.exists():
        write_atomically(mark, "\n".join(path.name for path in sessions).encode())
        return mark
    kept = mark.read_text(encoding="utf-8").splitlines()
    for path in sessions:
        if path.name not in kept:
            shutil.rmtree(path, ignore_errors=True)  # wandb's helper may still be writing: the next time
    return mark


def shown_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config as wandb's columns have it: `optimizer.learning_rate` and `run.steps`, not `run.run.steps`.

    With the content of the precision manifest that it names; None when there is none or it cannot be read.
    """
    run = config.get("run") or {}
    rest = {name: value for name, value in config.items() if name not in ("run", "deepspeed")}
    path, manifest = (run.get("precision") or {}).get("manifest"), None
    with suppress(OSError, ValueError):
        manifest = json.loads((REPOSITORY / path).read_text(encoding="utf-8")) if path else None
    return redact({**run, **rest, "ds_config": config.get("deepspeed") or {}, "manifest": manifest})


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
    run, init = None, job["init"] | {"config": shown_config(job["config"])}
    if job["mode"] == "online":
        try:
            if not wandb.login(prompt=False):
                raise RuntimeError("no login: run `wandb login` or set WANDB_API_KEY")
            run = wandb.init(mode="online", settings=settings, reinit="create_new", **init)
        except Exception as error:  # whatever the reason, an offline run is started instead
            report("log", f"wandb is recorded offline, since online failed: {one_line(error, 200)}")
    if run is None:
        run = wandb.init(mode="offline", settings=settings, reinit="create_new", **init)
    for place in (AXIS, "step", "applied", "tokens"):
        run.define_metric(place, hidden=True)  # axes, which would be the first charts
    run.define_metric("*", step_metric=AXIS)
    return run


def deliver(job: dict[str, Any]) -> None:
    """Follow the events; when wandb dies, start it again.

    wandb's helper ends at the SIGTERM that a scheduler or launcher sends to the whole job, long before training does.
    """
    import wandb

    delivered, folder = Delivered(Path(job["delivered"])), Path(job["init"]["dir"]) / "wandb"
    if delivered.lines > sum(1 for _ in Follower(Path(job["events"])).lines()):
        delivered.save(0)  # damaged: more than there are; what wandb has already it takes again
    for left in reversed(range(ATTEMPTS)):
        mark = begin_session(folder)
        delivery = WandbDelivery(start_run(job), job, delivered.lines)
        try:
            delivery.follow(job)
            break
        except Exception as error:
            log_traceback()
            with suppress(Exception):  # expected: it is dead
                wandb.teardown(exit_code=1)  # so that it can be started again
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
