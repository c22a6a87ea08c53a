"""Prometheus as a sink: rank 0 answers `GET /metrics` from daemon threads (server.py).

Listens on loopback unless `tracking.prometheus_address` is set, since there is no authentication. The last events of a
run would be lost between two scrapes, so `close` waits for one more, but only if there were scrapes before, for little
longer than their longest recent interval, and never for a preempted run.
"""

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Iterator
from itertools import pairwise

from prometheus_client import disable_created_metrics
from prometheus_client.metrics_core import GaugeMetricFamily, Metric

from tracking.events import Event
from tracking.prometheus.metrics import Metrics
from tracking.prometheus.server import PATH, MetricsServer

LONGEST_WAIT_S = 30.0
_SLACK = 1.5  # wait this many times the longest of the recent intervals
_RECENT = 5  # scrapes, which come at uneven intervals if several servers or people scrape
_ANSWERED_S = 0.2  # time to send the response after collecting


class PrometheusSink:
    """Serves the metrics of one run. If the port cannot be opened, the first `write` raises RuntimeError."""

    def __init__(self, run: str, *, planned_steps: int, port: int, address: str = "127.0.0.1") -> None:
        """Open the port immediately; 0 takes any free one (see `url`). address: interface to listen on."""
        disable_created_metrics()  # they add a useless second series for each counter
        self.url: str | None = None
        """URL of the metrics; None if the port could not be opened."""
        self._failure = ""
        self._server: MetricsServer | None = None
        self._await_scrape = False  # whether `close` waits for a last scrape
        pod = socket.gethostname() if "KUBERNETES_SERVICE_HOST" in os.environ else ""
        # The job as named by GPU exporters: the Slurm job ID, or the pod's name.
        facts = {"host": socket.gethostname(), "scheduler_job": os.environ.get("SLURM_JOB_ID", pod)}
        self._metrics = Metrics(run, planned_steps=planned_steps, facts=facts)
        self._scrapes = _Scrapes()
        self._metrics.registry.register(self._scrapes)
        try:
            server = MetricsServer(address, port, self._metrics.registry)
            server.start()
        except (OSError, OverflowError, UnicodeError, RuntimeError) as error:  # in use, wrong address, no thread left
            reason = getattr(error, "strerror", None) or str(error)
            self._failure = f"no metrics at {address}:{port} ({reason}); choose another tracking.prometheus_port"
            return
        host = f"[{address}]" if ":" in address else address
        self.url = f"http://{host}:{server.port}{PATH}"
        self._server = server

    def write(self, event: Event) -> None:
        """Update the metrics. Raises RuntimeError if the port could not be opened."""
        if self._failure:
            raise RuntimeError(self._failure)
        self._metrics.update(event)
        if event["event"] == "run_end":
            self._await_scrape = event["status"] != "preempted"
            self._scrapes.reset()

    def close(self) -> None:
        """Wait at most `LONGEST_WAIT_S` for one last scrape, then close the port."""
        if self._server is None:
            return
        server, self._server = self._server, None
        if self._await_scrape and self._scrapes.wait():
            time.sleep(_ANSWERED_S)
        server.close()


class _Scrapes:
    """A collector that counts scrapes, since each scrape collects it once."""

    def __init__(self) -> None:
        self._count = 0
        self._times: deque[float] = deque(maxlen=_RECENT)
        self._seen = threading.Event()

    def collect(self) -> Iterator[Metric]:
        """Yield one metric: the number of scrapes before this one."""
        self._times.append(time.monotonic())
        yield GaugeMetricFamily("mantissa_exporter_scrapes", "Scrapes of this process before this one.", self._count)
        self._count += 1
        self._seen.set()

    def reset(self) -> None:
        """Make `wait` ignore the scrapes so far."""
        self._seen.clear()

    def wait(self) -> bool:
        """Wait for the next scrape; False if none came, or if there were too few to know their interval."""
        times = [*self._times]  # more may come in other threads
        intervals = [later - earlier for earlier, later in pairwise(times)]
        if not intervals:
            return False
        due = times[-1] + min(_SLACK * max(intervals), LONGEST_WAIT_S)
        return self._seen.wait(max(0.0, due - time.monotonic()))
