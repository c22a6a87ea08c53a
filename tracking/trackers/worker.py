"""The process that runs a tracker's client. Each event becomes the row that wandb gets, on the same axis."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tracking.events import Event
from tracking.trackers.clients import DELIVERED, Client, open_client
from tracking.trackers.delivery import Delivered, Delivery, run_client
from tracking.wandb.charts import AXIS


class TrackerDelivery(Delivery):
    """Gives the numbers of new events to a client."""

    def __init__(self, client: Client, delivered: Delivered, log_every_steps: int) -> None:
        super().__init__(log_every_steps, delivered.lines)
        self._client, self._delivered = client, delivered

    def log(self, event: Event, row: dict[str, Any]) -> None:
        """Log the numbers of a row."""
        numbers = {name: float(value) for name, value in row.items() if isinstance(value, int | float)}
        attempt = int(numbers.pop(AXIS))
        numbers.pop("_timestamp", None)
        self._client.log(event, numbers, attempt)

    def flush(self) -> None:
        """Have the client store what it was given, and remember how much that was."""
        if self.line > self._delivered.lines:
            self._client.flush()
            self._delivered.save(self.line)

    def close(self, exit_code: int) -> None:
        """End the client's run."""
        self._client.close(exit_code)


def deliver(job: dict[str, Any]) -> None:
    """Deliver a run as a job of `tracking.trackers.sink` says."""
    delivered = Delivered(Path(job["folder"]) / DELIVERED.format(job["tracker"]))
    TrackerDelivery(open_client(job), delivered, job["log_every_steps"]).follow(job)


if __name__ == "__main__":
    sys.exit(run_client(deliver))
