"""Set-up of train.py's own process before anything heavy is imported: its end, its output and its caches."""

import atexit
import importlib
import io
import os
import resource
import select
import signal
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from config.errors import UserError, one_line
from config.files import temporary_folder, why_not_writable
from config.machine.processes import Launcher

_IN_CACHE = {
    "XDG_CACHE_HOME": "",
    "TORCH_EXTENSIONS_DIR": "torch_extensions",
    "TRITON_CACHE_DIR": "triton",
    "MPLCONFIGDIR": "matplotlib",
    "HF_HUB_CACHE": "huggingface/hub",
}
"""Maps variables to folders inside the cache. None of them moves where a library looks for credentials in the home."""

_MOST_FILES = 1 << 20
"""Enough for any job, and few enough for programs that walk through all numbers up to the limit."""


def end_with(above: Sequence[Launcher]) -> None:
    """Send this process SIGTERM, on which all ranks save, once a launcher has ended: nothing else would end them."""
    poller, watched = select.poll(), {}
    for launcher in above:
        with suppress(OSError):  # a kernel before 5.3, or it has ended already
            handle = os.pidfd_open(launcher.pid)
            watched[handle] = launcher
            poller.register(handle, select.POLLIN)

    def wait() -> None:
        for handle, _ in poller.poll():
            gone = watched[handle]
            text = f"mantissa: {gone.name} (pid {gone.pid}), which started this job, has ended: the run stops"
            with suppress(OSError):
                if os.environ.get("LOCAL_RANK", "0") == "0":
                    print(text, file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGTERM)
            return

    if watched:
        threading.Thread(target=wait, daemon=True).start()


def open_more_files() -> None:
    """Raise this process's limit of open files as far as it may: gloo connects every rank to every other."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError):  # the kernel grants fewer by now
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(now, min(most, _MOST_FILES)), most))


def use_writable_caches() -> str | None:
    """Set unset variables of `_IN_CACHE`, and HOME if there is none; returns a line on it or None. Raises UserError."""
    try:
        home = Path.home()
    except RuntimeError:  # no HOME, and a user without an entry in /etc/passwd
        home = Path("~")
    problem = why_not_writable(home / ".cache")
    if not problem:
        return None
    try:
        folder = temporary_folder()
    except OSError as error:
        raise UserError(f"HOME: {problem}, and {one_line(error)}; set HOME or TMPDIR to a folder of yours") from error
    for name, inside in _IN_CACHE.items():
        os.environ.setdefault(name, str(folder / inside))
    if home == Path("~"):
        os.environ["HOME"] = str(folder)
    return f"{problem}: libraries keep their caches in {folder}"


def import_deepspeed() -> None:
    """Import DeepSpeed without MLflow, which its autotuner would import wherever it is installed: a second."""
    modules: dict[str, Any] = sys.modules
    absent = "mlflow" not in modules
    if absent:
        modules["mlflow"] = None  # so that importing it fails
    try:
        importlib.import_module("deepspeed")
    finally:
        if absent:
            del modules["mlflow"]


def outlive_full_disk() -> None:
    """Drop output of this process that cannot be written from now on, so that no print raises OSError."""
    sys.stdout, sys.stderr = _lossy(sys.stdout), _lossy(sys.stderr)


def leave(code: int) -> NoReturn:
    """End this process after its exit functions, without tearing the interpreter down: a thread of gloo, which lives as
    long as anything refers to its group, would end it with SIGABRT (pytorch#190489)."""
    threading._shutdown()  # type: ignore[attr-defined]  # joins threads, as the interpreter would
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _lossy(stream: Any) -> Any:
    try:
        stream.flush()
        file = _LossyFile(stream.fileno(), "w", closefd=False)
    except (AttributeError, OSError, ValueError):  # not a file of the operating system
        return stream
    return io.TextIOWrapper(
        io.BufferedWriter(file), encoding=stream.encoding, errors=stream.errors, line_buffering=True
    )


class _LossyFile(io.FileIO):
    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return memoryview(data).nbytes
