"""OpenTelemetry spans of a run (docs/tracing.md): nothing is imported without `tracking.otlp_endpoint`.

Every step is one trace of all ranks: rank 0's root is the parent of the other ranks' roots, so that a sampler keeps or
drops a step on all ranks alike.
"""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

from config.printable import tell
from tracking.tracing.follow import follow

if TYPE_CHECKING:
    from config.resolved import Resolved


def open_tracing(
    resolved: Resolved, session: str, *, engine: Any, batches: Any, checkpoints: Any, note: Callable[[str], None]
) -> Tracing:
    """The configured tracing of one rank. session: as for `Tracing`. note: called with one line when spans are lost."""
    run = resolved.config.run.name
    facts = {
        "service.namespace": "mantissa",
        "service.instance.id": f"{run}/{resolved.rank}",
        "host.name": socket.gethostname(),
        "process.pid": os.getpid(),
        "run": run,
        "rank": resolved.rank,
        "world_size": resolved.world_size,
        "compute": resolved.compute,
        "zero_stage": resolved.zero_stage,
    }
    if "OTEL_SERVICE_NAME" not in os.environ:
        facts["service.name"] = "mantissa"
    endpoint = str(resolved.config.tracking.otlp_endpoint)
    tracing = Tracing(endpoint, facts, session=session, rank=resolved.rank, note=note)
    tracing.follow(engine, batches, checkpoints)
    return tracing


class Tracing:
    """The spans of one rank. Only `close` waits for the collector, for at most 5 seconds."""

    def __init__(
        self, endpoint: str, facts: dict[str, Any], *, session: str, rank: int, note: Callable[[str], None]
    ) -> None:
        """facts: resource attributes. session: the same on every rank, and different for every start of a run."""
        from opentelemetry import trace

        from tracking.tracing.otlp import Export, derived_id

        self._api, self._derived_id = trace, derived_id
        self._export = Export(endpoint, facts)
        self._tracer = self._export.provider.get_tracer("mantissa")
        self._endpoint, self._session, self._rank = endpoint, session, rank
        self._tell = note
        self._attempts = 0
        self._export.ids.trace_id = derived_id(128, session, 0)  # of `evaluate.at_start`, before the first step
        self._attributes: dict[str, Any] = {}
        self._context: Any = None  # of the newest step, to which the spans inside it and after it belong
        self._saves: deque[tuple[Any, int]] = deque()  # spans of saves in progress, with their start
        self._reported = False
        self._undo: Callable[[], None] = lambda: None

    def follow(self, engine: Any, batches: Any, checkpoints: Any) -> None:
        """Record spans of these objects' methods from now on."""
        self._undo = follow(
            [
                (batches, "next_step", lambda: self.span("data"), self._count),
                (engine, "forward_backward", lambda: self.span("forward_backward"), None),
                (engine, "health", lambda: self.span("health"), self._note("loss", "grad_norm")),
                (engine, "step", lambda: self.span("optimizer"), self._note("applied", "loss_scale", "lr")),
                (engine, "evaluate", lambda: self.span("evaluation"), None),
                (checkpoints, "start_save", self._saving, None),
                (checkpoints, "outcomes", None, self._after_saves),
            ]
        )

    @contextmanager
    def step(self, number: int, tokens: int) -> Iterator[None]:
        """Context of the root span of one attempt at a step. tokens: trained on before it."""
        span = self._start_step()
        self._attributes = {"step": number, "tokens": tokens}
        with self._ended(span):
            try:
                yield
            finally:
                span.set_attributes(self._attributes)
        self._report_loss()

    def span(self, name: str) -> AbstractContextManager[None]:
        """Context of a span in the newest step."""
        return self._ended(self._tracer.start_span(name, context=self._context, record_exception=False))

    def close(self) -> None:
        """Send the remaining spans, for at most 5 seconds, and restore the objects' methods."""
        self._undo()
        self._saves.clear()  # spans that did not end are not sent
        self._export.close()
        self._report_loss()

    def _start_step(self) -> Any:
        """A root span whose ids all ranks derive the same way; on other ranks a child of rank 0's."""
        self._attempts += 1
        ids, api = self._export.ids, self._api
        ids.trace_id = self._derived_id(128, self._session, self._attempts)
        parent: Any = api.set_span_in_context(api.INVALID_SPAN)
        if self._rank != 0:
            sampled = self._export.provider.sampler.should_sample(None, ids.trace_id, "step").decision.is_sampled()
            flags = api.TraceFlags(api.TraceFlags.SAMPLED if sampled else api.TraceFlags.DEFAULT)
            root = api.SpanContext(ids.trace_id, self._root_id(0), is_remote=True, trace_flags=flags)
            parent = api.set_span_in_context(api.NonRecordingSpan(root))
        ids.root_id = self._root_id(self._rank)
        span = self._tracer.start_span("step", context=parent, record_exception=False)
        self._context = api.set_span_in_context(span)
        return span

    def _root_id(self, rank: int) -> int:
        return self._derived_id(64, self._session, self._attempts, rank)

    @contextmanager
    def _ended(self, span: Any) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._fail(span, error)
            raise
        finally:
            span.end()

    def _fail(self, span: Any, error: BaseException) -> None:
        """Mark it as failed with the error's type only: a message may contain what must not leave this machine."""
        span.set_status(self._api.Status(self._api.StatusCode.ERROR, type(error).__name__))

    def _note(self, *names: str) -> Callable[[Any], None]:
        """A callback that makes these fields of a method's result attributes of the step."""
        return lambda result: self._attributes.update({name: getattr(result, name) for name in names})

    def _count(self, batch: Any) -> None:
        self._attributes["tokens"] += batch.tokens

    @contextmanager
    def _saving(self) -> Iterator[None]:
        """A `checkpoint` span, which lasts until the save is finished, and its child `stall`, while training waits."""
        save = self._tracer.start_span("checkpoint", context=self._context)
        self._saves.append((save, time.time_ns()))
        with self._ended(self._tracer.start_span("stall", context=self._api.set_span_in_context(save))):
            yield

    def _after_saves(self, outcomes: list[Any]) -> None:
        """End the span of each finished save at the time when it finished."""
        for outcome in outcomes:
            if not self._saves:
                return
            span, started = self._saves.popleft()
            if isinstance(outcome, Exception):
                self._fail(span, outcome)
                span.end()
                continue
            names = ("step", "tokens", "bytes", "stall_seconds", "verified")
            span.set_attributes({name: getattr(outcome, name) for name in names})
            span.end(started + int(outcome.seconds * 1e9))

    def _report_loss(self) -> None:
        trouble = None if self._reported else self._export.trouble()
        if trouble is None:
            return
        self._reported = True
        text = f"spans are lost, training continues: tracking.otlp_endpoint = {self._endpoint}: {trouble}"
        if self._endpoint.rstrip("/").endswith(":4317"):
            text += "; 4317 is gRPC's port, give that of HTTP, 4318"
        if self._rank == 0:  # all ranks have the same collector
            tell(text)
        self._tell(text)
