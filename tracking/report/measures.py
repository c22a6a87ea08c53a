"""The twelve measures of a mixed-precision run, each with a verdict, from its run folder alone.

Relative measures are compared with a baseline, the same work in FP32. A measure whose inputs were not recorded, or
whose baseline is not comparable, is not measured and says why. Nothing is guessed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from config.errors import UserError
from tracking.heatmap.still import still_of_run
from tracking.report.absolute import drift, job_success, low_precision, nonfinite, overflow_rate, restore_success
from tracking.report.context import Finding, MeasureContext, Measured, Run, find
from tracking.report.relative import epoch_cost, epoch_time, norm_variance, peak_memory, utilisation, validation_delta
from tracking.report.sessions import read_history
from tracking.run_dir import RunDir
from tracking.summary import read_run_folder

_MEASURES: tuple[Callable[[MeasureContext], Measured], ...] = (
    *(epoch_time, utilisation, peak_memory, nonfinite, validation_delta, epoch_cost),
    *(restore_success, overflow_rate, norm_variance, job_success, low_precision, drift),
)


def all_measures(context: MeasureContext) -> list[Finding]:
    """All twelve, in the order of `context.LIMITS`."""
    return [find(measure, context) for measure in _MEASURES]


def count_verdicts(findings: Sequence[Finding]) -> str:
    """Sentence with the number of measures that passed, failed and were not measured."""
    count = Counter(finding.verdict for finding in findings)
    failed = f"{count['fail']} failed" if count["fail"] else "none failed"
    return f"{count['pass']} of {len(findings)} measures pass, {failed}, {count['not measured']} not measured"


def caveats(context: MeasureContext) -> list[str]:
    """Sentences that limit the verdicts: about a run that hardly moves, or a baseline that is none."""
    still = still_of_run(context.run.facts)
    found = [still] if still else []
    baseline = context.baseline
    if baseline is None:
        return found
    if baseline.low_precision is not None:
        found.append(f"the baseline {baseline.name} computes in {baseline.low_precision}, not in FP32")
    if baseline.history.end is None:
        found.append(f"the baseline {baseline.name} has not ended")
    return found


def read_run(folder: Path) -> Run:
    """Read a run folder. Raises UserError when nothing was recorded there, or when it is damaged."""
    run_dir = RunDir(folder)
    facts = read_run_folder(run_dir, run_dir.name)
    if not facts.start:
        raise UserError(f"{run_dir.events}: no run_start event; nothing was recorded in this run folder")
    return Run(facts, read_history(run_dir.events))
