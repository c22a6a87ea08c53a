"""Run every suite of tests one after another, or a short check of the installed versions, and record what passed.

    python -m lab.suites [--out docs/tested.md] [--only SUITE] [--again]
    python -m lab.suites --compatibility [--out docs/compatibility.md]

A suite is a target of make, and of long ones a part. Results are kept in FOLDER by commit, so that hours of tests can
be interrupted; the page keeps a suite's row until the suite has run again. Exit code 0: nothing failed; 1: something
did.
"""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from config.cli import CRASH, DONE, REPOSITORY, Arguments, entry_point
from config.errors import UserError
from tracking.environment import environment
from tracking.pages import markdown

SUITES = {
    "test": "every test without a marker",
    "test-long ARGS=tests/training/engine": "the rest of the engine's matrices",
    "test-long ARGS=tests/training/tasks": "losses of tasks against plain torch",
    "test-long ARGS=tests/training --ignore=tests/training/engine --ignore=tests/training/tasks": "every architecture",
    "test-long ARGS=tests/tools": "the gate on planted defects, the audit, replays",
    "test-long ARGS=tests/lab": "the precision matrix, contestants of the benchmark",
    "test-long ARGS=tests/launch": "the planner on real ranks, killed sweeps",
    "test-long ARGS=--ignore=tests/training --ignore=tests/tools --ignore=tests/lab --ignore=tests/launch": "others",
    "test-cluster": "two machines made of network namespaces, a Slurm of two nodes",
    "test-machines": "whole jobs on strange and broken machines",
    "chaos": "saves killed at every phase",
    "test-kernels": "Liger's kernels in Triton's interpreter",
    "test-titan": "torchtitan beside Mantissa",
    "test-trl": "TRL's trainers beside Mantissa",
    "test-rl": "rollouts by vLLM",
}
"""Target and variable of make to a description of its tests, in execution order."""
CELLS = [f"BF16, ZeRO-{stage}, accumulation 4, clipping on, checkpointing full" for stage in range(4)]
VERSIONS = ("python", "torch", "transformers", "deepspeed")


@dataclass
class Result:
    """The result of one command."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    failures: list[str] = field(default_factory=list)
    """Names of failed tests; the exit code of a command that printed no summary."""
    day: str = field(default_factory=lambda: str(date.today()))

    @property
    def words(self) -> str:
        """Counts in the form of pytest's summary."""
        counts = {"passed": self.passed, "failed": self.failed, "skipped": self.skipped}
        return ", ".join(f"{number:,} {name}" for name, number in counts.items() if number or name != "skipped")


def run(command: Sequence[str], log: Path) -> Result:
    """Run a command in Mantissa's folder with its output in a file, and read the outcome."""
    began = time.monotonic()
    # A shell's background jobs, and what they start, ignore Ctrl-C, which some tests send.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with log.open("w", encoding="utf-8") as output:
        done = subprocess.run(command, cwd=REPOSITORY, stdout=output, stderr=subprocess.STDOUT, check=False)
    result = read(log.read_text(encoding="utf-8", errors="replace"), done.returncode)
    result.seconds = time.monotonic() - began
    return result


def read(text: str, code: int) -> Result:
    """The sum of pytest's summary lines; without a summary, the command passed or failed as a whole."""
    summaries = re.findall(r"^=* ?\d+ (?:passed|failed|skipped|error).* in [\d.]+s\b", text, re.MULTILINE)
    passed, skipped = (
        sum(map(int, re.findall(rf"(\d+) {name}\b", "\n".join(summaries)))) for name in ("passed", "skipped")
    )
    failures = re.findall(r"^(?:FAILED|ERROR) (.+?)(?: - .*)?$", text, re.MULTILINE)
    if not summaries and code == 0:
        return Result(passed=1)
    if code and not failures:
        failures = [f"exit code {code}"]
    return Result(passed, len(failures), skipped, failures=failures)


def run_suites(folder: Path, page: Path, only: str | None, *, again: bool) -> int:
    """Run every suite without a result for this commit, writing the page after each; returns the exit code."""
    facts = environment({})
    page = page.resolve()
    inside = [f":!{page.relative_to(REPOSITORY)}"] if page.is_relative_to(REPOSITORY) else []
    changed = ["git", "diff", "--quiet", "HEAD", "--", ".", *inside]
    if facts["git"] is None or subprocess.run(changed, cwd=REPOSITORY, check=False).returncode:
        raise UserError("the suites are recorded with their commit: commit or stash what has changed first")
    kept = folder / facts["git"]["commit"][:12]
    kept.mkdir(parents=True, exist_ok=True)
    page.parent.mkdir(parents=True, exist_ok=True)
    results = {}
    for suite in SUITES:
        path = kept / f"{re.sub(r'[^a-z]+', '-', suite.lower())}.json"
        if only in (None, suite) and (again or not path.exists()):
            log = path.with_suffix(".log")
            print(f"{_command(suite)}; tail -f {log}", flush=True)
            path.write_text(json.dumps(asdict(run(["make", *suite.split(" ", 1)], log))), encoding="utf-8")
        if path.exists():
            results[suite] = Result(**json.loads(path.read_text(encoding="utf-8")))
            page.write_text(tested_page(page, suite, results[suite], facts), encoding="utf-8")
    return CRASH if any(result.failed for result in results.values()) else DONE


def _command(suite: str) -> str:
    target, _, variable = suite.partition(" ")
    return f"make {target}" + (f' ARGS="{variable.removeprefix("ARGS=")}"' if variable else "")


def tested_page(page: Path, suite: str, result: Result, facts: dict[str, Any]) -> str:
    """The page with this result of a suite: what passed, failed and was skipped, and the names of failed tests."""
    written = page.read_text(encoding="utf-8").splitlines() if page.exists() else []
    rows = [line.strip("| ").split(" | ") for line in written if line.startswith("| `make ")]
    machine = f"{facts['cpu']['usable_cores']} cores of {facts['cpu']['model']}"
    failed = f" ({', '.join(map(markdown.text, result.failures))})" if result.failures else ""
    ended = (result.words + failed, f"{result.seconds / 60:.0f} min", facts["git"]["commit"][:12], result.day, machine)
    known: dict[str, Sequence[object]] = {row[0]: row[2:] for row in rows} | {f"`{_command(suite)}`": ended}
    table = markdown.Table(["suite", "what it tests", "result", "time", "commit", "date", "machine"])
    for each, what in SUITES.items():
        command = f"`{_command(each)}`"
        table.add(command, what, *known.get(command, ("not run", "-", "-", "-", "-")))
    return markdown.page(
        "# What was tested",
        "The newest result of every suite of tests and the commit that it tested, whose requirements.txt pins the "
        "versions. `make test-all` runs all of them. Do not edit this page.",
        table,
    )


def check_versions(folder: Path, page: Path) -> int:
    """Run the demo, the fast tests and four cells with the installed versions, and put their row into the page."""
    facts = environment({})
    versions = [facts["versions"][name] for name in VERSIONS]
    folder = folder / "-".join(versions)
    folder.mkdir(parents=True, exist_ok=True)
    python, runs = sys.executable, str(folder / "runs")
    os.environ["OMP_NUM_THREADS"] = "1"
    launcher = [python, "-m", "deepspeed.launcher.runner", "--quiet", "--num_gpus", "2", "--master_port", "29731"]
    demo = run(
        [*launcher, "train.py", "--config", "config/recipes/demo.yaml", f"run.dir={runs}", "tracking.wandb=disabled"],
        folder / "demo.log",
    )
    losses = re.findall(r"validation loss ([\d.]+)", (folder / "demo.log").read_text(encoding="utf-8"))
    fast = run([python, "-m", "pytest", "-n", "2", "--no-processes"], folder / "tests.log")
    cells = [
        run([python, "-m", "lab.matrix", "--only", cell, "--folder", str(folder / "cells")], folder / "cells.log")
        for cell in CELLS
    ]
    as_expected = sum(result.failed == 0 for result in cells)
    row = [*versions, f"validation {losses[-1]}" if losses and not demo.failed else "failed", fast.words]
    row += [f"{as_expected} of {len(cells)} as expected", str(date.today())]
    written = page.read_text(encoding="utf-8") if page.exists() else _COMPATIBILITY
    others = [line for line in written.splitlines() if line.startswith("| 3.")]
    rows = [line for line in others if not line.startswith(f"| {' | '.join(versions)} |")]
    lines = "".join(f"{line}\n" for line in sorted([*rows, f"| {' | '.join(row)} |"]))
    page.write_text(_COMPATIBILITY + lines, encoding="utf-8")
    return CRASH if demo.failed or fast.failed or as_expected < len(cells) else DONE


_COMPATIBILITY = """# Versions that were tested

Which versions of Python, torch, transformers and DeepSpeed Mantissa was tried on. `make compatibility` adds a row for
the installed versions: it runs the demo to its end, the tests that start no process, and one cell of the
[precision matrix](precision-matrix.md) at each ZeRO stage. Without rows it has not run. `requirements.txt` pins the
versions that [the suites](tested.md) run on.

| Python | torch | transformers | DeepSpeed | demo | fast tests | matrix | date |
|---|---|---|---|---|---|---|---|
"""


@entry_point()
def main(arguments: Sequence[str] | None = None) -> int:
    """Run the suites or the check of versions."""
    parser = Arguments("python -m lab.suites", __doc__)
    parser.add_argument("--compatibility", action="store_true", help="the check of the installed versions")
    parser.add_argument("--out", type=Path, help="the page (default: docs/tested.md or docs/compatibility.md)")
    parser.add_argument("--only", choices=[*SUITES], help="only this suite")
    parser.add_argument("--again", action="store_true", help="also suites that have a result of this commit")
    parser.add_argument("--folder", type=Path, default=Path("runs/suites"), help="folder of results and logs")
    options = parser.parse_args(arguments)
    if options.compatibility:
        return check_versions(options.folder, options.out or REPOSITORY / "docs/compatibility.md")
    return run_suites(options.folder, options.out or REPOSITORY / "docs/tested.md", options.only, again=options.again)


if __name__ == "__main__":
    sys.exit(main())
