"""Start Mantissa's own programs as real jobs: several processes under a launcher, output in a file, waited for.

Comparisons of runs are made of runs as users start them, not of something like them in this process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from config.child_jobs import LAUNCHER_VARIABLES, error_line
from config.cli import REPOSITORY
from config.errors import UserError

TRAIN = (str(REPOSITORY / "train.py"),)
"""The program of a training job."""

_MODULE_OPTION = {"deepspeed": "--module", "accelerate": "--module"}


def default_processes() -> int:
    """One process a GPU; two on a machine without."""
    import torch

    return torch.cuda.device_count() or 2


def launch(program: Sequence[str], *, processes: int, log: Path, launcher: Sequence[str] = ()) -> int:
    """Run `program` to its end and return the launcher's exit code, which may be 1 for every failure of the program.

    program: a script and its arguments, or ("-m", module, arguments ...). launcher: a command such as
    ("deepspeed", "--hostfile", "hosts"), which then says where and on how many processes; else torchrun, here.
    Standard output and error go to `log`. Raises UserError when the launcher does not exist.
    """
    command = [sys.executable, *program] if processes == 1 else _torchrun(program, processes)
    if launcher:
        module = _MODULE_OPTION.get(Path(launcher[0]).name, "-m")
        command = [*launcher, *([module, *program[1:]] if program[0] == "-m" else program)]
    programs = str(Path(sys.executable).parent)
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    environment["PATH"] = os.pathsep.join([programs, environment.get("PATH", "")])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(REPOSITORY), environment.get("PYTHONPATH")]))
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("w") as output:
        output.write(f"$ {' '.join(command)}\n")
        output.flush()
        try:
            job = subprocess.run(command, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False)
        except FileNotFoundError as error:
            raise UserError(f"--launch: there is no program {launcher[0]}; install it or give another") from error
    return job.returncode


def last_words(log: Path) -> str:
    """The line of a failed job's log that says why: our own error line, else the last that names one, else the last."""
    return error_line(log.read_text(errors="replace"))[:400]


def _torchrun(program: Sequence[str], processes: int) -> list[str]:
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        str(processes),
        *program,
    ]
