"""A liveness probe: exit code 1 if rank 0 of this pod does not answer, or has recorded nothing for too long.

    python -m launch.kubernetes.alive --port 9464 --silent-minutes 60

A closed port is not a failure: only rank 0's pod opens it, once the model is built. Set --silent-minutes above
run.timeout_minutes, after which a run with a stuck rank ends by itself, and above the longest evaluation. A single
metric is requested by name, which the sink does not count as a scrape.
"""

import time
from contextlib import closing, suppress
from http.client import HTTPConnection

from config.cli import Arguments, entry_point

METRIC = "mantissa_last_event_timestamp_seconds"
ANSWER_SECONDS = 10.0


def last_event(port: int) -> float | None:
    """Time of rank 0's last event, in seconds since the epoch; None without one, or if the port is closed. Raises
    TimeoutError or OSError if something listens there but does not answer."""
    connection = HTTPConnection("127.0.0.1", port, timeout=ANSWER_SECONDS)  # urlopen would obey http_proxy
    with closing(connection), suppress(ConnectionRefusedError):
        connection.request("GET", f"/metrics?name[]={METRIC}")
        answer = connection.getresponse()
        if answer.status != 200:
            raise OSError(f"HTTP {answer.status}")
        text = answer.read().decode()
        values = [line.rpartition(" ")[2] for line in text.splitlines() if line.startswith(METRIC)]
        return float(values[0]) if values else None
    return None


@entry_point()
def main(arguments: list[str] | None = None) -> int:
    """Returns 0 if alive or unknown, 1 if not."""
    parser = Arguments("python -m launch.kubernetes.alive", __doc__)
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
    raise SystemExit(main())
