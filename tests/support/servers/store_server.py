"""A real S3 server on loopback (moto's), and in front of it a proxy that fails as networks and stores do."""

import http.client
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import boto3

from config.machine.processes import free_port
from tests.support.jobs.launches import wait_until
from tests.support.servers import threads

CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": "AKIALOOPBACKONLY0000",
    "AWS_SECRET_ACCESS_KEY": "loopback-secret-loopback-secret-loopback",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_CONFIG_FILE": os.devnull,
    "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
}
SMALLEST_PART = 1 << 16
"""[bytes] That the server takes in a multipart upload; S3 takes 5 MiB and more."""
HANG_SECONDS = 6.0
SLOW_DOWN = ("SlowDown", "Please reduce your request rate.")
INTERNAL = ("InternalError", "We encountered an internal error. Please try again.")
DENIED = ("AccessDenied", "Access Denied")


@dataclass
class Fault:
    """A fault for the next `times` requests whose "METHOD /path?query" matches `pattern`."""

    pattern: str
    kind: int | str
    """A status to answer with; "cut before": the connection ends before an answer; "cut inside": half-way through the
    body of one; "hang": after HANG_SECONDS in which nothing happens; "done, then cut": the server did it, but the
    answer is lost; "corrupt": a byte of what is being stored changes on its way; "none": nothing happens."""
    times: int = 1
    seen: int = 0

    def takes(self, request: str) -> bool:
        if self.seen >= self.times or not re.search(self.pattern, request):
            return False
        self.seen += 1
        return True


class Proxy(threads.Server):
    """Passes requests on to `upstream` unless a fault takes them; `requests` has every one, in order."""

    def __init__(self, upstream: int) -> None:
        super().__init__(_Handler)
        self.upstream = upstream
        self.requests: list[str] = []
        self.faults: list[Fault] = []
        self.lock = threading.Lock()

    def fail(self, pattern: str, kind: int | str, times: int = 1) -> Fault:
        fault = Fault(pattern, kind, times)
        with self.lock:
            self.faults.append(fault)
        return fault

    def clear(self) -> None:
        with self.lock:
            self.faults.clear()
            self.requests.clear()

    def count(self, pattern: str) -> int:
        with self.lock:
            return sum(bool(re.search(pattern, request)) for request in self.requests)


class _Handler(threads.Handler):
    protocol_version = "HTTP/1.1"
    server: Proxy

    def handle_one(self) -> None:
        body = self.body()
        request = f"{self.command} {self.path}"
        with self.server.lock:
            self.server.requests.append(request)
            fault = next((fault.kind for fault in self.server.faults if fault.takes(request)), None)
        if isinstance(fault, int):
            self.answer_error(fault)
            return
        if fault == "hang":
            time.sleep(HANG_SECONDS)
        if fault in ("cut before", "hang"):
            self.cut()
            return
        if fault == "corrupt":
            body = bytes([body[0] ^ 1]) + body[1:]
        connection = http.client.HTTPConnection("127.0.0.1", self.server.upstream, timeout=60)
        headers = {name: value for name, value in self.headers.items() if name.lower() != "expect"}
        connection.request(self.command, self.path, body=body, headers=headers)
        response = connection.getresponse()
        content = response.read()
        connection.close()
        if fault == "done, then cut":
            self.cut()
            return
        self.send_response_only(response.status)
        for name, value in response.getheaders():
            if name.lower() not in ("transfer-encoding", "connection", "content-length"):
                self.send_header(name, value)
        length = response.getheader("Content-Length") if self.command == "HEAD" else str(len(content))
        self.send_header("Content-Length", length or "0")
        self.end_headers()
        if fault == "cut inside":
            self.wfile.write(content[: len(content) // 2])
            self.wfile.flush()
            self.cut()
            return
        self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = handle_one

    def answer_error(self, status: int) -> None:
        code, message = {403: DENIED, 503: SLOW_DOWN}.get(status, INTERNAL)
        text = f'<?xml version="1.0"?><Error><Code>{code}</Code><Message>{message}</Message></Error>'.encode()
        self.send_response_only(status)
        self.send_header("Content-Type", "application/xml")
        self.send_header("Content-Length", "0" if self.command == "HEAD" else str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def cut(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)


@dataclass
class S3Server:
    """moto's server, the proxy before it, and a client that goes past the proxy."""

    proxy: Proxy
    direct: Any

    def names(self, bucket: str) -> list[str]:
        found = self.direct.list_objects_v2(Bucket=bucket).get("Contents", [])
        return sorted(entry["Key"] for entry in found)

    def content(self, bucket: str, key: str) -> bytes:
        return self.direct.get_object(Bucket=bucket, Key=key)["Body"].read()


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """Start the server and the proxy; stops them at the end. The environment gets dummy credentials."""
    before = dict(os.environ)
    os.environ.update(CREDENTIALS)
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    environment = {**os.environ, "S3_UPLOAD_PART_MIN_SIZE": str(SMALLEST_PART)}
    server = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def answers() -> bool:
        assert server.poll() is None, f"moto's server ended with {server.returncode}"
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", port)) == 0

    try:
        wait_until(answers)
        with threads.answering(Proxy(port)) as proxy:
            yield S3Server(proxy, boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}"))
    finally:
        server.terminate()
        server.wait(timeout=20)
        for name in CREDENTIALS:
            os.environ.pop(name)
        os.environ.update({name: before[name] for name in CREDENTIALS if name in before})
