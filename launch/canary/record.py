"""The canary's decisions: one event per line of `canary.jsonl`, and the same as a page, `canary.md`.

A restarted canary reads its state from it.
"""

import time
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from config.files import write_atomically
from launch import job

log = partial(job.log, program="canary")
Event = dict[str, Any]
Kind = Literal["gate", "started", "check", "breach", "rolled_back", "fallback", "refused", "budget", "end"]


@dataclass
class Journal:
    """The events of one canary, including those of earlier starts."""

    folder: Path
    name: str
    events: list[Event] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path, name: str) -> Self:
        """Read the journal in a folder, which is created if missing. Skips damaged lines. Raises OSError."""
        from tracking.jsonl import Follower, decode  # imports orjson, which is not needed to start

        folder.mkdir(parents=True, exist_ok=True)
        journal = cls(folder, name)
        found = map(decode, Follower(journal.path).lines())
        journal.events += [event for event in found if event and {"event", "text"} <= event.keys()]
        return journal

    @property
    def path(self) -> Path:
        return self.folder / "canary.jsonl"

    def add(self, event: Kind, step: int, text: str, **further: Any) -> None:
        """Append an event, rewrite the page, and print the text."""
        from tracking.jsonl import JsonlSink

        found = {"event": event, "step": step, "time": time.time(), "text": text, **further}
        self.events.append(found)
        with closing(JsonlSink(self.path)) as sink:
            sink.write(found)
        lines = [f"# Canary of {self.name}\n", *(f"- {event['text']}" for event in self.events)]
        write_atomically(self.folder / "canary.md", ("\n".join(lines) + "\n").encode())
        log(text)

    def last(self, kind: Kind) -> Event | None:
        """The newest event of this kind; None if there is none."""
        return next((event for event in reversed(self.events) if event["event"] == kind), None)

    def spent(self) -> float:
        """[device hours] Time spent on canary, twin and checks so far."""
        return float(sum(event.get("device_hours", 0.0) for event in self.events))
