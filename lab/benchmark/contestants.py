"""The contestants of `lab.benchmark`: how each is started, and how its result is read."""

import json
import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from config.errors import UserError
from config.launcher import as_launched
from lab.benchmark.peers import titan_terms
from lab.benchmark.spec import Result, Spec
from launch.job import NO_STORE, error_line_of, launch, refusal, training_program
from tracking.compare.surviving import read_events

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
"""Mantissa as configured, with all of its optional work on, and with all of it off: overrides by name."""
_SAME_LAYOUT = ("deepspeed.config=null", "deepspeed.stage={stage}", "deepspeed.offload={offload}")
_TORCH = "model.kernels=torch"  # the manifest path supports no others
PRECISIONS: dict[str, tuple[str, ...]] = {
    "mantissa-fp32": (_TORCH, *_SAME_LAYOUT, "precision.compute=fp32"),
    "mantissa-bf16": (_TORCH, *_SAME_LAYOUT, "precision.compute=bf16"),
    # steps skipped while the scale settles would make the losses differ
    "mantissa-fp16": (_TORCH, *_SAME_LAYOUT, "precision.compute=fp16", "precision.loss_scale.initial=4096"),
    "mantissa-manifest": (
        *(_TORCH, *_SAME_LAYOUT, "precision.compute=auto", "precision.manifest=config/manifests/bf16.json"),
    ),
}
"""Mantissa with a precision other than the config's, on the same work: overrides by name, to be formatted with a ZeRO
stage and none or cpu."""
KERNELS: dict[str, tuple[str, ...]] = {
    "mantissa-liger": ("model.kernels=liger",),
    "mantissa-torch": ("model.kernels=torch",),
    "mantissa-compile": ("model.kernels=torch", "model.compile=true"),
}
"""Mantissa with Liger's kernels, with torch's even if Liger is there, and with compiled blocks: overrides by name."""
CHECKPOINTING: dict[str, tuple[str, ...]] = {
    **{f"recompute-{mode}": (f"model.activation_checkpointing={mode}",) for mode in ("none", "ops", "attention")},
    "recompute-selective": ("model.activation_checkpointing=selective",),
    "recompute-selective-4": ("model.activation_checkpointing=selective", "model.checkpointing_every=4"),
    "recompute-full": ("model.activation_checkpointing=full", "model.checkpointing_reentrant=false"),
    "recompute-full-reentrant": ("model.activation_checkpointing=full", "model.checkpointing_reentrant=true"),
}
"""Mantissa with each mode of activation checkpointing, which must not change its losses: overrides by name."""
OWN = MANTISSA | PRECISIONS | KERNELS | CHECKPOINTING


class Peer(NamedTuple):
    """A training loop of another library."""

    module: str
    """Module of `lab.benchmark.peers`."""
    tasks: tuple[str, ...] = ("pretrain",)
    """Tasks that it can train."""
    arguments: tuple[str, ...] = ()


PEERS = {
    "bare": Peer("bare_loop"),
    "accelerate": Peer("accelerate_loop"),
    "trainer": Peer("trainer_loop", ("pretrain", "sft")),
    "trl": Peer("trl_loop", ("sft", "dpo")),
    "torchtitan": Peer("titan_loop"),
    "torchtitan-compile": Peer("titan_loop", arguments=("--compile",)),
}
TITAN = ("torchtitan", "torchtitan-compile")
# Turns off work that no other contestant does while it is timed.
COMMON_OVERRIDES = (
    *("run.resume=never", "evaluate.every_steps=0", "checkpoint.every_steps=0", *NO_STORE),
    *("checkpoint.at_end=false", "generate.tokens=0", "profile.steps=0", "tracking.otlp_endpoint=null"),
)


@dataclass(frozen=True)
class Run:
    """One job of one contestant."""

    launched: float
    """[seconds since the epoch]"""
    warm_up: int
    """[steps] Untimed steps."""
    result: Result

    @property
    def first_step_seconds(self) -> float:
        """Seconds from the launcher's start to the end of the first step."""
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
    """Runs jobs of any contestant on one work, in a folder of its own."""

    folder: Path
    processes: int
    arguments: tuple[str, ...]
    """`--config FILE` and overrides, for train.py."""
    spec: Spec

    def run(self, contestant: str, label: str) -> Run:
        """Run one job to its end. Raises UserError."""
        target, warm_up = self._target(label), self.spec.warm_up
        if contestant in PEERS:
            work, peer = self.folder / "spec.json", PEERS[contestant]
            self.spec.write(work)
            program = ["-m", f"lab.benchmark.peers.{peer.module}", str(work), str(target), *peer.arguments]
            launched = self._start(program, label)
            return Run(launched, warm_up, Result.read(target))
        launched = self._start(training_program(self._own_arguments(contestant), self.folder, label), label)
        run_dir = self.folder / "runs" / label
        shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)
        steps = [event for event in read_events(run_dir / "events.jsonl") if event["event"] == "step"]
        losses, stamps = ([event[name] for event in steps] for name in ("loss", "time"))
        result = Result(losses, stamps, max(event["memory_bytes"] for event in steps), "Mantissa")
        result.write(target)
        return Run(launched, warm_up, result)

    def peak(self) -> dict[str, Any]:
        """The matmul rate in the work's dtype, in all processes at once; see `lab.benchmark.peak`."""
        target = self._target("peak")
        self._start(["-m", "lab.benchmark.peak", self.spec.compute, str(target)], "peak")
        return json.loads(target.read_text(encoding="utf-8"))

    def refusal(self, contestant: str) -> str | None:
        """Why a contestant cannot train this work; None if it can."""
        spec = self.spec
        if contestant in OWN:
            return refusal(self._own_arguments(contestant), as_launched(self.processes))
        if spec.task not in PEERS[contestant].tasks:
            return f"it trains {' and '.join(PEERS[contestant].tasks)}, not {spec.task}"
        if spec.tensor > 1 and contestant != "bare":  # DeepSpeed's own config gives bare AutoTP
            return f"its loop shares no matrices (parallel.tensor = {spec.tensor})"
        return titan_terms.unsupported_reason(spec) if contestant in TITAN else None

    def _target(self, label: str) -> Path:
        target = self.folder / "results" / f"{label}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        return target

    def _start(self, program: Sequence[str], label: str) -> float:
        """Run a program to its end; returns when it was launched. Raises UserError naming the log if it fails."""
        log, launched = self.folder / "logs" / f"{label}.log", time.time()
        code = launch(program, processes=self.processes, log=log)
        if code:
            raise UserError(f"{label} failed: {error_line_of(log)}; see {log}")
        return launched

    def _own_arguments(self, contestant: str) -> list[str]:
        offload = "none" if self.spec.offload == "none" else "cpu"
        overrides = [text.format(stage=self.spec.stage, offload=offload) for text in OWN[contestant]]
        return [*self.arguments, *COMMON_OVERRIDES, *overrides]


def read_names(text: str) -> list[str]:
    """The contestants of a comma-separated list. Raises UserError for an unknown or repeated one."""
    given = list(filter(None, text.split(",")))
    for name in given:
        if name not in {*OWN, *PEERS}:
            raise UserError(f"--contestants = {text}: there is no {name}; choose among {', '.join([*OWN, *PEERS])}")
        if given.count(name) > 1:
            raise UserError(f"--contestants = {text}: {name} is listed twice; list each once")
    return given


def parted(names: Sequence[str], reason_of: Callable[[str], str | None], what: str) -> tuple[list[str], dict[str, str]]:
    """The contestants that can do this, and the reason of each that cannot. Raises UserError if none is left."""
    reasons = {name: reason_of(name) for name in names}
    skipped = {name: reason for name, reason in reasons.items() if reason is not None}
    if len(skipped) == len(reasons):
        why = "; ".join(skipped.values()) or f"name one of {', '.join(OWN)}"
        raise UserError(f"--contestants = {','.join(names)}: none of them can {what}: {why}")
    return [name for name in reasons if name not in skipped], skipped


def unavailable_reason(name: str) -> str | None:
    """Why a contestant cannot be started here, whatever the work; None if it can."""
    if name == "trl" and find_spec("trl") is None:
        return "trl is not installed; make trl installs it into a folder of its own"
    if name == "mantissa-liger":
        import torch  # takes seconds

        from modeling.kernels import unavailable_reason as of_kernels

        return of_kernels(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return titan_terms.unavailable_reason() if name in TITAN else None
