"""The training side of a client that runs in a separate process: start it, monitor it, end it.

The process (`tracking.trackers.delivery`) follows `events.jsonl` as it grows: the file is the queue. Training does not
import the client and waits for it only in `close`, for a limited time. A slow start, a dead server, a stuck upload or a
crash of the client therefore cannot block a step or the end of the run, and when training is killed the process still
delivers the last events. The record needs a `JsonlSink` on the same run folder.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from config.machine.binding import unbind
from config.printable import shown, tell
from config.redact import redact
from tracking.events import Event
from tracking.run_dir import RunDir

CLOSE_SECONDS = 40.0
"""Seconds that the end of a run waits for a client to receive the remaining events."""
LOCK_WAIT_S = 30.0
_CODE_FOLDER = Path(__file__).resolve().parents[2]


class ClientSink:
    """One client as a sink. `write` raises RuntimeError once its process has died; `close` returns within its limit."""

    def __init__(self, client: str, run_dir: RunDir, *, limit_s: float, later: str) -> None:
        """client: its name, and that of its log in the run folder. later: text on who delivers the rest if it fails."""
        self._client, self._run_dir, self._limit, self._later = client, run_dir, limit_s, later
        self._log = f"{client}.log"
        self.done, self._error_line = "", ""
        self._failure: OSError | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def _start(self, module: str, job: dict[str, Any], variables: dict[str, str]) -> None:
        """Start the process. job: completed here with what `tracking.trackers.delivery` needs. variables: environment.

        Raises OSError (disk full, no process left).
        """
        job |= {
            "training_pid": os.getpid(),
            "events": str(self._run_dir.events.resolve()),
            "lock": str(self._run_dir.path.resolve() / f".{self._client}_lock"),
        }
        path = os.pathsep.join(filter(None, [str(_CODE_FOLDER), variables.get("PYTHONPATH")]))
        with (self._run_dir.path / self._log).open("ab") as stderr:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", module],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**variables, "PYTHONPATH": path, "PYTHONUTF8": "1"},  # its output is read as UTF-8
                start_new_session=True,  # Ctrl-C must reach only training; the worker ends after it
            )
        unbind(process.pid)  # do not compete for the cores of rank 0
        assert process.stdin is not None and process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        process.stdin.write(json.dumps(job, default=str).encode() + b"\n")
        process.stdin.flush()
        self._process = process

    def write(self, event: Event) -> None:
        """Check the process, which gets the event through the file. Raises RuntimeError if it has died."""
        self._require_start()
        if self._process is not None:
            code = self._process.poll()
            self._relay(self._process)
            if code is not None:
                raise RuntimeError(self._failure_message(code))

    def close(self) -> None:
        """Wait a limited time for the client to receive the rest. Raises RuntimeError if it failed or was too slow."""
        self._require_start()
        if self._process is None:
            return
        process, self._process = self._process, None
        assert process.stdin is not None
        try:
            process.stdin.write(b"end\n")  # a closed pipe is not enough: forked data workers may hold it open
            process.stdin.close()
        except BrokenPipeError:
            pass  # already gone; its exit code is checked next
        try:
            code = process.wait(self._limit)
        except subprocess.TimeoutExpired:
            process.kill()  # processes that the client started end with it
            process.wait()
            text = f"{self._client} did not finish within {self._limit:.0f} s; {self._later}; see {self._log}"
            raise RuntimeError(text) from None
        finally:
            self._relay(process)
        if code != 0:
            raise RuntimeError(self._failure_message(code))

    def _require_start(self) -> None:
        if self._failure is not None:
            raise RuntimeError(f"{self._client} could not be started: {self._failure}") from self._failure

    def _failure_message(self, code: int) -> str:
        return f"{self._client} failed: {self._error_line or f'exit code {code}'}; {self._later}; see {self._log}"

    def _relay(self, process: subprocess.Popen[bytes]) -> None:
        """Print the process's messages for the user, such as an unreachable server, and keep its outcome."""
        assert process.stdout is not None
        for line in (process.stdout.read() or b"").decode(errors="replace").splitlines():
            kind, _, text = line.partition(": ")
            if kind == "log":
                tell(text)
            elif kind in ("sent", "wrote"):
                self.done = f"{kind} {shown(text)}"
            else:
                self._error_line = shown(text)


def described(config: dict[str, Any]) -> dict[str, Any]:
    """Name, notes, project, group, tags and job type of a run for a tracker, from its resolved config; no secrets."""
    run, own = config["run"], config["tracking"]
    found = {"name": run["name"], "notes": run["hypothesis"], "project": own["project"]}
    found |= {"group": own.get("group") or "", "tags": own.get("tags") or []}
    return redact(found | {"job_type": own.get("job_type") or "train"})


class TrackerSink(ClientSink):
    def __init__(self, tracker: str, run_dir: RunDir, config: dict[str, Any]) -> None:
        """Start the process and return at once; it delivers new events and those left over from earlier sessions.

        tracker: tensorboard, mlflow, trackio or csv. config: the resolved run config; secrets are hidden.
        """
        super().__init__(tracker, run_dir, limit_s=CLOSE_SECONDS, later="the next session delivers the rest")
        job = {
            "tracker": tracker,
            "folder": str(run_dir.path.resolve()),
            "lock_wait_s": LOCK_WAIT_S,
            "earlier_bytes": run_dir.events.stat().st_size if run_dir.events.exists() else 0,
            "log_every_steps": config["tracking"]["log_every_steps"],
            "config": redact(config),
            **described(config),
        }
        try:
            self._start("tracking.trackers.clients", job, dict(os.environ))
        except OSError as error:  # raised by the first write
            self._failure = error
