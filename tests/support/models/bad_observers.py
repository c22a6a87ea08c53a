"""Observers of a run that do what they can to disturb it: clients of its metrics, and a collector of its spans."""

import itertools
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

GET = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"


@dataclass
class Seen:
    """The observers' calls."""

    held: int = 0
    """Connections to the metrics that were opened and held until the run closed them."""
    scrapes: int = 0
    longest_scrape: float = 0.0
    """[s] By the one client that behaves."""
    collected: dict[str, int] = field(default_factory=dict)
    """Requests with spans, by what was answered."""


@contextmanager
def metrics_clients(port: int, seen: Seen) -> Iterator[None]:
    """Hundreds of connections that are held, slow askers and readers, resets, garbage, a flood; one that behaves."""
    over = threading.Event()
    behaviours = [_hold, *[_slow_asker] * 2, *[_slow_reader] * 2, _reset, _garbage, *[_flood] * 2, _scrape]
    threads = [
        threading.Thread(target=_again_and_again, args=(behaviour, port, seen, over), daemon=True)
        for behaviour in behaviours
    ]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        over.set()
        for thread in threads:
            thread.join(30)


def _again_and_again(behaviour: Callable, port: int, seen: Seen, over: threading.Event) -> None:
    while not over.is_set():
        with suppress(OSError):
            behaviour(port, seen, over)
        over.wait(0.05)


def _connect(port: int) -> socket.socket:
    return socket.create_connection(("127.0.0.1", port), timeout=15)


def _hold(port: int, seen: Seen, over: threading.Event) -> None:
    held = []
    while len(held) < 300 and not over.is_set():
        with suppress(OSError):
            held.append(_connect(port))
            seen.held += 1
        over.wait(0.02)
    over.wait(2)
    for client in held:
        client.close()


def _slow_asker(port: int, seen: Seen, over: threading.Event) -> None:
    with _connect(port) as client:
        for byte in itertools.chain(GET[:-2], itertools.repeat(ord("x"))):
            client.sendall(bytes([byte]))
            if over.wait(0.2):
                return


def _slow_reader(port: int, seen: Seen, over: threading.Event) -> None:
    with _connect(port) as client:
        client.sendall(GET)
        while client.recv(1) and not over.wait(0.2):
            pass


def _reset(port: int, seen: Seen, over: threading.Event) -> None:
    with _connect(port) as client:
        client.sendall(GET)
        reset(client)


def _garbage(port: int, seen: Seen, over: threading.Event) -> None:
    with _connect(port) as client:
        client.sendall(random.Random(1).randbytes(1 << 20))
        client.recv(1000)


def _flood(port: int, seen: Seen, over: threading.Event) -> None:
    with _connect(port) as client:
        client.sendall(GET)
        while client.recv(1 << 16):
            pass


def _scrape(port: int, seen: Seen, over: threading.Event) -> None:
    started = time.monotonic()
    text = b""
    with _connect(port) as client:
        client.sendall(GET)
        while part := client.recv(1 << 16):
            text += part
    if b"mantissa_step{" in text:
        seen.scrapes += 1
        seen.longest_scrape = max(seen.longest_scrape, time.monotonic() - started)
    over.wait(1.0)


@contextmanager
def bad_collector(seen: Seen) -> Iterator[str]:
    """The URL of a collector that treats one request after another badly, each in another way."""
    over, turn = threading.Event(), itertools.cycle(ANSWERS.items())
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:

        def serve() -> None:
            while not over.is_set():
                with suppress(OSError):
                    client, _ = server.accept()
                    threading.Thread(target=answer, args=(client, *next(turn)), daemon=True).start()

        def answer(client: socket.socket, name: str, how: Callable) -> None:
            seen.collected[name] = seen.collected.get(name, 0) + 1
            with suppress(OSError), client:
                client.settimeout(15)
                client.recv(1 << 20)
                how(client, over)

        threading.Thread(target=serve, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.getsockname()[1]}"
        finally:
            over.set()


def reset(client: socket.socket, over: threading.Event | None = None) -> None:
    """Close with RST in place of FIN."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def _never_end(client: socket.socket, over: threading.Event) -> None:
    client.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
    while not over.is_set():
        client.sendall(b"100000\r\n" + b"x" * 0x100000 + b"\r\n")


def _drip(client: socket.socket, over: threading.Event) -> None:
    client.sendall(b"HTTP/1.1 200 OK\r\nX: ")
    while not over.wait(0.5):
        client.sendall(b"x")


def _sent(content: bytes) -> Callable:
    return lambda client, over: client.sendall(content)


_EMPTY = b"Content-Length: 0\r\n\r\n"
ANSWERS = {
    "accept": _sent(b"HTTP/1.1 200 OK\r\n" + _EMPTY),
    "refuse": _sent(b"HTTP/1.1 500 Internal Server Error\r\n" + _EMPTY),
    "reset": reset,
    "speak garbage": _sent(random.Random(2).randbytes(1 << 20)),
    "never end": _never_end,
    "ask to wait": _sent(b"HTTP/1.1 503 Unavailable\r\nRetry-After: 86400\r\n" + _EMPTY),
    "hang": lambda client, over: over.wait(30),
    "drip": _drip,
}
