"""A liveness probe: exit code 1 when rank 0 of this pod answers no more, or has recorded nothing for very long.

    python -m launch.kubernetes.alive --port 9464 --silent-minutes 60

A port that is closed is no sign of death: no pod but rank 0's ever opens it, rank 0's opens it when the model stands,
and the supervisor may be starting the job again. A run whose ranks wait for one of them ends by itself after
run.timeout_minutes and says which; so give the probe more than that, and more than the longest evaluation.

Asks for one metric by name: the sink does not take that for a scrape, and so still waits for Prometheus at its end.
"""

from __future__ import annotations

import argparse
import sys
import time
import urllib.error
import urllib.request

from config.cli import Arguments, entry_point

METRIC = "mantissa_last_event_timestamp_seconds"
ANSWER_SECONDS = 10.0


def last_event(port: int) -> float | None:
    """When rank 0 recorded something last, in seconds since the epoch; None when it has not, or the port is closed.

    Raises TimeoutError or OSError when something listens there and does not answer.
    """
    url = f"http://127.0.0.1:{port}/metrics?name[]={METRIC}"
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_SECONDS) as answer:
            text = answer.read().decode()
    except urllib.error.URLError as error:
        if isinstance(error.reason, ConnectionRefusedError):
            return None
        raise
    values = [line.rpartition(" ")[2] for line in text.splitlines() if line.startswith(METRIC)]
    return float(values[0]) if values else None


@entry_point()
def main(arguments: list[str]) -> int:
    """0: alive, or nothing to judge by; 1: not."""
    parser = Arguments(prog="python -m launch.kubernetes.alive", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--port", type=int, required=True, help="tracking.prometheus_port")
    parser.add_argument("--silent-minutes", type=float, required=True, help="how long nothing may be recorded")
    options = parser.parse_args(arguments)
    try:
        moment = last_event(options.port)
    except OSError as error:
        print(f"port {options.port} is open and does not answer: {error}")
        return 1
    silent = 0.0 if moment is None else (time.time() - moment) / 60
    if silent > options.silent_minutes:
        print(f"nothing recorded for {silent:.0f} minutes; --silent-minutes {options.silent_minutes:g}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
