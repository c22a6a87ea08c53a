"""The contestants of `lab.benchmark`: how each is started, and how its result is read."""

from __future__ import annotations

import dataclasses
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from config.command_line import refusal
from config.errors import UserError
from config.launcher import as_launched
from lab.benchmark.peers import titan_terms
from lab.benchmark.spec import Result, Spec
from launch.job import TRAIN, error_line_of, launch
from tracking.jsonl import read_events

MANTISSA: dict[str, tuple[str, ...]] = {
    "mantissa": (),
    "mantissa-full": (
        *("telemetry.every_steps=10", "telemetry.probe=false", "precision.verify_every_steps=10"),
        *("tracking.prometheus_port=0", "tracking.log_every_steps=1"),
        *("guard.spike_sigmas=6", "guard.spike_window=16"),
    ),
    "mantissa-off": (
        *("telemetry.every_steps=0", "precision.verify_every_steps=0"),
        *("tracking.prometheus_port=null", "tracking.wandb=disabled", "tracking.log_every_steps=1000000"),
        *("guard.spike_sigmas=0", "guard.attribute_overflows=false"),
    ),
}
"""Mantissa as its config has it, with all its optional work on, and with all of it off: overrides by name."""
_SAME_LAYOUT = ("deepspeed.config=null", "deepspeed.stage={stage}", "deepspeed.offload={offload}")
PRECISIONS: dict[str, tuple[str, ...]] = {
    f"mantissa-{compute}": (
        "model.kernels=torch",  # the manifest path has no others
        f"precision.compute={compute}",
        *_SAME_LAYOUT,
    )
    for compute in ("fp32", "bf16", "fp16")
}
# Steps that are skipped while the scale settles would make the losses differ.
PRECISIONS["mantissa-fp16"] += ("precision.loss_scale.initial=4096",)
PRECISIONS["mantissa-manifest"] = (
    "model.kernels=torch",
    "precision.compute=auto",
    "precision.manifest=config/manifests/bf16.json",
    *_SAME_LAYOUT,
)
"""Mantissa with another precision than the config's, on the same work: overrides by name, to be formatted with a ZeRO
stage and none or cpu."""
KERNELS: dict[str, tuple[str, ...]] = {
    "mantissa-liger": ("model.kernels=liger",),
    "mantissa-torch": ("model.kernels=torch",),
    "mantissa-compile": ("model.kernels=torch", "model.compile=true"),
}
"""Mantissa with Liger's kernels, without them where they are installed, and with compiled blocks: overrides by name."""
OWN = MANTISSA | PRECISIONS | KERNELS
PEERS = {
    "bare": "lab.benchmark.peers.bare_loop",
    "accelerate": "lab.benchmark.peers.accelerate_loop",
    "trainer": "lab.benchmark.peers.trainer_loop",
    "trl": "lab.benchmark.peers.trl_loop",
    "torchtitan": "lab.benchmark.peers.titan_loop",
    "torchtitan-compile": "lab.benchmark.peers.titan_loop",
}
"""Loops of other libraries: module by name."""
TITAN: dict[str, tuple[str, ...]] = {"torchtitan": (), "torchtitan-compile": ("--compile",)}
"""torchtitan's contestants, and the arguments of its loop."""
TASKS = {"bare": ("pretrain",), "accelerate": ("pretrain",), "trainer": ("pretrain", "sft"), "trl": ("sft", "dpo")}
"""What the loops train, where they do not train every task."""
SHARING = ("bare",)
"""Of the loops, those that share matrices (`parallel.tensor`): DeepSpeed's AutoTP by its own config."""
WITHOUT_SPLIT = tuple(TITAN)
"""Contestants that run forward and backward in one call, in chunks or as one CUDA graph: their stages cannot be timed
separately."""
# Turns off what no other contestant does while it is timed.
COMMON_OVERRIDES = (
    *("run.resume=never", "evaluate.every_steps=0", "checkpoint.every_steps=0", "checkpoint.dir=null"),
    *("checkpoint.at_end=false", "generate.tokens=0", "profile.steps=0", "tracking.otlp_endpoint=null"),
)


@dataclass(frozen=True)
class Run:
    """One job of one contestant."""

    contestant: str
    launched: float
    """[seconds since the epoch]"""
    job_seconds: float
    """From the launcher's start to its end."""
    warm_up: int
    result: Result

    @property
    def first_step_seconds(self) -> float:
        """From the launcher's start to the end of the first step."""
        return self.result.stamps[0] - self.launched

    @property
    def steps(self) -> list[float]:
        """Seconds of each timed step."""
        stamps = self.result.stamps[self.warm_up - 1 :]
        return [after - before for before, after in zip(stamps, stamps[1:], strict=False)]

    @property
    def step_seconds(self) -> float:
        """Mean of the timed steps."""
        return sum(self.steps) / len(self.steps)


@dataclass(frozen=True)
class Runner:
    """Starts jobs of any contestant on one work."""

    folder: Path
    arguments: tuple[str, ...]
    """`--config FILE` and overrides, for train.py."""
    processes: int
    launcher: tuple[str, ...]
    spec: Spec

    def run(self, contestant: str, label: str) -> Run:
        """Run one job to its end. Raises UserError, which names the log, when it fails."""
        target = self.folder / "results" / f"{label}.json"
        launched = time.time()
        if contestant in OWN:
            self._start([*TRAIN, *self._train_arguments(contestant, label)], label)
        else:
            self._start(self._peer_arguments(contestant, target, split=False), label)
        ended = time.time()
        result = self._read_result(label) if contestant in OWN else Result.read(target)
        if contestant in OWN:
            result.write(target)
            shutil.rmtree(self.folder / "runs" / label / "checkpoints", ignore_errors=True)
        return Run(contestant, launched, ended - launched, self.spec.warm_up, result)

    def split(self, contestant: str) -> dict[str, Any]:
        """Run one more job that times a step by stage; see `lab.benchmark.split`."""
        label = f"{contestant}-split"
        target = self.folder / "results" / f"{label}.json"
        if contestant not in OWN:
            self._start(self._peer_arguments(contestant, target, split=True), label)
            found = Result.read(target).split
            assert found is not None
            return found
        counts = [str(self.spec.warm_up), str(self.spec.steps)]
        program = ["-m", "lab.benchmark.split", str(target), *counts]
        self._start([*program, *self._train_arguments(contestant, label)], label)
        shutil.rmtree(self.folder / "runs" / label / "checkpoints", ignore_errors=True)
        return json.loads(target.read_text(encoding="utf-8"))

    def peak(self) -> dict[str, Any]:
        """The rate of matmuls in the work's dtype, in all processes at once; see `lab.benchmark.peak`."""
        target = self.folder / "results" / "peak.json"
        self._start(["-m", "lab.benchmark.peak", self.spec.compute, str(target)], "peak")
        return json.loads(target.read_text(encoding="utf-8"))

    def refusal(self, contestant: str) -> str | None:
        """Why one of Mantissa's own cannot train this work; None where its config can be resolved."""
        return refusal(self._train_arguments(contestant, contestant), as_launched(self.processes))

    def _start(self, program: Sequence[str], label: str) -> None:
        log = self.folder / "logs" / f"{label}.log"
        (self.folder / "results").mkdir(parents=True, exist_ok=True)
        code = launch(program, processes=self.processes, log=log, launcher=self.launcher)
        if code:
            raise UserError(f"{label} failed: {error_line_of(log)}; see {log}")

    def _train_arguments(self, contestant: str, label: str) -> list[str]:
        where = [f"run.dir={self.folder / 'runs'}", f"run.name={label}"]
        offload = "none" if self.spec.offload == "none" else "cpu"
        overrides = [text.format(stage=self.spec.stage, offload=offload) for text in OWN[contestant]]
        return [*self.arguments, *COMMON_OVERRIDES, *where, *overrides]

    def _peer_arguments(self, contestant: str, target: Path, *, split: bool) -> list[str]:
        path = self.folder / ("spec-split.json" if split else "spec.json")
        dataclasses.replace(self.spec, split=split).write(path)
        return ["-m", PEERS[contestant], str(path), str(target), *TITAN.get(contestant, ())]

    def _read_result(self, label: str) -> Result:
        """Mantissa's result, from its event file."""
        events = read_events(self.folder / "runs" / label / "events.jsonl")
        steps = [event for event in events if event["event"] == "step"]
        return Result(
            losses=[event["loss"] for event in steps],
            stamps=[event["time"] for event in steps],
            memory_bytes=steps[-1]["memory_bytes"],
            engine="Mantissa",
        )


def choose(names: str) -> tuple[list[str], dict[str, str]]:
    """The contestants of a comma-separated list, and those that are skipped, with the reason.

    Raises UserError: no such contestant, one twice, or none left.
    """
    chosen: list[str] = []
    skipped: dict[str, str] = {}
    for name in filter(None, names.split(",")):
        if name not in {*OWN, *PEERS}:
            known = ", ".join([*OWN, *PEERS])
            raise UserError(f"--contestants = {names}: there is no {name}; choose among {known}")
        if name in chosen:
            raise UserError(f"--contestants = {names}: {name} is listed twice; list each once")
        reason = _unavailable_reason(name)
        if reason is not None:
            skipped[name] = reason
        else:
            chosen.append(name)
    if not chosen:
        raise UserError(f"--contestants = {names}: none of them can run here; name one of {', '.join(OWN)}")
    return chosen, skipped


def skip_unsupported(
    contestants: Sequence[str], spec: Spec, *, refused: Mapping[str, str] | None = None
) -> tuple[list[str], dict[str, str]]:
    """Those that can train this work, and those that cannot, with the reason. Raises UserError: none is left.

    refused: those whose own config refuses it, with the reason.
    """
    skipped = dict(refused or {}) | {
        name: f"it trains {' and '.join(TASKS[name])}, not {spec.task}"
        for name in contestants
        if spec.task not in TASKS.get(name, (spec.task,))
    }
    if spec.tensor > 1:
        why = f"its loop shares no matrices (parallel.tensor = {spec.tensor})"
        skipped |= {name: why for name in contestants if name in PEERS and name not in SHARING}
    titans = [name for name in contestants if name in TITAN]
    reason = None
    if titans:
        reason = titan_terms.unsupported_reason(spec) if spec.task == "pretrain" else "it trains pretrain only here"
    skipped |= dict.fromkeys(titans, reason) if reason is not None else {}
    chosen = [name for name in contestants if name not in skipped]
    if not chosen:
        reasons = "; ".join(skipped.values())
        raise UserError(f"--contestants = {','.join(contestants)}: none of them can train this: {reasons}")
    return chosen, skipped


def _unavailable_reason(name: str) -> str | None:
    """Why a contestant cannot be started here, whatever the work is; None where it can."""
    if name in ("accelerate", "trainer") and find_spec("accelerate") is None:
        return "accelerate is not installed"
    if name == "trl" and find_spec("trl") is None:
        return "trl is not installed; make trl installs it into a folder of its own"
    if name == "mantissa-liger":
        return _liger_unavailable_reason()
    return titan_terms.unavailable_reason() if name in TITAN else None


def _liger_unavailable_reason() -> str | None:
    import torch  # takes seconds

    from modeling.kernels import unavailable_reason

    return unavailable_reason(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
