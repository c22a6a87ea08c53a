"""Read the events of a run for tools that need whole events: all of them, or only the surviving ones."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from tracking.events import Event
from tracking.jsonl import Follower, decode, event_on


def read_events(
    path: Path, understand: Callable[[bytes], Event | None] = decode, what: str = "a JSON object"
) -> Iterator[Event]:
    """Every JSON object of a file, in order and in bounded memory; non-finite numbers are restored to floats.

    An incomplete last line (after a crash, or in a running run) is skipped. Raises UserError if the file cannot be read
    or `understand` returns None for any other line.
    """
    file = Follower(path)
    for line in file.lines(whole=True):
        event = understand(line)
        if event is not None:
            yield event
        else:
            file.refuse(line, what)


def read_run_events(path: Path) -> Iterator[Event]:
    """Events of a run, by `read_events`. Also raises UserError for a line that is not an event (run-folder.md)."""
    return read_events(path, event_on, "an event as docs/run-folder.md has them")


def surviving(events: Iterable[Event]) -> list[Event]:
    """The events of the history that led to the run's current state: the last attempt at a step wins.

    A resumed or rolled-back run attempts some steps again. `step`, `scale`, `eval` and `checkpoint` events of an
    abandoned attempt are dropped, along with those of every later step, since the weights no longer contain any of
    those updates. All other events, such as `run_start` and `incident`, belong to the session and always stay.
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
