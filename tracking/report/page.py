"""`report.md`, one page about a run from its folder alone; and the same numbers as a table for the console."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from config import json_text
from config.files import write_atomically
from config.redact import redact
from tracking.events import Event, describe_event
from tracking.figures import HEADLINES
from tracking.heatmap.grid import drawn_panels, read_heat
from tracking.heatmap.panels import PANELS
from tracking.heatmap.picture import draw_heat
from tracking.heatmap.words import sentences
from tracking.numbers import duration, human, loss, mib, number, perplexity, precise_duration, scale
from tracking.observed_dtypes import computed, lower_than_promised, unobserved
from tracking.pages.markdown import Table, code, fenced, page, section
from tracking.pages.markdown import text as escaped
from tracking.plots import plot_run
from tracking.report.context import Finding, MeasureContext
from tracking.report.measures import all_measures, caveats, count_verdicts, read_run
from tracking.report.objective import adapter_in_words, samples_in_words, task_in_words
from tracking.run_dir import RunDir
from tracking.summary import Summary, read_inputs, setting, summarise
from tracking.terminal import words

if TYPE_CHECKING:
    from rich.table import Table as Grid

_MOST_WARNINGS = 20
_MOST_SAMPLES = 20
_TOKENS_PER_PARAMETER = 20  # from which a model from random weights is trained (Hoffmann et al., 2022)


def write_report(
    run_dir: RunDir,
    *,
    sample: str | None,
    resume_command: str,
    findings: Sequence[Finding] | None = None,
    remarks: Sequence[str] = (),
    summary: Summary | None = None,
) -> Path:
    """Draw the plot, write `report.md` and return its path.

    sample: text from the trained model, written to `sample.txt`; None uses the one already there. findings: the twelve
    measures; None measures without a baseline. remarks: sentences that limit the verdicts, of findings that are given.
    summary: None reads it.
    Raises UserError when nothing has been recorded in the run folder, OSError when the page itself cannot be written.
    """
    if findings is None:
        alone = MeasureContext(read_run(run_dir.path))
        findings, remarks, summary = all_measures(alone), caveats(alone), Summary(alone.run.facts)
    summary = summary or summarise(run_dir)
    if sample is not None:
        _attempt(run_dir.sample, lambda: write_atomically(run_dir.sample, redact(sample).encode(errors="replace")))
    hypothesis = setting(read_inputs(run_dir)[0], "run.hypothesis")
    verdict, plot = summary.verdict, run_dir.plots / "run.png"
    drawn = summary.steps and _attempt(plot, lambda: plot_run(summary.facts, plot))
    parts = {title: section(title, body) for title, body in sections(run_dir, summary, resume_command).items()}
    content = page(
        f"# {escaped(summary.name)}",
        f"**{verdict.word}**{escaped(verdict.text.removeprefix(verdict.word))}",
        fenced(verdict.command, "bash") if verdict.command else "",
        f"> Hypothesis: {escaped(hypothesis)}" if hypothesis else "",
        f"In {summary.sessions} sessions." if summary.sessions > 1 else "",
        parts.pop("What ran"),
        parts.pop("Results"),
        "![loss or reward, gradient norm, learning rate, loss scale or speed](plots/run.png)" if drawn else "",
        _layers(run_dir),
        section("Measures", f"{count_verdicts(findings)}.", _measures(findings, remarks)),
        *parts.values(),
    )
    write_atomically(run_dir.report, content.encode())
    return run_dir.report


def sections(run_dir: RunDir, summary: Summary, resume_command: str = "") -> dict[str, str]:
    """The parts of a report that are text, in Markdown by their titles: those of `report.md` and of the page."""
    config, deepspeed, environment = read_inputs(run_dir)
    ledger = [(escaped(row["what"]), row["dtype"], mib(row["bytes"])) for row in environment.get("ledger") or ()]
    left_out = len(summary.warnings) - _MOST_WARNINGS
    sample = run_dir.sample.read_text(encoding="utf-8", errors="replace") if run_dir.sample.is_file() else ""
    newest = [f"{sample_title(run_dir, summary)}:", fenced(sample)] if sample else []
    earlier = [part for step, text in summary.samples[-_MOST_SAMPLES:] for part in (f"At step {step:,}:", fenced(text))]
    resume = fenced(resume_command or resume_command_of(run_dir), "bash")
    return {
        "What ran": page(_facts(_what_ran(summary, config, deepspeed, environment))),
        "Results": page(_facts(results(summary))),
        "Faults of the machine": page(_points(summary.corruption, describe_event)),
        "Dtypes": page(Table(("what", "dtype", "size"), ledger), _observed(summary.precision or {})),
        "Early warnings": page(
            f"{left_out} earlier ones are in events.jsonl." if left_out > 0 else "",
            _points(summary.warnings[-_MOST_WARNINGS:], lambda event: event["reason"]),
        ),
        "Notes": page([escaped(note) for note in summary.notes]),
        "Canary": page(_canary(run_dir)),
        "Sample": page(*newest, earlier and "### Samples at evaluations", *earlier),
        "Resume": page(f"Newest checkpoint: {code(summary.checkpoint or 'none')}", resume),
    }


def sample_title(run_dir: RunDir, summary: Summary) -> str:
    """The sample's place in the training, and whether text can be expected to make sense there."""
    config = read_inputs(run_dir)[0]
    few = summary.tokens < _TOKENS_PER_PARAMETER * summary.start["parameters"]
    untrained = few and config.get("model") and setting(config, "model.name_or_path") is None
    return f"Sample after {summary.steps:,} steps{', untrained text is expected' if untrained else ''}"


def _measures(findings: Sequence[Finding], remarks: Sequence[str]) -> str:
    """A table of the measures and how each was computed below it."""
    rows = [(escaped(item.title), escaped(item.shown or "-"), escaped(item.limit), _verdict(item)) for item in findings]
    return page(
        *(f"> {escaped(remark)}" for remark in remarks),
        Table(("measure", "value", "limit", "verdict"), rows),
        "<details><summary>How they were computed</summary>",
        [f"**{escaped(item.title)}**: {escaped(item.how)}." for item in findings],
        "</details>",
    )


def _verdict(item: Finding) -> str:
    word = f"**{item.verdict}**" if item.verdict == "fail" else item.verdict
    return f"{word}: {escaped(item.reason)}" if item.reason else word


def _layers(run_dir: RunDir) -> str:
    """The heat maps, drawn to `plots/heatmap.png`, and what stands out in them; nothing without telemetry."""
    heat, png = read_heat(run_dir.events), run_dir.plots / "heatmap.png"
    if not drawn_panels(heat):
        return ""
    drawn = _attempt(png, lambda: draw_heat(heat, png, title=run_dir.name))
    return section(
        "Layers over time",
        "![heat maps of the modules over the steps](plots/heatmap.png)" if drawn else "",
        [f"**{PANELS[key].title}**: {escaped(line)}" for key, line in sentences(heat).items()],
    )


def _points(events: Sequence[Event], words_of: Callable[[Event], str]) -> list[str]:
    return [f"step {event['step']}: {escaped(words_of(event))}" for event in events]


def _canary(run_dir: RunDir) -> list[str]:
    """Decisions of `launch.canary` about the run, from the folder beside it; none without one."""
    path, lines = run_dir.path.with_name(f"{run_dir.name}-canary") / "canary.jsonl", []
    for text in path.read_bytes().splitlines() if path.is_file() else ():
        with suppress(ValueError, KeyError, TypeError):
            lines.append(escaped(json_text.parse(text)["text"]))
    return lines


def _attempt(path: Path, write: Callable[[], object]) -> bool:
    """Write one file of the report; whether that worked. The report is written without it, and one line says so."""
    try:
        write()
    except OSError as error:
        print(f"mantissa: {path} was not written: {error.strerror or error}", file=sys.stderr, flush=True)
        return False
    return True


def summary_table(run_dir: RunDir, summary: Summary | None = None) -> Grid:
    """The results as a table for the console; summary: the run's, None reads it.

    Raises UserError when nothing has been recorded.
    """
    summary = summary or summarise(run_dir)
    rows = [(words(what, "dim"), value) for what, value in results(summary)]
    return Table(("", ""), rows, title=f"{summary.name}: {summary.verdict.text}").grid()


def results(summary: Summary) -> list[tuple[str, str]]:
    """The results as (measure, value) rows; a measure that does not apply is left out."""
    best = "never finite"
    if summary.best_loss_step is not None:
        best = f"best {loss(summary.best_loss)} at step {summary.best_loss_step}"
    older = "nats" if summary.eval_loss is None or summary.perplexity is not None else ""
    unit = summary.start.get("loss_unit", older)
    what = HEADLINES.get(summary.facts.headline, "loss") + (f" ({unit})" if unit else "")
    found: dict[str, str] = {
        f"training {what}": f"{loss(summary.first_loss)} -> {loss(summary.last_loss)} ({best})",
        "losses that were not finite": str(summary.nonfinite_losses or ""),
    }
    if summary.eval_loss is not None:
        exponential = "" if summary.perplexity is None else f" (perplexity {perplexity(summary.perplexity)})"
        found[f"validation {what}"] = f"{loss(summary.first_eval_loss)} -> {loss(summary.eval_loss)}{exponential}"
        found |= {f"validation {name}": " -> ".join(map(loss, both)) for name, both in summary.metrics.items()}
    found["steps"] = f"{summary.steps} attempted, {summary.applied} applied, {summary.skipped} skipped"
    if summary.start["compute"] == "fp16" and summary.first_scale is not None:
        reasons = ", ".join(f"{count} x {reason}" for reason, count in sorted(summary.scale_reasons.items()))
        both_scales = f"{scale(summary.first_scale)} -> {scale(summary.last_scale)}"
        found["loss scale"] = f"{both_scales} ({reasons or 'never changed'})"
    if summary.grad_norm_median is not None:
        norms = f"median {number(summary.grad_norm_median, 3)}, largest {number(summary.grad_norm_max, 3)}"
        found["gradient norm"] = f"{norms}; clipped on {summary.clipped} of {summary.steps} steps"
    found["incidents"] = str(summary.incidents or "")
    if summary.nonfinite:
        first = f"{describe_event(summary.nonfinite[0])}, step {summary.nonfinite[0]['step']}"
        found["non-finite tensors"] = f"{len(summary.nonfinite)} found; the first: {first}"
    found |= {"faults of the machine": _faults_summary(summary), "tokens": f"{summary.tokens:,}"}
    if summary.tokens_per_second is not None and summary.step_seconds is not None:
        speed = f"{human(summary.tokens_per_second)} tokens/s, {precise_duration(summary.step_seconds)} per step"
        found["speed (median)"] = speed
    found["wall time"] = duration(summary.wall_seconds)
    found |= {"peak memory (largest rank)": mib(summary.memory_bytes), "checkpoint": summary.checkpoint or ""}
    return [row for row in found.items() if row[1]]


def _faults_summary(summary: Summary) -> str:
    ended = Counter(event["outcome"] for event in summary.corruption if event["event"] == "reexecution")
    wrong = sum(event["event"] == "corruption" for event in summary.corruption)
    found = [f"{wrong} wrong value{'s' * (wrong > 1)}"] if wrong else []
    found += [f"{count} {outcome}" for outcome, count in ended.items() if outcome != "numeric"]
    return ", ".join(found)


def _what_ran(
    summary: Summary, config: dict[str, Any], deepspeed: dict[str, Any], environment: dict[str, Any]
) -> list[tuple[str, str]]:
    start = summary.start
    versions = environment.get("versions", {})
    git = environment.get("git") or {}
    global_size, micro = setting(config, "batch.global_size"), setting(config, "batch.micro_size")
    model = start.get("model") or setting(config, "model.name_or_path") or setting(config, "model.architecture")
    rows = [
        ("model", f"{model or '?'}, {start['parameters']:,} parameters{_trained(start)}"),
        ("task", task_in_words(config)),
        ("adapter", adapter_in_words(config)),
        ("data", _data(config)),
        ("tokenizer", str(setting(config, "data.tokenizer") or "")),
        (
            "batch",
            f"{global_size} {samples_in_words(config)}, micro-batch {micro}, "
            f"accumulation {start.get('accumulation') or deepspeed.get('gradient_accumulation_steps', '?')}",
        ),
        ("precision", f"{start['compute']} compute, FP32 masters, {setting(config, 'precision.path') or 'cast'} path"),
        ("ZeRO", f"stage {start['zero_stage']}, {describe_event(start).rpartition(', ')[2]}"),
        ("hardware", _hardware(environment, start["world_size"])),
        ("software", ", ".join(f"{name} {number}" for name, number in versions.items() if number)),
        ("code", f"{git.get('commit', '')[:12]}{' with local changes' if git.get('dirty') else ''}" if git else ""),
        ("config sha256", str(start["config_sha256"])[:16]),
    ]
    return [row for row in rows if row[1]]


def _trained(start: Event) -> str:
    """The number of trained parameters, where others are frozen."""
    trained = start.get("trained_parameters")
    return "" if trained in (None, start["parameters"]) else f", {trained:,} of them trained"


def _data(config: dict[str, Any]) -> str:
    """Source and path of the data, or of each part of a mixture."""
    sources = setting(config, "data.sources")
    if sources:
        return "; ".join(_join(item.get("name"), item.get("source"), item.get("path")) for item in sources)
    return _join(setting(config, "data.source"), setting(config, "data.path"), setting(config, "data.name"))


def _hardware(environment: dict[str, Any], world_size: int) -> str:
    """Host and devices: the accelerators as recorded by training, else the CPU."""
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
    """The dtypes in which sums inside the modules were observed; empty for a run that did not observe."""
    counted = {
        what: [f"{dtype} ({count:,})" for dtype, count in dtypes.items()] for what, dtypes in computed(event).items()
    }
    rows = [*((what, "; ".join(dtypes)) for what, dtypes in counted.items()), *unobserved(event)]
    if not rows:
        return ""
    seen = Table(("observed", "computed in (modules)"), [tuple(map(escaped, row)) for row in rows])
    lower = [f"**{escaped(found)}**" for found in lower_than_promised(event)]
    return page("### Inside the modules", f"Seen in step {event['step']}:", seen, lower)


def resume_command_of(run_dir: RunDir) -> str:
    """The command that resumes the run: the one in environment.json, else the command line it was started with."""
    environment = read_inputs(run_dir)[2]
    return environment.get("resume_command") or shlex.join(environment.get("command_line", ["train.py"]))
