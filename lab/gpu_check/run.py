"""Run the items of a part within a time budget, one result file per item, resumable.

Untimed items run concurrently; a timed one has the machine to itself. Each result is written as its item ends, so if
this process is killed only the running items are lost. Finished items are not repeated; failed ones are retried after
those never tried. An item whose requirements this machine does not meet is skipped, with the reason.
"""

import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from config.errors import one_line
from config.json_text import object_in
from config.printable import shown
from lab.benchmark.harness import write_json
from lab.gpu_check.bench import Bench, ItemFailed, newest_log
from lab.gpu_check.items import Item, Part
from launch.job import error_line_of

DONE, FAILED, TIMED_OUT, SKIPPED = "done", "failed", "took too long", "skipped"
MOST_BYTES = 2**20
"""Larger files (weights, checkpoints, prepared batches) except logs are deleted when their item ends, so that large
models leave room on the disk and the folder can be copied."""
MARK = "MANTISSA_GPU_CHECK"
"""Environment variable that marks a check's jobs; its value is the work folder."""
TOGETHER = 3
"""Maximum number of concurrent untimed items, which spend most of their time starting up and leave the GPU idle."""
PATIENCE, GRACE = 3.0, 60.0
"""An item is killed after PATIENCE times its expected duration plus GRACE seconds."""


@dataclass(frozen=True)
class Check:
    """Settings shared by all items of a call."""

    out: Path
    processes: int
    tiny: bool
    machine: Mapping[str, Any]
    again: bool = False
    """Repeat finished items."""
    stopped: threading.Event = field(default_factory=threading.Event, compare=False)
    """Set on interruption; items that end afterwards write no result."""

    @property
    def conditions(self) -> dict[str, Any]:
        """Conditions under which an earlier result is still valid: pages name them once, for all figures."""
        named = ("device", "driver", "cuda", "versions", "git")
        return {name: self.machine[name] for name in named} | {"processes": self.processes, "tiny": self.tiny}

    def path(self, part: int, item: Item) -> Path:
        """Path of an item's result file."""
        return self.out / f"{part}-{item.name}.json"

    def result(self, part: int, item: Item) -> dict[str, Any] | None:
        """Result of an earlier call under the same conditions, if any."""
        found = object_in(self.path(part, item))
        same = all(found.get(name) == value for name, value in self.conditions.items())
        return found if same else None

    def lacks(self, item: Item) -> str | None:
        """Why this machine cannot run the item; None if it can."""
        return self.machine.get("lacks", {}).get(item.needs)


def run_part(check: Check, number: int, part: Part, not_run: dict[str, str], *, ends: float) -> Iterator[str]:
    """Run pending items until `ends` (time.monotonic()); yields progress lines.

    not_run: filled with the reason for each item that was not started.
    """
    running: dict[Future[dict[str, Any]], Item] = {}
    with ThreadPoolExecutor(TOGETHER) as pool:
        try:
            for item in _order(check, number, part):
                reason = check.lacks(item)
                if reason is not None:
                    _write(check, number, item, SKIPPED, reason)
                    yield f"skipped: {item.name}, {reason}"
                    continue
                alone = item.timed or any(other.timed for other in running.values())
                yield from _ended(running, fewer_than=1 if alone else TOGETHER)
                left = ends - time.monotonic()
                if item.seconds > left:
                    not_run[item.name] = f"takes about {item.seconds:.0f} s, and {max(0.0, left):.0f} s were left"
                    yield f"not run: {item.name}, {not_run[item.name]}"
                    continue
                yield f"{item.name}: {item.what}; about {item.seconds:.0f} s"
                patience = left if check.tiny else PATIENCE * item.seconds + GRACE  # a CPU may be slow
                running[pool.submit(measure, check, number, item, limit=min(left, patience))] = item
            yield from _ended(running, fewer_than=1)
        except BaseException:
            check.stopped.set()
            while not all(job.done() for job in running):  # an item ends once its jobs are gone
                _kill(psutil.Process().children(recursive=True))
                time.sleep(0.05)
            raise


def _ended(running: MutableMapping[Future[dict[str, Any]], Item], *, fewer_than: int) -> Iterator[str]:
    """Wait until fewer than this many items are running; yields a line per finished item."""
    while len(running) >= fewer_than:
        for job in wait(running, return_when=FIRST_COMPLETED).done:
            name, result = running.pop(job).name, job.result()
            why = f": {result['error']}" if result["error"] else ""
            yield f"{name} {result['status']}, {result['seconds']:.0f} s{why}"


def end_leftovers(work: Path) -> list[str]:
    """Kill processes left behind by an earlier check of this folder that was itself killed; returns lines to print.

    Also sets MARK for every process started from now on. work: folder of all items.
    """
    this, found = psutil.Process(), []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process != this and process.environ().get(MARK) == str(work):
                found.append(process)
    _kill(found)
    os.environ[MARK] = str(work)
    return [f"ended {len(found)} processes that a killed check left in {work}"] if found else []


def _kill(processes: Sequence[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, timeout=10)


def _order(check: Check, number: int, part: Part) -> list[Item]:
    """Items to run: those without a result in listed order, then failed ones."""
    if check.again:
        return list(part.items)
    found = {item.name: check.result(number, item) for item in part.items}
    status = {item.name: (found[item.name] or {}).get("status") for item in part.items}
    new = [item for item in part.items if status[item.name] in (None, SKIPPED)]
    failed = [item for item in part.items if status[item.name] in (FAILED, TIMED_OUT)]
    return [*new, *failed]


def measure(check: Check, number: int, item: Item, *, limit: float) -> dict[str, Any]:
    """Run one item for at most `limit` seconds and write its result.

    Any failure is a result too: the last line of the error, the log and partial figures. Raises InterruptedError if the
    check was stopped.
    """
    folder = check.out / "work" / f"{number}-{item.name}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    name, memory = str(check.machine["device"]), check.machine.get("device_bytes")
    shared = (check.out / "cache", check.processes, check.tiny)
    bench = Bench(folder, *shared, limit, device=name, device_bytes=memory)
    started, status, error, log, figures = time.monotonic(), DONE, "", None, {}
    try:
        figures = item.measure(bench)
    except subprocess.TimeoutExpired:
        status, log = TIMED_OUT, newest_log(folder)
        error = f"killed after {limit:.0f} s" + (f"; {error_line_of(log)}" if log else "")
    except ItemFailed as failure:
        status, error, log = FAILED, str(failure), failure.log or newest_log(folder)
    except Exception as failure:  # whatever it is, later items are still worth running
        status, error, log = FAILED, one_line(failure), newest_log(folder)
    if check.stopped.is_set():
        raise InterruptedError(item.name)
    figures = figures or bench.found
    result = _write(
        *(check, number, item, status, error),
        log=str(log) if log else None,
        seconds=time.monotonic() - started,
        figures=figures if item.timed else {name: each for name, each in figures.items() if name != "tokens/s"},
        commands=bench.commands,
    )
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink() and path.suffix != ".log" and path.stat().st_size > MOST_BYTES:
            path.unlink()
    return result


def _write(check: Check, number: int, item: Item, status: str, error: str, **measured: Any) -> dict[str, Any]:
    """Write an item's result and return it."""
    result = {
        "part": number,
        "item": item.name,
        "what": item.what,
        "status": status,
        "error": shown(error),
        **({"log": None, "seconds": 0.0, "figures": {}, "commands": []} | measured),
        "expected_seconds": item.seconds,
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        **check.conditions,
        "machine": check.machine,
    }
    write_json(check.path(number, item), result)
    return result
