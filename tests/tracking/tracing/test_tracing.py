"""Spans of real steps on real processes, taken by a collector that parses OTLP, and by some that take none."""

import contextlib
import gzip
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from config.cli import REPOSITORY
from tests.support.jobs.launches import command, finish
from tests.support.servers import threads
from tests.tracking.tracing import tracing_cases
from tracking.tracing.otlp import Export
from tracking.tracing.spans import Tracing


class Collector:
    """The requests that arrived so far."""

    def __init__(self, status: int) -> None:
        self.status, self.url = status, ""
        self.spans: list[dict[str, Any]] = []
        """name, trace, id, parent (hex), start and end (ns), failed, attributes, resource."""
        self.headers: list[dict[str, str]] = []
        self.paths: list[str] = []

    def take(self, path: str, headers: dict[str, str], body: bytes) -> None:
        """One request. Raises what the parser raises when the body is no trace."""
        self.paths.append(path)
        self.headers.append(headers)
        if self.status != 200:
            return
        request = ExportTraceServiceRequest()
        request.ParseFromString(gzip.decompress(body) if headers.get("content-encoding") == "gzip" else body)
        for resource in request.resource_spans:
            facts = _plain(resource.resource.attributes)
            for scope in resource.scope_spans:
                self.spans += [_span(span, facts) for span in scope.spans]

    def named(self, name: str, **resource: Any) -> list[dict[str, Any]]:
        """The spans of that name, by start, of the processes with these resource attributes."""
        found = [s for s in self.spans if s["name"] == name and resource.items() <= s["resource"].items()]
        return sorted(found, key=lambda span: span["start"])


@contextlib.contextmanager
def collector(status: int = 200, seconds: float = 0.0) -> Iterator[Collector]:
    """A collector on a free port of the loopback interface. status: of its answers; it takes spans with 200 only.
    seconds: that an answer takes.
    """
    collected = Collector(status)

    class Handler(threads.Handler):
        def do_POST(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            time.sleep(seconds)
            collected.take(self.path, headers, self.body())
            self.answer({}, collected.status)

    with threads.answering(threads.Server(Handler)) as server:
        collected.url = server.url
        yield collected


def _span(span: Any, resource: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": span.name,
        "trace": span.trace_id.hex(),
        "id": span.span_id.hex(),
        "parent": span.parent_span_id.hex(),
        "start": span.start_time_unix_nano,
        "end": span.end_time_unix_nano,
        "failed": span.status.message if span.status.code == 2 else None,
        "attributes": _plain(span.attributes),
        "resource": resource,
    }


def _plain(attributes: Any) -> dict[str, Any]:
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in attributes}


STAGES = ("data", "forward_backward", "health", "optimizer")


def test_every_step_is_one_trace_of_all_ranks(pair, tmp_path):
    overrides = ["precision.loss_scale.initial=256", "faults=[{kind: inf_gradient, step: 2, rank: 1}]"]
    arguments = {"folder": str(tmp_path), "compute": "fp16", "overrides": overrides, "wait": 0.05}
    plain = pair.run(tracing_cases.traced, endpoint=None, **arguments)
    with collector() as taken:
        results = pair.run(tracing_cases.traced, endpoint=taken.url, save=True, **arguments)
    assert set(taken.paths) == {"/v1/traces"}
    roots = {rank: taken.named("step", rank=rank) for rank in (0, 1)}
    for rank, result in enumerate(results):
        assert result["masters"] == plain[rank]["masters"] and result["python_random"] == plain[rank]["python_random"]
        assert result["notes"] == [] and result["left"] == []
        told = [[root["attributes"][name] for name in ("loss", "applied", "loss_scale")] for root in roots[rank]]
        assert told == result["rows"] and [row[1] for row in told] == [True, False, True]
        assert [root["attributes"]["step"] for root in roots[rank]] == [1, 2, 3]
        assert [root["attributes"]["tokens"] for root in roots[rank]] == [100, 200, 300], "without padding"
        assert [root["trace"] for root in roots[rank]] == [root["trace"] for root in roots[0]]
        assert [root["parent"] for root in roots[rank]] == ([""] * 3 if rank == 0 else [r["id"] for r in roots[0]])
        for name in STAGES:
            for span, root in zip(taken.named(name, rank=rank), roots[rank], strict=True):
                assert (span["trace"], span["parent"], span["failed"]) == (root["trace"], root["id"], None)
                assert root["start"] <= span["start"] <= span["end"] <= root["end"]
        for span in taken.named("data", rank=rank):
            assert (span["end"] - span["start"]) / 1e9 >= 0.05
        for root, seconds in zip(roots[rank], result["seconds"], strict=True):
            assert (root["end"] - root["start"]) / 1e9 == pytest.approx(seconds, abs=0.2)
        [evaluation] = taken.named("evaluation", rank=rank)
        [save], [stall] = taken.named("checkpoint", rank=rank), taken.named("stall", rank=rank)
        assert evaluation["parent"] == save["parent"] == roots[rank][-1]["id"] and stall["parent"] == save["id"]
        assert (save["end"] - save["start"]) / 1e9 == pytest.approx(result["save_seconds"][0], abs=0.2)
        assert save["attributes"]["step"] == 3 and save["attributes"]["bytes"] > 0
    assert len({root["trace"] for root in roots[0]}) == 3
    assert len({span["id"] for span in taken.spans}) == len(taken.spans) == 2 * (3 * 5 + 3)
    assert taken.spans[0]["resource"]["run"] == "a test"


def test_an_evaluation_before_the_first_step_has_a_trace_of_its_own():
    with collector() as taken:
        tracing = Tracing(taken.url, {}, session="s", rank=0, note=pytest.fail)
        with tracing.span("evaluation"), tracing.step(1, 0):
            pass
        tracing.close()
    traces = {span["trace"] for span in taken.spans}
    assert len(traces) == 2 and "0" * 32 not in traces, "collectors refuse an id of zeros"


def test_a_failed_save_and_a_failed_step_are_told_without_their_words(pair, tmp_path):
    with collector() as taken:
        results = pair.run(tracing_cases.full_disk, endpoint=taken.url, folder=str(tmp_path))
    assert all(result["saves"] == ["SaveFailed"] for result in results)
    assert [span["failed"] for span in taken.named("checkpoint")] == ["SaveFailed", "SaveFailed"]
    with collector() as taken:
        pair.run(tracing_cases.traced, endpoint=taken.url, folder=str(tmp_path / "f"), steps=1, fail=True)
    for name in ("step", "forward_backward"):
        assert [span["failed"] for span in taken.named(name, rank=0)] == [None, "Spoiled"]
    assert "must not leave" not in repr(taken.spans)


def test_a_run_that_raises_sends_the_spans_of_its_last_step(tmp_path):
    with collector() as taken:
        told = ["run.hypothesis=error,0,2,", "checkpoint.every_steps=0", f"tracking.otlp_endpoint={taken.url}"]
        line = command("python", tmp_path, "raises", *told)
        finish([line[0], str(REPOSITORY / "tests/support/jobs/dying_train.py"), *line[2:]], exit_code=1)
    assert [span["failed"] for span in taken.named("step")] == [None, "ValueError"]


@pytest.fixture(scope="module")
def plain(pair, tmp_path_factory):
    """The same steps without spans."""
    return pair.run(tracing_cases.traced, endpoint=None, folder=str(tmp_path_factory.mktemp("plain")), steps=30)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("kind", "seconds", "reason"),
    [("nobody", 2, "Connection refused"), ("silent", 1, "nobody answers"), ("refusing", 1, "401")],
)
def test_a_collector_that_takes_nothing_costs_one_note(pair, plain, tmp_path, kind, seconds, reason):
    """Nobody listens; somebody accepts and never answers; somebody answers 401."""
    quick = {"OTEL_BSP_SCHEDULE_DELAY": "50", "OTEL_BSP_MAX_EXPORT_BATCH_SIZE": "8"}
    # a full queue is told, too: before the time-out of who never answers it would be the first trouble
    quick |= {"OTEL_BSP_MAX_QUEUE_SIZE": "512" if kind == "silent" else "32"}
    quick |= {"OTEL_EXPORTER_OTLP_TIMEOUT": str(seconds)}
    arguments = {"folder": str(tmp_path), "steps": 30, "environment": quick}
    with socket.socket() as deaf, collector(status=401) as refusing:
        deaf.bind(("127.0.0.1", 0))
        if kind == "silent":
            deaf.listen(64)
        address = refusing.url if kind == "refusing" else f"http://127.0.0.1:{deaf.getsockname()[1]}"
        results = pair.run(tracing_cases.traced, endpoint=address, **arguments)
        refused = len(refusing.paths)
    for result, without in zip(results, plain, strict=True):
        [note] = result["notes"]
        lead = f"spans are lost, training continues: tracking.otlp_endpoint = {address}: "
        assert note.startswith(lead) and reason in note.removeprefix(lead) and len(note) < 250
        assert result["close_seconds"] < 15 and result["left"] == []
        assert result["masters"] == without["masters"] and result["python_random"] == without["python_random"]
        assert max(result["seconds"][1:]) < 3 + 2 * max(without["seconds"][1:])
    assert (refused > 0) is (kind == "refusing")


def test_without_an_endpoint_nothing_of_opentelemetry_is_imported():
    program = "import sys, tracking.tracing.spans; print([name for name in sys.modules if 'opentelemetry' in name])"
    found = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_a_body_without_end_is_not_read() -> None:
    """The batch was taken, as the status says; what follows would fill the memory."""
    sent = []

    def answer(server: socket.socket) -> None:
        client, _ = server.accept()
        client.recv(1 << 20)
        with contextlib.suppress(OSError), client:
            client.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            while len(sent) < 64:
                client.sendall(b"100000\r\n" + b"x" * (1 << 20) + b"\r\n")
                sent.append(1 << 20)

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=answer, args=(server,))
        thread.start()
        export = Export(f"http://127.0.0.1:{server.getsockname()[1]}", {})
        with export.provider.get_tracer("test").start_as_current_span("step"):
            pass
        export.close()
        thread.join()
    assert export.trouble() is None and sum(sent) < 16 << 20
