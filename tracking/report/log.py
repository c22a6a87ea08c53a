"""The last lines of a run's log, if one was kept, and its newest events."""

import os
import re
from pathlib import Path

from config.printable import printable
from config.redact import redact
from tracking.events import Event, describe_event
from tracking.run_dir import RunDir
from tracking.run_facts import RunFacts

_LINES = 20
_BYTES = 1 << 16
_NUMBERS = ("precision", "self_check")  # events without a descriptive sentence
_SEQUENCES = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")


def log_files(run_dir: RunDir) -> list[Path]:
    """Logs in the run folder, and the one that a sweep or other launcher keeps next to the runs."""
    folder = run_dir.path.resolve()
    number = folder.name.rpartition("-")[2]  # number of a sweep's trial
    inside = sorted([*run_dir.path.glob("*.log"), *(run_dir.path / "logs").glob("*.log")])
    beside = [folder.parent.parent / "logs" / f"{folder.name}.log", folder.parent / "logs" / f"{number}.log"]
    return [path for path in (*inside, *beside) if path.is_file()]


def last_lines(path: Path) -> str:
    """The last lines of a log, stripped of colours, cursor movements and secrets; empty if it cannot be read."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _BYTES))
            text = file.read(_BYTES).decode(errors="replace")
    except OSError:
        return ""
    lines = [_SEQUENCES.sub("", line).rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n")]
    return "\n".join(printable(redact(line)) for line in [line for line in lines if line][-_LINES:])


def newest_events(facts: RunFacts, most: int = _LINES) -> list[tuple[Event, str]]:
    """The newest events other than steps, each with a line of text, newest last."""
    if not most:
        return []
    kept = [event for kind, events in facts.rare_events.items() if kind not in _NUMBERS for event in events[-most:]]
    newest = sorted(kept, key=lambda event: (event["time"], event["step"]))[-most:]
    return [(event, event.get("text") or describe_event(event)) for event in newest]
