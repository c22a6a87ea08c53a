"""The trials of a stability envelope: their conditions, their runs in this process's world, and trials.jsonl.

A trial already in trials.jsonl under the same conditions is not rerun; a new one is appended and flushed before the
next starts.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from config.command_line import parse
from config.json_text import json_sha256
from config.launcher import as_launched
from config.load import to_dict
from config.resolved import Resolved, resolve_run
from config.schema import ParitySection
from data.corpora.corpus import Corpus
from lab.benchmark.harness import SHARES
from lab.detection.made_of import gpu_name
from lab.envelope.search import CONTROL, Cell, DivergenceWatch, Setting, Trial, explore
from tools.parity.judge_runs import NUDGE
from tracking.compare.surviving import read_events
from tracking.environment import environment
from tracking.jsonl import JsonlSink
from training.tasks.task import prepare

if TYPE_CHECKING:
    from training.distributed import World

TRIALS = "trials.jsonl"
# Sections and keys of a config that do not change a trial's numbers.
_IRRELEVANT = ("tracking", "profile", "checkpoint", "telemetry", "generate", "parity", "deepspeed")
_IRRELEVANT_OF = {
    "run": ("name", "dir", "resume", "hypothesis"),
    "data": ("cache_dir", "workers", "wait_minutes", "verify"),
    "evaluate": ("every_steps",),
}


class Missing(LookupError):
    """A trial that the search needs has not been run."""


@dataclass(frozen=True)
class Study:
    """The settings and rates to explore."""

    folder: Path
    """Folder of trials.jsonl."""
    config: Path
    """Run config."""
    overrides: tuple[str, ...]
    """`key.sub=value` for every trial."""
    models: dict[int, dict[str, Any]]
    """Depth to the value of model.config with that depth."""
    documents: dict[str, Path]
    """Dtype of forward and backward to its DeepSpeed JSON."""
    settings: tuple[Setting, ...]
    rates: tuple[float, ...]
    """Ascending."""
    bounds: ParitySection
    processes: int
    code: str
    """The code and the versions that make trials, by `made_of`."""

    def resolve(self, setting: Setting, rate: float, launched: Mapping[str, str] | None = None) -> Resolved:
        """The run of one trial; the control's rate is larger by NUDGE. Raises UserError if it cannot be started.

        launched: environment variables of the process that runs it; None: those of rank 0.
        """
        if setting.precision == CONTROL:
            rate *= 1 + NUDGE
        given = [*self.overrides, f"model.config={json.dumps(self.models[setting.depth])}"]
        given += [f"batch.global_size={setting.batch}", f"precision.compute={setting.compute}"]
        given += [f"deepspeed.config={json.dumps(str(self.documents[setting.compute]))}"]
        given += [f"optimizer.learning_rate={rate!r}"]
        given += [f"precision.loss_scale.policy={setting.policy}"] if setting.policy else []
        return resolve_run(parse(["--config", str(self.config), *given]), launched or as_launched(self.processes))

    def first(self, launched: Mapping[str, str] | None = None) -> Resolved:
        """The first run of all; settings that it shares with the others are the study's."""
        return self.resolve(self.settings[0], self.rates[0], launched)


def trial_key(resolved: Resolved, fingerprint: str, device: str, code: str) -> str:
    """Key of a trial: 20 hex digits of a hash of everything that determines its numbers, code and device too."""
    config = to_dict(resolved.config)
    for section in _IRRELEVANT:
        del config[section]
    for section, keys in _IRRELEVANT_OF.items():
        for key in keys:
            del config[section][key]
    if resolved.compute != "fp16":
        del config["precision"]["loss_scale"]
    parts = [config, resolved.deepspeed, resolved.world_size, fingerprint, device, code]
    return json_sha256(parts, sort_keys=True)[:20]


def read_trials(folder: Path) -> dict[str, Trial]:
    """Finished trials of an output folder, by key."""
    path = folder / TRIALS
    found = {}
    for line in read_events(path) if path.exists() else ():
        trial = {field.name: line[field.name] for field in dataclasses.fields(Trial)}
        found[line["key"]] = Trial(**{**trial, "losses": tuple(trial["losses"])})
    return found


def device_name() -> str:
    """The GPU's name, or without one the processor's."""
    return gpu_name() or str(environment({})["cpu"]["model"])


def explore_finished(study: Study) -> tuple[list[Cell], set[str], str]:
    """The cells according to trials.jsonl, the keys of the trials used and the data's fingerprint. Raises Missing."""
    fingerprint, device = prepare(study.first().config, progress=False).fingerprint, device_name()
    known = read_trials(study.folder)
    used: set[str] = set()

    def recorded(setting: Setting, rate: float) -> Trial:
        key = trial_key(study.resolve(setting, rate), fingerprint, device, study.code)
        if key not in known:
            raise Missing(f"{setting.label} at rate {rate:g}")
        used.add(key)
        return known[key]

    return list(explore(study.settings, study.rates, study.bounds, recorded)), used, fingerprint


def run_trial(resolved: Resolved, corpus: Corpus, world: World) -> Trial:
    """Train one setting at one rate from its seed, until its last step or until it fails. A collective."""
    from training.schedule import scheduled_rate
    from training.session import session

    config, steps = resolved.config, resolved.config.run.steps
    watch = DivergenceWatch(window=max(5, steps // 8), most_skips=config.guard.max_consecutive_skips)
    losses: list[float] = []
    applied, why, validation = 0, None, math.nan
    with session(resolved, corpus=corpus, world=world, shares=SHARES) as opened:
        engine = opened.engine
        while why is None and len(losses) < steps:
            outcome = engine.forward_backward(opened.batches.next_step(), step=len(losses) + 1)
            health = engine.health(outcome)
            routine = health.scales_dynamically and not health.scale_at_minimum
            update = engine.step(health, scheduled_rate(config, applied))
            applied += update.applied
            losses.append(health.loss)
            why = watch.failure(health.loss, grad_norm=health.grad_norm, routine=routine, applied=update.applied)
        if why is None and corpus.validation.sequences(config.data.sequence_length):
            validation = engine.evaluate(opened.validation()).loss
            why = None if math.isfinite(validation) else f"the validation loss is {validation}"
    held_out = validation if math.isfinite(validation) else None
    return Trial(tuple(losses), held_out, len(losses) - applied, None if why is None else len(losses), why)


def work(study: Study, corpus: Corpus, world: World, log: Callable[[str], Any]) -> int:
    """Run the trials of the search that are not known yet; returns their number. A collective."""
    device, ran = device_name(), 0
    known: dict[str, Trial] = world.from_main(read_trials(study.folder) if world.is_main else None)

    def run(setting: Setting, rate: float) -> Trial:
        nonlocal ran
        resolved = study.resolve(setting, rate, os.environ)
        key = trial_key(resolved, corpus.fingerprint, device, study.code)
        if key not in known:
            started = time.perf_counter()
            known[key] = trial = run_trial(resolved, corpus, world)
            seconds, ran = time.perf_counter() - started, ran + 1
            if world.is_main:
                line = {"event": "trial", "key": key, **asdict(setting), "rate": rate, **asdict(trial)}
                with closing(JsonlSink(study.folder / TRIALS)) as sink:
                    sink.write({**line, "seconds": seconds})
                log(f"{_described(setting, rate, trial)}, {seconds:.1f} s")
        return known[key]

    for _ in explore(study.settings, study.rates, study.bounds, run):
        pass
    return ran


def _described(setting: Setting, rate: float, trial: Trial) -> str:
    """One line about a trial."""
    ending = f"failed at step {trial.failed_step}: {trial.why}" if trial.why else f"loss {trial.losses[-1]:.3f}"
    skips = f", {trial.skipped} skipped" if trial.skipped else ""
    return f"{setting.depth} layers, batch {setting.batch}, {setting.label}, rate {rate:g}: {ending}{skips}"
