"""One tracker as a sink: rank 0 only, and it never blocks training."""

from __future__ import annotations

import os
from typing import Any

from config.redact import redact
from tracking.run_dir import RunDir
from tracking.trackers.process import ClientSink

CLOSE_SECONDS = 40.0
"""Seconds that the end of a run waits for a client to take the rest."""
LOCK_WAIT_S = 30.0


class TrackerSink(ClientSink):
    """Feeds one tracker."""

    def __init__(self, tracker: str, run_dir: RunDir, facts: dict[str, Any], *, log_every_steps: int) -> None:
        """Start the process and return at once; it delivers new events, and those that an earlier session left.

        tracker: tensorboard, mlflow, trackio or csv. facts: `name`, `project`, `group`, `tags`, `job_type`, `notes` and
        `config`, a nested dict; secrets are hidden.
        """
        super().__init__(tracker, run_dir, limit_s=CLOSE_SECONDS, later="the next session delivers the rest")
        job = {
            "tracker": tracker,
            "folder": str(run_dir.path.resolve()),
            "lock_wait_s": LOCK_WAIT_S,
            "log_every_steps": log_every_steps,
            **redact(facts),
        }
        try:
            self._start("tracking.trackers.worker", job, dict(os.environ))
        except OSError as error:  # raised by the first write
            self._failure = error
