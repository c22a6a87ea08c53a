"""Run folders for the tests of the report: a few lines describe what happened, the real record writes it."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.runs.compare_runs import SCALE, TOKENS_PER_STEP, start_fields, step_fields, ticking_clock
from tracking.jsonl import JsonlSink
from tracking.record import Record, Sink
from tracking.report.context import MeasureContext
from tracking.report.page import write_report
from tracking.run_dir import RunDir
from tracking.summary import read_run

CONFIG: dict[str, Any] = {
    "model": {"config": {"num_hidden_layers": 4, "hidden_size": 256}},
    "data": {"sequence_length": 512},
    "batch": {"micro_size": 2},
}
ENVIRONMENT: dict[str, Any] = {
    "accelerator": {"device": "NVIDIA H100 80GB HBM3"},
    "data": {"fingerprint": "aa", "train_tokens": 8_000_000},
}
EVALS = ((20, 4.0), (40, 3.0))


class SessionWriter:
    """One session under way: its methods record what happens next."""

    def __init__(self, record: Record, step: int) -> None:
        self._record, self.step = record, step

    def event(self, event: str, **fields: Any) -> None:
        """Record an event of any kind where the run is."""
        self._record.event(event, step=self.step, tokens=self.step * TOKENS_PER_STEP, **fields)

    def steps(self, count: int, **fields: Any) -> None:
        for _ in range(count):
            self.step += 1
            self.event("step", **step_fields(self.step, **{"loss_scale": 1.0} | fields))

    def overflow(self, *, reason: str | None = "overflow", loss: float = 3.0) -> None:
        """One step that overflows; reason None: no loss scale answers it."""
        self.steps(1, loss=loss, grad_norm=math.inf, clip_coefficient=None, applied=False, loss_scale=1024.0)
        if reason is not None:
            self.scale(reason)

    def scale(self, reason: str, previous: float = 1024.0, new: float = 512.0, **fields: Any) -> None:
        self.event("scale", reason=reason, **SCALE | {"from": previous, "to": new} | fields)

    def evaluate(self, loss: float) -> None:
        self.event("eval", loss=loss, perplexity=math.exp(loss))

    def save(self, path: str = "") -> None:
        path = path or f"step-{self.step}"
        self.event("checkpoint", path=path, seconds=1.0, stall_seconds=0.1, bytes=10, verified=True)

    def incident(self, verdict: str, **fields: Any) -> None:
        self.event("incident", verdict=verdict, **{"reason": "the loss is nan", "modules": [], "replay": ""} | fields)

    def end(self, status: str, exit_code: int = 0) -> None:
        self.event("run_end", status=status, exit_code=exit_code, reason="" if exit_code == 0 else "why it ended")


@contextmanager
def session(
    folder: Path, *sinks: Sink, step: int = 0, time: float = 1.7e9, seconds: float = 0.5, **start: Any
) -> Iterator[SessionWriter]:
    """A session of the run in `folder`, from `step` on, also for `sinks`; times of its events are `seconds` apart."""
    folder.mkdir(parents=True, exist_ok=True)
    record = Record([JsonlSink(RunDir(folder).events), *sinks], clock=ticking_clock(time, seconds))
    run = SessionWriter(record, step)
    run.event("run_start", **start_fields(**start))
    yield run
    record.close()


def simple_run(
    folder, *, compute="bf16", seconds=0.5, evals=EVALS, steps=60, fields=None, config=CONFIG, environment=ENVIRONMENT
) -> Path:
    """A finished run of one session. evals: (step, loss)."""
    with session(folder, compute=compute, seconds=seconds) as run:
        for step in range(1, steps + 1):
            run.steps(1, step_seconds=seconds, tokens_per_second=TOKENS_PER_STEP / seconds, **fields or {})
            for _, loss in (item for item in evals if item[0] == step):
                run.evaluate(loss)
        run.save()
        run.end("done")
    RunDir(folder).write_inputs(config, {}, environment)
    return folder


def report_of(run_dir: RunDir, **given: Any) -> str:
    """The text of the report that is written for a run folder. given: as for `write_report`."""
    return write_report(MeasureContext(read_run(run_dir.path)), **given).read_text(encoding="utf-8")
