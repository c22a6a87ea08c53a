"""wandb as a sink: rank 0 only, offline by default, and it never blocks training."""

import os
import re
import shlex
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from config.files import why_not_writable, write_atomically
from config.printable import printable, shown, tell
from config.redact import redact
from tracking.run_dir import RunDir
from tracking.trackers.sink import ClientSink, described

INIT_TIMEOUT_S = 20.0
FINISH_TIMEOUT_S = 30.0

_ID = re.compile(rb"[\w.-]{1,128}\s*")
_DECIDED = ("WANDB_MODE", "WANDB_DISABLED", "WANDB_CONSOLE", "WANDB_SILENT", "WANDB_DIR", "WANDB_RESUME")
"""Variables for settings made here; removed because wandb validates them anyway and rejects the run if one is wrong."""
_MARGIN_S = 5.0  # time to import wandb and read the file one last time


class WandbSink(ClientSink):
    def __init__(
        self,
        run_dir: RunDir,
        config: dict[str, Any],
        *,
        mode: str,
        models: Sequence[dict[str, Any]] = (),
        init_timeout_s: float = INIT_TIMEOUT_S,
        finish_timeout_s: float = FINISH_TIMEOUT_S,
    ) -> None:
        """Start the worker and return at once; it delivers new events and those that wandb still lacks.

        config: `run` (the resolved run config), `deepspeed` (its JSON) and `environment`; secrets are hidden.
        mode: offline, online or disabled (then nothing is started). Online without a login or a reachable server
        becomes offline, with one line. models: facts as in `tracking.wandb.models`, recorded at the end.
        """
        online = " --online" if mode == "online" else ""
        command = f"python -m tracking.wandb.sync {shlex.quote(str(run_dir.path))}{online}"
        limit_s = init_timeout_s + finish_timeout_s + _MARGIN_S
        super().__init__("wandb", run_dir, limit_s=limit_s, later=f"`{command}` delivers the rest")
        if mode == "disabled":
            return
        job: dict[str, Any] = {
            "mode": mode,
            "delivered": str((run_dir.path / "wandb_delivered").resolve()),
            "config": redact(config),
            "models": list(models),
            "log_every_steps": config["run"]["tracking"]["log_every_steps"],
            "init_timeout_s": init_timeout_s,
            "finish_timeout_s": finish_timeout_s,
            "lock_wait_s": finish_timeout_s,
        }
        leaving = described(config["run"])
        words: dict[str, Any] = {name: shown(said) for name, said in leaving.items()}
        words |= {"notes": printable(leaving["notes"]), "tags": [shown(tag) for tag in leaving["tags"]]}
        words["group"] = words["group"] or None
        init = {"resume": "allow", "allow_val_change": True, "dir": str(run_dir.path.resolve()), **words}
        try:
            self._start("tracking.wandb.worker", job | {"init": init | {"id": run_id(run_dir)}}, self._variables())
        except OSError as error:  # raised by the first write
            self._failure = error

    def _variables(self) -> dict[str, str]:
        # The mode comes from tracking.wandb in the run config, so that it is recorded, and not from WANDB_MODE.
        variables = {name: value for name, value in os.environ.items() if name not in _DECIDED}
        cache = Path(variables.get("XDG_CACHE_HOME") or Path(variables.get("HOME", "/")) / ".cache") / "wandb"
        for name, usual in (("WANDB_CACHE_DIR", cache), ("WANDB_DATA_DIR", self._run_dir.wandb)):
            if why_not_writable(Path(variables.get(name) or usual)):
                variables[name] = str(self._run_dir.wandb.resolve() / "cache")
        variables.setdefault("WANDB_ERROR_REPORTING", "false")  # do not send error reports to wandb
        # Keep files staged for upload in the run folder, so that `wandb sync` works from a copy of it elsewhere.
        variables.setdefault("WANDB_DATA_DIR", str(self._run_dir.wandb.resolve()))
        return variables


def run_id(run_dir: RunDir) -> str:
    """wandb id of this run, created once and kept in the run folder, so that a resumed run continues its wandb run."""
    path = run_dir.path / "wandb_run_id"
    if path.exists() and not _ID.fullmatch(path.read_bytes()):
        path.rename(path.with_name("wandb_run_id.damaged"))
        (run_dir.path / "wandb_delivered").unlink(missing_ok=True)
        tell(f"{path} was damaged: a new wandb run gets all of the events")
    if not path.exists():
        # Under `wandb agent`, wandb accepts only the agent's id.
        named = os.environ.get("WANDB_RUN_ID") if os.environ.get("WANDB_SWEEP_ID") else None
        write_atomically(path, (named or uuid.uuid4().hex[:12]).encode())
    return path.read_text(encoding="utf-8").strip()
