"""An OTLP/HTTP collector for tests: takes what a real one takes, parsed with OpenTelemetry's own protocol buffers."""

import gzip
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from tests.support.servers import threads


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


@contextmanager
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
