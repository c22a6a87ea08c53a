"""One tracker as a sink: rank 0 only, and it never blocks training.

Its client runs in a process of its own (`tracking.trackers.worker`) that follows `events.jsonl`, as wandb's does: a
slow start, a dead server or a crash of the client cannot block a step. What a session could not deliver, the next does.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from config.machine.binding import unbind
from config.printable import shown
from config.redact import redact
from tracking.events import Event
from tracking.run_dir import RunDir

CLOSE_SECONDS = 40.0
"""How long the end of a run waits for a client to take the rest."""

_CODE_FOLDER = Path(__file__).resolve().parents[2]


class TrackerSink:
    """Feeds one tracker. `write` raises RuntimeError once its process has died; `close` returns within its limit."""

    def __init__(self, tracker: str, run_dir: RunDir, facts: dict[str, Any], *, log_every_steps: int) -> None:
        """Start the process and return at once; it delivers new events, and those that an earlier session left.

        tracker: tensorboard, mlflow, trackio or csv. facts: `name`, `project`, `group`, `tags`, `job_type`, `notes` and
        `config`, a nested dict; secrets are hidden.
        """
        self._tracker, self._folder = tracker, run_dir.path
        self._log = f"{tracker}.log"  # in the run folder: standard error of the client
        job = {
            "tracker": tracker,
            "training_pid": os.getpid(),
            "folder": str(run_dir.path.resolve()),
            "log_every_steps": log_every_steps,
            **redact(facts),
        }
        self._failure: OSError | None = None
        self._process: subprocess.Popen[bytes] | None = None
        try:
            self._process = self._start(job)
        except OSError as error:  # a full disk, no process left: raised by the first write
            self._failure = error

    def _start(self, job: dict[str, Any]) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(filter(None, [str(_CODE_FOLDER), os.environ.get("PYTHONPATH")]))
        with (self._folder / self._log).open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tracking.trackers.worker"],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=output,
                env={**os.environ, "PYTHONPATH": path, "PYTHONUTF8": "1"},
                start_new_session=True,  # Ctrl-C is for training; the worker ends after it
            )
        unbind(process.pid)  # not on the cores of rank 0
        assert process.stdin is not None
        process.stdin.write(json.dumps(job, default=str).encode() + b"\n")
        process.stdin.flush()
        return process

    def write(self, event: Event) -> None:
        """Check the process; the event itself reaches it through the file. RuntimeError when it has died."""
        if self._failure is not None:
            raise RuntimeError(f"{self._tracker} could not be started: {self._failure}") from self._failure
        if self._process is not None and self._process.poll() is not None:
            raise RuntimeError(self._why(self._process.returncode))

    def close(self) -> None:
        """Wait for the client to take the rest, for a limited time. RuntimeError when it failed or was too slow."""
        if self._failure is not None or self._process is None:
            return
        process, self._process = self._process, None
        assert process.stdin is not None
        try:
            process.stdin.write(b"end\n")
            process.stdin.close()
        except BrokenPipeError:
            pass  # it is already gone; its exit code is checked next
        try:
            code = process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise RuntimeError(
                f"{self._tracker} did not finish within {CLOSE_SECONDS:.0f} s; see {self._log}"
            ) from None
        if code:
            raise RuntimeError(self._why(code))

    def _why(self, code: int) -> str:
        """The last line of the client's log."""
        try:
            said = (self._folder / self._log).read_text(encoding="utf-8", errors="replace").strip().splitlines()
        except OSError:
            said = []
        reason = shown(said[-1])[:200] if said else f"exit code {code}"
        return f"{self._tracker} failed: {reason}; the next session delivers the rest; see {self._log}"
