"""Start real training jobs through real launchers, on a small corpus, and read what they left behind."""

import os
import pty
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from config.cli import REPOSITORY
from config.launcher import deepspeed_program
from config.machine.processes import free_port, stat_fields
from tests.support.jobs.forked import Job
from tracking.compare.surviving import read_events

BIN = Path(sys.executable).parent

SMALL = [
    *("data.source=text", f"data.path={REPOSITORY}/data", "data.tokenizer=bytes", "data.sequence_length=32"),
    "data.validation_fraction=0.2",
    "model.config={hidden_size: 32, intermediate_size: 48, num_hidden_layers: 2, num_attention_heads: 2}",
]
"""A model of a few thousand parameters on Mantissa's own source."""
EXACT = ("step", "loss", "grad_norm", "lr", "sample_ids_sha256", "tokens", "applied")
"""Fields of a step event that do not depend on the machine's speed."""

LAUNCHERS = {
    "deepspeed": [*deepspeed_program(), "--num_gpus", "2", "--master_port", "{port}"],
    "torchrun": ["torchrun", "--nproc_per_node", "2", "--master_port", "{port}"],
    "accelerate": ["python", "-m", "accelerate.commands.launch"]
    + ["--config_file", "launch/accelerate/one_machine_cpu_zero2.yaml"]
    + ["--main_process_port", "{port}"],
    "python": ["python"],
}


def command(launcher: str, folder: Path, name: str, *overrides: str) -> list[str]:
    """The command line of a small job: six FP32 ZeRO-2 steps on Mantissa's own source, none of which checks itself."""
    port = str(free_port())
    return [
        *(part.format(port=port) for part in LAUNCHERS[launcher]),
        str(REPOSITORY / "train.py"),
        "--config",
        str(REPOSITORY / "config/recipes/demo.yaml"),
        *(f"run.dir={folder}/runs", f"run.name={name}", "run.steps=6", "run.resume=auto", "schedule.warmup_steps=2"),
        *SMALL,
        *(f"data.cache_dir={folder}/cache", "deepspeed.config=ds_configs/zero2_fp32.json", "precision.compute=fp32"),
        *("batch.global_size=8", "batch.micro_size=2", "evaluate.every_steps=6", "checkpoint.every_steps=2"),
        *("tracking.wandb=disabled", "tracking.log_every_steps=1", "generate.tokens=8"),
        "guard.self_check_every=0",  # at the first step of every job 0.15 s of CPU time
        *overrides,
    ]


def start(arguments: Sequence[str], *, ranks: int = 1) -> subprocess.Popen[str] | Job:
    """The job in a process group of its own, so that a test can kill all of it.

    What `python` starts is forked from a server that has imported everything, as one rank or several without a
    launcher.
    """
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    environment |= {"PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    if arguments[0] == "python":
        return Job(arguments, environment, ranks)
    return subprocess.Popen(
        arguments,
        env=environment,
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def with_defect(defect: str, arguments: Sequence[str]) -> list[str]:
    """A job that `python` starts, with a defect as `permanent` takes it in its engine; without one, the job."""
    return [arguments[0], "-m", "lab.detection.planted", defect, *arguments[1:]] if defect else [*arguments]


def finish(arguments: Sequence[str], *, exit_code: int = 0, seconds: float = 240.0, **how: Any) -> str:
    """Run a job to its end and check its exit code; what it printed. how: as in `start`."""
    return output_of(start(arguments, **how), exit_code=exit_code, seconds=seconds)


def output_of(process: subprocess.Popen[str] | Job, *, exit_code: int = 0, seconds: float = 30.0) -> str:
    """The output of a started job, which ends when nobody holds it any more; checks the exit code."""
    output, _ = process.communicate(timeout=seconds)
    assert process.returncode == exit_code, output
    return output


def on_a_terminal(arguments: Sequence[str], **how: Any) -> tuple[int, str]:
    """A program's exit code and what it prints on a real pseudo-terminal. how: as in `subprocess.Popen`."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(arguments, **dict.fromkeys(("stdin", "stdout", "stderr"), theirs) | how)
    os.close(theirs)
    output = b""
    with suppress(OSError):  # Linux reports the end of a pseudo-terminal this way
        while read := os.read(ours, 65536):
            output += read
    os.close(ours)
    return process.wait(60), output.decode(errors="replace")


def wait_until(condition: Callable[[], Any], *, seconds: float = 30.0, why: Callable[[], object] = lambda: "") -> Any:
    """The value of the condition once it holds; fails with what `why` says when it does not within `seconds`."""
    ends = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < ends, why()
        time.sleep(0.02)
    return found


def replay(folder: Path, name: str, step: int, *, exit_code: int = 0, ranks: int = 1) -> str:
    """`python -m tools.replay` of a job's step; what it printed. ranks: already started, as by a launcher."""
    run = str(folder / "runs" / name)
    return finish(["python", "-m", "tools.replay", run, "--step", str(step)], exit_code=exit_code, ranks=ranks)


def events(folder: Path, name: str, kind: str) -> list[dict]:
    """The events of one kind in a job's run folder."""
    return [event for event in read_events(folder / "runs" / name / "events.jsonl") if event["event"] == kind]


def trace(folder: Path, name: str) -> list[dict[str, Any]]:
    """Every attempt at a step of a job, without times and memory."""
    return [{key: event[key] for key in EXACT} for event in events(folder, name, "step")]


def last_attempts(folder: Path, name: str) -> list[dict[str, Any]]:
    """The last attempt at each step of a job."""
    latest = {attempt["step"]: attempt for attempt in trace(folder, name)}
    return [latest[step] for step in sorted(latest)]


def children(pid: int) -> list[int]:
    """The processes that this one has started, by any of its threads."""
    return [int(word) for path in Path(f"/proc/{pid}/task").glob("*/children") for word in path.read_text().split()]


def runs(pid: int) -> bool:
    """Whether there is such a process that has not ended."""
    return stat_fields(pid)[:1] not in ([], ["Z"], ["X"])
