"""The events of a run as a list, for tools that look at whole events: all of them, or those that survived."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tracking.events import Event
from tracking.jsonl import Follower, decode, event_on


def read_events(
    path: Path, understand: Callable[[bytes], Event | None] = decode, what: str = "a JSON object"
) -> Iterator[Event]:
    """Every JSON object of a file in order, in bounded memory; floats that were not finite are floats again.

    An incomplete last line (a crash, or a run that is writing) is left out. Raises UserError when the file cannot be
    read, or `understand` makes nothing of another line.
    """
    file = Follower(path)
    for line in file.lines(whole=True):
        event = understand(line)
        if event is not None:
            yield event
        else:
            file.refuse(line, what)


def read_run_events(path: Path) -> Iterator[Event]:
    """Events of a run, as `read_events` has them. Raises UserError also for a line that is no event (run-folder.md)."""
    return read_events(path, event_on, "an event as docs/run-folder.md has them")


def surviving(events: Iterable[Event]) -> list[Event]:
    """The events of the one history that led to the run's present state: the last attempt at a step wins.

    A resumed or rolled-back run attempts some steps again. What an abandoned attempt recorded is dropped, together
    with every step that came after it, since none of those updates is part of the weights any more. `run_start`,
    `run_end`, `incident`, `nonfinite`, `corruption`, `reexecution` and `note` belong to the session and not to the
    run's state, and always stay.
    """
    kept: list[Event] = []
    newest_step = -1  # index in `kept` of the newest step event
    for event in events:
        if event["event"] == "run_start":
            kept = [old for old in kept if not _is_state(old) or old["step"] <= event["step"]]
            newest_step = max((index for index, old in enumerate(kept) if old["event"] == "step"), default=-1)
        elif event["event"] == "step":
            if newest_step >= 0 and event["step"] <= kept[newest_step]["step"]:
                # Events after the newest step event may already belong to the new attempt at this very step.
                kept = [
                    old
                    for index, old in enumerate(kept)
                    if not _is_state(old) or old["step"] < event["step"] + (index > newest_step)
                ]
            newest_step = len(kept)
        kept.append(event)
    return kept


def _is_state(event: Event) -> bool:
    return event["event"] in ("step", "scale", "eval", "checkpoint")
