"""The process that runs a tracker's client, and the clients behind one small interface.

Their packages are optional and imported only here. Each event becomes the same row as for wandb, on the same axis.
"""

import csv
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from config.files import write_atomically
from tracking.compare.differences import flat
from tracking.events import Event
from tracking.jsonl import Follower
from tracking.trackers.delivery import RUNNING, Delivered, Delivery, run_client
from tracking.trackers.tensorboard_client import TensorBoard
from tracking.wandb.charts import AXIS

DELIVERED = ".{}_delivered"
"""File in the run folder with the number of event lines that the named tracker has stored."""

CSV_COLUMNS = (
    *("attempt", "step", "time", "tokens", "train/loss", "train/grad_norm", "train/clip_coefficient", "train/lr"),
    *("train/loss_scale", "train/applied", "train/skipped_total", "train/step_seconds", "train/tokens_per_second"),
    *("train/memory_bytes", "eval/loss", "eval/perplexity"),
)


class Client(Protocol):
    """One tracker's run. Any method may raise: the worker then ends, and training continues."""

    def log(self, event: Event, numbers: dict[str, float], attempt: int) -> None:
        """Log an event and its numbers by name, which may be non-finite. attempt: position on the axis."""

    def flush(self) -> None:
        """Store everything logged so far."""

    def close(self, exit_code: int, verdict: dict[str, Any]) -> None:
        """Mark the run as ended; a non-zero code means it failed. verdict: as for `Delivery.close`."""


class MLflow:
    """A run at MLFLOW_TRACKING_URI, or in RUN/mlflow.db if that is not set; a resumed run continues it."""

    _MOST_METRICS, _MOST_PARAMS, _MOST_TEXT = 1000, 100, 500  # per batch; characters of a parameter

    def __init__(self, job: dict[str, Any]) -> None:
        from mlflow.entities import Param
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        folder = Path(job["folder"])
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{folder / 'mlflow.db'}")
        self._pending: list[Any] = []
        known = folder / "mlflow_run_id"
        try:
            self._run = self._client.get_run(known.read_text(encoding="utf-8").strip()).info.run_id
            self._client.update_run(self._run, status="RUNNING")
        except (OSError, MlflowException):  # a new run, or another server
            experiment = self._client.get_experiment_by_name(job["project"])
            number = experiment.experiment_id if experiment else self._client.create_experiment(job["project"])
            tags = {"mlflow.note.content": job["notes"], "group": job["group"], "job_type": job["job_type"]}
            tags |= {f"tag.{tag}": "true" for tag in job["tags"]}
            kept = {name: value for name, value in tags.items() if value}
            self._run = self._client.create_run(number, tags=kept, run_name=job["name"]).info.run_id
            (folder / DELIVERED.format("mlflow")).unlink(missing_ok=True)  # it has nothing yet of what was delivered
            write_atomically(known, self._run.encode())
            params = [Param(_mlflow_name(key), str(value)[: self._MOST_TEXT]) for key, value in flat(job["config"])]
            for batch in _batches(params, self._MOST_PARAMS):
                self._client.log_batch(self._run, params=batch)

    def log(self, event: Event, numbers: dict[str, float], attempt: int) -> None:
        """Queue metrics for the next flush."""
        from mlflow.entities import Metric

        at = int(event["time"] * 1000)
        self._pending += [Metric(_mlflow_name(name), value, at, attempt) for name, value in numbers.items()]
        if event["event"] == "run_start":
            self._tag(RUNNING)

    def flush(self) -> None:
        pending, self._pending = self._pending, []
        for batch in _batches(pending, self._MOST_METRICS):
            self._client.log_batch(self._run, metrics=batch)

    def _tag(self, verdict: dict[str, Any]) -> None:
        for name in RUNNING.keys() & verdict:
            self._client.set_tag(self._run, name, verdict[name])

    def close(self, exit_code: int, verdict: dict[str, Any]) -> None:
        """Set the status (FINISHED, KILLED if preempted, or FAILED), and the verdict as tags."""
        self.flush()
        self._tag(verdict)
        status = {0: "FINISHED", 75: "KILLED"}.get(exit_code, "FAILED")
        self._client.set_terminated(self._run, status=status)


class Trackio:
    """A Trackio run, stored locally in TRACKIO_DIR unless Trackio's environment variables name a Space."""

    def __init__(self, job: dict[str, Any]) -> None:
        import trackio

        self._trackio = trackio
        config = dict(flat(job["config"]))
        options = {"group": job["group"]} if job["group"] else {}
        known = Path(job["folder"]) / "trackio_run_id"
        resume = "allow" if known.with_name(DELIVERED.format("trackio")).exists() else "never"
        run = trackio.init(project=job["project"], name=job["name"], config=config, resume=resume, **options)
        if resume == "allow" and known.exists():  # it resumed the newest run of this name, maybe of another run folder
            run.id = known.read_text(encoding="utf-8")
        else:
            write_atomically(known, run.id.encode())

    def log(self, event: Event, numbers: dict[str, float], attempt: int) -> None:
        """Log metrics. Trackio's own axis is called "step", so the run's step becomes "train/step"."""
        named = {"train/step" if name == "step" else name: value for name, value in numbers.items()}
        self._trackio.log(named, step=attempt)

    def flush(self) -> None:
        """Do nothing: Trackio sends by itself."""

    def close(self, exit_code: int, verdict: dict[str, Any]) -> None:
        """Send the rest and finish the run."""
        self._trackio.finish()


class Csv:
    """RUN/metrics.csv for spreadsheets: a row per step and evaluation, with less than events.jsonl has."""

    def __init__(self, job: dict[str, Any]) -> None:
        path = Path(job["folder"]) / "metrics.csv"
        whole = path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0
        self._file = path.open("a", encoding="utf-8", newline="")
        self._file.truncate(whole)  # the rest is a row, cut within a number, that is delivered again
        self._writer = csv.DictWriter(self._file, CSV_COLUMNS, extrasaction="ignore")
        if not whole:
            self._writer.writeheader()

    def log(self, event: Event, numbers: dict[str, float], attempt: int) -> None:
        """Write a row for a step or an evaluation; ignore other events."""
        if "train/loss" in numbers or "eval/loss" in numbers:
            self._writer.writerow({**numbers, "attempt": attempt, "time": event["time"], "step": int(numbers["step"])})

    def flush(self) -> None:
        self._file.flush()

    def close(self, exit_code: int, verdict: dict[str, Any]) -> None:
        self._file.close()


_CLIENTS: dict[str, Callable[[dict[str, Any]], Client]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
    "trackio": Trackio,
    "csv": Csv,
}


def _batches(items: list[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _mlflow_name(name: str) -> str:
    """A valid MLflow name: at most 250 letters, digits, underscores, dashes, periods, spaces and slashes."""
    return "".join(letter if letter.isalnum() or letter in "_-. /" else "_" for letter in name)[:250]


class TrackerDelivery(Delivery):
    def __init__(self, client: Client, delivered: Delivered, log_every_steps: int) -> None:
        super().__init__(log_every_steps, delivered.lines)
        self._client, self._delivered = client, delivered

    def log(self, event: Event, row: dict[str, Any], *, earlier: bool) -> None:
        if earlier:
            return
        numbers = {name: float(value) for name, value in row.items() if isinstance(value, int | float)}
        attempt = int(numbers.pop(AXIS))
        numbers.pop("_timestamp", None)
        self._client.log(event, numbers, attempt)

    def flush(self) -> None:
        """Have the client store what it was given, and record how many lines that covers."""
        if self.line > self._delivered.lines:
            self._client.flush()
            self._delivered.save(self.line)

    def close(self, exit_code: int, verdict: dict[str, Any]) -> None:
        self._client.close(exit_code, verdict)


def deliver(job: dict[str, Any]) -> None:
    """Deliver the run described by a job of `tracking.trackers.sink`."""
    client = _CLIENTS[job["tracker"]](job)
    delivered = Delivered(Path(job["folder"]) / DELIVERED.format(job["tracker"]))
    events = Follower(Path(job["events"]))
    # A power failure takes the newest lines from the file, but not from the count, which is fsynced.
    delivered.lines = min(delivered.lines, sum(events.offset <= job["earlier_bytes"] for _ in events.lines()))
    TrackerDelivery(client, delivered, job["log_every_steps"]).follow(job)


if __name__ == "__main__":
    sys.exit(run_client(deliver))
