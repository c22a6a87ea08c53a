"""Shared by all tests: real gloo process groups, each started once a session; with --no-processes, none of them."""

import functools
import gc
import multiprocessing.util
import os
import pty
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import hypothesis
import pytest
from filelock import FileLock

from config.machine import op_builds
from tests.support.jobs.launches import command, finish, trace
from tests.support.jobs.process_group import ProcessGroup

STARTS = (
    (subprocess.Popen, "_execute_child"),
    (multiprocessing.util, "spawnv_passfds"),
    (os, "fork"),
    (os, "forkpty"),
    (pty, "fork"),
)
"""Functions through which every new process starts."""

hypothesis.settings.register_profile("untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("untimed")  # a busy machine fails no test

_STARTS_JOBS = re.compile(r"launches|strange|subprocess")


@pytest.fixture(autouse=True)
def _hub_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever one test finds out about the hub is forgotten before the next one."""
    if "HF_HUB_OFFLINE" in os.environ:
        monkeypatch.setenv("HF_HUB_OFFLINE", os.environ["HF_HUB_OFFLINE"])
    else:
        monkeypatch.setenv("HF_HUB_OFFLINE", "")
        monkeypatch.delenv("HF_HUB_OFFLINE")
    if client := sys.modules.get("huggingface_hub.constants"):
        monkeypatch.setattr(client, "HF_HUB_OFFLINE", client.HF_HUB_OFFLINE)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--no-processes", action="store_true", help="skip each test as soon as it would start a process")


def pytest_sessionstart() -> None:
    """A session that was killed in a build would stall those tests that start DeepSpeed without Mantissa.

    They use the ops that Mantissa has built.
    """
    op_builds.use_own_folder()
    op_builds.clear_abandoned("*", functools.partial(print, flush=True))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what `one_in` leaves out, and sort the files.

    Files that start jobs first, then those that use the process groups, then the rest.

    Files are handed out one by one: a long one at the end would leave the other worker without work.
    """
    seen: Counter[tuple[Path, str]] = Counter()
    for item in items:
        mark = item.get_closest_marker("one_in")
        if mark is not None and isinstance(item, pytest.Function):
            case = item.path, item.originalname
            if seen[case] % mark.args[0]:
                item.add_marker("slow")
            seen[case] += 1
    packed = [item.nodeid for item in items if r"\x1f\x8b" in item.nodeid]
    if packed:  # gzip's output holds the time of packing, and all workers of a session have to collect the same names
        raise pytest.UsageError(f"give these cases ids, they are named by packed bytes: {', '.join(packed)}")
    users = {item.path for item in items if {"pair", "solo", "four"} & set(getattr(item, "fixturenames", ()))}
    starters = {path for path in {item.path for item in items} if _STARTS_JOBS.search(path.read_text(encoding="utf-8"))}
    items.sort(key=lambda item: 0 if item.path in starters else 1 if item.path in users else 2)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Imports and collected tests stay: collecting garbage need not look at them, now or later."""
    gc.disable()
    found = yield
    gc.collect()
    gc.freeze()
    gc.enable()
    return found


@pytest.fixture(scope="session", autouse=True)
def _no_processes(request: pytest.FixtureRequest) -> None:
    def skip(*arguments: Any, **options: Any) -> NoReturn:
        pytest.skip("starts a process")

    for owner, name in STARTS if request.config.getoption("--no-processes") else ():
        setattr(owner, name, skip)


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, worker_id: str) -> Path:
    """The folder of the run `it`, six FP32 ZeRO-2 steps of two ranks that nothing disturbed, to be read only.

    It is made once for all workers of the session; the file `output` has what it printed.
    """
    own = tmp_path_factory.getbasetemp()
    folder = (own if worker_id == "master" else own.parent) / "finished"
    with FileLock(f"{folder}.lock"):
        if not (folder / "output").exists():
            output = finish(command("python", folder, "it", "guard.self_check_every=500"), ranks=2)
            (folder / "output").write_text(output, encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def unbroken(finished: Path) -> list[dict[str, Any]]:
    """The steps of that run."""
    return trace(finished, "it")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all jobs of a file: the corpus is prepared once."""
    return tmp_path_factory.mktemp("jobs")


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """A function of a command and its arguments, which it must not take: the one line that it says.

    quiet: nothing else may be printed before.
    """

    def refused(main: Callable[..., Any], arguments: list[str], *, quiet: bool = False) -> str:
        try:
            code = main(arguments)
        except SystemExit as ended:
            code = ended.code
        printed, said = capsys.readouterr()
        assert code == 2 and said.startswith("error: ") and said.count("\n") == 1, said
        assert not (quiet and printed), printed
        return said

    return refused


def _processes(world_size: int) -> Any:
    """Real processes joined by gloo; `pair.run(function, **arguments)` gives both ranks' results."""

    @pytest.fixture(scope="session")
    def group() -> Iterator[ProcessGroup]:
        with ProcessGroup(world_size) as started:
            yield started

    return group


solo, pair, four = map(_processes, (1, 2, 4))
