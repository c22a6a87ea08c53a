"""`report.md`, one page about a run from its folder alone; and the same numbers as a table for the console."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rich.table import Table

from config import json_text, markdown
from config.files import write_atomically
from config.redact import redact
from tracking.console import duration, human
from tracking.events import Event, describe_event, format_scale
from tracking.heatmap.grid import read_heat
from tracking.heatmap.panels import PANELS
from tracking.heatmap.picture import draw_heat
from tracking.heatmap.scale import drawn_panels
from tracking.heatmap.words import sentences
from tracking.observed_dtypes import computed, lower_than_promised, unobserved
from tracking.plots import plot_run
from tracking.report.context import Finding, MeasureContext
from tracking.report.measures import all_measures, caveats, count_verdicts, read_run
from tracking.report.objective import adapter_in_words, samples_in_words, task_in_words
from tracking.run_dir import RunDir
from tracking.summary import Summary, read_inputs, setting, summarise
from tracking.terminal import words

_MOST_WARNINGS = 20


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
    config, deepspeed, environment = read_inputs(run_dir)
    text = sample
    if sample is not None:
        _attempt(run_dir.sample, lambda: write_atomically(run_dir.sample, redact(sample).encode(errors="replace")))
    elif run_dir.sample.is_file():
        text = run_dir.sample.read_text(encoding="utf-8", errors="replace")
    parts = [f"# {markdown.text(summary.name)}\n"]
    hypothesis = setting(config, "run.hypothesis")
    if hypothesis:
        parts.append(f"> Hypothesis: {markdown.text(hypothesis)}\n")
    cause = f": {markdown.text(summary.cause)}" if summary.cause else ""
    parts.append(f"**{markdown.text(summary.status)}**{_sessions(summary)}{cause}\n")
    parts.append("## What ran\n\n" + _rows(_what_ran(summary, config, deepspeed, environment)))
    parts.append("## Results\n\n" + _rows(results(summary)))
    plot = run_dir.plots / "run.png"
    if summary.steps and _attempt(plot, lambda: plot_run(run_dir.events, plot)):
        parts.append("![loss, gradient norm, learning rate, loss scale or speed](plots/run.png)\n")
    parts += _layers(run_dir)
    parts.append(f"## Measures\n\n{count_verdicts(findings)}.\n\n{_measures(findings, remarks)}")
    parts += _corruption(summary)
    if environment.get("ledger"):
        parts.append("## Dtypes\n\n" + _ledger(environment["ledger"]))
    parts += _observed(summary.precision or {})
    parts += _warnings(summary.warnings)
    if summary.notes:
        parts.append("## Notes\n\n" + "".join(f"- {markdown.text(note)}\n" for note in summary.notes))
    parts += _canary(run_dir)
    if text:
        parts.append(f"## A sample from the trained model\n\n{markdown.fenced(text)}\n")
    checkpoint = f"Newest checkpoint: {markdown.code(summary.checkpoint or 'none')}"
    parts.append(f"## Resume\n\n{checkpoint}\n\n" + markdown.fenced(resume_command, "bash"))
    write_atomically(run_dir.report, "\n".join(parts).encode())
    return run_dir.report


def _measures(findings: Sequence[Finding], remarks: Sequence[str]) -> str:
    """A table of the measures and how each was computed below it."""
    lines = "".join(f"> {markdown.text(remark)}\n\n" for remark in remarks)
    cells = ((item.title, item.shown or "-", item.limit) for item in findings)
    rows = [(*map(markdown.text, row), _verdict(item)) for row, item in zip(cells, findings, strict=True)]
    lines += markdown.table(("measure", "value", "limit", "verdict"), rows)
    how = "".join(f"- **{markdown.text(item.title)}**: {markdown.text(item.how)}.\n" for item in findings)
    return f"{lines}\n<details><summary>How they were computed</summary>\n\n{how}\n</details>\n"


def _verdict(item: Finding) -> str:
    word = f"**{item.verdict}**" if item.verdict == "fail" else item.verdict
    return f"{word}: {markdown.text(item.reason)}" if item.reason else word


def _layers(run_dir: RunDir) -> list[str]:
    """The heat maps, drawn to `plots/heatmap.png`, and what stands out in them; nothing without telemetry."""
    heat = read_heat(run_dir.events)
    if not drawn_panels(heat):
        return []
    parts = ["## Layers over time\n"]
    png = run_dir.plots / "heatmap.png"
    if _attempt(png, lambda: draw_heat(heat, png, title=run_dir.name)):
        parts.append("![heat maps of the modules over the steps](plots/heatmap.png)\n")
    lines = [f"- **{PANELS[key].title}**: {markdown.text(line)}\n" for key, line in sentences(heat).items()]
    return [*parts, "".join(lines)]


def _warnings(events: Sequence[Event]) -> list[str]:
    """The early warnings, the newest last; nothing where there was none."""
    if not events:
        return []
    left_out = f"{len(events) - _MOST_WARNINGS} earlier ones are in events.jsonl.\n\n" * (len(events) > _MOST_WARNINGS)
    lines = (f"- step {event['step']}: {markdown.text(event['reason'])}\n" for event in events[-_MOST_WARNINGS:])
    return [f"## Early warnings\n\n{left_out}{''.join(lines)}"]


def _canary(run_dir: RunDir) -> list[str]:
    """Decisions of `launch.canary` about the run, from the folder beside it; nothing without one."""
    path = run_dir.path.with_name(f"{run_dir.name}-canary") / "canary.jsonl"
    if not path.is_file():
        return []
    lines = []
    for text in path.read_bytes().splitlines():
        with suppress(ValueError, KeyError, TypeError):
            lines.append(f"- {markdown.text(str(json_text.parse(text)['text']))}\n")
    return ["## Canary\n\n" + "".join(lines)] if lines else []


def _attempt(path: Path, write: Callable[[], object]) -> bool:
    """Write one file of the report; whether that worked. The report is written without it, and one line says so."""
    try:
        write()
    except OSError as error:
        print(f"mantissa: {path} was not written: {error.strerror or error}", file=sys.stderr, flush=True)
        return False
    return True


def summary_table(run_dir: RunDir, summary: Summary | None = None) -> Table:
    """The results as a table for the console; summary: the run's, None reads it.

    Raises UserError when nothing has been recorded.
    """
    summary = summary or summarise(run_dir)
    cause = f", {summary.cause}" if summary.cause else ""
    table = Table(title=words(f"{summary.name}: {summary.status}{cause}"), show_header=False, title_justify="left")
    table.add_column(style="dim")
    table.add_column()
    for what, value in results(summary):
        table.add_row(what, words(value))
    return table


def results(summary: Summary) -> list[tuple[str, str]]:
    """The results as (measure, value) rows; a measure that does not apply is left out."""
    best = "never finite"
    if summary.best_loss_step is not None:
        best = f"best {_number(summary.best_loss)} at step {summary.best_loss_step}"
    older = "nats" if summary.eval_loss is None or summary.perplexity is not None else ""
    unit = summary.start.get("loss_unit", older)
    unit = f" ({unit})" if unit else ""
    rows = [
        (f"training loss{unit}", f"{_number(summary.first_loss)} -> {_number(summary.last_loss)} ({best})"),
        ("losses that were not finite", str(summary.nonfinite_losses) if summary.nonfinite_losses else ""),
    ]
    if summary.eval_loss is not None:
        evaluated = f"{_number(summary.first_eval_loss)} -> {_number(summary.eval_loss)}"
        perplexity = "" if summary.perplexity is None else f" (perplexity {summary.perplexity:.2f})"
        rows.append((f"validation loss{unit}", evaluated + perplexity))
        rows += [(f"validation {name}", " -> ".join(map(_number, both))) for name, both in summary.metrics.items()]
    rows += [
        ("steps", f"{summary.steps} attempted, {summary.applied} applied, {summary.skipped} skipped"),
        ("loss scale", _scale_summary(summary)),
        ("gradient norm", _norm_summary(summary)),
        ("incidents", str(summary.incidents) if summary.incidents else ""),
        ("non-finite tensors", _nonfinite_summary(summary)),
        ("faults of the machine", _faults_summary(summary)),
        ("tokens", f"{summary.tokens:,}"),
        ("speed (median)", _speed(summary)),
        ("wall time", duration(summary.wall_seconds)),
        ("peak memory (largest rank)", _gib(summary.memory_bytes)),
        ("checkpoint", summary.checkpoint or ""),
    ]
    return [row for row in rows if row[1]]


def _sessions(summary: Summary) -> str:
    return f" in {summary.sessions} sessions" if summary.sessions > 1 else ""


def _scale_summary(summary: Summary) -> str:
    if summary.start["compute"] != "fp16" or summary.first_scale is None:
        return ""
    reasons = ", ".join(f"{count} x {reason}" for reason, count in sorted(summary.scale_reasons.items()))
    return f"{format_scale(summary.first_scale)} -> {format_scale(summary.last_scale)} ({reasons or 'never changed'})"


def _norm_summary(summary: Summary) -> str:
    if summary.grad_norm_median is None:
        return ""
    return (
        f"median {summary.grad_norm_median:.3g}, largest {summary.grad_norm_max:.3g}; "
        f"clipped on {summary.clipped} of {summary.steps} steps"
    )


def _nonfinite_summary(summary: Summary) -> str:
    if not summary.nonfinite:
        return ""
    first = summary.nonfinite[0]
    return f"{len(summary.nonfinite)} found; the first: {describe_event(first)}, step {first['step']}"


def _faults_summary(summary: Summary) -> str:
    ended = Counter(event["outcome"] for event in summary.corruption if event["event"] == "reexecution")
    wrong = sum(event["event"] == "corruption" for event in summary.corruption)
    found = [f"{wrong} wrong value{'s' * (wrong > 1)}"] if wrong else []
    found += [f"{count} {outcome}" for outcome, count in ended.items() if outcome != "numeric"]
    return ", ".join(found)


def _corruption(summary: Summary) -> list[str]:
    """Each finding of the checks for silent corruption; nothing without one."""
    if not summary.corruption:
        return []
    lines = (f"- step {event['step']}: {markdown.text(describe_event(event))}\n" for event in summary.corruption)
    return ["## Faults of the machine\n\n" + "".join(lines)]


def _speed(summary: Summary) -> str:
    if summary.tokens_per_second is None:
        return ""
    return f"{human(summary.tokens_per_second)} tokens/s, {summary.step_seconds:.3g} s a step"


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
        ("ZeRO", f"stage {start['zero_stage']}, {start['world_size']} process(es)"),
        ("hardware", _hardware(environment, start["world_size"])),
        ("software", ", ".join(f"{name} {number}" for name, number in versions.items() if number)),
        ("code", f"{git.get('commit', '')[:12]}{' with local changes' if git.get('dirty') else ''}" if git else ""),
        ("config sha256", str(start["config_sha256"])[:16]),
    ]
    return [row for row in rows if row[1]]


def _trained(start: Event) -> str:
    """Number of trained parameters, where others are frozen."""
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


def _rows(rows: list[tuple[str, str]]) -> str:
    return markdown.table(("", ""), [(what, markdown.text(value)) for what, value in rows])


def _ledger(ledger: list[dict[str, Any]]) -> str:
    sizes = (f"{row['bytes'] / 2**20:,.1f}" if row["bytes"] else "" for row in ledger)
    rows = [(markdown.text(row["what"]), row["dtype"], size) for row, size in zip(ledger, sizes, strict=True)]
    return markdown.table(("what", "dtype", "MiB"), rows)


def _observed(event: dict[str, Any]) -> list[str]:
    """In which dtypes sums inside the modules were seen to be made; nothing of a run that did not look."""
    counted = {
        what: [f"{dtype} ({count:,})" for dtype, count in dtypes.items()] for what, dtypes in computed(event).items()
    }
    rows = [*((what, "; ".join(dtypes)) for what, dtypes in counted.items()), *unobserved(event)]
    if not rows:
        return []
    lower = "".join(f"- **{markdown.text(found)}**\n" for found in lower_than_promised(event))
    seen = markdown.table(("observed", "computed in (modules)"), [tuple(map(markdown.text, row)) for row in rows])
    return [f"### Inside the modules\n\nSeen in step {event['step']}:\n\n{seen}" + (f"\n{lower}" if lower else "")]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _gib(value: int | None) -> str:
    return f"{value / 2**30:.2f} GiB" if value else ""


def resume_command_of(run_dir: RunDir) -> str:
    """The command that resumes the run: the one in environment.json, else the command line it was started with."""
    environment = read_inputs(run_dir)[2]
    return environment.get("resume_command") or shlex.join(environment.get("command_line", ["train.py"]))
