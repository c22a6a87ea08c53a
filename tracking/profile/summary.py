"""Summarise a profile: step time by category, matmuls in FP32, and sizes that do not suit tensor cores.

Every moment of the profiled steps is counted once, under the innermost category. On a GPU, kernel time is split into
the same categories, and the rest is idle.
"""

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

from tracking.pages.document import write_document
from tracking.profile.matmul import NAMES, Matmul, added_up, fp32_matmuls, matmul_of, misaligned_sizes, table
from tracking.profile.page import largest_parts, profile_page, which_steps
from tracking.profile.timeline import Event, Timeline, build_timeline, merged, overlap, read_trace

DATA, COMMUNICATION, OPTIMIZER, ATTENTION, CAST = "data wait", "communication", "optimizer", "attention", "casts"
OPERATORS, PYTHON, IDLE = "other operators", "Python between operators", "idle"
_COMMUNICATION = ("c10d::", "gloo:", "nccl:", "record_param_comms", "_c10d_functional::", "deepspeed_shm_comm::")
_ATTENTION = ("scaled_dot_product", "scaleddotproduct", "flash_attn", "flash_attention", "flashattn", "flex_attention")
_RANGES = ("user_annotation",)


def summarise(timeline: Timeline, facts: dict[str, Any]) -> dict[str, Any]:
    """The summary as plain values; times in seconds over all profiled steps. facts: from `Profiling`, included."""
    for event in timeline.events:
        event.category = _category(event)
    matmuls = [product for event in timeline.events if (product := matmul_of(event)) is not None]
    found: dict[str, Any] = {
        **facts,
        "steps_seconds": [(end - start) / 1e6 for start, end in timeline.steps],
        "host": _host(timeline),
        "device_time": _device(timeline) if timeline.device else None,
        "stages": _by(timeline, lambda event: event.stage or "rest of the step"),
        "phases": _by(timeline, lambda event: event.phase or "none"),
        "communication": _communication(timeline),
        "casts": _casts(timeline),
    }
    if timeline.device:
        _time_matmuls(matmuls, timeline)
    found["matmuls"] = table(matmuls)
    found["fp32_matmuls"] = fp32_matmuls(matmuls, compute=facts.get("compute", "fp32"), regions=facts.get("regions"))
    found["misfits"] = misaligned_sizes(matmuls, timeline.events)
    return found


def write_summary(trace: Path, facts: dict[str, Any]) -> str:
    """Write .json, .md and .html next to the trace; returns what took longest. Raises ValueError without a step."""
    summary = summarise(build_timeline(read_trace(trace)), facts)
    stem = trace.parent / trace.name.partition(".")[0]
    stem.with_suffix(".json").write_text(json.dumps(summary, indent=1), encoding="utf-8")
    write_document(stem.with_suffix(".md"), profile_page(summary, trace.name))
    return f"profiled {which_steps(summary['steps'])} of rank {summary['rank']}: {largest_parts(summary)}"


def _category(event: Event) -> str:
    """Category of an event's self time; its parent's category must be set already."""
    above = event.parent.category if event.parent is not None else ""
    if above in (DATA, COMMUNICATION):
        return above
    name = event.name.lower()
    if name.startswith(_COMMUNICATION):
        return COMMUNICATION
    if event.stage == "data":
        return DATA
    if event.stage == "optimizer":
        return OPTIMIZER
    if above in (ATTENTION, CAST) or above.startswith("matmul"):
        return above
    if event.kind == "cpu_op":
        if any(word in name for word in _ATTENTION):
            return ATTENTION
        found = matmul_of(event)
        if found is not None:
            return f"matmul {found.dtype}"
        return CAST if _cast_of(event) else OPERATORS
    return OPERATORS if event.kind not in _RANGES else PYTHON


def _cast_of(event: Event) -> str | None:
    """Dtypes `from -> to` of a copy between dtypes; None for other operators."""
    types = event.dtypes
    if event.name != "aten::copy_" or len(types) < 2 or types[0] == types[1]:
        return None
    return f"{NAMES.get(types[1], types[1])} -> {NAMES.get(types[0], types[0])}"


def _host(timeline: Timeline) -> dict[str, float]:
    """Seconds of the training thread by category, adding up to the time of the steps.

    Python time during which another thread communicates counts as communication.
    """
    elsewhere = merged((e.start, e.end) for e in timeline.elsewhere if e.name.lower().startswith(_COMMUNICATION))
    found: defaultdict[str, float] = defaultdict(float)
    for start, end, event in timeline.segments:
        if event.category == PYTHON or (event.category == OPTIMIZER and event.kind in _RANGES):
            waited = overlap(start, end, elsewhere)
            found[COMMUNICATION] += waited
            found[event.category] += end - start - waited
        else:
            found[event.category] += end - start
    return _seconds(found)


def _by(timeline: Timeline, key: Any) -> dict[str, float]:
    found: defaultdict[str, float] = defaultdict(float)
    for start, end, event in timeline.segments:
        found[key(event)] += end - start
    return _seconds(found)


def _device(timeline: Timeline) -> dict[str, Any]:
    """Kernel time by category, clipped to the steps, and the time without a kernel.

    Streams run concurrently, so categories may add up to more than the busy time.
    """
    found: defaultdict[str, float] = defaultdict(float)
    busy = []
    for kernel in timeline.device:
        inside = overlap(kernel.start, kernel.end, timeline.steps)
        if not inside:
            continue
        category = kernel.parent.category if kernel.parent is not None else OPERATORS
        if "nccl" in kernel.name.lower():
            category = COMMUNICATION
        found[OPERATORS if category == PYTHON else category] += inside
        busy.append((kernel.start, kernel.end))
    together = sum(overlap(start, end, timeline.steps) for start, end in merged(busy))
    found[IDLE] = sum(end - start for start, end in timeline.steps) - together
    return {"categories": _seconds(found), "busy_seconds": together / 1e6}


def _communication(timeline: Timeline) -> dict[str, float]:
    """Seconds during which a collective was running on any thread or stream, whether overlapped or not."""
    host = [*timeline.events, *timeline.elsewhere]
    spans = [(e.start, e.end) for e in host if e.name.lower().startswith(_COMMUNICATION)]
    spans += [(e.start, e.end) for e in timeline.device if "nccl" in e.name.lower()]
    return {"under_way": sum(overlap(a, b, timeline.steps) for a, b in merged(spans)) / 1e6}


def _casts(timeline: Timeline) -> list[dict[str, Any]]:
    """Dtype casts outside the optimizer: count, seconds and elements by kind and module, longest first."""
    found = []
    for event in timeline.events:
        kind = _cast_of(event)
        if kind is not None and event.category == CAST:
            seconds = (event.device_us if timeline.device else event.end - event.start) / 1e6
            elements = math.prod(event.dims[0]) if event.dims else 1
            found.append({"kind": kind, "module": event.module, "count": 1, "seconds": seconds, "elements": elements})
    return added_up(found, "kind", "module")


def _time_matmuls(matmuls: list[Matmul], timeline: Timeline) -> None:
    """Set each matmul's time to that of the kernels it launched."""
    by_event = {id(found.event): found for found in matmuls}
    for found in matmuls:
        found.seconds = 0.0
    for kernel in timeline.device:
        above = kernel.parent
        while above is not None and id(above) not in by_event:
            above = above.parent
        if above is not None:
            by_event[id(above)].seconds += (kernel.end - kernel.start) / 1e6


def _seconds(found: dict[str, float]) -> dict[str, float]:
    return {name: value / 1e6 for name, value in sorted(found.items(), key=lambda item: -item[1])}
