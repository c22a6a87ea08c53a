"""A run folder filled through the real record, with the kinds of trouble a real run has."""

import math
from pathlib import Path

import pytest

from tests.support.runs.synthetic_events import SCALE, TOKENS_PER_STEP, start_fields, step_fields, ticking_clock
from tracking.jsonl import JsonlSink
from tracking.record import Record
from tracking.run_dir import RunDir


@pytest.fixture
def run_dir(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "runs", "demo", fresh=False)


@pytest.fixture
def fp16_run(run_dir: RunDir) -> RunDir:
    """A finished FP16 run of 60 steps: two overflows, one growth of the scale, two evaluations, a checkpoint."""
    record = Record([JsonlSink(run_dir.events)], clock=ticking_clock())
    record.event("run_start", step=0, tokens=0, **start_fields(compute="fp16"))
    scale, skipped = 65536.0, 0
    for step in range(1, 61):
        where, overflow = {"step": step, "tokens": step * TOKENS_PER_STEP}, step in (3, 40)
        skipped += overflow
        broken = {"grad_norm": math.inf, "clip_coefficient": None} if overflow else {}
        fields = step_fields(step, loss_scale=scale, applied=not overflow, skipped_total=skipped, **broken)
        record.event("step", **where, **fields)
        if overflow or step == 20:
            new, reason = (scale / 2, "overflow") if overflow else (scale * 2, "growth")
            fields = SCALE | {"consecutive_overflows": int(overflow)}
            record.scale(**where, previous=scale, new=new, reason=reason, **fields)
            scale = new
        if step % 30 == 0:
            loss = 3.2 + 10 / step
            record.event("eval", **where, loss=loss, perplexity=math.exp(loss))
    path = str(run_dir.checkpoints / "step-60")
    facts = {"path": path, "seconds": 1.5, "stall_seconds": 1.5, "bytes": 10_000_000, "verified": True}
    record.event("checkpoint", **where, **facts)
    record.event("run_end", **where, status="done", exit_code=0)
    record.close()
    return run_dir
