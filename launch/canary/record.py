"""The canary's decisions: one event per line of `canary.jsonl`, and the same as a page, `canary.md`.

A canary that is started again reads from it where it stood.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from config import json_text
from config.files import write_atomically
from launch import job

Event = dict[str, Any]
Kind = Literal["gate", "started", "check", "breach", "rolled_back", "fallback", "refused", "budget", "end"]


@dataclass
class Journal:
    """The events of one canary, those of earlier starts included."""

    folder: Path
    name: str
    """Name of the run."""
    events: list[Event] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path, name: str) -> Journal:
        """The journal of a folder, which is made. A line that is cut off or damaged is passed over. Raises OSError."""
        folder.mkdir(parents=True, exist_ok=True)
        journal = cls(folder, name)
        if journal.path.is_file():
            content = journal.path.read_bytes()
            if content and not content.endswith(b"\n"):  # the next event must not end up on the line that was cut off
                with journal.path.open("ab") as file:
                    file.write(b"\n")
            for text in content.splitlines():
                try:
                    event = json_text.parse(text)
                except ValueError:
                    continue
                if isinstance(event, dict) and {"event", "text"} <= event.keys():
                    journal.events.append(event)
        return journal

    @property
    def path(self) -> Path:
        """canary.jsonl."""
        return self.folder / "canary.jsonl"

    def add(self, event: Kind, step: int, text: str, **further: Any) -> None:
        """Append an event, write the page anew, and print the line."""
        found = {"event": event, "step": step, "time": time.time(), "text": text, **further}
        self.events.append(found)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(found) + "\n")
            file.flush()
            os.fsync(file.fileno())
        lines = [f"# Canary of {self.name}\n", *(f"- {event['text']}" for event in self.events)]
        write_atomically(self.folder / "canary.md", ("\n".join(lines) + "\n").encode())
        log(text)

    def last(self, *kinds: Kind) -> Event | None:
        """The newest event of these kinds."""
        return next((event for event in reversed(self.events) if event["event"] in kinds), None)

    def spent(self) -> float:
        """[device hours] Spent on canary, twin and checks so far."""
        return float(sum(event.get("device_hours", 0.0) for event in self.events))


def log(text: str) -> None:
    """One line of the canary's own, on stderr."""
    job.log(text, "canary")
