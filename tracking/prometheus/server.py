"""The HTTP server for the metrics, built so that clients can tie up few resources of the run, and only briefly.

It runs in the training process, so the number of connections, and hence threads, is bounded; the oldest connection
makes room for a new one, each ends after `LONGEST_SECONDS`, and collecting the metrics takes at most a tenth of a core.
A real Prometheus scrape takes milliseconds and is the least affected.
"""

import gzip
import socket
import threading
import time
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import Any
from urllib.parse import parse_qs, urlsplit

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from config.printable import tell

PATH = "/metrics"
MOST_CONNECTIONS = 8
LONGEST_SECONDS = 5.0
"""Maximum lifetime of a connection."""
_IDLE_SHARE = 9  # the next collection waits this many times the CPU time of the last
_ACCEPT_PAUSE_S = 0.01  # at most a hundred connections a second
_RETRY_S = 1.0  # pause after a connection could not be accepted


class MetricsServer(ThreadingMixIn, TCPServer):
    """Answers `GET PATH` with the metrics of a registry, and nothing else."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 16

    def __init__(self, address: str, port: int, registry: CollectorRegistry) -> None:
        """Open the port. Raises OSError, OverflowError or UnicodeError if it is not available."""
        found = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, _, _, _, place = found[0]
        self._registry = registry
        self._open: dict[socket.socket, float] = {}  # connection to the time it was accepted, oldest first
        self._changed = threading.Condition()
        self._collecting = threading.Lock()
        self._next_collection = 0.0
        self._complained = False
        super().__init__((str(place[0]), port), _Handler)

    @property
    def port(self) -> int:
        return int(self.server_address[1])

    def start(self) -> None:
        """Serve from a background thread."""
        threading.Thread(target=self.serve_forever, daemon=True, name="metrics").start()

    def close(self) -> None:
        """Stop listening, and close every connection."""
        self.shutdown()
        self.server_close()
        self._end_connections(older_than=0.0)

    def collect(self, accept: str, names: list[str]) -> tuple[str, bytes]:
        """(content type, text) of the metrics. names: the metrics to return; empty returns all."""
        with self._collecting:
            time.sleep(max(0.0, self._next_collection - time.monotonic()))
            started = time.thread_time()
            encode, content_type = choose_encoder(accept)
            registry: Any = self._registry.restricted_registry(names) if names else self._registry
            text = encode(registry)
            self._next_collection = time.monotonic() + _IDLE_SHARE * (time.thread_time() - started)
        return content_type, text

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection. A failure, such as a lack of file descriptors, is printed once and followed by a pause,
        because it persists and the waiting client would keep this thread spinning."""
        try:
            return super().get_request()
        except OSError as error:
            if not self._complained:
                self._complained = True
                tell(f"metrics for Prometheus are not available ({error.strerror or error}); training continues")
            time.sleep(_RETRY_S)
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a separate thread once there is room; close the connection if there is none within a second."""
        with self._changed:
            if len(self._open) >= MOST_CONNECTIONS:
                _end(next(iter(self._open)))
            if not self._changed.wait_for(lambda: len(self._open) < MOST_CONNECTIONS, timeout=1.0):
                super().shutdown_request(request)
                return
            self._open[request] = time.monotonic()
        super().process_request(request, client_address)
        time.sleep(_ACCEPT_PAUSE_S)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection that was answered or whose client has left."""
        super().shutdown_request(request)
        with self._changed:
            self._open.pop(request, None)
            self._changed.notify_all()

    def service_actions(self) -> None:
        """End connections that have been open for too long; called twice a second."""
        self._end_connections(older_than=LONGEST_SECONDS)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that leave, or are cut off, in the middle of an answer."""

    def _end_connections(self, *, older_than: float) -> None:
        with self._changed:
            for connection, since in self._open.items():
                if time.monotonic() - since >= older_than:
                    _end(connection)


class _Handler(BaseHTTPRequestHandler):
    server: MetricsServer

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        if asked.path != PATH:
            self.send_error(HTTPStatus.NOT_FOUND, explain=f"The metrics are at {PATH}.")
            return
        try:
            names = parse_qs(asked.query, max_num_fields=100).get("name[]", [])
        except ValueError:
            self.send_error(HTTPStatus.BAD_REQUEST)
            return
        content_type, text = self.server.collect(self.headers.get("Accept", ""), names)
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", content_type)
        if "gzip" in self.headers.get("Accept-Encoding", ""):
            text = gzip.compress(text)
            self.send_header("Content-Encoding", "gzip")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing."""


def _end(connection: socket.socket) -> None:
    """Shut a connection down, which wakes the thread that serves it; that thread closes it."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
