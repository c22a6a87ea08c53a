"""Send spans by OTLP over HTTP, without slowing training down when the collector does not answer."""

import atexit
import hashlib
import importlib
import logging
import os
import random
import threading
from collections.abc import Sequence
from typing import Any

import requests
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator

CLOSE_SECONDS = 5.0
"""The longest wait at the end of a run for the last spans to be sent."""
_PATH = "/v1/traces"
_LOGGERS = ("opentelemetry.exporter", "opentelemetry.sdk._shared_internal", "opentelemetry.sdk.trace")


class Export:
    """A tracer provider that exports to one collector."""

    def __init__(self, endpoint: str, facts: dict[str, Any]) -> None:
        """endpoint: the collector's; `/v1/traces` is added if it is missing. facts: resource attributes."""
        retries: Any = importlib.import_module("opentelemetry.exporter.otlp.common.http")
        retries.random = random.Random()  # the jitter of retries must not draw from the generator that training seeded
        self._last_warning = _LastWarning()
        for name in _LOGGERS:  # a single note instead of a line for every batch
            logger = logging.getLogger(name)
            logger.addHandler(self._last_warning)
            logger.propagate = False
        self._unanswered = False
        self.ids = Ids()
        url = endpoint.rstrip("/").removesuffix(_PATH) + _PATH
        own_session = "OTEL_PYTHON_EXPORTER_OTLP_HTTP_TRACES_CREDENTIAL_PROVIDER" not in os.environ
        self.exporter = CountingExporter(OTLPSpanExporter(endpoint=url, session=_Session() if own_session else None))
        self.provider = TracerProvider(resource=Resource.create(facts), id_generator=self.ids, shutdown_on_exit=False)
        self.provider.add_span_processor(BatchSpanProcessor(self.exporter))
        atexit.register(self.close)  # a run that raises sends its last spans, too, once its end is recorded

    def trouble(self) -> str | None:
        """Why spans were lost, in one line; None when none were lost."""
        if self.exporter.lost or self._unanswered:
            return self._last_warning.text or "nobody answers"
        if self._last_warning.queue_was_full:
            return self._last_warning.text or "more spans than the queue holds (OTEL_BSP_MAX_QUEUE_SIZE)"
        return None

    def close(self) -> None:
        """Send the queue, for at most `CLOSE_SECONDS`, and not at all if the last batch failed."""
        atexit.unregister(self.close)
        if self.exporter.failing:
            self.exporter.give_up()
        ending = threading.Thread(target=self.provider.shutdown, daemon=True)
        ending.start()
        ending.join(CLOSE_SECONDS)
        if ending.is_alive():
            self._unanswered = True
            self.exporter.give_up()


class _Session(requests.Session):
    """A session that reads no bodies: only the status matters, and a body without end would fill the memory."""

    def send(self, request: requests.PreparedRequest, **options: Any) -> requests.Response:
        answer = super().send(request, **{**options, "stream": True})
        answer.close()
        return answer


class CountingExporter(SpanExporter):
    """Passes spans on and counts those that could not be sent."""

    def __init__(self, inner: SpanExporter) -> None:
        self._inner = inner
        self.lost = 0
        self.failing = False
        """Whether the newest batch could not be sent."""
        self._given_up = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = SpanExportResult.FAILURE if self._given_up else self._inner.export(spans)
        self.failing = result is not SpanExportResult.SUCCESS
        self.lost += len(spans) if self.failing else 0
        return result

    def give_up(self) -> None:
        """Cancel the request in flight, and send no more."""
        if not self._given_up:
            self._given_up = True
            self._inner.shutdown()

    shutdown = give_up


class Ids(RandomIdGenerator):
    """Ids that all ranks agree on for the root of a step, and random ones for the rest, not drawn from Python's global
    generator, as OpenTelemetry does, which training has seeded."""

    def __init__(self) -> None:
        self._random = random.SystemRandom()
        self.trace_id = 0
        self.root_id: int | None = None
        """Id of the next span only."""

    def generate_trace_id(self) -> int:
        return self.trace_id

    def generate_span_id(self) -> int:
        chosen, self.root_id = self.root_id, None
        return chosen or self._random.getrandbits(64) or 1


def derived_id(bits: int, *parts: str | int) -> int:
    """A number above 0 of this many bits, derived from `parts` by a hash."""
    digest = hashlib.sha256("/".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[: bits // 8], "big") or 1


class _LastWarning(logging.Handler):
    """Keeps the newest warning that names a reason."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.text = ""
        self.queue_was_full = False

    def emit(self, record: logging.LogRecord) -> None:
        text = " ".join(record.getMessage().split())
        if text.startswith("Queue full"):
            self.queue_was_full = True
        elif not text.endswith(("shutdown.", "aborting retry.")):  # "due to timeout, max retries or shutdown."
            self.text = _reason(text)


def _reason(text: str) -> str:
    """The cause in a line of OpenTelemetry's log: the innermost of nested errors."""
    text = text.removeprefix("Transient error ").partition(" encountered while")[0]
    _, nested, cause = text.rpartition("(Caused by ")
    return cause.rpartition(": ")[2].strip("\"')") if nested else text[:300]
