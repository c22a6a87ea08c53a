"""Parse a torch.profiler trace into a tree of nested events with their modules, and the training thread's time spans.

Reads the Chrome trace file, whose fields are the same in all torch versions that Mantissa supports, so that a trace can
be summarised later and elsewhere. Needs no torch.
"""

import bisect
import gzip
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

STEP, STAGE, MODULE = "mantissa step ", "mantissa stage ", "mantissa module "
"""Name prefixes of the profiler ranges that Mantissa adds to a trace."""
_BACKWARD = "autograd::engine::evaluate_function"
_HOST = {"cpu_op", "user_annotation", "cuda_runtime", "cuda_driver"}
_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}


@dataclass(slots=True, eq=False)
class Event:
    """One event of a trace. Times are microseconds on the trace's clock."""

    name: str
    kind: str
    """The trace's category: cpu_op, user_annotation, cuda_runtime, kernel ..."""
    start: float
    end: float
    thread: Any
    arguments: dict[str, Any]
    parent: Self | None = None
    stage: str = ""
    """The part of the step: data, forward_backward, health, optimizer."""
    module: str = ""
    """Innermost module; for a backward operator, that of its forward operator. Empty outside of modules."""
    phase: str = ""
    """forward, backward, recompute (forward again inside backward, for activation checkpointing), or empty."""
    category: str = ""
    """Set by `tracking.profile.summary`."""
    device_us: float = 0.0
    """Time of the kernels that this event itself launched."""

    @property
    def dims(self) -> list[list[int]]:
        """Shapes of the inputs; an empty list for each input that is not a tensor."""
        return self.arguments.get("Input Dims", [])

    @property
    def dtypes(self) -> list[str]:
        """C++ dtype names of the inputs, such as float and c10::BFloat16."""
        return self.arguments.get("Input type", [])


@dataclass
class Timeline:
    """The steps of one trace."""

    events: list[Event]
    """Events of the training and autograd threads within the steps, sorted by start."""
    segments: list[tuple[float, float, Event]]
    """(start, end, innermost event) spans that exactly cover the steps."""
    device: list[Event]
    """GPU kernels and copies; `parent` is the operator that launched them."""
    elsewhere: list[Event]
    """Operators of other threads."""
    steps: list[tuple[float, float]]
    """Start and end of each step."""


def read_trace(path: Path) -> dict[str, Any]:
    """The JSON of a trace, compressed or not."""
    with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
        return json.load(file)


def build_timeline(trace: dict[str, Any]) -> Timeline:
    """Build the timeline. Raises ValueError if the trace contains no step of Mantissa."""
    raw = [entry for entry in trace["traceEvents"] if entry.get("ph") == "X"]
    events = [
        Event(e["name"], e["cat"], e["ts"], e["ts"] + e["dur"], e["tid"], e.get("args") or {})
        for e in raw
        if e.get("cat") in _HOST | _DEVICE
    ]
    host = [event for event in events if event.kind in _HOST]
    steps = sorted((e for e in host if e.name.startswith(STEP)), key=lambda e: e.start)
    if not steps:
        raise ValueError("the trace holds no step")
    ours = {steps[0].thread} | {event.thread for event in host if event.name.startswith(_BACKWARD)}
    spans = [(step.start, step.end) for step in steps]
    inside = sorted(
        (event for event in host if event.thread in ours and any(start <= event.start < end for start, end in spans)),
        key=lambda event: (event.start, -event.end),
    )
    segments = list(_nest(inside))
    _name_modules(inside, _origins(trace, inside))
    device = [event for event in events if event.kind in _DEVICE]
    _link_kernels(device, inside)
    elsewhere = [event for event in host if event.thread not in ours]
    return Timeline(inside, segments, device, elsewhere, spans)


def merged(intervals: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of the intervals, as sorted disjoint intervals."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def overlap(start: float, end: float, intervals: list[tuple[float, float]]) -> float:
    """Length of start..end that is covered by `intervals`, which come from `merged`."""
    total = 0.0
    for index in range(max(0, bisect.bisect_right(intervals, (start, start)) - 1), len(intervals)):
        low, high = intervals[index]
        if low >= end:
            break
        total += max(0.0, min(end, high) - max(start, low))
    return total


def _nest(events: list[Event]) -> Iterator[tuple[float, float, Event]]:
    """Set parents and yield (start, end, innermost event) spans. events: sorted by start, outer before inner."""
    stack: list[Event] = []
    cursor = 0.0
    for event in events:
        while stack and stack[-1].end <= event.start:
            if stack[-1].end > cursor:
                yield cursor, stack[-1].end, stack[-1]
                cursor = stack[-1].end
            stack.pop()
        if stack:
            if event.start > cursor:
                yield cursor, event.start, stack[-1]
            event.parent = stack[-1]
            event.end = min(event.end, stack[-1].end)  # times in the file are rounded to a nanosecond
        cursor = event.start
        stack.append(event)
    while stack:
        event = stack.pop()
        if event.end > cursor:
            yield cursor, event.end, event
            cursor = event.end


def _origins(trace: dict[str, Any], events: list[Event]) -> dict[tuple[Any, float], Event]:
    """(thread, start) of a backward operator to its forward operator, from the trace's flow events."""
    at = {(event.thread, event.start): event for event in events if event.kind == "cpu_op"}
    flows = [entry for entry in trace["traceEvents"] if entry.get("cat") == "fwdbwd"]
    starts = {entry["id"]: at.get((entry["tid"], entry["ts"])) for entry in flows if entry["ph"] == "s"}
    ends = (entry for entry in flows if entry["ph"] == "f")
    return {(end["tid"], end["ts"]): forward for end in ends if (forward := starts.get(end["id"])) is not None}


def _name_modules(events: list[Event], origins: dict[tuple[Any, float], Event]) -> None:
    """Set stage, module and phase of each event from those enclosing it. events: parents before children."""
    for event in events:
        above = event.parent
        if above is not None:
            event.stage, event.module, event.phase = above.stage, above.module, above.phase
        if event.name.startswith(STAGE):
            event.stage = event.name.removeprefix(STAGE)
        elif event.name.startswith(MODULE):
            event.module = event.name.removeprefix(MODULE)
            event.phase = "recompute" if event.phase in ("backward", "recompute") else "forward"
        elif event.name.startswith(_BACKWARD):
            event.phase = "backward"
        origin = origins.get((event.thread, event.start))
        if origin is not None:
            event.module = origin.module


def _link_kernels(device: list[Event], host: list[Event]) -> None:
    """Set the operator that launched each kernel as its parent, and add the kernel's time to that operator."""
    calls = {e.arguments["correlation"]: e for e in host if "correlation" in e.arguments}
    by_id = {e.arguments["External id"]: e for e in host if "External id" in e.arguments and e.kind == "cpu_op"}
    for kernel in device:
        call = calls.get(kernel.arguments.get("correlation"))
        launcher = call.parent if call is not None else by_id.get(kernel.arguments.get("External id"))
        kernel.parent = launcher
        if launcher is not None:
            launcher.device_us += kernel.end - kernel.start
