"""Whoever reaches the port of the metrics can neither use up what the run needs nor keep others from scraping."""

import os
import resource
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry, Gauge

from tests.support.jobs.launches import wait_until
from tracking.prometheus import server as server_file
from tracking.prometheus.server import LONGEST_SECONDS, MOST_CONNECTIONS, MetricsServer

GET = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"


@pytest.fixture
def registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    Gauge("height_metres", "Of the tide.", registry=registry).set(3)
    return registry


@pytest.fixture
def server(registry: CollectorRegistry) -> Iterator[MetricsServer]:
    server = MetricsServer("127.0.0.1", 0, registry)
    server.start()
    yield server
    server.close()


def connect(server: MetricsServer) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=20)


def said(client: socket.socket) -> bytes:
    """Everything up to the end of the connection."""
    parts = []
    try:
        while part := client.recv(1 << 20):
            parts.append(part)
    except ConnectionResetError:
        pass  # the server closed with bytes of the request unread, which resets the connection
    return b"".join(parts)


def answer(server: MetricsServer, request: bytes) -> bytes:
    with connect(server) as client:
        client.sendall(request)
        return said(client)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def scrape_seconds(server: MetricsServer) -> float:
    started = time.monotonic()
    text = urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics", timeout=20).read()
    assert b"height_metres 3.0" in text
    return time.monotonic() - started


def test_connections_that_are_held_open_cost_few_descriptors_and_threads_and_others_are_answered(server) -> None:
    before, threads = descriptors(), threading.active_count()
    with ExitStack() as held:
        for count in range(1, 101):
            held.enter_context(connect(server))
            if count % 20 == 0:
                assert scrape_seconds(server) < 3.0, "the oldest of those who say nothing make room"
            # One more of each may be on its way out.
            assert descriptors() - before - count <= MOST_CONNECTIONS + 1
            assert threading.active_count() - threads <= MOST_CONNECTIONS + 1
    # Less is left where a thread of an earlier test has ended meanwhile.
    wait_until(lambda: descriptors() <= before and threading.active_count() <= threads, seconds=LONGEST_SECONDS)


@pytest.mark.parametrize("request_start", [b"", b"G", b"GET /metrics HTTP/1.1\r\n"])
def test_a_client_that_is_slow_to_ask_is_cut_off(server, monkeypatch, request_start) -> None:
    monkeypatch.setattr(server_file, "LONGEST_SECONDS", 0.5)
    started = time.monotonic()
    with connect(server) as client:
        with pytest.raises(OSError):  # a byte from time to time keeps nothing open
            client.sendall(request_start)
            for _ in range(40):
                client.sendall(b"x")
                time.sleep(0.1)
        assert 0.4 < time.monotonic() - started < 3


def test_a_client_that_is_slow_to_read_is_cut_off(registry, server, monkeypatch) -> None:
    monkeypatch.setattr(server_file, "LONGEST_SECONDS", 0.5)
    Gauge("long", "x" * (64 << 20), registry=registry)  # more than the kernel buffers
    threads = threading.active_count()
    with connect(server) as client:
        client.sendall(GET)
        wait_until(lambda: threading.active_count() > threads)
        wait_until(lambda: threading.active_count() <= threads, why=lambda: "its thread waits for it")


def test_only_the_metrics_are_answered_and_only_to_small_requests(server) -> None:
    body = answer(server, GET)
    assert body.startswith(b"HTTP/1.0 200 ") and b"height_metres 3.0" in body
    assert b"height_metres" not in answer(server, b"GET /metrics?name[]=other HTTP/1.1\r\n\r\n")
    for request, status in (
        (b"GET / HTTP/1.1\r\n\r\n", b"404"),
        (b"GET /metrics/../../etc/passwd HTTP/1.1\r\n\r\n", b"404"),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 999999999\r\n\r\n", b"501"),
        (b"GET /metrics?" + b"name[]=x&" * 200 + b" HTTP/1.1\r\n\r\n", b"400"),
        (b"GET /metrics?" + b"x" * 70_000 + b" HTTP/1.1\r\n\r\n", b"414"),
        (b"GET /metrics HTTP/1.1\r\n" + b"X: y\r\n" * 8192 + b"\r\n", b"431"),
    ):
        assert answer(server, request).split(b" ", 2)[1] == status, request[:50]
    assert b"Bad request" in answer(server, b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n"), "TLS"
    assert scrape_seconds(server) < 3.0


def test_a_client_that_asks_without_pause_gets_a_tenth_of_a_core(registry, server) -> None:
    for number in range(2000):
        Gauge(f"number_{number}", "Of many.", registry=registry)
    ends = time.monotonic() + 3.0

    def ask() -> None:
        while time.monotonic() < ends:
            answer(server, GET)

    clients = [threading.Thread(target=ask) for _ in range(4)]
    collecting, collected = 0.0, server.collect

    def measured(accept: str, names: list[str]) -> tuple[str, bytes]:
        nonlocal collecting
        started = time.thread_time()
        try:
            return collected(accept, names)
        finally:
            collecting += time.thread_time() - started

    server.collect = measured
    for client in clients:
        client.start()
    for client in clients:
        client.join()
    assert 0 < collecting < 0.2 * 3.0


def test_no_descriptor_left_is_said_once_costs_no_time_and_passes(server, capsys) -> None:
    with ExitStack() as opened:
        client = opened.enter_context(socket.socket())
        client.settimeout(20)
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 10, hard))  # noqa: PTH208
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        with ExitStack() as files, pytest.raises(OSError):
            while True:
                files.callback(os.close, os.open("/dev/null", os.O_RDONLY))
                if _full():
                    began = time.process_time()
                    client.connect(("127.0.0.1", server.port))
                    time.sleep(2.5)
                    assert time.process_time() - began < 0.5, "it does not try without pause"
                    raise OSError("full")
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        client.sendall(GET)
        assert b"height_metres 3.0" in said(client), "it was kept waiting, and is answered"
    errors = capsys.readouterr().err.splitlines()
    assert errors == ["mantissa: metrics for Prometheus are not available (Too many open files); training continues"]


def _full() -> bool:
    try:
        os.close(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        return True
    return False


def test_it_closes_while_clients_hang(server: MetricsServer) -> None:
    closing: Callable[[], None] = server.close
    with connect(server) as client:
        time.sleep(0.1)
        started = time.monotonic()
        closing()
        assert said(client) == b""
        assert time.monotonic() - started < 2.0
    server.close = lambda: None  # type: ignore[method-assign]
