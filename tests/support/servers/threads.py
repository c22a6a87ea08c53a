"""Servers of a test, on a free port of the loopback interface, each in a thread of the test."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import BaseServer
from threading import Thread
from typing import Any, TypeVar

S = TypeVar("S", bound=BaseServer)


class Server(ThreadingHTTPServer):
    """Answers at `url`."""

    daemon_threads = True

    def __init__(self, handler: Any) -> None:
        super().__init__(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server_port}"

    def handle_error(self, *request: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # clients that hang up are what some tests are about
            super().handle_error(*request)


class Handler(BaseHTTPRequestHandler):
    """Reads whole bodies, answers in JSON, and writes nothing on stderr."""

    def log_message(self, *_: Any) -> None:
        """Silent."""

    def body(self) -> bytes:
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def answer(self, body: Any, status: int = 200, **headers: str) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", "Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def answering(server: S) -> Iterator[S]:
    """The server, which answers for as long as the context lasts."""
    thread = Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
