"""Kill a process while a job of two ranks prepares its data, see how the job ends, and start it again."""

import re
import time
from pathlib import Path

from config.cli import CONFIG_ERROR, LOST
from tests.support.jobs.forked import Job
from tests.support.jobs.launches import command, finish, start

WITHIN_SECONDS = 40.0
"""The limit from the start of the job to the end of its last rank; up to 15 s of it follow the death."""


def check(folder: Path, who: str, phase: str, *, grace: float) -> float:
    """The seconds that the whole job took. grace: seconds that a rank has to stop by itself once another one is lost.

    Raises AssertionError: it did not end as it should, or the next start left something behind.
    """
    given = command("python", folder, "it", "run.steps=3", "data.workers=2", "evaluate.every_steps=0")
    given[1:2] = ["-m", "tests.support.jobs.dying_preparation", f"{who}:{phase}:{grace}:{folder}/mark"]
    started = time.monotonic()
    job = start(given, ranks=2)
    assert isinstance(job, Job)
    try:
        output, _ = job.communicate(timeout=WITHIN_SECONDS)
    finally:
        job.kill()
    seconds = time.monotonic() - started
    errors = [line for line in output.splitlines() if line.startswith("error: ")]
    assert "Traceback" not in output, output
    if who == "worker":
        assert CONFIG_ERROR in job.exit_codes and set(job.exit_codes) <= {CONFIG_ERROR, LOST}, output
        advice = "data.workers=2: a worker process was killed by SIGKILL while tokenizing"
        assert any(advice in line and "Use fewer workers" in line for line in errors), output
    else:
        assert sorted(job.exit_codes) == [-9, LOST], output
        (line,) = errors
        named = re.match(r"error: rank (\d) \(pid \d+ on .*\) was killed by SIGKILL", line)
        assert named is not None and job.exit_codes[int(named[1])] == -9, output
    finish(command("python", folder, "it", "run.steps=3", "evaluate.every_steps=0"), ranks=2)
    assert not list((folder / "cache").glob("*.partial-*"))
    return seconds
