"""Budget, resumption, failures, table and goals of the GPU check, on items that are functions or short programs."""

import dataclasses
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from lab.gpu_check import command
from lab.gpu_check.bench import Bench, ItemFailed
from lab.gpu_check.command import TF32_SWITCHES, main, settle_environment
from lab.gpu_check.goals import GOALS, HOLDS, MISSED, goals_table
from lab.gpu_check.items import PARTS, Item, Part
from lab.gpu_check.page import page
from lab.gpu_check.run import MARK, TOGETHER, Check, end_leftovers, measure, run_part
from launch.job import kill, launch, start
from tests.support.jobs.launches import runs, wait_until
from tracking.file_lock import exclusive_lock

MACHINE = {
    "device": "a device",
    "driver": "1.2",
    "cuda": "13.0",
    "versions": {"torch": "2.13.0", "deepspeed": None},
    "git": {"commit": "0123456789abcdef", "dirty": False},
}


def check_in(folder: Path, **changes: Any) -> Check:
    return Check(**{"out": folder, "processes": 1, "tiny": True, "machine": MACHINE, **changes})


def item(
    name: str, run: Callable[[Bench], dict[str, Any]], *, seconds: float = 1.0, against: str | None = None
) -> Item:
    return Item(name, f"what {name} is", seconds, run, against)


def ran(check: Check, part: Part, *, seconds: float = 100.0) -> tuple[list[str], dict[str, str]]:
    """The items that were started, in order, and the reasons of those that were not."""
    started: list[str] = []

    def watched(each: Item) -> Item:
        def run(bench: Bench) -> dict[str, Any]:
            started.append(each.name)
            return each.measure(bench)

        return dataclasses.replace(each, measure=run)

    not_run: dict[str, str] = {}
    watched_part = Part(part.title, tuple(map(watched, part.items)))
    list(run_part(check, 7, watched_part, not_run, ends=time.monotonic() + seconds))
    return started, not_run


def fails(bench: Bench) -> dict[str, Any]:
    """An item whose job ends with a UserError."""
    bench.tool("config.version_that_is_not_there")
    raise AssertionError


def test_a_result_is_kept_with_its_conditions_and_not_measured_again(tmp_path) -> None:
    part = Part("a part", (item("one", lambda _: {"tokens/s": 12345.6}), item("two", lambda _: {"fine": True})))
    check = check_in(tmp_path)
    assert ran(check, part) == (["one", "two"], {})
    found = json.loads((tmp_path / "7-one.json").read_text())
    assert found["figures"] == {"tokens/s": 12345.6} and found["status"] == "done"
    assert found["machine"] == MACHINE and found["device"] == "a device" and found["seconds"] >= 0
    (tmp_path / "7-two.json").write_text('{"half')
    assert ran(check, part) == (["two"], {})
    assert ran(check_in(tmp_path, again=True), part) == (["one", "two"], {})
    changed = ({"device": "another"}, {"git": {"commit": "f" * 16, "dirty": False}}, {"versions": {"torch": "2.12.0"}})
    for other in ({"tiny": False}, {"processes": 2}, *({"machine": MACHINE | each} for each in changed)):
        assert check_in(tmp_path, **other).result(7, part.items[0]) is None
        assert "| `one` | what one is | not run |" in page(check_in(tmp_path, **other), 7, part, {})


def works(bench: Bench) -> dict[str, Any]:
    """Done at once."""
    return {"fine": True}


@pytest.fixture
def one_item(monkeypatch) -> None:
    """The command, with an item of part 1 that is done at once, on a machine that is described beforehand."""
    monkeypatch.setenv(MARK, "")  # restored afterwards
    monkeypatch.setattr(command, "settle_environment", list)
    monkeypatch.setattr(command, "provide", lambda wheels, target: [])
    monkeypatch.setattr(command, "look_at_machine", lambda folder: MACHINE)
    small = item("one", lambda bench: {"tokens/s": 1.0 if bench.tiny else 2.0})
    monkeypatch.setitem(PARTS, 1, Part("a part", (small,)))


def test_a_rehearsal_leaves_what_was_measured(one_item, tmp_path) -> None:
    assert main(["--part=1", f"--out={tmp_path}"]) == 0
    written = {path: path.read_bytes() for path in tmp_path.iterdir() if path.suffix in (".json", ".md")}
    assert {path.name for path in written} == {"1-one.json", "part-1.md", "goals.md"}
    assert main(["--part=1", f"--out={tmp_path}", "--tiny"]) == 0
    assert {path: path.read_bytes() for path in written} == written
    assert json.loads((tmp_path / "tiny/1-one.json").read_text())["figures"] == {"tokens/s": 1.0}


def test_two_checks_of_one_folder_are_kept_apart(one_item, refusal, tmp_path) -> None:
    with exclusive_lock(tmp_path / ".lock", 0):
        assert "another check runs there" in refusal(main, ["--part=1", f"--out={tmp_path}"])
    assert not (tmp_path / "1-one.json").exists()


def test_a_folder_that_cannot_be_written_is_refused(refusal, tmp_path) -> None:
    (tmp_path / "file").touch()
    said = refusal(main, ["--out", str(tmp_path / "file/out")])
    assert said.startswith(f"error: --out {tmp_path}/file/out: ") and "give another folder" in said


def test_what_does_not_fit_is_not_started_and_what_is_smaller_is(tmp_path) -> None:
    part = Part("a part", (item("long", works, seconds=60), item("short", works)))
    check = check_in(tmp_path)
    started, not_run = ran(check, part, seconds=30)
    assert started == ["short"] and not_run["long"].startswith("takes about 60 s, and ")
    table = page(check, 7, part, not_run)
    assert "1 of 2 items done" in table and "| `long` | what long is | not run |  | takes about 60 s, and " in table


def test_a_failure_is_a_row_and_tried_again_after_what_was_never_tried(tmp_path) -> None:
    worked: list[int] = []

    def unlucky(bench: Bench) -> dict[str, Any]:
        if not worked:
            raise ValueError("the first\nline and the second")
        return {"fine": True}

    part = Part("a part", (item("program", fails), item("unlucky", unlucky), item("good", works)))
    check = check_in(tmp_path)
    assert ran(check, part) == (["program", "unlucky", "good"], {})
    result = check.result(7, part.items[0])
    assert result["status"] == "failed" and "No module named config.version_that_is_not_there" in result["error"]
    assert "No module named" in Path(result["log"]).read_text() and result["commands"][0].startswith(
        "python -m config."
    )
    table = page(check, 7, part, {})
    assert "| failed |" in table and "the first line and the second" in table and result["log"] in table
    (tmp_path / "7-good.json").unlink()
    worked.append(1)
    assert ran(check, part) == (["good", "program", "unlucky"], {})
    assert check.result(7, part.items[1])["status"] == "done"


def test_a_job_over_its_time_is_killed_with_all_that_it_started(tmp_path) -> None:
    program = tmp_path / "sleeps.py"
    program.write_text(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'], start_new_session=True)\n"
        "print('error: child', child.pid, flush=True)\ntime.sleep(600)\n"
    )

    def hangs(bench: Bench) -> dict[str, Any]:
        launch([str(program)], processes=1, log=bench.folder / "logs/hangs.log", seconds=bench.left)
        return {}

    result = measure(check_in(tmp_path), 7, item("hangs", hangs), limit=3.0)
    assert result["status"] == "took too long" and 3 <= result["seconds"] < 30
    said, _, pid = result["error"].rpartition(" ")
    assert said == "killed after 3 s; error: child"
    wait_until(lambda: not runs(int(pid)))


def test_what_this_machine_lacks_is_skipped_and_measured_once_it_is_there(tmp_path) -> None:
    part = Part("a part", (Item("liger", "Liger's", 1.0, works, None, "liger"), item("one", works)))
    lacking = check_in(tmp_path, machine=MACHINE | {"lacks": {"liger": "liger-kernel is not installed"}})
    assert ran(lacking, part) == (["one"], {})
    assert lacking.result(7, part.items[0])["status"] == "skipped"
    assert "1 of 2 items done, 1 skipped" in page(lacking, 7, part, {})
    assert "| skipped | 0 | liger-kernel is not installed |" in page(lacking, 7, part, {})
    assert ran(check_in(tmp_path), part) == (["liger"], {})


def test_what_was_measured_before_a_failure_or_the_end_of_the_time_is_kept(tmp_path) -> None:
    def that_ends(name: str, written: str, error: Exception) -> Item:
        def ends(bench: Bench) -> dict[str, Any]:
            with bench.keeping(lambda: {"mantissa": json.loads((bench.folder / "rows.json").read_text())}):
                if written:
                    (bench.folder / "rows.json").write_text(written)
                raise error

        return item(name, ends)

    late = that_ends("late", '{"tokens/s": 5.0}', ItemFailed("the trainer has no memory"))
    long = that_ends("long", '{"tokens/s": 6.0}', subprocess.TimeoutExpired("a job", 1.0))
    part = Part("a part", (late, long, that_ends("soon", "", ItemFailed("there is no data"))))
    check = check_in(tmp_path)
    ran(check, part)
    found = [check.result(7, each) for each in part.items]
    assert [each["status"] for each in found] == ["failed", "took too long", "failed"]
    assert [each["figures"] for each in found] == [{"mantissa": {"tokens/s": 5.0}}, {"mantissa": {"tokens/s": 6.0}}, {}]
    table = page(check, 7, part, {})
    assert "tokens/s 5" in table and "the trainer has no memory" in table


def test_jobs_neither_use_tf32_nor_ask_the_hub(monkeypatch) -> None:
    for name in TF32_SWITCHES:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "")
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert [line.split()[0] for line in settle_environment()] == list(TF32_SWITCHES)
    assert os.environ["HF_HUB_OFFLINE"] == "1" and not set(TF32_SWITCHES) & set(os.environ)
    assert settle_environment() == []


def test_items_that_time_nothing_run_at_once_and_a_timed_one_alone(tmp_path) -> None:
    running, seen, met = [0], [], threading.Barrier(TOGETHER)

    def watched(bench: Bench) -> dict[str, Any]:
        running[0] += 1
        met.wait(timeout=60)  # breaks unless so many are there
        met.wait(timeout=60)
        running[0] -= 1
        return {"tokens/s": 5.0, "loss": 1.0}

    def alone(bench: Bench) -> dict[str, Any]:
        seen.append(running[0])
        return {"tokens/s": 5.0}

    together = [dataclasses.replace(item(f"shared-{at}", watched), timed=False) for at in range(2 * TOGETHER)]
    part = Part("a part", (*together[:TOGETHER], item("alone", alone), *together[TOGETHER:], item("last", alone)))
    check = check_in(tmp_path)
    ran(check, part)
    assert seen == [0, 0]
    found = {each.name: check.result(7, each) for each in part.items}
    assert {result["status"] for result in found.values()} == {"done"}
    assert found["shared-0"]["figures"] == {"loss": 1.0} and found["alone"]["figures"] == {"tokens/s": 5.0}


def test_what_a_killed_check_left_running_is_ended_and_nothing_else(tmp_path, monkeypatch) -> None:
    (tmp_path / "sleeps.py").write_text(SLEEPS)
    jobs, logs = [], []
    try:
        for name in ("out", "other"):
            monkeypatch.setenv(MARK, str(tmp_path / name / "work"))
            logs.append(tmp_path / f"{name}.log")
            jobs.append(start([str(tmp_path / "sleeps.py")], processes=1, log=logs[-1]))
        monkeypatch.delenv(MARK)
        wait_until(lambda: all(log.read_text().count("started") == 2 for log in logs))
        children = [psutil.Process(job.pid).children()[0].pid for job in jobs]
        work = tmp_path / "out/work"
        assert end_leftovers(work) == [f"ended 2 processes that a killed check left in {work}"]
        assert [job.poll() is None for job in jobs] == [False, True]
        assert [runs(child) for child in children] == [False, True]
        assert os.environ[MARK] == str(work) and end_leftovers(work) == []
    finally:
        for job in jobs:
            kill(job)


SLEEPS = (
    "import subprocess, sys, time\n"
    "if len(sys.argv) == 1:\n    subprocess.Popen([sys.executable, sys.argv[0], 'child'], start_new_session=True)\n"
    "print('started', flush=True)\ntime.sleep(600)\n"
)
"""A job that starts another one, out of its session."""


def test_whoever_compiles_needs_a_compiler() -> None:
    compiling = {each.name: each.needs for part in PARTS.values() for each in part.items if "compile" in each.name}
    assert compiling == dict.fromkeys(("compile", "nan-compile", "compile-2048"), "compiler")


def test_items_are_named_once_and_compared_with_one_of_their_part() -> None:
    assert sorted(PARTS) == [1, 2, 3, 4, 5, 6]
    for part in PARTS.values():
        names = [each.name for each in part.items]
        assert len(names) == len(set(names))
        assert {each.against for each in part.items} - {None} <= set(names)
        assert all(0 < each.seconds < 0.75 * 570 for each in part.items)  # fits into a part, also when it is last


def done(figures: dict[str, Any]) -> dict[str, Any]:
    return {"status": "done", "error": "", "figures": figures}


def row(rate: float, *, same: bool = True, mfu: float = 0.4) -> dict[str, Any]:
    return {"tokens/s": rate, "MFU": mfu, "memory GiB": 10.0, "trains the same": same}


def outcomes(part: int, results: dict[str, Any], *, tiny: bool = False) -> dict[str, tuple[str, str]]:
    """The measured value and its outcome, by goal."""
    lines = str(goals_table(part, results, tiny=tiny)).splitlines()[2:]
    cells = [line.strip("|").split(" | ") for line in lines]
    return {each[0].strip(): (each[2].strip(), each[3].strip()) for each in cells}


def test_every_goal_is_measured_by_items_of_its_part() -> None:
    for goal in GOALS:
        assert set(goal.items) <= {item.name for item in PARTS[goal.part].items}, goal.what
    assert {goal.part for goal in GOALS} == set(PARTS)


def test_a_goal_holds_where_every_measurement_of_it_does() -> None:
    first = {"mantissa": row(130.0, mfu=0.51), "bare": row(130.0), "mantissa-torch": row(100.0), "trainer": row(100.0)}
    again = first | {"mantissa": row(120.0, mfu=0.52)}
    found = outcomes(3, {"peers-2048": done(first), "peers-2048-again": done(again)})
    assert found["MFU, of the data sheet's peak"] == ("0.51; 0.52", "holds")
    assert found["mantissa over the Trainer with DeepSpeed"] == ("1.3; 1.2", "**not sure**: it held in one measurement")
    assert found["with torch's kernels over bare DeepSpeed"] == ("0.7692; 0.7692", "**missed**")
    assert found["mantissa over torchtitan"] == ("losses differ, or it took no part", "not measured")
    slower = {"mantissa": row(90.0), "torchtitan": row(100.0), "torchtitan-compile": row(60.0)}
    found = outcomes(3, {"peers-4096": done(slower)})
    assert found["mantissa over torchtitan with 4,096 tokens"] == ("0.9", "**missed**")
    assert found["mantissa over torchtitan, compiled, 4,096 tokens"] == ("1.5", "holds")
    assert found["mantissa over torchtitan"] == ("peers-2048 was not run", "not measured")


def test_contestants_whose_losses_differ_and_those_that_failed_reach_no_goal() -> None:
    figures = {"mantissa": row(130.0), "bare": row(1.0, same=False), "trainer": "failed", "mantissa-torch": row(1.0)}
    failed = {"status": "failed", "error": "trainer-1 failed: no memory", "figures": figures}
    found = outcomes(3, {"peers-2048": failed})
    assert found["mantissa over bare DeepSpeed, tokens/s"] == ("trainer-1 failed: no memory", "not measured")
    assert found["mantissa over the Trainer with DeepSpeed"][1] == "not measured"
    assert found["MFU, of the data sheet's peak"] == ("0.4", "**missed**")
    assert outcomes(3, {"peers-2048": done(figures)})["mantissa over bare DeepSpeed, tokens/s"] == (
        "losses differ, or it took no part",
        "not measured",
    )


@pytest.mark.parametrize(
    ("equal", "before", "after", "outcome"),
    [(True, 0.0, 0.0, HOLDS), (False, 1e-6, 9e-6, HOLDS), (False, 0.0, 1e-6, MISSED), (False, 1e-6, 2e-5, MISSED)],
)
def test_a_resumed_run_may_differ_as_two_runs_do(equal: bool, before: float, after: float, outcome: str) -> None:
    figures = {"bit-equal": equal, "largest difference after it": after, "and before it, of two runs": before}
    found = outcomes(1, {"resume": done(figures)})["does a killed run resume as two runs agree?"]
    assert found == ("yes" if outcome == HOLDS else "no", outcome)


def test_a_wrong_cell_and_other_losses_than_the_references_miss_a_goal() -> None:
    cell = "FP16 manifest, ZeRO-1, accumulation 4: wrong, not verified: masters 3.0e-01"
    results = {"matrix-zero0": done({"not as expected": []}), "matrix-zero1": done({"not as expected": [cell]})}
    found = outcomes(2, results | {"fp8-emulate": done({"losses": [4.0]}), "fp8-scaled_mm": done({"losses": ["nan"]})})
    assert found["ZeRO-0: are cells as expected?"] == ("yes", HOLDS)
    assert found["ZeRO-1: are cells as expected?"] == ("no", MISSED)
    assert found["ZeRO-2: are cells as expected?"][1] == "not measured"
    assert found["losses of fp8-scaled_mm from those of fp8-emulate"] == ("inf", MISSED)
    losses = {"zero0-fp32": [4.0, 3.0], "zero1-bf16": [4.0, 3.003], "zero1-fp32": [4.0, 3.003]}
    found = outcomes(1, {name: done({"losses": each}) for name, each in losses.items()})
    assert found["losses of zero1-bf16 from those of zero0-fp32"] == ("0.001", HOLDS)
    assert found["losses of zero1-fp32 from those of zero0-fp32"] == ("0.001", MISSED)
    assert found["losses of zero2-fp32 from those of zero1-fp32"] == ("zero2-fp32 was not run", "not measured")
    assert found["losses of attention-eager from those of kernels-torch"] == (
        "kernels-torch was not run",
        "not measured",
    )
