"""Resolve and check the canary and the whole run before anything starts, and make the overrides of fallbacks."""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config.batch import refuse_sharing
from config.cli import REPOSITORY
from config.command_line import read_command_line
from config.deepspeed.document import write_in_fp32
from config.errors import UserError
from config.files import write_atomically
from config.launcher import as_launched
from config.resolved import Resolved
from config.schema import CanarySection
from launch.job import job_command, processes_of, refusal, with_steps, without_later

STEPS = 50
"""Default length of a canary, if the config gives neither steps nor a share of the run's data."""


@dataclass(frozen=True)
class Plan:
    """One canary and its whole run."""

    arguments: tuple[str, ...]
    """`--config FILE` and the user's overrides, for train.py."""
    resolved: Resolved
    """The whole run."""
    processes: int
    launcher: tuple[str, ...]
    """Launcher of the whole run, and of the canary unless canary.ranks is set; empty: torchrun on this machine."""
    check_launcher: tuple[str, ...] = ()
    """Launcher of the checks, which run beside the whole run; empty: torchrun on this machine."""

    @property
    def section(self) -> CanarySection:
        return self.resolved.config.canary

    @property
    def steps(self) -> int:
        whole, section = self.resolved.config.run.steps, self.section
        if section.data_share is not None:
            return max(1, round(section.data_share * whole))
        return section.steps or STEPS

    @property
    def ranks(self) -> int:
        """Number of processes of the canary, its twin and the checks."""
        return self.section.ranks or self.processes

    @property
    def run_folder(self) -> Path:
        run = self.resolved.config.run
        return Path(run.dir).expanduser() / run.name

    @property
    def folder(self) -> Path:
        return self.run_folder.with_name(f"{self.run_folder.name}-canary")

    @property
    def first_checkpoint(self) -> Path:
        """Checkpoint with the final state of the canary."""
        seed = self.resolved.config.run.seed
        return self.folder / f"gate/runs/candidate-seed-{seed}/checkpoints/step-{self.steps}"

    @property
    def bounds(self) -> list[str]:
        return [f"parity.{name}={value}" for name, value in self.section.bounds.items()]

    @property
    def first_steps(self) -> list[str]:
        """Overrides for the first steps of the whole run."""
        config = self.resolved.config
        length = [f"run.steps={self.steps}", f"schedule.steps={config.scheduled_steps}"]
        return [*length, *without_later(config, self.steps)]

    def whole_command(self, overrides: Sequence[str], resume: str) -> list[str]:
        """Command that trains the whole run, resuming from `resume`."""
        interval = self.section.check_every or self.steps
        every = [] if self.resolved.config.checkpoint.every_steps else [f"checkpoint.every_steps={interval}"]
        train = [str(REPOSITORY / "train.py"), *self.arguments, *every, *overrides, f"run.resume={resume}"]
        return job_command(train, processes=self.processes, launcher=self.launcher)

    def refusal(self, overrides: Sequence[str]) -> str | None:
        """Why the whole run cannot be started with these overrides; None if its config can be resolved."""
        return refusal([*self.arguments, *overrides], as_launched(self.processes))


def read_plan(
    config: str, overrides: Sequence[str], *, processes: int | None, launch: Sequence[str], check_launch: Sequence[str]
) -> Plan:
    """The plan of a command line. Raises UserError if the config is wrong or leaves no steps after the canary, and for
    launchers that start another number of processes."""
    processes = processes_of(launch, processes)
    arguments: tuple[str, ...] = ("--config", config, *overrides)
    resolved = read_command_line(arguments, as_launched(processes))
    length = with_steps(resolved)
    if length:
        arguments = (*arguments, *length)
        resolved = read_command_line(arguments, as_launched(processes))
    section, whole = resolved.config.canary, resolved.config
    plan = Plan(arguments, resolved, processes, tuple(launch), tuple(check_launch))
    if plan.steps >= whole.run.steps:
        key = f"steps = {plan.steps}" if section.data_share is None else f"data_share = {section.data_share:g}"
        problem = f"leaves none of run.steps = {whole.run.steps} for the whole run; make it smaller"
        raise UserError(f"{config}: canary.{key} {problem}")
    if section.ranks is not None:
        read_command_line(arguments, as_launched(section.ranks))
        if whole.parallel.tensor > 1 and resolved.zero_stage == 0 and section.ranks != processes:
            fix = f"leave it out, or set it to {processes}"
            problem = f"canary.ranks = {section.ranks}: ranks that share matrices without ZeRO resume on as many"
            raise UserError(f"{config}: {problem}; {fix}")
    processes_of(check_launch, plan.ranks, option="--check-launch")
    refuse_sharing(resolved.batch, but=("sequence", "tensor"), why="the FP32 twin is verified with {what} on each rank")
    if whole.checkpoint.dir is not None:
        raise UserError(f"{config}: checkpoint.dir: the canary goes back only within the run folder; leave it out")
    return plan


def in_fp32(resolved: Resolved, folder: Path) -> list[str]:
    """Overrides for all modules in FP32. Writes the DeepSpeed JSON without its 16-bit sections into `folder`."""
    own = ["precision.path=cast", "precision.manifest=null", "precision.compute=fp32", "precision.masters=fp32"]
    return [_json(resolved, folder), *own, f"model.attention={resolved.config.model.wide_attention}"]


def promoted(resolved: Resolved, modules: Sequence[str], folder: Path) -> tuple[list[str], list[str]]:
    """Overrides for these modules or parameters in FP32, and those among them that compute in less so far.

    Writes a manifest, extending the run's own or its one dtype, to `folder`. Raises UserError if all of them compute in
    FP32 already, or are no regions.
    """
    from launch.plan.model import adapted_model_of  # imports torch, which is not needed to start
    from precision.manifest import Manifest, assign, load_manifest

    section, path = resolved.config.precision, folder / "promoted.json"
    content: dict[str, Any] = {"default": resolved.compute}
    manifest = Manifest(content["default"], (), path)
    if section.manifest is not None:
        manifest = load_manifest(REPOSITORY / section.manifest)
        content = json.loads((REPOSITORY / section.manifest).read_text(encoding="utf-8"))
        content.pop("$schema", None)  # relative to the original file
    assigned = assign(manifest, adapted_model_of(resolved.config))
    whole = None if section.manifest is not None else resolved.compute  # on the cast path that of norms, too
    found = {
        module: [name for name in _regions_of(module, assigned) if (whole or assigned[name].compute) != "fp32"]
        for module in modules
    }
    wide = list(dict.fromkeys(name for names in found.values() for name in names))
    if not wide:
        raise UserError(f"{', '.join(modules)}: no region of a manifest that computes in less than FP32")
    kept = {given.rule_index for name, given in assigned.items() if name not in wide}
    rules = [rule for index, rule in enumerate(content.get("rules", [])) if index in kept]
    # a rule that names a class takes norms, too, which are narrower only where another rule does
    rule = {"module_class": "*", "compute": "fp32", "reason": "its check against FP32 failed"}
    rules += [{"match": name, **rule} for name in wide if assigned[name].compute != "fp32"]
    write_atomically(path, (json.dumps({**content, "rules": rules}, indent=2) + "\n").encode())
    own = ["precision.path=manifest", f"precision.manifest={path.resolve()}", "precision.compute=auto"]
    return [_json(resolved, folder), *own, "precision.masters=fp32"], [name for name in modules if found[name]]


def _regions_of(module: str, regions: Collection[str]) -> list[str]:
    """The regions that a module is, or else holds, or else is part of, as a parameter is."""
    if module in regions:
        return [module]
    inside = [name for name in regions if name.startswith(f"{module}.")]
    return inside or [name for name in regions if module.startswith(f"{name}.")][-1:]


def _json(resolved: Resolved, folder: Path) -> str:
    write_in_fp32(resolved.deepspeed_path, folder / "fp32.json")
    return f"deepspeed.config={(folder / 'fp32.json').resolve()}"
