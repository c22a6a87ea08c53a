"""A home that is missing, or may not be written: caches go elsewhere, and one line says where."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from config.cli import REPOSITORY
from training.start.process import use_writable_caches

NOBODY = 54_321
"""A user without an entry in /etc/passwd, as containers have them."""


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every user may write."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    yield folder
    shutil.rmtree(folder)


def ask(place: Path, *, user: int | None = None, **variables: str) -> list[str]:
    """The answer of a process of that user: the line about caches, and where they are; or the error."""
    if user is not None and os.getuid() != 0:
        pytest.skip("only root can start a process of another user")
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.environ.clear()
        os.environ.update(TMPDIR=str(place), **variables)
        tempfile.tempdir = None
        if user is not None:
            os.setuid(user)
        try:
            line = use_writable_caches()
            text = f"{line}\n{os.environ.get('TORCH_EXTENSIONS_DIR')} {os.environ.get('HOME')}"
        except BaseException as error:
            text = str(error)
        os.write(writing, text.encode())
        os._exit(0)
    os.close(writing)
    os.waitpid(child, 0)
    with os.fdopen(reading) as answer:
        return answer.read().splitlines()


def test_a_home_that_cannot_be_written_keeps_its_credentials_and_loses_its_caches(place: Path) -> None:
    home = place / "home"
    home.mkdir(mode=0o755)
    line, paths = ask(place, user=NOBODY, HOME=str(home))
    cache = f"{place}/mantissa-{NOBODY}"
    assert line == f"[Errno 13] Permission denied: '{home}/.cache': libraries keep their caches in {cache}"
    assert paths == f"{cache}/torch_extensions {home}"


def test_a_user_without_a_home_gets_one(place: Path) -> None:
    line, paths = ask(place, user=NOBODY)
    cache = f"{place}/mantissa-{NOBODY}"
    assert line == f"HOME is not set: libraries keep their caches in {cache}"
    assert paths == f"{cache}/torch_extensions {cache}"


def test_a_folder_that_somebody_else_made_is_not_used(place: Path) -> None:
    (place / f"mantissa-{NOBODY}").mkdir()
    answer = ask(place, user=NOBODY, HOME="/nonexistent")
    assert answer[-1].endswith("is not a folder of this user's; set HOME or TMPDIR to a folder of yours")


def test_leaving_joins_threads_and_runs_exit_functions_but_tears_nothing_down() -> None:
    """At teardown a thread of gloo that drops a tensor ends the process with SIGABRT."""
    script = """
import atexit, threading, time
from training.start.process import leave

class Torn:
    def __del__(self):
        print("torn down", flush=True)

kept = Torn()
atexit.register(print, "exit function", end="")
threading.Thread(target=lambda: (time.sleep(0.1), print("thread, ", end=""))).start()
leave(5)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=REPOSITORY)
    assert (done.returncode, done.stdout) == (5, "thread, exit function"), done.stderr
