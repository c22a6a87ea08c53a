"""The trials of the stability envelope, one after another in the processes that were launched once for all of them.

`lab.envelope` writes the study file and starts this module. A trial that is in trials.jsonl under the same
conditions is not run again; a new one is appended and flushed before the next starts.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from config.cli import Arguments, entry_point
from config.load import to_dict
from config.resolved import Resolved, resolve_run
from lab.benchmark.harness import SHARES
from lab.envelope.search import CONTROL, Bounds, DivergenceWatch, Setting, Trial, explore, window_of
from tools.parity.judge_runs import NUDGE
from tracking.compare.surviving import read_events
from tracking.environment import environment
from tracking.jsonl import JsonlSink

if TYPE_CHECKING:
    from data.corpora.corpus import Corpus
    from training.distributed import World

TRIALS = "trials.jsonl"
TRIAL_PREFIX = "trial:"
"""Opens a line of output about a trial."""
# Sections and keys of a config that do not change a trial's numbers.
_IRRELEVANT = ("tracking", "profile", "checkpoint", "telemetry", "generate", "parity", "deepspeed")
_IRRELEVANT_OF_RUN = ("name", "dir", "resume", "hypothesis")


@dataclass(frozen=True)
class Study:
    """The settings and rates to explore; written by `lab.envelope`, read by every process."""

    folder: str
    """[path] Folder of trials.jsonl."""
    config: str
    """[path] Run config."""
    overrides: tuple[str, ...]
    """`key.sub=value` for every trial."""
    models: dict[str, str]
    """Depth, as text, to the value of model.config that has it, in JSON."""
    documents: dict[str, str]
    """Dtype of forward and backward to its DeepSpeed JSON."""
    settings: tuple[Setting, ...]
    rates: tuple[float, ...]
    """Ascending."""
    bounds: Bounds

    def write(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(dataclasses.asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Study:
        """The inverse of `write`."""
        plain = json.loads(path.read_text(encoding="utf-8"))
        plain["settings"] = tuple(Setting(**setting) for setting in plain["settings"])
        plain |= {key: tuple(plain[key]) for key in ("overrides", "rates")}
        return cls(**{**plain, "bounds": Bounds(**plain["bounds"])})

    def resolve(self, setting: Setting, rate: float, environment: Mapping[str, str]) -> Resolved:
        """The run of one trial; the control's rate is larger by NUDGE. Raises UserError when it cannot be started."""
        if setting.precision == CONTROL:
            rate *= 1 + NUDGE
        given = [*self.overrides, f"model.config={self.models[str(setting.depth)]}"]
        given += [f"batch.global_size={setting.batch}", f"precision.compute={setting.compute}"]
        given += [f"deepspeed.config={json.dumps(self.documents[setting.compute])}"]
        given += [f"optimizer.learning_rate={rate!r}"]
        given += [f"precision.loss_scale.policy={setting.policy}"] if setting.policy else []
        options = argparse.Namespace(config=self.config, overrides=given, deepspeed_config=None, local_rank=None)
        return resolve_run(options, environment)


def trial_key(resolved: Resolved, fingerprint: str, device: str) -> str:
    """Key of a trial: 20 hex digits of a hash over all that determines its numbers, with versions and device."""
    config = to_dict(resolved.config)
    for section in _IRRELEVANT:
        del config[section]
    for key in _IRRELEVANT_OF_RUN:
        del config["run"][key]
    for key in ("cache_dir", "workers", "wait_minutes", "verify"):
        del config["data"][key]
    del config["evaluate"]["every_steps"]
    if resolved.compute != "fp16":
        del config["precision"]["loss_scale"]
    versions = [version(package) for package in ("torch", "deepspeed", "transformers")]
    parts = [config, resolved.deepspeed, resolved.world_size, fingerprint, device, versions]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:20]


def read_trials(folder: Path) -> dict[str, Trial]:
    """Finished trials of an output folder, by key."""
    path = folder / TRIALS
    found = {}
    for line in read_events(path) if path.exists() else ():
        trial = {field.name: line[field.name] for field in dataclasses.fields(Trial)}
        found[line["key"]] = Trial(**{**trial, "losses": tuple(trial["losses"])})
    return found


def append_trial(folder: Path, key: str, setting: Setting, rate: float, trial: Trial, seconds: float) -> None:
    """Write one line to trials.jsonl and flush it to disk."""
    line = {"event": "trial", "key": key, **dataclasses.asdict(setting), "rate": rate, **dataclasses.asdict(trial)}
    with closing(JsonlSink(folder / TRIALS)) as sink:
        sink.write({**line, "seconds": seconds})


def device_name() -> str:
    """The GPU's name, or the processor's without one."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else str(environment({})["cpu"]["model"])


def run_trial(resolved: Resolved, corpus: Corpus, world: World) -> Trial:
    """Train one setting at one rate from its seed, until its last step or until it fails. A collective."""
    from training.schedule import scheduled_rate
    from training.session import session

    config, steps = resolved.config, resolved.config.run.steps
    watch = DivergenceWatch(window=window_of(steps), most_skips=config.guard.max_consecutive_skips)
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


def work(study: Study, corpus: Corpus, world: World, log: Callable[[str], Any] = print) -> int:
    """Run the trials of the search that are not known yet; returns how many it ran. A collective."""
    folder, device = Path(study.folder), device_name()
    known: dict[str, Trial] = world.from_main(read_trials(folder) if world.is_main else None)
    ran = 0

    def run(setting: Setting, rate: float) -> Trial:
        nonlocal ran
        resolved = study.resolve(setting, rate, os.environ)
        key = trial_key(resolved, corpus.fingerprint, device)
        if key not in known:
            started = time.perf_counter()
            known[key] = trial = run_trial(resolved, corpus, world)
            seconds, ran = time.perf_counter() - started, ran + 1
            if world.is_main:
                append_trial(folder, key, setting, rate, trial, seconds)
                log(f"{TRIAL_PREFIX} {describe(setting, rate, trial)}, {seconds:.1f} s")
        return known[key]

    for _ in explore(study.settings, study.rates, study.bounds, run):
        pass
    return ran


def describe(setting: Setting, rate: float, trial: Trial) -> str:
    """One line about a trial."""
    ending = f"failed at step {trial.failed_step}: {trial.why}" if trial.why else f"loss {trial.losses[-1]:.3f}"
    skips = f", {trial.skipped} skipped" if trial.skipped else ""
    return f"{setting.depth} layers, batch {setting.batch}, {setting.label}, rate {rate:g}: {ending}{skips}"


@entry_point(launched=True)
def main(arguments: Sequence[str] | None = None) -> int:
    """One process of the job."""
    parser = Arguments("python -m lab.envelope.worker", __doc__)
    parser.add_argument("study", type=Path)
    parser.add_argument("--local_rank", help=argparse.SUPPRESS)  # the deepspeed launcher passes it
    study = Study.read(parser.parse_args(arguments).study)
    from training import distributed
    from training.tasks.task import prepare

    first = study.resolve(study.settings[0], study.rates[0], os.environ)
    corpus = prepare(first.config, progress=False)
    world = distributed.start(rank=first.rank, world_size=first.world_size, local_rank=first.local_rank)
    try:
        work(study, corpus, world, log=lambda text: print(text, flush=True))
    finally:
        distributed.stop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
