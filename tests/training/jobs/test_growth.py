"""Mantissa's own memory and files do not grow with the length of a run, counted in bytes."""

import json
import re
import tracemalloc
from pathlib import Path

from config.schema import GuardSection
from precision.guard import Guard, Judgement, Verdict
from precision.manifest import Manifest, Rule
from precision.regions import Regions
from precision.step_health import Health
from tests.support.models.small_models import small_model

MANIFEST = Manifest("bf16", (Rule("fp16", "to have one", "*.q_proj"),), Path("a manifest"))


def healthy(step: int) -> Health:
    return Health(step=step, loss=2 + 1 / step, grad_norm=1 + 1 / step)


def test_what_the_guard_saves_does_not_grow_once_its_window_is_full() -> None:
    """Incidents occur on the way, as many as their budgets allow."""
    guard, sizes = Guard(GuardSection(spike_sigmas=6.0)), {}
    for step in range(1, 2001):
        refused = step % 100 == 0 and guard.used["skip"] < GuardSection().skip_budget
        judgement = Judgement(Verdict.SKIP, "a test") if refused else Judgement(Verdict.STEP)
        guard.note(healthy(step), judgement, applied=not refused)
        sizes[step] = len(re.sub(r"\d+(\.\d+)?", "0", json.dumps(guard.state_dict())))
    assert sizes[20] < sizes[150] == sizes[2000] < 2000


def test_regions_that_change_to_and_fro_leave_nothing_behind() -> None:
    """As the probe of telemetry changes all of them, twice each time."""
    regions = Regions(small_model("llama", num_hidden_layers=4), MANIFEST)

    def to_and_fro(times: int) -> None:
        for _ in range(times):
            for name, compute in regions.dtypes.items():
                regions.set(name, "fp32", "a probe")
                regions.set(name, compute, "a probe")

    to_and_fro(2)
    tracemalloc.start()
    to_and_fro(50)
    held = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert held < 20_000, f"{held} bytes"
