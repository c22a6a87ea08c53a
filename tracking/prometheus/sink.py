"""Prometheus as one more window on the run: rank 0 answers `GET /metrics` from a daemon thread.

Loopback only, unless `tracking.prometheus_address` says otherwise: whoever reaches the port can read the run's name,
host and losses, and nothing here asks who they are.

The last events of a run are those that page people, and they would be lost between two scrapes. So `close` waits for
one more scrape: only when someone has scraped before, no longer than they usually take, and never for a run that was
asked to stop and has little time left.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

from prometheus_client import disable_created_metrics, start_http_server
from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from tracking.events import Event
from tracking.prometheus.metrics import Metrics

LONGEST_WAIT_S = 30.0
_SLACK = 1.5  # a scrape may come this much later than the one before did
_ANSWERED_S = 0.2  # from collecting to the last byte of the answer


class PrometheusSink:
    """Serves the metrics of one run. Trouble with the port is raised by the first `write`, as RuntimeError."""

    def __init__(self, run: str, *, planned_steps: int, port: int, address: str = "127.0.0.1") -> None:
        """Open the port at once; 0 takes any that is free (see `url`). address: of the interface to listen on."""
        disable_created_metrics()  # a second series for each counter that nothing here asks for
        self.url: str | None = None
        """Where the metrics are; None when the port could not be had."""
        self._failure = ""
        self._server: Any = None
        self._last_words = False  # an end that someone should hear of
        self._metrics = Metrics(
            run, planned_steps=planned_steps, facts={"host": socket.gethostname(), "scheduler_job": _scheduler_job()}
        )
        self._scrapes = _Scrapes()
        self._metrics.registry.register(self._scrapes)
        try:
            self._server, _ = start_http_server(port, address, self._metrics.registry)
        except (OSError, OverflowError) as error:  # in use, not this host's address, not a port number
            reason = getattr(error, "strerror", None) or str(error)
            self._failure = f"no metrics at {address}:{port} ({reason}); choose another tracking.prometheus_port"
            return
        host = f"[{address}]" if ":" in address else address
        self.url = f"http://{host}:{self._server.server_port}/metrics"

    def write(self, event: Event) -> None:
        """Let the event move the metrics. RuntimeError when the port could not be opened."""
        if self._failure:
            raise RuntimeError(self._failure)
        self._metrics.update(event)
        if event["event"] == "run_end":
            self._last_words = event["status"] != "preempted"
            self._scrapes.forget()

    def close(self) -> None:
        """Wait for one last scrape, for at most `LONGEST_WAIT_S`, and close the port."""
        if self._server is None:
            return
        server, self._server = self._server, None
        if self._last_words and self._scrapes.wait():
            time.sleep(_ANSWERED_S)
        server.shutdown()
        server.server_close()


class _Scrapes:
    """A collector that takes note of being collected, which is once a scrape."""

    def __init__(self) -> None:
        self._count = 0
        self._last: float | None = None
        self._interval: float | None = None
        self._seen = threading.Event()

    def collect(self) -> Iterator[Metric]:
        """One metric: scrapes before this one."""
        now = time.monotonic()
        if self._last is not None:
            self._interval = now - self._last
        self._last = now
        yield GaugeMetricFamily("mantissa_exporter_scrapes", "Scrapes of this process before this one.", self._count)
        self._count += 1
        self._seen.set()

    def forget(self) -> None:
        """From here on only a later scrape counts."""
        self._seen.clear()

    def wait(self) -> bool:
        """Until the scrape that is due has come; False when it did not, or when there is no reason to expect one."""
        if self._interval is None or self._last is None:
            return False
        due = self._last + min(_SLACK * self._interval, LONGEST_WAIT_S)
        return self._seen.wait(max(0.0, due - time.monotonic()))


def _scheduler_job() -> str:
    """The job as GPU exporters name it: the Slurm job's number, or the pod's name."""
    if "SLURM_JOB_ID" in os.environ:
        return os.environ["SLURM_JOB_ID"]
    return socket.gethostname() if "KUBERNETES_SERVICE_HOST" in os.environ else ""
