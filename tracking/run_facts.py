"""One run as columns: reads `events.jsonl` in one pass and keeps 105 bytes per step, plus 8 per metric of the task.

Per-step numbers are arrays, so that two runs of a million steps can be compared exactly; rare events (scale changes,
evaluations, checkpoints, incidents) are kept whole. After a resume or rollback the last attempt at a step counts, as in
`tracking.compare.surviving`.
"""

import math
import re
from array import array
from collections import Counter
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from config.cli import BROKEN
from config.errors import UserError
from tracking.crash import CRASHED
from tracking.events import Event, describe_event, fault_in
from tracking.figures import headline_of
from tracking.heatmap.grid import Heat, HeatCollector, read_heat
from tracking.jsonl import Follower, beginnings, event_on, restored
from tracking.status import Status, ended
from tracking.verdict import Evidence, Verdict, is_warning, judge

MAX_RARE_EVENTS = 20_000
"""Maximum number of events kept per kind: the first half and the newest half."""
_FEW_RARE_EVENTS = 1000

_STATE = ("scale", "eval", "checkpoint")  # dropped with the attempt that recorded them
_STEP, _TELEMETRY = beginnings("step", "telemetry")
_RESCALED = ("overflow", "hysteresis")  # reasons of scale events caused by an overflow
_PASSED_OVER = "passed over checkpoint"  # prefix of the note about a checkpoint that a resuming session skipped
_NONE_LOADS = re.compile("; no checkpoint can be loaded: (?!there is none$)")  # in the reason of a rollback's ABORT
WIDE = frozenset({"fp32", "fp64"})
"""Dtypes that are not low precision."""
_HASH_DIGITS = 15  # hex digits of sample_ids_sha256 to keep: 60 bits fit a signed 64-bit integer


@dataclass(frozen=True)
class Columns:
    """One value per surviving step, in step order; every array has shape (steps,), nan where nothing was recorded.

    Units as in `tracking.events`. `seconds`: cumulative step time after this step, including abandoned attempts and
    earlier sessions, but not pauses between sessions. `order`: the first 60 bits of `sample_ids_sha256`, -1 if missing.
    """

    step: np.ndarray
    tokens: np.ndarray
    seconds: np.ndarray
    loss: np.ndarray
    grad_norm: np.ndarray
    clip_coefficient: np.ndarray
    lr: np.ndarray
    loss_scale: np.ndarray
    applied: np.ndarray
    step_seconds: np.ndarray
    tokens_per_second: np.ndarray
    memory_bytes: np.ndarray
    data_seconds: np.ndarray
    order: np.ndarray
    metrics: dict[str, np.ndarray] = field(default_factory=dict)
    """Metrics of the task by name."""

    def __len__(self) -> int:
        return len(self.step)


_TYPES = {column.name: "d" for column in fields(Columns) if column.name != "metrics"}
_TYPES |= {"step": "q", "order": "q", "applied": "b"}
_NUMBERS = [name for name, code in _TYPES.items() if code == "d" and name != "seconds"]


@dataclass
class Session:
    """One start of the run. Times in seconds since the epoch."""

    began: float
    resumed_from: str | None
    could_resume: bool
    """Whether an earlier session had recorded a checkpoint."""
    last: float
    """Time of its newest event other than a note, since 0.2 recorded a session's first notes before its `run_start`."""
    world_size: int | None
    """Number of its processes; None if not recorded."""
    skipped_checkpoints: int = 0
    """Number of checkpoints it skipped because they were damaged or belonged to another run."""
    rollbacks: int = 0
    failed_rollbacks: int = 0
    """Number of rollbacks that found checkpoints and could load none of them."""
    end: Event | None = None
    aborted: str | None = None
    """Reason of its first ABORT incident."""

    def add(self, event: Event) -> None:
        if event["event"] != "note":
            self.last = float(event["time"])  # step events have not been validated yet
        match event["event"]:
            case "run_end":
                self.end = event
            case "incident" if event["verdict"] == "ABORT":
                self.aborted = self.aborted or event["reason"]
                self.failed_rollbacks += _NONE_LOADS.search(event["reason"]) is not None
            case "incident":
                self.rollbacks += event["verdict"] == "ROLLBACK" and event.get("rolled_back_to") is not None
            case "note":
                self.skipped_checkpoints += event["text"].startswith(_PASSED_OVER)

    @property
    def stopped_on_numerics(self) -> str | None:
        """Why the guard stopped it; None if it did not, or if a machine that computes wrongly was the reason."""
        at_fault = self.end is not None and self.end["exit_code"] == BROKEN
        return None if at_fault else self.aborted

    @property
    def crashed(self) -> bool:
        """Whether it ended without a `run_end`, or with one that records a crash. Meaningless while it runs."""
        return self.end is None or self.end["status"] == CRASHED

    @property
    def restored(self) -> bool | None:
        """Whether it resumed from the newest checkpoint it found; None if it had none to resume from."""
        if not (self.could_resume or self.resumed_from is not None or self.skipped_checkpoints):
            return None
        return self.resumed_from is not None and self.skipped_checkpoints == 0


@dataclass(slots=True)
class Broken:
    """A non-finite attempt at a step, and its consequences."""

    step: int
    loss_finite: bool = True
    rescaled: bool = False
    """Whether the loss scale reacted, by a change or by using up hysteresis."""
    overflowed: bool = False
    """Whether an activation overflowed FP16, which no loss scale can prevent."""
    cause: str = ""

    @property
    def handled(self) -> bool:
        """Whether it was an overflow handled by dynamic loss scaling: a finite loss but a non-finite gradient."""
        return self.rescaled and self.loss_finite


@dataclass(frozen=True)
class RunFacts:
    """A run as recorded in its events and the files beside them (`tracking.summary.read_run_folder`); the source of
    every page, table and figure.

    rare_events: events by kind, in file order: `scale`, `eval` and `checkpoint` of the surviving history; all others,
    such as `run_start`, `incident` and `note`, of every session.
    counts: number of events by kind over all sessions, including those no longer in `rare_events`. scale_reasons: the
    same for scale events, by reason.
    warnings: the events that the verdict counts as warnings, of every session.
    abandoned: number of step attempts replaced by a later one. sessions, broken: over all attempts, abandoned included.
    running_seconds: sum of step_seconds over all attempts. evidence: the basis of the verdict. checked: for a run
    folder, its status after looking up its process.
    """

    label: str
    source: str
    events: Path | None
    columns: Columns
    rare_events: dict[str, list[Event]]
    counts: Counter[str]
    scale_reasons: Counter[str]
    warnings: list[Event]
    abandoned: int
    sessions: list[Session]
    broken: list[Broken]
    running_seconds: float
    evidence: Evidence
    newest: Event
    """The newest `step` event; empty before the first, and if the event is invalid."""
    config: dict[str, Any] = field(default_factory=dict)
    deepspeed: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    checked: Status | None = None

    @property
    def start(self) -> Event:
        """The newest `run_start` event; empty if none was recorded."""
        return (self.rare_events.get("run_start") or [{}])[-1]

    @property
    def end(self) -> Event | None:
        """The `run_end` of the newest session; None if it has none, being still running or killed."""
        return self.sessions[-1].end if self.sessions else None

    @property
    def wall_seconds(self) -> float:
        """Time from the first to the last event, summed over sessions."""
        return sum(session.last - session.began for session in self.sessions)

    @property
    def device_hours(self) -> float:
        """`wall_seconds` in hours, each session's times the number of its processes."""
        sizes = ((session.world_size or self.world_size, session) for session in self.sessions)
        return sum(size * (session.last - session.began) for size, session in sizes) / 3600

    @property
    def restores(self) -> tuple[int, int]:
        """(successful, due) restores: sessions with a checkpoint to resume from, and rollbacks."""
        rollbacks = sum(session.rollbacks for session in self.sessions)
        failed = sum(session.failed_rollbacks for session in self.sessions)
        due = [session.restored for session in self.sessions if session.restored is not None]
        return rollbacks + sum(due), rollbacks + failed + len(due)

    @property
    def nonfinite(self) -> list[Broken]:
        """Non-finite attempts, except overflows handled by the loss scale."""
        return [attempt for attempt in self.broken if not attempt.handled]

    @property
    def scaled(self) -> bool:
        """Whether loss scaling was used: the scale changed, or was not 1."""
        scales = self.columns.loss_scale
        return self.counts["scale"] > 0 or bool((np.isfinite(scales) & (scales != 1.0)).any())

    @property
    def low_precision(self) -> str | None:
        """The configured matmul dtype below FP32; None for an FP32 run."""
        dtypes = [self.start.get("compute"), *(self.start.get("regions") or {}).values()]
        return next((dtype for dtype in dtypes if dtype and dtype not in WIDE), None)

    @cached_property
    def heat(self) -> Heat:
        """The run's heat maps; empty for a run without a file. Raises UserError if its events cannot be read."""
        return HeatCollector().heat() if self.events is None else read_heat(self.events)

    @cached_property
    def verdict(self) -> Verdict:
        """The run's verdict. Without a checked status and a recorded end, it counts as running."""
        step = int(self.columns.step[-1]) if len(self.columns) else 0
        unchecked = Status("running", step=step) if self.end is None else ended(self.end, step)
        folder = None if self.events is None else self.events.parent
        resume = str(self.environment.get("resume_command") or "")
        status = self.checked or unchecked
        return judge(self.evidence, status, folder=folder, config=self.config, resume_command=resume)

    @cached_property
    def tokens_per_second(self) -> float:
        """Median throughput of all ranks together over the surviving steps; nan without a step."""
        return median(self.columns.tokens_per_second)

    @property
    def world_size(self) -> int:
        """Number of processes of the newest session, each with one device; 1 if not recorded."""
        return int(self.start.get("world_size") or self.environment.get("world_size") or 1)

    def world_size_at(self, steps: np.ndarray) -> np.ndarray:
        """Number of processes of the session in which each of these surviving steps was done."""
        found = np.full(len(steps), self.world_size)
        for start in self.rare_events.get("run_start", ()):
            found[steps > start["step"]] = start["world_size"] or self.world_size
        return found

    @property
    def device_speed(self) -> float:
        """Median throughput of one device in tokens/s over the surviving steps; nan without a step."""
        return median(self.columns.tokens_per_second / self.world_size_at(self.columns.step))

    @property
    def loss_unit(self) -> str:
        """Unit of the loss; empty if it has none. Where it was not recorded, a loss is in nats per token."""
        return str(self.start.get("loss_unit", "" if self.headline else "nats per token"))

    @cached_property
    def headline(self) -> str:
        """Name of the headline metric that replaces the loss; empty if the loss is the headline."""
        return headline_of([*self.columns.metrics, *self.evaluated])

    @cached_property
    def evaluated(self) -> dict[str, np.ndarray]:
        """Metrics of the surviving evaluations, each of shape (evaluations,); nan where missing."""
        found = [event.get("metrics") or {} for event in self.rare_events.get("eval", [])]
        names = dict.fromkeys(name for metrics in found for name in metrics)
        return {name: np.array([_number(metrics.get(name)) for metrics in found]) for name in names}

    @property
    def evaluations(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(step, tokens, running seconds, loss) of the surviving evaluations, each of shape (evaluations,)."""
        events, columns = self.rare_events.get("eval", []), self.columns
        steps = np.array([event["step"] for event in events], float)
        tokens = np.array([event["tokens"] for event in events], float)
        losses = np.array([_number(event["loss"]) for event in events], float)
        if not len(columns):
            return steps, tokens, np.full(len(events), math.nan), losses
        at = np.searchsorted(columns.step, steps, side="right") - 1
        return steps, tokens, np.where(at >= 0, columns.seconds[np.maximum(at, 0)], 0.0), losses

    @property
    def peak_memory_bytes(self) -> float:
        """Peak memory of the rank that used most; nan if not recorded."""
        known = self.columns.memory_bytes[self.columns.memory_bytes > 0]
        return float(known.max()) if known.size else math.nan


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def median(values: np.ndarray) -> float:
    """Median of the finite values; nan if there are none."""
    finite = values[np.isfinite(values)]
    return float(np.median(finite)) if finite.size else math.nan


class Collector:
    """Accumulates events in file order and keeps the surviving history."""

    def __init__(self, *, columns: bool = True) -> None:
        """columns: False keeps no per-step numbers and fewer events per kind, so that memory stays bounded."""
        self._keeps_columns, self._most = columns, MAX_RARE_EVENTS if columns else _FEW_RARE_EVENTS
        self._columns = {name: array(code) for name, code in _TYPES.items()}
        self._metrics: dict[str, array[float]] = {}
        self._step = self._columns["step"]
        self._state: dict[str, list[tuple[int, Event]]] = {kind: [] for kind in _STATE}
        self._events: dict[str, list[Event]] = {}
        self._warnings: list[Event] = []
        self._serial = self._began = 0  # number of events so far; step at which the session started
        self._reached = (0, 0)  # newest step, and the number of its event
        self._running = 0.0
        self._sessions: list[Session] = []
        self._broken: list[Broken] = []
        self._open: Broken | None = None
        """The newest attempt, if it was not finite."""
        self.counts: Counter[str] = Counter()
        self.scale_reasons: Counter[str] = Counter()
        self.abandoned = 0
        self.evidence = Evidence()
        self._newest: Event = {}

    def take(self, line: bytes) -> bool:
        """Add the event on a line; returns whether there is one.

        Telemetry events are counted without being parsed: they are large and not needed here.
        """
        if line.startswith(_TELEMETRY):
            self._serial += 1
            self.counts["telemetry"] += 1
            return True
        try:
            # Steps need no prior validation: all of their numbers are converted below.
            event = orjson.loads(line) if line.startswith(_STEP) else event_on(line)
            if event is not None:
                self.add(event)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError):
            return False
        return event is not None

    def add(self, event: Event) -> None:
        """Add one event; numbers of a step may be the strings "inf", "-inf" and "nan"."""
        kind = event["event"]
        self._serial += 1
        self.counts[kind] += 1
        if kind == "run_start" or (not self._sessions and kind != "note"):
            saved, resumed_from = self.counts["checkpoint"] > 0, event.get("resumed_from")
            began = float(event["time"])
            self._sessions.append(Session(began, resumed_from, saved, began, event.get("world_size")))
        if self._sessions:
            self._sessions[-1].add(event)
        self.evidence.add(event)
        if is_warning(event):
            self._keep(self._warnings, event)
        if kind == "step":
            self._newest = event
            if event["step"] <= self._reached[0]:
                self._drop_steps(event["step"], also_newest=False)
            if self._keeps_columns:
                self._add_step(event)
            self._reached = (event["step"], self._serial)
        elif kind in _STATE:
            if kind == "scale":
                self.scale_reasons[event["reason"]] += 1
                if self._open is not None and self._open.step == event["step"]:
                    self._open.rescaled |= event["reason"] in _RESCALED
            self._keep(self._state[kind], (self._serial, event))
        elif kind == "precision":
            kept = self._events.setdefault(kind, [])
            if not kept or any(kept[-1].get(name) != event.get(name) for name in ("flop_share", "inner")):
                self._keep(kept, event)
        else:
            if kind == "run_start":
                self._began, self._open, self._reached = event["step"], None, (event["step"], self._serial)
                self._drop_steps(event["step"] + 1, also_newest=True)
            elif kind == "nonfinite":
                self._explain(event)
            self._keep(self._events.setdefault(kind, []), event)

    def _keep(self, kept: list[Any], item: Any) -> None:
        """Append an item, dropping the middle one if there are too many."""
        if len(kept) >= self._most:
            del kept[self._most // 2]
        kept.append(item)

    def _explain(self, event: Event) -> None:
        """Add a `nonfinite` event to its attempt, whose loss and gradient norm may nevertheless be finite."""
        if self._open is None:
            self._open = Broken(event["step"])
            self._broken.append(self._open)
        what = (event["tensor"], event["kind"], event.get("dtype"))
        self._open.overflowed |= what == ("activation", "inf", "float16")
        self._open.cause = self._open.cause or describe_event(event)

    def _add_step(self, event: Event) -> None:
        step = event["step"]
        if not 0 <= step < 1 << 63:
            raise ValueError(f"step {step}")
        row: dict[str, Any] = {name: _number(event.get(name)) for name in _NUMBERS}
        metrics = {name: _number(value) for name, value in (event.get("metrics") or {}).items()}
        order = event.get("sample_ids_sha256")
        row["order"] = int(order[:_HASH_DIGITS], 16) if order else -1
        covered = max(1, step - (self._step[-1] if self._step else self._began))  # wandb omits steps
        self._running += row["step_seconds"] * covered if math.isfinite(row["step_seconds"]) else 0.0
        row |= {"step": step, "seconds": self._running, "applied": bool(event.get("applied", True))}
        for name, value in row.items():
            self._columns[name].append(value)
        for name in {**metrics, **self._metrics}:
            if name not in self._metrics:  # nan for all earlier steps
                self._metrics[name] = array("d", [math.nan]) * (len(self._step) - 1)
            self._metrics[name].append(metrics.get(name, math.nan))
        self._open = None
        finite = [math.isfinite(row[name]) or event.get(name) is None for name in ("loss", "grad_norm")]
        if not all(finite):
            self._open = Broken(step, loss_finite=finite[0])
            self._broken.append(self._open)

    def _drop_steps(self, step: int, *, also_newest: bool) -> None:
        """Drop all steps from `step` on, and what they recorded.

        also_newest: False keeps state events of `step` after the newest step event: they belong to the new attempt.
        """
        kept = int(np.searchsorted(np.frombuffer(self._step, np.int64), step)) if self._step else 0
        self.abandoned += len(self._step) - kept
        columns: list[array[Any]] = [*self._columns.values(), *self._metrics.values()]
        for column in columns:
            del column[kept:]
        for kind, events in self._state.items():
            self._state[kind] = [
                (serial, event)
                for serial, event in events
                if event["step"] < step + (not also_newest and serial > self._reached[1])
            ]

    def facts(self, label: str, source: str, events: Path | None) -> RunFacts:
        """The run so far. The columns share memory with this collector, so nothing may be added while they are used."""
        columns = {name: np.frombuffer(column, column.typecode) for name, column in self._columns.items()}
        columns["applied"] = columns["applied"].astype(bool)
        metrics = {name: np.frombuffer(column) for name, column in self._metrics.items()}
        state = {kind: [event for _, event in kept] for kind, kept in self._state.items()}
        return RunFacts(
            label=label,
            source=source,
            events=events,
            columns=Columns(**columns, metrics=metrics),
            rare_events={kind: kept for kind, kept in {**state, **self._events}.items() if kept},
            counts=self.counts,
            scale_reasons=self.scale_reasons,
            warnings=[*self._warnings],
            abandoned=self.abandoned,
            sessions=[replace(session) for session in self._sessions],
            broken=[replace(attempt) for attempt in self._broken],
            running_seconds=self._running,
            evidence=self.evidence,
            newest={} if fault_in(newest := restored(self._newest)) else newest,
        )


def read_facts(path: Path, label: str) -> RunFacts:
    """The facts of one `events.jsonl`, read in one pass.

    An incomplete last line (after a crash, or in a running run) is skipped. Raises UserError if the file cannot be
    read, another line is damaged or nothing was recorded.
    """
    collector, file = Collector(), Follower(path)
    for line in file.lines(whole=True):
        if not collector.take(line):
            file.refuse(line)
    if not collector.counts:
        raise UserError(f"{path}: nothing was recorded in this run folder")
    return collector.facts(label, str(path.parent), path)
