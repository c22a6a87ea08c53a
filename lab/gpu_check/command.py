"""Everything that has to be measured on a GPU, in six parts of under ten minutes each.

    python -m lab.gpu_check [--part N] [--items NAME,NAME] [--minutes 9.5] [--again] [--wheels DIR]
        [--out runs/gpu-check] [--processes 1] [--commit SHA] [--tiny]

Parts: 1 smoke, 2 numerics, 3 speed, 4 precision, 5 memory, 6 cost of trust; without --part all of them, in order. An
item that does not fit into the remaining minutes is not started; rerun the same command to continue, also after a kill.
The folder gets NUMBER-ITEM.json for every item, part-NUMBER.md and goals.md. --tiny rehearses every item with a model
of a few thousand parameters, on a CPU too, in the folder `tiny` of --out. See docs/gpu-check.md.

Exit code 0: every item is done, or skipped because the machine does not meet its requirements; 3: some failed or were
not run; 2: the check is not possible.
"""

import argparse
import dataclasses
import json
import os
import re
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from config.cli import Arguments, entry_point
from config.errors import UserError
from config.files import why_not_writable
from config.options import positive_int, positive_number
from lab.gpu_check.packages import provide
from tracking.file_lock import exclusive_lock

ALL_DONE, INCOMPLETE = 0, 3
PARTS = range(1, 7)
TF32_SWITCHES = ("NVIDIA_TF32_OVERRIDE", "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE")
"""Variables that enable TF32 regardless of torch's setting; NVIDIA's images set the second."""


def read_options(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line. Raises UserError."""
    parser = Arguments("python -m lab.gpu_check", __doc__)
    parser.add_argument("--part", type=int, choices=PARTS, help="one part (default: all, in turn)")
    parser.add_argument("--items", default="", help="only these items, comma-separated")
    parser.add_argument("--minutes", type=positive_number, default=9.5, help="time budget per part (9.5)")
    parser.add_argument("--again", action="store_true", help="repeat finished measurements")
    parser.add_argument("--wheels", type=Path, help="folder of wheels to install from, without a package registry")
    parser.add_argument("--out", type=Path, default=Path("runs/gpu-check"), help="folder of results and logs")
    parser.add_argument("--processes", type=positive_int, default=1, help="ranks per job (1)")
    parser.add_argument("--commit", type=commit_hash, help="commit of the code, if it was copied without .git")
    parser.add_argument("--tiny", action="store_true", help="rehearse with a tiny model")
    return parser.parse_args(arguments)


def commit_hash(text: str) -> str:
    """argparse type for a commit hash."""
    if not re.fullmatch(r"[0-9a-f]{7,64}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not 7 to 64 lower-case hexadecimal digits, as git prints them")
    return text


def name_commit(machine: dict[str, Any], given: str | None) -> list[str]:
    """Set a machine's `git` to the commit given by --commit; returns lines to print.

    It takes precedence over what git reports, which may be an unrelated repository around the copy.
    """
    found = (machine["git"] or {}).get("commit")
    if given is None:
        none = "git finds no commit here: results will not name the code's; give it with --commit SHA"
        return [] if found else [none]
    if found is not None and found.startswith(given):
        return []
    machine["git"] = {"commit": given, "dirty": None}
    return [f"git finds {found} here; results name {given}, as --commit says"] if found else []


def settle_environment() -> list[str]:
    """Set the environment that all jobs inherit; returns lines to print.

    TF32 is off. No item needs the Hugging Face hub, and without a network every request to it would time out.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    switched = [name for name in TF32_SWITCHES if os.environ.pop(name, None) is not None]
    return [f"{name} is not passed on: FP32 is measured without TF32" for name in switched]


def look_at_machine(folder: Path) -> dict[str, Any]:
    """Device, driver and versions, from a separate process. Raises UserError if training's imports fail."""
    from launch.job import error_line_of, launch

    path, log = folder / "machine.json", folder / "work" / "machine.log"
    try:
        code = launch(["-m", "lab.gpu_check.machine", str(path)], processes=1, log=log, seconds=240)
    except subprocess.TimeoutExpired as error:
        raise UserError(f"a job does not start here within {error.timeout:.0f} s; see {log}") from error
    if code:
        raise UserError(f"no job can start here: {error_line_of(log)}; see {log}")
    return json.loads(path.read_text(encoding="utf-8"))


@entry_point()
def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    started, options = time.monotonic(), read_options(arguments)
    out = options.out.expanduser().resolve()
    if why := why_not_writable(out):
        raise UserError(f"--out {options.out}: {why}; give another folder")
    for line in settle_environment():
        print(line, flush=True)
    for line in provide(options.wheels, out / ".packages"):
        print(line, flush=True)
    with exclusive_lock(out / ".lock", 0) as acquired:
        if not acquired:  # its jobs would be taken for leftovers, and ended
            raise UserError(f"--out {options.out}: another check runs there; wait for it or give another folder")
        return run_parts(options, out, started)


def run_parts(options: argparse.Namespace, out: Path, started: float) -> int:
    """Measure what is missing; returns the exit code. started: time.monotonic() at the command's start."""
    # imported late: their dependencies may just have been installed
    from config.files import write_atomically
    from lab.gpu_check import items
    from lab.gpu_check.page import all_goals, page
    from lab.gpu_check.run import DONE, SKIPPED, Check, end_leftovers, run_part

    parts = {number: items.PARTS[number] for number in ([options.part] if options.part else PARTS)}
    wanted = set(filter(None, options.items.split(",")))
    unknown = wanted - {item.name for part in parts.values() for item in part.items}
    if unknown:
        where = f"part {', '.join(map(str, parts))}; see lab/gpu_check/items.py"
        raise UserError(f"--items: there is no {', '.join(sorted(unknown))} in {where}")
    for line in end_leftovers(out / "work"):
        print(line, flush=True)
    machine = look_at_machine(out)
    for line in name_commit(machine, options.commit):
        print(line, flush=True)
    if options.tiny:  # its results must not replace those that took a GPU's minutes
        out = out / "tiny"
        out.mkdir(exist_ok=True)
    check = Check(out, options.processes, options.tiny, machine, options.again)
    complete = True
    for number, part in parts.items():
        few = tuple(item for item in part.items if not wanted or item.name in wanted)
        chosen = dataclasses.replace(part, items=few)
        target = out / f"part-{number}.md"
        not_run: dict[str, str] = {}
        # rewritten after every item, since this process may be killed without warning
        for line in run_part(check, number, chosen, not_run, ends=started + 60 * options.minutes):
            print(line, flush=True)
            write_atomically(target, page(check, number, part, not_run).encode())
            write_atomically(out / "goals.md", all_goals(check).encode())
        text = page(check, number, part, not_run)
        write_atomically(target, text.encode())
        print(f"\n{text}\ntable    {target}", flush=True)
        results = [check.result(number, item) for item in chosen.items]
        complete &= all(result is not None and result["status"] in (DONE, SKIPPED) for result in results)
        started = time.monotonic()
    return ALL_DONE if complete else INCOMPLETE
