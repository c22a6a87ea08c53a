"""The end of a run: the sample, the report, and the last lines on the console."""

from __future__ import annotations

import os

from rich.console import Console

from config.cli import DIVERGED, DONE, PREEMPTED, UNSAVED
from data.prepare import Corpus
from data.tokenizer import load_tokenizer
from modeling.generate import sample_text
from tracking.report.page import summary_table, write_report
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
    console = Console(highlight=False, soft_wrap=True)
    console.print(summary_table(run_dir))
    if sample:
        console.print(sample.strip(), style="dim", markup=False)
    console.print(f"report   {os.path.relpath(report)}\nplot     {os.path.relpath(run_dir.plots / 'run.png')}")
    console.print(f"resume   {command}", markup=False)
    if ending.reason:
        console.print(f"stopped  after step {ending.progress.step}: {ending.reason}", markup=False)
