"""The end of a run: the sample, the report, and the last lines on the console."""

from __future__ import annotations

import os

from config.cli import DIVERGED, DONE, PREEMPTED, UNSAVED
from config.printable import printable
from config.redact import redact
from data.prepare import Corpus
from data.tokenizer import load_tokenizer
from modeling.generate import sample_text
from tracking.report.page import summary_table, write_report
from tracking.terminal import console, words
from training.loop import Ending
from training.parts import Parts
from training.session import run_dir_of

_STATUS = {DONE: "done", DIVERGED: "aborted", UNSAVED: "aborted", PREEMPTED: "preempted"}


def finish(parts: Parts, corpus: Corpus, ending: Ending) -> None:
    """Sample text, close the record and write the report. A collective: every rank samples."""
    generate = parts.resolved.config.generate
    sample = None
    if generate.tokens and ending.exit_code == DONE:
        sample = sample_text(
            parts.engine.model,
            load_tokenizer(corpus.tokenizer_folder),
            prompt=generate.prompt,
            tokens=generate.tokens,
            temperature=generate.temperature,
            seed=parts.resolved.config.run.seed,
            device=parts.engine.world.device,
        )
    parts.batches.close()
    parts.stop_watching()
    parts.record.event(
        "run_end",
        step=ending.progress.step,
        tokens=ending.progress.tokens,
        status=_STATUS[ending.exit_code],
        exit_code=ending.exit_code,
        reason=ending.reason,
    )
    parts.record.close()
    if parts.engine.world.is_main:
        _report(parts, sample, ending)


def _report(parts: Parts, sample: str | None, ending: Ending) -> None:
    run_dir = run_dir_of(parts.resolved)
    command = parts.resolved.resume_command
    report = write_report(run_dir, sample=sample, resume_command=command)
    screen = console(soft_wrap=True)
    screen.print(summary_table(run_dir))
    if sample:
        screen.print(printable(redact(sample.strip())), style="dim")
    screen.print(words(f"report   {os.path.relpath(report)}"))
    screen.print(words(f"plot     {os.path.relpath(run_dir.plots / 'run.png')}"))
    screen.print(words(f"resume   {command}"))
    if ending.reason:
        screen.print(words(f"stopped  after step {ending.progress.step}: {ending.reason}"))
