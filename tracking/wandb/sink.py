"""wandb as a sink: rank 0 only, offline by default, and it never blocks training.

wandb runs in a process of its own (`tracking.wandb.worker`) that follows `events.jsonl` as it grows. Training does not
import wandb, waits for it only in `close` (for a limited time), and needs no queue: the file is the queue. A slow
start, a dead server, a stuck upload or a crash inside wandb therefore cannot block a step or the end of the run, and
when training is killed the worker still delivers the last events and marks the wandb run as failed.

The record needs a `JsonlSink` on the same run folder; this sink only starts, monitors and ends the worker.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from config.cli import REPOSITORY
from config.files import why_not_writable, write_atomically
from config.machine.binding import unbind
from config.printable import printable, shown
from config.redact import redact
from tracking.events import Event
from tracking.run_dir import RunDir

INIT_TIMEOUT_S = 20.0
FINISH_TIMEOUT_S = 30.0

_CODE_FOLDER = Path(__file__).resolve().parents[2]
_LOG = "wandb.log"  # in the run folder: standard error of the worker and wandb
_ID = re.compile(rb"[\w.-]{1,128}\s*")
_DECIDED = ("WANDB_MODE", "WANDB_DISABLED", "WANDB_CONSOLE", "WANDB_SILENT", "WANDB_DIR", "WANDB_RESUME")
"""Variables of what is decided here; wandb checks them even so, and refuses all of a run for one that is wrong."""
_MARGIN_S = 5.0  # to import wandb and read the file a last time


class WandbSink:
    """Logs to one wandb run. `write` raises RuntimeError once the worker has died; `close` returns within its limit."""

    def __init__(
        self,
        run_dir: RunDir,
        config: dict[str, Any],
        *,
        mode: str,
        project: str,
        name: str,
        notes: str,
        log_every_steps: int,
        group: str = "",
        tags: Sequence[str] = (),
        job_type: str = "train",
        models: Sequence[dict[str, Any]] = (),
        init_timeout_s: float = INIT_TIMEOUT_S,
        finish_timeout_s: float = FINISH_TIMEOUT_S,
    ) -> None:
        """Start the worker and return at once; it delivers new events and those that wandb does not have yet.

        config: `run` (the resolved run config), `deepspeed` (its JSON) and `environment`; secrets are hidden.
        mode: offline, online or disabled (then nothing is started). Online without a login or a reachable server
        becomes offline, with one line. models: facts as in `tracking.wandb.models`, recorded at the end.
        """
        self._run_dir = run_dir
        self._limit = init_timeout_s + finish_timeout_s + _MARGIN_S
        self._error_line = ""
        self._failure: OSError | None = None
        self._process: subprocess.Popen[bytes] | None = None
        if mode == "disabled":
            return
        job: dict[str, Any] = {
            "mode": mode,
            "training_pid": os.getpid(),
            "events": str(run_dir.events.resolve()),
            "delivered": str((run_dir.path / "wandb_delivered").resolve()),
            "lock": str((run_dir.path / ".wandb_lock").resolve()),
            "models": list(models),
            "log_every_steps": log_every_steps,
            "init_timeout_s": init_timeout_s,
            "finish_timeout_s": finish_timeout_s,
        }
        words: dict[str, Any] = {"project": project, "name": shown(name), "notes": printable(notes)}
        words |= {"group": shown(group) or None, "tags": [shown(tag) for tag in tags], "job_type": shown(job_type)}
        leaving = redact({**words, "config": _as_shown(config) | {"manifest": _manifest(config)}})
        job["config"] = redact(config)
        init = {"resume": "allow", "allow_val_change": True, **leaving}
        try:
            job["init"] = {**init, "id": run_id(run_dir), "dir": str(run_dir.path.resolve())}
            self._process = self._start(job)
        except OSError as error:  # a full disk, no process left: raised by the first write
            self._failure = error

    def _start(self, job: dict[str, Any]) -> subprocess.Popen[bytes]:
        # tracking.wandb in the run config decides, so that the mode is on record; WANDB_MODE does not.
        variables = {name: value for name, value in os.environ.items() if name not in _DECIDED}
        cache = Path(variables.get("XDG_CACHE_HOME") or Path(variables.get("HOME", "/")) / ".cache") / "wandb"
        for name, usual in (("WANDB_CACHE_DIR", cache), ("WANDB_DATA_DIR", self._run_dir.wandb)):
            if why_not_writable(Path(variables.get(name) or usual)):
                variables[name] = str(self._run_dir.wandb.resolve() / "cache")
        variables.setdefault("WANDB_ERROR_REPORTING", "false")  # no error reports to wandb from this machine
        # Files staged for upload stay in the run folder, so that `wandb sync` works from a copy of it elsewhere.
        variables.setdefault("WANDB_DATA_DIR", str(self._run_dir.wandb.resolve()))
        variables["PYTHONUTF8"] = "1"  # its lines are read as UTF-8, whatever the locale
        variables["PYTHONPATH"] = os.pathsep.join(filter(None, [str(_CODE_FOLDER), variables.get("PYTHONPATH")]))
        with (self._run_dir.path / _LOG).open("ab") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tracking.wandb.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env=variables,
                start_new_session=True,  # Ctrl-C is for training; the worker ends after it
            )
        unbind(process.pid)  # not on the cores of rank 0
        assert process.stdin is not None and process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        process.stdin.write(json.dumps(job, default=str).encode() + b"\n")
        process.stdin.flush()
        return process

    def write(self, event: Event) -> None:
        """Check the worker; the event itself reaches it through the file. RuntimeError when it has died."""
        if self._failure is not None:
            raise RuntimeError(f"wandb could not be started: {self._failure}") from self._failure
        if self._process is None:
            return
        code = self._process.poll()
        self._relay(self._process)
        if code is not None:
            raise RuntimeError(self._failure_message(code))

    def close(self) -> None:
        """Wait for wandb to deliver the rest, for a limited time. RuntimeError when it failed or was too slow."""
        if self._failure is not None:
            raise RuntimeError(f"wandb could not be started: {self._failure}") from self._failure
        if self._process is None:
            return
        process, self._process = self._process, None
        try:
            self._end(process)
            code = process.wait(self._limit)
        except subprocess.TimeoutExpired:
            process.kill()  # wandb's own helper ends with the worker
            process.wait()
            later = f"`wandb sync` on the newest folder in {self._run_dir.wandb} delivers the rest"
            raise RuntimeError(f"wandb did not finish within {self._limit:.0f} s; {later}") from None
        finally:
            self._relay(process)
        if code != 0:
            raise RuntimeError(self._failure_message(code))

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdin is not None
        try:
            process.stdin.write(b"end\n")  # a closed pipe is not enough: forked data workers may hold it open
            process.stdin.close()
        except BrokenPipeError:
            return  # it is already gone; its exit code is checked next

    def _failure_message(self, code: int) -> str:
        later = f"`python -m tracking.wandb.deliver {shlex.quote(str(self._run_dir.path))}` delivers the rest"
        return f"wandb failed: {self._error_line or f'exit code {code}'}; {later}; see {_LOG}"

    def _relay(self, process: subprocess.Popen[bytes]) -> None:
        """Print the worker's lines for the user, such as a server that cannot be reached."""
        assert process.stdout is not None
        for line in (process.stdout.read() or b"").decode(errors="replace").splitlines():
            kind, _, text = line.partition(": ")
            if kind == "log":
                print(f"mantissa: {shown(text)}", file=sys.stderr, flush=True)
            else:
                self._error_line = text


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


def run_id(run_dir: RunDir) -> str:
    """The wandb id of this run, created once and kept in the run folder: a resumed run continues the same wandb run."""
    path = run_dir.path / "wandb_run_id"
    if path.exists() and not _ID.fullmatch(path.read_bytes()):
        path.rename(path.with_name("wandb_run_id.damaged"))
        (run_dir.path / "wandb_delivered").unlink(missing_ok=True)
        print(f"mantissa: {path} was damaged: a new wandb run gets all of the events", file=sys.stderr, flush=True)
    if not path.exists():
        # Under `wandb agent` wandb accepts only the agent's id.
        named = os.environ.get("WANDB_RUN_ID") if os.environ.get("WANDB_SWEEP_ID") else None
        write_atomically(path, (named or uuid.uuid4().hex[:12]).encode())
    return path.read_text(encoding="utf-8").strip()
