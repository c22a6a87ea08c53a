"""Events of a long run, nearly all of them telemetry, and the memory that reading them takes."""

import json
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tracking.events import REQUIRED_FIELDS

STEPS = 300


def write_long_record(path: Path) -> int:
    """Write STEPS steps, the telemetry of 300 modules after each, and the end; returns the size."""
    modules = {f"model.layers.{number}.mlp.down_proj": number / 7 for number in range(300)}
    telemetry = {"event": "telemetry", **dict.fromkeys(REQUIRED_FIELDS["telemetry"], {}), "gradients": modules}
    step = {"event": "step", **dict.fromkeys(REQUIRED_FIELDS["step"])}
    with path.open("w") as file:

        def write(event: dict[str, Any], number: int) -> None:
            common = {"step": number, "time": 10.0 + number, "tokens": 8 * number}
            file.write(json.dumps(event | common, separators=(",", ":")) + "\n")

        write({"event": "run_start", **dict.fromkeys(REQUIRED_FIELDS["run_start"])}, 0)
        for number in range(1, STEPS + 1):
            write(step, number)
            write(telemetry, number)
        write({"event": "checkpoint", **dict.fromkeys(REQUIRED_FIELDS["checkpoint"])}, STEPS - 1)
        write({"event": "run_end", "status": "preempted", "exit_code": 75, "reason": "max_minutes"}, STEPS)
    return path.stat().st_size


@contextmanager
def peak_memory() -> Iterator[list[int]]:
    """Context whose list holds, at its end, the most that Python's objects took meanwhile [bytes]."""
    peak: list[int] = []
    tracemalloc.start()
    try:
        yield peak
        peak.append(tracemalloc.get_traced_memory()[1])
    finally:
        tracemalloc.stop()
