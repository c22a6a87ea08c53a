"""The end of a run: the sample, the report, and the last lines on the console."""

import os
import shlex
import time
from dataclasses import replace
from typing import Any

from config.cli import BROKEN, DIVERGED, DONE, PREEMPTED, UNSAVED
from config.errors import UserError, one_line
from config.printable import printable, shown
from tracking.heatmap.still import still_of_run
from tracking.report.context import MeasureContext
from tracking.report.page import sample_title, summary_table, write_report
from tracking.status import ended
from tracking.summary import read_run
from tracking.terminal import console, paragraph, words
from tracking.verdict import STYLES, Verdict
from training.loop import Ending
from training.parts import Parts
from training.session import run_dir_of

_STATUS = {DONE: "done", DIVERGED: "aborted", BROKEN: "aborted", UNSAVED: "aborted", PREEMPTED: "preempted"}


def finish(parts: Parts, ending: Ending) -> None:
    """Sample text, close the record and write the report. A collective: every rank samples."""
    sample = parts.sample() if ending.exit_code == DONE else ""
    parts.batches.close()
    parts.stop_watching()
    end: dict[str, Any] = {"step": ending.progress.step, "tokens": ending.progress.tokens}
    end |= {"status": _STATUS[ending.exit_code], "exit_code": ending.exit_code, "reason": ending.reason}
    verdict = None
    if parts.engine.world.is_main:
        verdict, further = _judge(parts, end)
        end |= further
    parts.record.event("run_end", **end)
    parts.record.close()
    if parts.engine.world.is_main:
        _report(parts, sample, ending, verdict)


def _judge(parts: Parts, end: dict[str, Any]) -> tuple[Verdict | None, dict[str, Any]]:
    """The verdict on a run that is about to record `end`, and more fields for it; none if events are damaged."""
    try:
        facts = read_run(run_dir_of(parts.resolved).path)
        # it reads all telemetry, which takes long after many steps, while whoever preempts waits to kill
        lost = "" if end["exit_code"] == PREEMPTED else still_of_run(facts)
    except UserError:
        return None, {}
    final = end | {"time": time.time(), "standstill": lost}
    verdict = replace(facts, checked=ended(final, end["step"])).verdict
    return verdict, {
        "verdict": verdict.word,
        "verdict_text": verdict.text,
        "since_step": verdict.step,
        "next_command": verdict.command,
        "warnings": verdict.warnings,
        "standstill": lost,
    }


def _report(parts: Parts, sample: str, ending: Ending, verdict: Verdict | None) -> None:
    run_dir = run_dir_of(parts.resolved)
    command = parts.resolved.resume_command
    screen = console(soft_wrap=True)
    try:
        run = read_run(run_dir.path)
        report = write_report(MeasureContext(run), sample=sample or None, resume_command=command)
        table = summary_table(run)
        table.title = words(run.label)  # the verdict is the last line
        screen.print(table)
        if lost := (run.end or {}).get("standstill"):
            screen.print(paragraph(shown(f"! {lost}"), screen, "yellow"))
        if sample:
            screen.print(words(f"{sample_title(run)}:"))
            screen.print(printable(sample.strip()), style="dim")
        screen.print(words(f"report   {os.path.relpath(report)}"))
        screen.print(words(f"plot     {os.path.relpath(run_dir.plots / 'run.png')}"))
    except Exception as error:  # the run is over and recorded: a report must not fail it
        again = f"python -m tracking.report {shlex.quote(str(run_dir.path))} writes it again"
        screen.print(words(f"report   was not written: {one_line(error)}; {again}"))
    if verdict is None:
        screen.print(words(f"verdict  none, the events cannot be read; {ending.reason}"))
        return
    sound = verdict.command in ("", command)
    screen.print(words(f"resume   {command}" if sound else f"next     {verdict.command}"))
    screen.print(paragraph(shown(f"verdict  {verdict.text}"), screen, STYLES[verdict.tone]))
