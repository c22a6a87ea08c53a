"""What starting train.py as a job of its own takes, for launch/ and training/ alike."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from config.cli import REPOSITORY

_MODULES = {
    ("deepspeed",): "deepspeed.launcher.runner",
    ("torchrun",): "torch.distributed.run",
    ("accelerate", "launch"): "accelerate.commands.launch",
}

_MODULE_OPTION = {"deepspeed": "--module", "accelerate": "--module"}

LAUNCHER_VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
"""What a launcher tells its processes; a job started from inside another one must not inherit it."""


def with_project(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment of a process that finds Mantissa's modules from any folder."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY), environment.get("PYTHONPATH")]))
    return {**environment, "PYTHONPATH": path}


def by_interpreter(command: Sequence[str], path: str | None = None) -> list[str]:
    """A command line whose launcher, where it is this environment's, is started by this interpreter.

    pip writes the program `deepspeed` so that it cannot start where the environment's path has a space in it.
    path: the command's PATH, if it is not this process's.
    """
    for words, module in _MODULES.items():
        if tuple(command[: len(words)]) == words:
            found = shutil.which(words[0], path=path)
            if found is None or Path(found).parent == Path(sys.executable).parent:
                return [sys.executable, "-m", module, *command[len(words) :]]
    return list(command)


def job_command(program: Sequence[str], *, processes: int, launcher: Sequence[str] = ()) -> list[str]:
    """The command line that starts a program on several processes.

    program: a script and its arguments, or ("-m", module, arguments ...). launcher: a command such as
    ("deepspeed", "--hostfile", "hosts"), which then says where and on how many processes; else torchrun, here.
    """
    if launcher:
        module = _MODULE_OPTION.get(Path(launcher[0]).name, "-m")
        return [*launcher, *([module, *program[1:]] if program[0] == "-m" else program)]
    if processes == 1:
        return [sys.executable, *program]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    return [sys.executable, *launch, *program]


def deepspeed_program() -> list[str]:
    """The words that start the deepspeed launcher in a shell, whatever the environment's path."""
    starts = " " not in sys.executable
    return ["deepspeed"] if starts else [sys.executable, "-m", _MODULES["deepspeed",]]


def free_port() -> int:
    """A port of this machine that nothing listened on a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def describe_exit(code: int) -> str:
    """An exit code in words, as in "was killed by SIGKILL"; negative for a signal, as in subprocess."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def error_line(output: str) -> str:
    """Why a job failed: the last `error:` line of its output, else the last that names an Error, else the last."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    ours = [line for line in lines if line.startswith("error:")]
    # torchrun's own error comes last and says nothing
    raised = [line for line in lines if "Error:" in line and "ChildFailedError" not in line]
    return (ours or raised or lines or ["it printed nothing"])[-1]
