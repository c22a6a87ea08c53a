"""The process that runs wandb.

wandb's own step counter is the line number of the event in `events.jsonl`, which never goes back, so wandb drops
nothing. What wandb keeps of a session in RUN/wandb is whole, or it is removed and made again from the events: wandb's
file is torn when its process or the machine dies, and `wandb sync` stops at a torn one.
"""

from __future__ import annotations

import json
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any

from config.cli import REPOSITORY
from config.errors import one_line
from config.files import write_atomically
from config.redact import redact
from tracking.jsonl import Follower
from tracking.trackers.delivery import Delivered, give_way, log_traceback, report, run_client
from tracking.wandb.charts import AXIS
from tracking.wandb.upload import NoSpaceLeft, WandbDelivery

ATTEMPTS = 3


class Unfinished:
    """Marks the session of RUN/wandb that is being written, by the names of the folders that were there before it."""

    def __init__(self, folder: Path) -> None:
        """folder: RUN/wandb, which is made where it is missing."""
        self._folder, self._path = folder, folder / "unfinished"
        folder.mkdir(exist_ok=True)

    def begin(self) -> None:
        """Remove what a session has left that wandb did not finish, and mark the next one."""
        if self._path.exists():
            kept = self._path.read_text(encoding="utf-8").splitlines()
            for path in self._sessions():
                if path.name not in kept:
                    shutil.rmtree(path, ignore_errors=True)  # wandb's helper may still be writing: the next time
        else:
            write_atomically(self._path, "\n".join(path.name for path in self._sessions()).encode())

    def end(self) -> None:
        """Keep the session: wandb has finished it."""
        self._path.unlink()

    def _sessions(self) -> list[Path]:
        return [path for path in self._folder.glob("*run-[0-9]*") if path.is_dir()]


def _as_shown(config: dict[str, Any]) -> dict[str, Any]:
    """The config as wandb's columns have it: `optimizer.learning_rate` and `run.steps`, not `run.run.steps`."""
    rest = {name: value for name, value in config.items() if name not in ("run", "deepspeed")}
    return {**(config.get("run") or {}), **rest, "ds_config": config.get("deepspeed") or {}}


def _manifest(config: dict[str, Any]) -> Any:
    """The content of the precision manifest that the run config names; None when there is none or it cannot be read."""
    path = ((config.get("run") or {}).get("precision") or {}).get("manifest")
    try:
        return json.loads((REPOSITORY / path).read_text(encoding="utf-8")) if path else None
    except (OSError, ValueError):
        return None


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
    run, config = None, job["config"]
    init = job["init"] | {"config": redact(_as_shown(config) | {"manifest": _manifest(config)})}
    if job["mode"] == "online":
        try:
            if not wandb.login(prompt=False):
                raise RuntimeError("no login: run `wandb login` or set WANDB_API_KEY")
            run = wandb.init(mode="online", settings=settings, reinit="create_new", **init)
        except Exception as error:  # whatever the reason, an offline run is started instead
            report("log", f"wandb is recorded offline, since online failed: {one_line(error, 200)}")
    if run is None:
        run = wandb.init(mode="offline", settings=settings, reinit="create_new", **init)
    give_way()  # wandb-core, too, which has a session of its own
    for place in (AXIS, "step", "applied", "tokens"):
        run.define_metric(place, hidden=True)  # axes, which would be the first charts
    run.define_metric("*", step_metric=AXIS)
    return run


def deliver(job: dict[str, Any]) -> None:
    """Follow the events; when wandb dies, start it again.

    wandb's helper ends at the SIGTERM that a scheduler or launcher sends to the whole job, long before training does.
    """
    delivered, unfinished = Delivered(Path(job["delivered"])), Unfinished(Path(job["init"]["dir"]) / "wandb")
    if delivered.lines > sum(1 for _ in Follower(Path(job["events"])).lines()):
        delivered.save(0)  # damaged: more than there are; what wandb has already it takes again
    for left in reversed(range(ATTEMPTS)):
        unfinished.begin()
        delivery = WandbDelivery(start_run(job), job, delivered.lines)
        try:
            delivery.follow(job)
            break
        except Exception as error:
            log_traceback()
            reset_wandb()
            if left == 0 or isinstance(error, NoSpaceLeft):
                unfinished.begin()
                raise
    unfinished.end()
    delivered.save(delivery.line)
    new = f"{max(0, delivery.line - delivery.earlier):,} new events"
    if delivery.url is None:
        report("wrote", f"{new}, offline; upload them: wandb sync {shlex.quote(job['init']['dir'] + '/wandb')}")
    else:
        report("sent", f"{new} to {delivery.url}")


def reset_wandb() -> None:
    """Reset wandb, so that it can be started again."""
    import wandb

    try:
        wandb.teardown(exit_code=1)
    except Exception:
        log_traceback()  # expected: it is dead


if __name__ == "__main__":
    sys.exit(run_client(deliver))
