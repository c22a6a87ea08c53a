"""The results of a stability envelope: envelope.json, .md, .html and .png in the output folder."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from config.launcher import as_launched
from config.optimizers import settings_of
from config.redact import redact_arguments
from config.resolved import Resolved
from config.schema import LossScaleSection
from lab.envelope.plot import draw_envelope, envelope_page
from lab.envelope.search import CONTROL, RISE, Bounds, Cell, Setting, Trial, explore, window_of
from lab.envelope.worker import TRIALS, Study, device_name, read_trials, trial_key
from tools.parity.judge_runs import NUDGE
from tracking.compare.surviving import read_events
from tracking.environment import environment
from tracking.pages.document import write_document
from training.tasks.task import prepare


class Missing(LookupError):
    """A trial of the search has not been run."""


def explore_finished(study: Study, processes: int) -> tuple[list[Cell], set[str]]:
    """The cells according to trials.jsonl, and the keys of the trials used; runs nothing. Raises Missing."""
    launched = as_launched(processes)
    config = study.resolve(study.settings[0], study.rates[0], launched).config
    fingerprint, device = prepare(config, progress=False).fingerprint, device_name()
    known = read_trials(Path(study.folder))
    used: set[str] = set()

    def recorded(setting: Setting, rate: float) -> Trial:
        key = trial_key(study.resolve(setting, rate, launched), fingerprint, device)
        if key not in known:
            raise Missing(f"{setting.label} at rate {rate:g}")
        used.add(key)
        return known[key]

    return list(explore(study.settings, study.rates, study.bounds, recorded)), used


def write_results(study: Study, processes: int, *, command: Sequence[str]) -> list[dict[str, Any]]:
    """Write the results of the finished trials and return the rows of envelope.json.

    command: for the page. Raises Missing.
    """
    folder = Path(study.folder)
    cells, used = explore_finished(study, processes)
    first = study.resolve(study.settings[0], study.rates[0], as_launched(processes))
    fingerprint = prepare(first.config, progress=False).fingerprint
    rows = [_row(cell, cells) for cell in sorted(cells, key=lambda cell: _order(study, cell.setting))]
    others = len(read_trials(folder)) - len(used)
    seconds = sum(line["seconds"] for line in read_events(folder / TRIALS) if line["key"] in used)
    conditions = {
        "command": shlex.join(redact_arguments(list(command))),
        **_conditions(study, first, fingerprint),
        "device": f"{device_name()}, {processes} process{'' if processes == 1 else 'es'}",
        "versions": _versions(),
        "trials": f"{len(used)} of {first.config.run.steps} steps, {seconds:,.0f} s in all"
        + (f"; {others} more in {TRIALS} under other conditions or at rates not needed, left out" if others else ""),
    }
    plain = {"rates": study.rates, "conditions": conditions, "rows": rows}
    (folder / "envelope.json").write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")
    title = f"Largest stable learning rate: {first.config.model.architecture or first.config.model.name_or_path}"
    draw_envelope(rows, study.rates, folder / "envelope.png", title=title)
    meaning = _meaning(study.bounds, first.config.run.steps, first.config.guard.max_consecutive_skips)
    page = envelope_page(rows, study.rates, conditions, meaning, picture="envelope.png")
    write_document(folder / "envelope.md", page)
    return rows


def _order(study: Study, setting: Setting) -> tuple[int, int, int]:
    """Sort key: FP32 first, then in the order of the settings; then depth and batch."""
    labels = ["fp32", *dict.fromkeys(item.label for item in study.settings if item.precision != "fp32")]
    return labels.index(setting.label), setting.depth, setting.batch


def _row(cell: Cell, cells: Sequence[Cell]) -> dict[str, Any]:
    """A row of envelope.json, as `lab.envelope.plot` describes it."""
    position = (cell.setting.depth, cell.setting.batch)
    here = {item.setting.label: item.largest for item in cells if (item.setting.depth, item.setting.batch) == position}
    tried = []
    for item in cell.tried:
        step, why = (item.failure.step, item.failure.why) if item.failure else (None, None)
        tried.append({"rate": item.rate, "step": step, "why": why, "skipped": item.skipped, "steps": item.steps})
    found = {"depth": cell.setting.depth, "batch": cell.setting.batch, "label": cell.setting.label}
    found |= {"largest": cell.largest, "fp32": here["fp32"], "control": here.get(CONTROL), "lucky": cell.lucky}
    return found | {"tried": tried}


def _meaning(bounds: Bounds, steps: int, most_skips: int) -> str:
    return (
        f"Every setting was trained for {steps} steps at one peak learning rate after the other.\n\n"
        "- **fp32** is stable at a rate when no step is not finite and the running median of its loss "
        f"({window_of(steps)} steps) never rises more than {RISE:.0%} above the lowest it has been.\n"
        "- **bf16** and **fp16** pass at a rate where FP32 is stable, when they are stable by the same rule, fewer "
        f"than {most_skips} steps in a row are skipped, the running median of the loss stays within "
        f"{bounds.loss_gap:.2%} (`parity.loss_gap`) of FP32's at every step, and the last validation loss is within "
        f"{bounds.validation_delta:.2%} (`parity.validation_delta`) of FP32's, at the same depth, batch and rate. FP16 "
        "overflows that the loss scale answers are skipped steps, no failure.\n"
        f"- **control** is FP32 at a learning rate {NUDGE:.2%} larger, held to the same bounds. Runs diverge "
        "at large rates in any precision: what a 16-bit one loses beyond the control is due to the precision.\n\n"
        "The *largest rate* is the last one below the first that fails; the *divergence step* is the first step at "
        "which a failure shows, the last step where only the validation loss fails."
    )


def _conditions(study: Study, first: Resolved, fingerprint: str) -> dict[str, str]:
    """The conditions under which the numbers were measured, as text."""
    config, optimizer, schedule = first.config, first.config.optimizer, first.config.schedule
    most = config.evaluate.most_batches
    settings = ", ".join(
        f"{key} {list(value) if isinstance(value, tuple) else format(value, '' if isinstance(value, str) else 'g')}"
        for key, value in settings_of(optimizer).items()
    )
    model = config.model.name_or_path or config.model.architecture
    shapes = [json.loads(text) for text in study.models.values()]
    shape = {key: value for key, value in shapes[0].items() if all(other.get(key) == value for other in shapes)}
    launched = as_launched(first.world_size)
    scales = {
        str(item.policy): study.resolve(item, study.rates[0], launched).config.precision.loss_scale
        for item in study.settings
        if item.policy
    }
    return {
        "model": f"{model} {json.dumps(shape)}",
        "data": f"{config.data.path or config.data.source}, tokenizer {config.data.tokenizer}, "
        f"fingerprint {fingerprint}, sequences of {config.data.sequence_length} tokens",
        "schedule": f"{schedule.name}, {schedule.warmup_steps} warm-up steps, final ratio {schedule.final_ratio:g}",
        "optimizer": f"{optimizer.name}, {settings}, weight decay {optimizer.weight_decay:g}, "
        f"clipping {optimizer.gradient_clipping:g}",
        "seed": str(config.run.seed),
        "micro-batch": f"{first.batch.micro_size} sequences",
        "DeepSpeed": f"ZeRO-{first.zero_stage}, offload {first.offload}, reduction in {config.precision.reduce}",
        **{f"loss scale, {name}": _describe_scale(section) for name, section in scales.items()},
        "validation": "all" if most is None else f"{most} global batches at most",
    }


def _describe_scale(section: LossScaleSection) -> str:
    if section.policy == "static":
        return f"{section.initial_scale:g}"
    return f"starts at {section.initial_scale:g}, grows after {section.window} steps, lowered after " + (
        f"{section.tolerated_overflows} overflow{'' if section.tolerated_overflows == 1 else 's'}"
    )


def _versions() -> str:
    facts = environment({})
    names = ("python", "torch", "deepspeed", "transformers")
    git = facts["git"]
    commit = f", commit {git['commit'][:12]}{' with changes' if git['dirty'] else ''}" if git else ""
    return ", ".join(f"{name} {facts['versions'][name]}" for name in names) + commit
