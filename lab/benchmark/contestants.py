"""The contestants of `lab.benchmark`: how each is started, and how its result is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from config.errors import UserError
from config.launcher import as_launched
from lab.benchmark.harness import Jobs, Run
from lab.benchmark.peers import titan_terms
from lab.benchmark.spec import Result, Spec
from launch.job import TRAIN, refusal

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
_TORCH = "model.kernels=torch"  # the manifest path has no others
PRECISIONS: dict[str, tuple[str, ...]] = {
    "mantissa-fp32": (_TORCH, *_SAME_LAYOUT, "precision.compute=fp32"),
    "mantissa-bf16": (_TORCH, *_SAME_LAYOUT, "precision.compute=bf16"),
    # steps that are skipped while the scale settles would make the losses differ
    "mantissa-fp16": (_TORCH, *_SAME_LAYOUT, "precision.compute=fp16", "precision.loss_scale.initial=4096"),
    "mantissa-manifest": (
        *(_TORCH, *_SAME_LAYOUT, "precision.compute=auto", "precision.manifest=config/manifests/bf16.json"),
    ),
}
"""Mantissa with another precision than the config's, on the same work: overrides by name, to be formatted with a ZeRO
stage and none or cpu."""
KERNELS: dict[str, tuple[str, ...]] = {
    "mantissa-liger": ("model.kernels=liger",),
    "mantissa-torch": ("model.kernels=torch",),
    "mantissa-compile": ("model.kernels=torch", "model.compile=true"),
}
"""Mantissa with Liger's kernels, without them where they are installed, and with compiled blocks: overrides by name."""
OWN = MANTISSA | PRECISIONS | KERNELS


class Peer(NamedTuple):
    """A loop of another library."""

    module: str
    """Module of `lab.benchmark.peers`."""
    tasks: tuple[str, ...] = ("pretrain",)
    """The tasks that it trains."""
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
"""Contestants that run forward and backward in one call, in chunks or as one CUDA graph: their stages cannot be timed
separately."""
# Turns off what no other contestant does while it is timed.
COMMON_OVERRIDES = (
    *("run.resume=never", "evaluate.every_steps=0", "checkpoint.every_steps=0", "checkpoint.dir=null"),
    *("checkpoint.at_end=false", "generate.tokens=0", "profile.steps=0", "tracking.otlp_endpoint=null"),
)


@dataclass(frozen=True)
class Runner:
    """Runs jobs of any contestant on one work."""

    jobs: Jobs
    arguments: tuple[str, ...]
    """`--config FILE` and overrides, for train.py."""
    spec: Spec

    def run(self, contestant: str, label: str, *, split: bool = False) -> Run:
        """Run one job to its end. split: time a step by stage, which `Result.split` has. Raises UserError."""
        target = self.jobs.folder / "results" / f"{label}.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        if contestant in PEERS:
            work, peer = self.jobs.folder / ("spec-split.json" if split else "spec.json"), PEERS[contestant]
            replace(self.spec, split=split).write(work)
            program = ["-m", f"lab.benchmark.peers.{peer.module}", str(work), str(target), *peer.arguments]
            timed = self.jobs.start(program, label)
            return Run(*timed, self.jobs.warm_up, Result.read(target))
        timer = ("-m", "lab.benchmark.split", str(target), str(self.jobs.warm_up), str(self.spec.steps))
        run = self.jobs.train(self._own_arguments(contestant), label, timer if split else TRAIN)
        if split:
            run = replace(run, result=replace(run.result, split=_json(target)))
        run.result.write(target)
        return run

    def peak(self) -> dict[str, Any]:
        """The rate of matmuls in the work's dtype, in all processes at once; see `lab.benchmark.peak`."""
        target = self.jobs.folder / "results" / "peak.json"
        target.parent.mkdir(parents=True, exist_ok=True)
        self.jobs.start(["-m", "lab.benchmark.peak", self.spec.compute, str(target)], "peak")
        return _json(target)

    def refusal(self, contestant: str) -> str | None:
        """Why one of Mantissa's own cannot train this work; None where its config can be resolved."""
        return refusal(self._own_arguments(contestant), as_launched(self.jobs.processes))

    def _own_arguments(self, contestant: str) -> list[str]:
        offload = "none" if self.spec.offload == "none" else "cpu"
        overrides = [text.format(stage=self.spec.stage, offload=offload) for text in OWN[contestant]]
        return [*self.arguments, *COMMON_OVERRIDES, *overrides]


def _json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def choose(names: str) -> tuple[list[str], dict[str, str]]:
    """The contestants of a comma-separated list, and those that are skipped, with the reason.

    Raises UserError: no such contestant, one twice, or none left.
    """
    given = list(filter(None, names.split(",")))
    for name in given:
        if name not in {*OWN, *PEERS}:
            known = ", ".join([*OWN, *PEERS])
            raise UserError(f"--contestants = {names}: there is no {name}; choose among {known}")
        if given.count(name) > 1:
            raise UserError(f"--contestants = {names}: {name} is listed twice; list each once")
    chosen, skipped = _parted(given, _unavailable_reason)
    if not chosen:
        raise UserError(f"--contestants = {names}: none of them can run here; name one of {', '.join(OWN)}")
    return chosen, skipped


def skip_unsupported(
    contestants: Sequence[str], spec: Spec, *, refused: Mapping[str, str] | None = None
) -> tuple[list[str], dict[str, str]]:
    """The contestants that can train this work, and the reason of each that cannot. Raises UserError: none is left.

    refused: those whose own config refuses it, with the reason.
    """
    chosen, skipped = _parted(contestants, lambda name: (refused or {}).get(name) or _unsupported_reason(name, spec))
    if not chosen:
        reasons = "; ".join(skipped.values())
        raise UserError(f"--contestants = {','.join(contestants)}: none of them can train this: {reasons}")
    return chosen, skipped


def _parted(names: Iterable[str], reason_of: Callable[[str], str | None]) -> tuple[list[str], dict[str, str]]:
    reasons = {name: reason_of(name) for name in names}
    skipped = {name: reason for name, reason in reasons.items() if reason is not None}
    return [name for name in reasons if name not in skipped], skipped


def _unsupported_reason(name: str, spec: Spec) -> str | None:
    """Why a contestant cannot train this work; None where it can."""
    if name in OWN:
        return None
    if spec.task not in PEERS[name].tasks:
        return f"it trains {' and '.join(PEERS[name].tasks)}, not {spec.task}"
    if spec.tensor > 1 and name != "bare":  # whose DeepSpeed has AutoTP by its own config
        return f"its loop shares no matrices (parallel.tensor = {spec.tensor})"
    return titan_terms.unsupported_reason(spec) if name in TITAN else None


def _unavailable_reason(name: str) -> str | None:
    """Why a contestant cannot be started here, whatever the work is; None where it can."""
    if name in ("accelerate", "trainer") and find_spec("accelerate") is None:
        return "accelerate is not installed"
    if name == "trl" and find_spec("trl") is None:
        return "trl is not installed; make trl installs it into a folder of its own"
    if name == "mantissa-liger":
        import torch  # takes seconds

        from modeling.kernels import unavailable_reason

        return unavailable_reason(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    return titan_terms.unavailable_reason() if name in TITAN else None
