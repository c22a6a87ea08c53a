"""Prometheus gets the run's numbers; its absence or slowness harms nothing, nor does anybody at the port."""

import os
import resource
import socket
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from random import Random
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Gauge
from prometheus_client.parser import text_string_to_metric_families

from tests.support.jobs.launches import wait_until
from tests.support.runs.compare_runs import start_fields, step_fields, ticking_clock, whole_event
from tests.support.runs.report_runs import session
from tracking.compare.surviving import read_events
from tracking.jsonl import JsonlSink
from tracking.prometheus import server as server_file
from tracking.prometheus.metrics import METRICS, VERDICTS
from tracking.prometheus.server import LONGEST_SECONDS, MOST_CONNECTIONS, MetricsServer
from tracking.prometheus.sink import PrometheusSink
from tracking.record import Record

RUN = "night shift"


def scrape(sink: PrometheusSink) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    """(sample name, labels without the run) to value; every series has to name the run."""
    assert sink.url is not None
    text = urllib.request.urlopen(sink.url, timeout=10).read().decode()
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = dict(sample.labels)
            if family.name != "mantissa_exporter_scrapes":
                assert labels.pop("run") == RUN
            found[sample.name, frozenset(labels.items())] = sample.value
    return found


def port_of(sink: PrometheusSink) -> int:
    assert sink.url is not None
    return int(sink.url.rsplit(":", 1)[1].split("/")[0])


def value(found: dict[Any, float], name: str, **labels: str) -> float:
    return found[f"mantissa_{name}", frozenset(labels.items())]


@pytest.fixture
def sink() -> Any:
    """On a port of its own."""
    sink = PrometheusSink(RUN, planned_steps=100, port=0)
    yield sink
    sink.close()


def record_random_run(record: Record, random: Random) -> Counter[Any]:
    """Record what a run may go through; what there was of everything."""
    seen: Counter[Any] = Counter()
    record.event("run_start", step=0, tokens=0, **start_fields(compute="fp16", model="Llama"))
    for step in range(1, 60):
        where = {"step": step, "tokens": step * 4096}
        applied, loss = random.random() < 0.8 and step < 57, random.choice([float("nan"), float("inf"), 2.5])
        seconds = random.choice([0.05, 0.4, 3.0, 1000.0])
        fields = step_fields(step, loss=loss, applied=applied, step_seconds=seconds, tokens_per_second=4096 / seconds)
        record.event("step", **where, **fields, data_seconds=0.25)
        seen["applied" if applied else "skipped"] += 1
        seen["row"] = 0 if applied else seen["row"] + 1
        seen["seconds"] += seconds  # type: ignore[assignment]
        seen["below half a second"] += seconds <= 0.5
        if random.random() < 0.3:
            verdict = random.choice(VERDICTS)
            record.event("incident", **where, verdict=verdict, reason="", modules=[], replay="")
            seen[verdict] += 1
        if random.random() < 0.3:
            tensor, kind = random.choice(["loss", "gradient"]), random.choice(["inf", "nan"])
            record.event("nonfinite", **where, rank=1, module="lm_head", tensor=tensor, kind=kind, count=7)
            seen[tensor, kind] += 1
            seen["rank 1"] += 1
        if random.random() < 0.2:
            record.event("checkpoint", **where, path="p", seconds=2.0, stall_seconds=0.5, bytes=10, verified=True)
            seen["checkpoint"] += 1
    return seen


def test_what_is_scraped_is_what_was_recorded(sink: PrometheusSink, tmp_path: Path) -> None:
    record = Record([JsonlSink(tmp_path / "events.jsonl"), sink], clock=ticking_clock(start=1.7e9, seconds=1.0))
    seen = record_random_run(record, Random(5))
    found = scrape(sink)
    for outcome in ("applied", "skipped"):
        assert value(found, "steps_total", outcome=outcome) == seen[outcome]
    assert value(found, "consecutive_skipped_steps") == seen["row"]
    assert value(found, "tokens_total") == 59 * 4096, "speed times duration gives the step's tokens back"
    assert value(found, "step_seconds_sum") == pytest.approx(seen["seconds"])
    assert value(found, "step_seconds_bucket", le="0.5") == seen["below half a second"]
    assert value(found, "step_seconds_bucket", le="+Inf") == 59
    assert {v: value(found, "incidents_total", verdict=v) for v in VERDICTS} == {v: seen[v] for v in VERDICTS}
    assert value(found, "early_warnings_total", signal="gradient_jump") == 0, "there before anything happens"
    for tensor in ("loss", "gradient"):
        for kind in ("inf", "nan"):
            assert value(found, "nonfinite_total", tensor=tensor, kind=kind) == seen[tensor, kind]
    assert value(found, "nonfinite_by_rank_total", rank="1") == seen["rank 1"] > 0
    assert value(found, "nonfinite_by_rank_total", rank="0") == 0, "there before anything happens"
    assert value(found, "checkpoints_total", verified="true") == seen["checkpoint"]
    assert value(found, "checkpoint_stall_seconds_total") == 0.5 * seen["checkpoint"]
    assert value(found, "data_wait_seconds_total") == 59 * 0.25
    assert value(found, "planned_steps") == 100 and value(found, "step") == 59
    events = list(read_events(tmp_path / "events.jsonl"))
    last = [event for event in events if event["event"] == "step"][-1]
    for name, field in (("loss_nats", "loss"), ("gradient_norm", "grad_norm"), ("learning_rate", "lr")):
        assert value(found, name) == pytest.approx(last[field], nan_ok=True)
    assert value(found, "last_step_timestamp_seconds") == last["time"]
    assert value(found, "session_start_timestamp_seconds") == events[0]["time"]


def test_ranks_have_series_of_their_own_in_small_runs_only(sink: PrometheusSink) -> None:
    step = whole_event("step", 1)
    large = {"least": 0.1, "median": 0.2, "most": 0.9, "rank": 700}
    sink.write(step | {"by_rank": {"work_seconds": large, "memory_bytes": large}})
    found = scrape(sink)
    assert value(found, "slowest_rank") == 700 and value(found, "work_seconds", statistic="most") == 0.9
    assert not any(name.startswith("mantissa_rank_") for name, _ in found)
    sink.write(step | {"by_rank": {"work_seconds": [0.3, 0.5], "memory_bytes": [10, 20]}})
    assert not any(name.startswith(("mantissa_reward", "mantissa_gap")) for name, _ in found), "of no run but RL's"
    rewarded = {"reward/mean": -0.5, "reward/spread": 0.25, "gap/k3": 1e-6, "gap/of_bound": 0.5}
    sink.write(step | {"metrics": rewarded, "by_rank": {"work_seconds": [0.3, 0.5], "memory_bytes": [10, 20]}})
    found = scrape(sink)
    assert [value(found, name) for name in ("reward", "reward_spread", "gap_k3_nats", "gap_of_bound")] == [
        *rewarded.values()
    ]
    assert value(found, "slowest_rank") == 1 and value(found, "work_seconds", statistic="median") == 0.4
    assert value(found, "rank_work_seconds", rank="1") == 0.5
    assert value(found, "rank_memory_peak_bytes", rank="0") == 10


def test_a_failed_checkpoint_and_the_end_are_exposed(sink: PrometheusSink) -> None:
    record = Record([sink])
    record.event("note", step=1, tokens=1, text="wandb is lost")
    assert value(scrape(sink), "checkpoint_failures_total") == 0
    record.event("note", step=1, tokens=1, text="disk full", failed="checkpoint")
    record.event("run_end", step=1, tokens=1, status="aborted", exit_code=74)
    found = scrape(sink)
    assert value(found, "checkpoint_failures_total") == 1 and value(found, "notes_total") == 2
    assert value(found, "exit_code") == 74


def test_every_metric_is_named_as_prometheus_wants_it() -> None:
    for name, (kind, text, _) in METRICS.items():
        assert name.endswith("_total") == (kind.__name__ == "Counter"), name
        assert text.endswith("."), name
        for unit in ("ms", "mib", "gib", "minutes", "percent"):
            assert unit not in name.split("_"), f"{name}: base units only"


def test_only_the_loopback_interface_is_bound_by_default(sink: PrometheusSink) -> None:
    assert sink.url is not None and sink.url.startswith("http://127.0.0.1:")
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.2", port_of(sink)), timeout=2).close()
    everywhere = PrometheusSink(RUN, planned_steps=1, port=0, address="0.0.0.0")
    try:
        socket.create_connection(("127.0.0.2", port_of(everywhere)), timeout=2).close()
    finally:
        everywhere.close()


@pytest.mark.parametrize("address", ["127.0.0.1", "192.0.2.1", "no such host.invalid", "10..0.1"])
def test_a_port_that_cannot_be_had_costs_one_note(address, sink, run_dir, capsys) -> None:
    taken = port_of(sink)
    second = PrometheusSink(RUN, planned_steps=1, port=taken, address=address)
    assert second.url is None
    with session(run_dir.path, second) as run:
        run.steps(3)
    events = list(read_events(run_dir.events))
    assert [event["event"] for event in events] == ["run_start", "note", "step", "step", "step"]
    assert f"{address}:{taken}" in events[1]["text"] and "tracking.prometheus_port" in events[1]["text"]
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("second_pause", [1.0, 0.1])
def test_the_end_waits_for_the_scrape_that_is_due(second_pause: float) -> None:
    """By one server, or also by somebody else shortly after its last one."""
    sink, ended = PrometheusSink(RUN, planned_steps=1, port=0), threading.Event()
    for pause in (1.0, second_pause):
        scrape(sink)
        time.sleep(pause)
    scrape(sink)
    sink.write(whole_event("run_end", 1, status="aborted", exit_code=3))
    closing = threading.Thread(target=lambda: (sink.close(), ended.set()))
    closing.start()
    assert not ended.wait(0.9), "it was scraped every second, so the next scrape is awaited"
    assert value(scrape(sink), "exit_code") == 3, "the last event is still to be had"
    assert ended.wait(5)


@pytest.mark.parametrize(
    ("status", "scrapes", "apart", "limit"),
    [("done", 0, 1.0, 0.9), ("done", 1, 1.0, 0.9), ("preempted", 3, 1.0, 0.9), ("done", 2, 0.4, 1.5)],
)
def test_nobody_is_waited_for_without_a_reason_nor_long_if_gone(status, scrapes, apart, limit) -> None:
    sink = PrometheusSink(RUN, planned_steps=1, port=0)
    for _ in range(scrapes):
        scrape(sink)
        time.sleep(apart)
    sink.write(whole_event("run_end", 1, status=status, exit_code=0))
    started = time.monotonic()
    sink.close()
    assert time.monotonic() - started < limit


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
