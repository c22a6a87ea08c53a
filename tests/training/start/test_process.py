"""The start of a rank: caches without a home, and ranks of one job that find each other and never another's."""

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest

from config.cli import REPOSITORY
from config.errors import UserError
from training.start.process import use_writable_caches
from training.start.rendezvous import open_store

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


def test_a_rank_may_open_as_many_files_as_the_machine_lets_it() -> None:
    program = (
        "import resource, train\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, 4096))\n"
        "try:\n"
        "    train.main(['--config', 'none.yaml'])\n"
        "finally:\n"
        "    print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    ran = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout.split()) == (2, ["4096", "4096"]), ran.stderr


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


TIMEOUT = timedelta(seconds=20)


@pytest.fixture
def port(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A port at which something listens."""
    for name in ("LOCAL_SIZE", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE", "SLURM_JOB_ID", "MANTISSA_START"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with socket.create_server(("", 0)) as server:
        monkeypatch.setenv("MASTER_PORT", str(server.getsockname()[1]))
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    ("variables", "flag"),
    [
        ({"LOCAL_SIZE": "2"}, "give deepspeed --master_port "),
        ({}, "set MASTER_PORT="),
    ],
)
def test_a_port_in_use_is_one_line_with_the_launchers_flag(port, monkeypatch, variables, flag):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError) as caught:
        open_store(rank=0, world_size=2, timeout=TIMEOUT, job="ours")
    assert str(caught.value).startswith(f"environment: MASTER_PORT = {port} is in use on {socket.gethostname()}, by")
    assert flag in str(caught.value)


def test_a_single_process_takes_another_port(port):
    store = open_store(rank=0, world_size=1, timeout=TIMEOUT, job="ours")
    assert int(os.environ["MASTER_PORT"]) == store.port != port


def test_a_rank_does_not_join_the_store_of_another_job(monkeypatch, port):
    monkeypatch.setenv("MASTER_PORT", "0")
    theirs = open_store(rank=0, world_size=2, timeout=TIMEOUT, job="theirs")
    where = f"127.0.0.1:{theirs.port}"
    with pytest.raises(UserError, match=f"{where}, is another job, theirs, not this one, ours; set MASTER_PORT="):
        open_store(rank=1, world_size=2, timeout=TIMEOUT, job="ours")
    assert open_store(rank=1, world_size=2, timeout=TIMEOUT, job="theirs").get("mantissa/job") == b"theirs"


def test_deepspeed_is_imported_without_mlflow_which_can_be_imported_afterwards() -> None:
    program = "import sys; from training.start.process import import_deepspeed; import_deepspeed(); " + (
        "print('deepspeed' in sys.modules, 'mlflow' in sys.modules); import mlflow; print(mlflow.__version__ != '')"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=REPOSITORY, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-3:] == ["True", "False", "True"]
