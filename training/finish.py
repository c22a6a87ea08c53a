"""The end of a run: the sample, the report, and the last lines on the console."""

import os
import shlex
import time
from dataclasses import replace
from typing import Any

from config.cli import BROKEN, DIVERGED, DONE, PREEMPTED, UNSAVED
from config.errors import UserError, one_line
from config.printable import printable
from config.redact import redact
from config.task import ENCODER_TASKS
from data.text.prepare import Corpus
from data.text.tokenizer import load_tokenizer
from modeling.generate import sample_text
from tracking.heatmap.grid import read_heat
from tracking.heatmap.still import still_sentence
from tracking.report.page import sample_title, summary_table, write_report
from tracking.status import ended
from tracking.summary import read_run_folder, summarise
from tracking.terminal import console, words
from tracking.verdict import STYLES, Verdict
from training.loop import Ending
from training.parts import Parts
from training.session import run_dir_of

_STATUS = {DONE: "done", DIVERGED: "aborted", BROKEN: "aborted", UNSAVED: "aborted", PREEMPTED: "preempted"}


def finish(parts: Parts, corpus: Corpus, ending: Ending) -> None:
    """Sample text, close the record and write the report. A collective: every rank samples."""
    sample = _sample(parts, corpus) if ending.exit_code == DONE else None
    parts.batches.close()
    parts.stop_watching()
    end: dict[str, Any] = {
        "step": ending.progress.step,
        "tokens": ending.progress.tokens,
        "status": _STATUS[ending.exit_code],
        "exit_code": ending.exit_code,
        "reason": ending.reason,
    }
    verdict = None
    if parts.engine.world.is_main:
        verdict, further = _judge(parts, end)
        end |= further
    parts.record.event("run_end", **end)
    parts.record.close()
    if parts.engine.world.is_main:
        _report(parts, sample, ending, verdict)


def _judge(parts: Parts, end: dict[str, Any]) -> tuple[Verdict | None, dict[str, Any]]:
    """The verdict on a run that is about to record `end`, and further fields of it; none where events are damaged."""
    run_dir = run_dir_of(parts.resolved)
    try:
        facts = read_run_folder(run_dir, run_dir.name)
        lost = still_sentence(read_heat(run_dir.events), after=parts.resolved.config.schedule.warmup_steps)
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


def _sample(parts: Parts, corpus: Corpus) -> str | None:
    """Text from the model; None where none is configured, or a rank cannot read the tokenizer. A collective."""
    generate, tokenizer, problem = parts.resolved.config.generate, None, None
    if not generate.tokens or parts.resolved.config.task in ENCODER_TASKS:
        return None
    try:
        tokenizer = load_tokenizer(corpus.tokenizer_folder)
    except Exception as error:  # the cache may be gone by now, or damaged; the tokenizers raise plain Exception
        problem = f"no text was sampled: {corpus.tokenizer_folder}: {one_line(error)}"
    problem = next(filter(None, parts.engine.world.gather_objects(problem)), None)
    if problem is not None or tokenizer is None:
        parts.record.note(str(problem))
        return None
    return sample_text(
        parts.engine.model,
        tokenizer,
        prompt=generate.prompt,
        tokens=generate.tokens,
        temperature=generate.temperature,
        seed=parts.resolved.config.run.seed,
        device=parts.engine.world.device,
        has_encoder=parts.engine.model.config.is_encoder_decoder,
    )


def _report(parts: Parts, sample: str | None, ending: Ending, verdict: Verdict | None) -> None:
    run_dir = run_dir_of(parts.resolved)
    command = parts.resolved.resume_command
    screen = console(soft_wrap=True)
    try:
        report = write_report(run_dir, sample=sample, resume_command=command)
        summary = summarise(run_dir)
        screen.print(summary_table(run_dir, summary))
        if summary.standstill:
            screen.print(words(f"! {summary.standstill}", "yellow"))
        if sample:
            screen.print(words(f"{sample_title(run_dir, summary)}:"))
            screen.print(printable(redact(sample.strip())), style="dim")
        screen.print(words(f"report   {os.path.relpath(report)}"))
        screen.print(words(f"plot     {os.path.relpath(run_dir.plots / 'run.png')}"))
    except Exception as error:  # the run is over and recorded: what is for people must not make it a failed one
        again = f"python -m tracking.report {shlex.quote(str(run_dir.path))} writes it again"
        screen.print(words(f"report   was not written: {one_line(error)}; {again}"))
    if verdict is None:
        screen.print(words(f"verdict  none, the events cannot be read; {ending.reason}"))
        return
    sound = verdict.command in ("", command)
    screen.print(words(f"resume   {command}" if sound else f"next     {verdict.command}"))
    screen.print(words(f"verdict  {verdict.text}", STYLES[verdict.tone]))
