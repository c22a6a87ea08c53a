"""The record of a run: each event is validated, stripped of secrets, timestamped and fanned out to the sinks.

`events.jsonl` is the source of truth. Any other sink that fails is switched off with one line and training continues;
a failure to write `events.jsonl` itself is logged once, and writing is tried again with every later event.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol, Self

from config.printable import tell
from config.redact import Redactor
from tracking.events import Event, check
from tracking.jsonl import JsonlSink

_NUMBERS_ONLY = ("step", "telemetry")
"""Events whose only strings are hashes and module names, so that they are not searched for secrets."""


class Sink(Protocol):
    """A destination of events. `write` may raise anything; the record handles it."""

    def write(self, event: Event) -> None:
        """Write one event, a dict of plain Python values."""

    def close(self) -> None:
        """Flush and close, within a bounded time."""


class Record:
    """Fans events out to sinks. Used on rank 0; other ranks use `Record.silent()`."""

    def __init__(self, sinks: Sequence[Sink], clock: Callable[[], float] = time.time) -> None:
        """`clock` gives seconds since the epoch."""
        self._sinks = list(sinks)
        self._redactor = Redactor()
        self._clock = clock
        self._lost_events = 0
        self._last: tuple[int, int] = (0, 0)  # (step, tokens) of the newest event, for `note`

    @classmethod
    def silent(cls) -> Self:
        """A record without sinks, for ranks other than 0; it still checks events."""
        return cls([])

    def event(self, event: str, *, step: int, tokens: int, **fields: Any) -> None:
        """Record one of the events defined in `tracking.events`.

        Raises ValueError for an unknown event or a missing field (a bug in the caller), never because of a sink.
        """
        check(event, fields)
        self._last = (step, tokens)
        if event not in _NUMBERS_ONLY:
            fields = self._redactor.value("", fields)
        whole = {"event": event, "step": step, "time": self._clock(), "tokens": tokens, **fields}
        broken = []
        for sink in list(self._sinks):
            if isinstance(sink, JsonlSink):
                self._write_events_file(sink, whole)
                continue
            try:
                sink.write(whole)
            except Exception as error:  # whatever happens to a sink, training continues
                self._sinks.remove(sink)
                broken.append(f"{type(sink).__name__} is switched off for the rest of this run: {_one_line(error)}")
        for text in broken:
            tell(f"{text}; training continues and events.jsonl has every event")
            self.note(text)

    def scale(self, *, previous: float, new: float, **fields: Any) -> None:
        """Record a `scale` event, whose field `from` is a Python keyword. fields: all other fields."""
        self.event("scale", **fields | {"from": previous, "to": new})

    def note(self, text: str, **fields: Any) -> None:
        """Record a free-text `note`, such as a failed sink, at the newest step. fields: machine-readable extras."""
        self.event("note", step=self._last[0], tokens=self._last[1], text=text, **fields)

    def close(self) -> None:
        """Close every sink; errors are logged in one line each, never raised."""
        for sink in self._sinks:
            try:
                sink.close()
            except Exception as error:  # a sink must not turn a finished run into a failed one
                how = f"could not be closed cleanly ({_one_line(error)})"
                tell(f"{type(sink).__name__}: {how}; the run is not affected")
        self._sinks = []

    def _write_events_file(self, sink: JsonlSink, event: Event) -> None:
        """Write to events.jsonl; consecutive failures are logged once, and noted with their number afterwards."""
        try:
            sink.write(event)
        except OSError as error:
            if self._lost_events == 0:
                tell(f"{sink.path}: event not written ({_one_line(error)}); training continues, later events are tried")
            self._lost_events += 1
            return
        if self._lost_events:
            lost, self._lost_events = self._lost_events, 0
            text = f"{lost} events before this one could not be written to {sink.path.name}"
            tell(f"{sink.path}: writing works again; {lost} events were lost")
            self.note(text)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
