"""Write `report.md`, one page about a run from its folder alone, and show the same numbers as a console table."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from config import json_text
from config.files import write_atomically
from config.printable import tell
from config.redact import redact
from tracking.events import Event, describe_event, lower_than_promised, observed_dtypes, unobserved
from tracking.figures import HEADLINES, followed
from tracking.heatmap.grid import drawn_panels
from tracking.heatmap.panels import PANELS
from tracking.heatmap.picture import draw_heat
from tracking.heatmap.words import sentences
from tracking.numbers import duration, human, loss, mib, number, perplexity, precise_duration, scale
from tracking.pages.markdown import Table, code, fenced, page, section
from tracking.pages.markdown import text as escaped
from tracking.plots import plot_run
from tracking.report.context import Finding, MeasureContext
from tracking.report.measures import all_measures, caveats, count_verdicts
from tracking.report.objective import adapter_in_words, samples_in_words, task_in_words
from tracking.run_dir import RunDir, setting
from tracking.run_facts import RunFacts
from tracking.terminal import words

if TYPE_CHECKING:
    from rich.table import Table as Grid

_MOST_WARNINGS = 20
_MOST_SAMPLES = 20
_TOKENS_PER_PARAMETER = 20  # below, a model from scratch counts as undertrained (Hoffmann et al., 2022)


def write_report(context: MeasureContext, *, sample: str | None = None, resume_command: str = "") -> Path:
    """Draw the plots, write `report.md` and return its path.

    sample: text from the trained model, written to `sample.txt`; None uses the existing file. resume_command: overrides
    the one in the run folder. Raises UserError if the events can no longer be read, OSError if the page itself cannot
    be written.
    """
    run, findings = context.run, all_measures(context)
    run_dir, verdict = RunDir(Path(run.source)), run.verdict
    if sample is not None:
        _attempt(run_dir.sample, lambda: write_atomically(run_dir.sample, redact(sample).encode(errors="replace")))
    hypothesis, plot = setting(run.config, "run.hypothesis"), run_dir.plots / "run.png"
    drawn = len(run.columns) and _attempt(plot, lambda: plot_run(run, plot))
    parts = {title: section(title, body) for title, body in sections(run, resume_command).items()}
    moment = datetime.fromtimestamp(run.sessions[-1].last, UTC)
    step = run.columns.step[-1] if len(run.columns) else 0
    content = page(
        f"# {escaped(run.label)}",
        f"**{verdict.word}**{escaped(verdict.text.removeprefix(verdict.word))}",
        fenced(verdict.command, "bash") if verdict.command else "",
        f"As of step {step:,}, {moment:%Y-%m-%d %H:%M} UTC.",  # a later session may be running or have been killed
        f"> Hypothesis: {escaped(hypothesis)}" if hypothesis else "",
        f"In {run.counts['run_start']} sessions." if run.counts["run_start"] > 1 else "",
        parts.pop("What ran"),
        parts.pop("Results"),
        "![loss or reward, gradient norm, learning rate, loss scale or speed](plots/run.png)" if drawn else "",
        _layers(run, run_dir.plots / "heatmap.png"),
        section("Measures", f"{count_verdicts(findings)}.", _measures(findings, caveats(context))),
        *parts.values(),
    )
    write_atomically(run_dir.report, content.encode())
    return run_dir.report


def sections(run: RunFacts, resume_command: str = "") -> dict[str, str]:
    """Title to Markdown for the textual parts of a report, shared by `report.md` and the HTML page."""
    run_dir, rare = RunDir(Path(run.source)), run.rare_events
    ledger = [(escaped(row["what"]), row["dtype"], mib(row["bytes"])) for row in run.environment.get("ledger") or ()]
    warned, saved, seen = (rare.get(kind, []) for kind in ("warning", "checkpoint", "precision"))
    left_out = len(warned) - _MOST_WARNINGS
    sample = run_dir.sample.read_text(encoding="utf-8", errors="replace") if run_dir.sample.is_file() else ""
    newest = [f"{sample_title(run)}:", fenced(sample)] if sample else []
    sampled = [event for event in rare.get("eval", []) if event.get("sample")][-_MOST_SAMPLES:]
    earlier = [part for event in sampled for part in (f"At step {event['step']:,}:", fenced(str(event["sample"])))]
    known, started = (run.environment.get(name) for name in ("resume_command", "command_line"))
    notes = dict.fromkeys(event["text"] for event in rare.get("note", []))  # each session repeats them
    return {
        "What ran": page(_facts(_what_ran(run))),
        "Results": page(_facts(results(run))),
        "Faults of the machine": page(_points(_faults(run), describe_event)),
        "Dtypes": page(Table(("what", "dtype", "size"), ledger), *map(_observed, seen[-1:])),
        "Early warnings": page(
            f"{left_out} earlier ones are in events.jsonl." if left_out > 0 else "",
            _points(warned[-_MOST_WARNINGS:], lambda event: event["reason"]),
        ),
        "Notes": page([escaped(note) for note in notes]),
        "Canary": page(_canary(run_dir)),
        "Sample": page(*newest, earlier and "### Samples at evaluations", *earlier),
        "Resume": page(
            f"Newest checkpoint: {code(saved[-1]['path'] if saved else 'none')}",
            fenced(resume_command or known or shlex.join(started or ["train.py"]), "bash"),
        ),
    }


def sample_title(run: RunFacts) -> str:
    """Title with the sample's step, which says so if the model is too little trained to produce sensible text.

    Sessions that end otherwise than done leave the sample of an earlier one.
    """
    done = (event for event in reversed(run.rare_events.get("run_end", [])) if event["status"] == "done")
    at = next(done, {"step": 0, "tokens": 0} | run.newest)
    few = at["tokens"] < _TOKENS_PER_PARAMETER * run.start["parameters"]
    untrained = few and run.config.get("model") and setting(run.config, "model.name_or_path") is None
    return f"Sample after {at['step']:,} steps{', untrained text is expected' if untrained else ''}"


def _measures(findings: Sequence[Finding], remarks: Sequence[str]) -> str:
    """A table of the measures, and below it how each was computed."""
    table = Table(("measure", "value", "limit", "verdict"))
    for item in findings:
        word = f"**{item.verdict}**" if item.verdict == "fail" else item.verdict
        verdict = f"{word}: {escaped(item.reason)}" if item.reason else word
        table.add(escaped(item.title), escaped(item.shown or "-"), escaped(item.limit), verdict)
    return page(
        *(f"> {escaped(remark)}" for remark in remarks),
        table,
        "<details><summary>How they were computed</summary>",
        [f"**{escaped(item.title)}**: {escaped(item.how)}." for item in findings],
        "</details>",
    )


def _layers(run: RunFacts, png: Path) -> str:
    """Section with the heat maps, drawn to `png`, and what stands out in them; empty without telemetry."""
    if not drawn_panels(run.heat):
        return ""
    drawn = _attempt(png, lambda: draw_heat(run.heat, png, title=run.label))
    return section(
        "Layers over time",
        "![heat maps of the modules over the steps](plots/heatmap.png)" if drawn else "",
        [f"**{PANELS[key].title}**: {escaped(line)}" for key, line in sentences(run.heat).items()],
    )


def _points(events: Sequence[Event], words_of: Callable[[Event], str]) -> list[str]:
    return [f"step {event['step']}: {escaped(words_of(event))}" for event in events]


def _canary(run_dir: RunDir) -> list[str]:
    """Decisions of `launch.canary` about the run, from the folder beside it; empty if there was no canary."""
    path, lines = run_dir.path.with_name(f"{run_dir.name}-canary") / "canary.jsonl", []
    for text in path.read_bytes().splitlines() if path.is_file() else ():
        with suppress(ValueError, KeyError, TypeError):
            lines.append(escaped(json_text.parse(text)["text"]))
    return lines


def _attempt(path: Path, write: Callable[[], object]) -> bool:
    """Write one file of the report; returns whether it worked. If not, prints one line and the report goes without."""
    try:
        write()
    except OSError as error:
        tell(f"{path} was not written: {error.strerror or error}")
        return False
    return True


def summary_table(run: RunFacts) -> Grid:
    rows = [(words(what, "dim"), value) for what, value in results(run)]
    return Table(("", ""), rows, title=f"{run.label}: {run.verdict.text}").grid()


def results(run: RunFacts) -> list[tuple[str, str]]:
    """The results as (measure, value) rows, without measures that do not apply."""
    steps, rare, start, attempted = run.columns, run.rare_events, run.start, len(run.columns)
    course = steps.metrics.get(run.headline, steps.loss)
    finite = np.flatnonzero(np.isfinite(course))
    losses, best = course[finite], "never finite"
    if losses.size:
        at = int(np.argmax(losses) if run.headline else np.argmin(losses))
        best = f"best {loss(losses[at])} at step {steps.step[finite[at]]}"
    evals = [rare["eval"][at] for at in (0, -1)] if rare.get("eval") else []
    older = "nats" if not evals or evals[-1]["perplexity"] is not None else ""
    unit = start.get("loss_unit", older)
    what = HEADLINES.get(run.headline, "loss") + (f" ({unit})" if unit else "")
    ends = [losses[at] if losses.size else None for at in (0, -1)]
    found: dict[str, str] = {
        f"training {what}": f"{' -> '.join(map(loss, ends))} ({best})",
        "losses that were not finite": str(attempted - np.count_nonzero(np.isfinite(steps.loss)) or ""),
    }
    if evals:
        exponential = evals[-1]["perplexity"]
        further = "" if exponential is None else f" (perplexity {perplexity(exponential)})"
        found[f"validation {what}"] = " -> ".join(loss(followed(event)[1]) for event in evals) + further
        both = [_measured(event) for event in evals]
        for name in both[-1]:
            found[f"validation {name}"] = " -> ".join(loss(values[name]) for values in both if name in values)
    applied = int(np.count_nonzero(steps.applied))
    found["steps"] = f"{attempted} attempted, {applied} applied, {attempted - applied} skipped"
    if start["compute"] == "fp16" and attempted:
        reasons = ", ".join(f"{count} x {reason}" for reason, count in sorted(run.scale_reasons.items()))
        both_scales = " -> ".join(scale(float(steps.loss_scale[at])) for at in (0, -1))
        found["loss scale"] = f"{both_scales} ({reasons or 'never changed'})"
    if (norms := steps.grad_norm[np.isfinite(steps.grad_norm)]).size:
        clipped = np.count_nonzero((steps.clip_coefficient < 1.0) & (steps.clip_coefficient != 0.0))
        size = f"median {number(float(np.median(norms)), 3)}, largest {number(float(norms.max()), 3)}"
        found["gradient norm"] = f"{size}; clipped on {clipped} of {attempted} steps"
    found["incidents"] = str(run.counts["incident"] or "")
    if tensors := rare.get("nonfinite"):
        first = f"{describe_event(tensors[0])}, step {tensors[0]['step']}"
        found["non-finite tensors"] = f"{len(tensors)} found; the first: {first}"
    found |= {"faults of the machine": _faults_summary(run), "tokens": f"{steps.tokens.max(initial=0):,.0f}"}
    if attempted:
        seconds = precise_duration(float(np.median(steps.step_seconds)))
        found["speed (median)"] = f"{human(run.tokens_per_second)} tokens/s, {seconds} per step"
    found |= {"wall time": duration(run.wall_seconds), "peak memory (largest rank)": mib(run.peak_memory_bytes)}
    found["checkpoint"] = rare["checkpoint"][-1]["path"] if rare.get("checkpoint") else ""
    return [row for row in found.items() if row[1]]


def _measured(event: Event) -> Mapping[str, float]:
    """Metrics of an evaluation other than the headline, and its losses by data source."""
    metrics = {name: value for name, value in (event.get("metrics") or {}).items() if name not in HEADLINES}
    return metrics | {f"loss, {part}": value for part, value in event.get("by_source", {}).items()}


def _faults(run: RunFacts) -> list[Event]:
    found = [event for kind in ("corruption", "reexecution") for event in run.rare_events.get(kind, [])]
    return sorted(found, key=lambda event: (event["step"], event["time"]))


def _faults_summary(run: RunFacts) -> str:
    ended = Counter(event["outcome"] for event in _faults(run) if event["event"] == "reexecution")
    wrong = len(run.rare_events.get("corruption", []))
    found = [f"{wrong} wrong value{'s' * (wrong > 1)}"] if wrong else []
    found += [f"{count} {outcome}" for outcome, count in ended.items() if outcome != "numeric"]
    return ", ".join(found)


def _what_ran(run: RunFacts) -> list[tuple[str, str]]:
    start, config, environment = run.start, run.config, run.environment
    versions = environment.get("versions", {})
    git = environment.get("git") or {}
    global_size, micro = setting(config, "batch.global_size"), setting(config, "batch.micro_size")
    model = start.get("model") or setting(config, "model.name_or_path") or setting(config, "model.architecture")
    trained = start.get("trained_parameters")
    share = "" if trained in (None, start["parameters"]) else f", {trained:,} of them trained"
    rows = [
        ("model", f"{model or '?'}, {start['parameters']:,} parameters{share}"),
        ("task", task_in_words(config)),
        ("adapter", adapter_in_words(config)),
        ("data", _data(config)),
        ("tokenizer", str(setting(config, "data.tokenizer") or "")),
        (
            "batch",
            f"{global_size} {samples_in_words(config)}, micro-batch {micro}, "
            f"accumulation {start.get('accumulation') or run.deepspeed.get('gradient_accumulation_steps', '?')}",
        ),
        ("precision", f"{start['compute']} compute, FP32 masters, {setting(config, 'precision.path') or 'cast'} path"),
        ("ZeRO", f"stage {start['zero_stage']}, {describe_event(start).rpartition(', ')[2]}"),
        ("hardware", _hardware(environment, start["world_size"])),
        ("software", ", ".join(f"{name} {number}" for name, number in versions.items() if number)),
        ("code", f"{git.get('commit', '')[:12]}{' with local changes' if git.get('dirty') else ''}" if git else ""),
        ("config sha256", str(start["config_sha256"])[:16]),
    ]
    return [row for row in rows if row[1]]


def _data(config: dict[str, Any]) -> str:
    """Source, path and name of the data, or of each part of a mixture."""
    sources = setting(config, "data.sources")
    if sources:
        return "; ".join(_join(item.get("name"), item.get("source"), item.get("path")) for item in sources)
    return _join(setting(config, "data.source"), setting(config, "data.path"), setting(config, "data.name"))


def _hardware(environment: dict[str, Any], world_size: int) -> str:
    """Host and devices: the recorded accelerators, or the CPU."""
    accelerator = (environment.get("accelerator") or {}).get("device", "cpu")
    cpu = environment.get("cpu", {})
    devices = f"{cpu.get('model', '?')}, {cpu.get('usable_cores', '?')} cores"
    if accelerator != "cpu":
        devices = accelerator if world_size == 1 else f"{world_size} x {accelerator}"
    return f"{environment.get('hostname', '?')}: {devices}"


def _join(*parts: Any) -> str:
    return ", ".join(str(part) for part in parts if part)


def _facts(rows: list[tuple[str, str]]) -> Table:
    return Table(("", ""), [(what, escaped(value)) for what, value in rows])


def _observed(event: dict[str, Any]) -> str:
    """Dtypes observed inside modules; empty for a run without observations."""
    found = observed_dtypes(event).items()
    rows = [(what, "; ".join(f"{dtype} ({count:,})" for dtype, count in dtypes.items())) for what, dtypes in found]
    rows += unobserved(event)
    if not rows:
        return ""
    seen = Table(("observed", "computed in (modules)"), [tuple(map(escaped, row)) for row in rows])
    lower = [f"**{escaped(wrong)}**" for wrong in lower_than_promised(event)]
    return page("### Inside the modules", f"Seen in step {event['step']}:", seen, lower)
