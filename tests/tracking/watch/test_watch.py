"""The dashboard shows what was recorded, in any terminal, of runs of any length: running, ended or crashed."""

import io
import math
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from fcntl import ioctl
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from rich.text import Text

from config.cli import REPOSITORY
from tests.support.runs.compare_runs import facts_of, start_fields, whole_event
from tests.support.runs.heat_runs import growing, write_heat_run
from tests.support.runs.report_runs import session
from tracking.events import spread
from tracking.jsonl import encode
from tracking.run_dir import RunDir
from tracking.run_facts import RunFacts
from tracking.status import Status, run_status
from tracking.summary import read_run
from tracking.watch.command import Watch, main
from tracking.watch.curves import Axes, Line, draw
from tracking.watch.screen import View, frame

_STYLE = re.compile(r"\x1b\[[0-9;]*m")


def shown(run: RunFacts, *, width: int = 130, height: int = 36, status: Status | None = None, **changes: Any) -> str:
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    run = replace(run, checked=status or Status("running"), config={"run": {"steps": 100}})
    console.print(frame(run, View(**({"width": width, "height": height, "now": 1.7e9} | changes))))
    return console.file.getvalue()  # type: ignore[attr-defined]


def test_the_numbers_are_those_of_the_run(fp16_run: RunDir) -> None:
    text = shown(read_run(fp16_run.path), status=run_status(fp16_run.path))
    for words in ("healthy", "step 60 of 100", "2 (3.3%)", "2 down, 1 up", "2^15 -> 2^16 (growth)", "at 60"):
        assert words in text, words


def test_trouble_is_named() -> None:
    where: dict[str, Any] = {"step": 7, "time": 1.7e9, "tokens": 7}
    cause = {"rank": 3, "module": "model.layers.1", "tensor": "activation", "kind": "nan", "count": 12}
    run = facts_of(
        [
            {"event": "run_start", **where, **start_fields()},
            whole_event("step", 8, loss=math.nan, applied=False, skipped_total=1),
            {"event": "nonfinite", **where, **cause},
            {"event": "incident", **where, "verdict": "ROLLBACK", "reason": "it broke", "rolled_back_to": "c/step-5"},
            {"event": "note", **where, "text": "wandb is\nlost"},
            {"event": "run_end", **where, "status": "aborted", "exit_code": 3, "reason": "nothing left"},
        ]
    )
    text = shown(run, status=Status("aborted", "nothing left", 8, end={"exit_code": 3}))
    for words in (
        "not learning since step 8 (exit 3)",
        "12 nan in the activation of model.layers.1 on rank 3",
        "ROLLBACK: it broke",
        "rolled back to step-5",
        "wandb is lost",
        "exit code 3: nothing left",
        "1 ROLLBACK",
        "loss, nats per token nan",
    ):
        assert words in text, words


def test_the_eta_is_the_median_of_recent_steps_and_is_of_a_run_that_runs() -> None:
    steps = [whole_event("step", n, step_seconds=100.0 if n in (3, 60) else 2.0) for n in range(1, 61)]
    run = facts_of([whole_event("run_start"), *steps])
    assert "running" in shown(run) and "ETA 1m20s" in shown(run)
    silent = shown(run, status=Status("silent", "no event for 3m20s", 60))
    assert "stalled since step 60" in silent and "no event for 3m20s" in silent and "ETA" not in silent


def test_ranks_are_shown_one_by_one_or_by_their_spread() -> None:
    few = {"work_seconds": [0.5, 0.9, 0.5], "memory_bytes": [2**30, 2**31, 2**30]}
    many = {name: {"least": 1, "median": 2**30, "most": 2**31, "rank": 700} for name in few}
    start = whole_event("run_start")
    text = shown(facts_of([start, whole_event("step", 1, by_rank=few)]), height=50)
    assert "rank 1          2,048 MiB, 0.9 s" in text and re.search(r"slowest +rank 1", text)
    text = shown(facts_of([start, whole_event("step", 1, by_rank=many)]))
    assert re.search(r"slowest +rank 700", text) and "0 / 1,024 / 2,048" in text
    assert "slowest" not in shown(facts_of([start, whole_event("step", 1)])), "not recorded, not shown"
    assert spread({}, "work_seconds") is None


@pytest.mark.parametrize("height", [20, 24, 36, 60])
@pytest.mark.parametrize("width", [60, 80, 99, 100, 130, 250])
def test_a_frame_fits_its_terminal(width: int, height: int, fp16_run: RunDir) -> None:
    run = read_run(fp16_run.path)
    by_rank = {"work_seconds": [0.1] * 16, "memory_bytes": [1] * 16}
    run = replace(run, newest=run.newest | {"by_rank": by_rank})
    why = "rank 3 (pid 4711 on node7) was killed by SIGKILL; it was the largest of the machine's processes, which had "
    why += "no memory left: 503 of 503 GiB; " + "see the kernel's log and docs/restarts.md; " * 2
    crashed = shown(run, width=width, height=height, status=Status("crashed", why, 60, end={"exit_code": 69}))
    assert " ".join(why.split()) in " ".join(crashed.split()) and "ETA" not in crashed
    texts = (shown(run, width=width, height=height), shown(facts_of([]), width=width, height=height), crashed)
    for text in texts:
        lines = text.rstrip("\n").split("\n")
        assert len(lines) <= height and max(len(line) for line in lines) <= width
    assert "what happened" in shown(run, width=width, height=36)


def test_a_curve_falls_where_its_values_fall_and_far_values_are_pointed_out() -> None:
    steps = np.arange(1, 1001)
    line = Line(steps, 10.0 - steps / 100 + np.where(steps == 500, 500.0, 0.0), "")
    axes = Axes(width=49, height=11, last_step=1000)
    rows = [line[9:] for line in draw([line], np.array([]), axes, "{:.1f}".format).plain.split("\n")]
    heights = [next(row for row in range(10) if rows[row][column].strip()) for column in range(40)]
    spike = heights.index(0, 5)
    assert rows[0][spike] == "▲" and abs(spike - 20) <= 1, "one step of a thousand, cut off and still seen"
    others = heights[: spike - 1] + heights[spike + 2 :]  # the line of the means rises beside it
    assert others == sorted(others) and (others[0], others[-1]) == (0, 9), "and the others are not flattened by it"


def test_steps_on_a_logarithmic_axis_give_the_start_more_room() -> None:
    line, marks = Line(np.arange(1, 1001), np.ones(1000), ""), np.array([32])  # half-way to 1000 in powers
    for log, place in ((False, 1), (True, 20)):
        last = draw([line], marks, Axes(49, 5, 1000, log_steps=log), str).plain.split("\n")[-1]
        assert abs(last[9:].index("▾") - place) <= 1


@pytest.mark.parametrize("ascii_only", [False, True])
@pytest.mark.parametrize(("width", "height"), [(80, 24), (160, 50), (40, 12)])
def test_the_layers_are_shown_over_time(tmp_path: Path, ascii_only: bool, width: int, height: int) -> None:
    activation = growing([6, 7], limit_step=220, per_100=3.0)
    watch = Watch(
        RunDir(write_heat_run(tmp_path, "a", layers=8, steps=200, activation=activation)), ascii_only=ascii_only
    )
    while watch.read(5.0):
        pass
    assert watch.panel == ""
    watch.next_panel()
    console = Console(file=io.StringIO(), width=width, height=height, force_terminal=True)
    console.print(watch.frame(width, height, keys=True))
    lines = [Text.from_ansi(line).plain for line in console.file.getvalue().rstrip("\n").split("\n")]
    assert len(lines) <= height and max(len(line) for line in lines) <= width
    text = " ".join(" ".join(lines).split())
    assert "down_proj" in text and "layers 6-7 down_proj: activations" in text
    assert text.isascii() is ascii_only
    seen = [watch.panel]
    while watch.panel:
        watch.next_panel()
        seen.append(watch.panel)
    assert seen == ["activation", "gradient", "underflow", "update", ""]


def test_a_run_started_afresh_in_the_same_folder_is_shown_from_its_start(run_dir: RunDir) -> None:
    watch = Watch(run_dir)
    for name, last in (("first", 50), ("second", 3)):
        run_dir.events.unlink(missing_ok=True)
        start = whole_event("run_start", name=name)
        events = [start, *(whole_event("step", n) for n in range(1, last + 1))]
        (run_dir.path / "new").write_bytes(b"".join(encode(event) for event in events))
        (run_dir.path / "new").rename(run_dir.events)
        while watch.read(5.0):
            pass
        run = watch.run.known_facts()
        assert run.columns.step[-1] == last and len(run.sessions) == 1


def test_one_frame_goes_through_a_pipe_and_torch_is_not_needed(fp16_run: RunDir) -> None:
    fp16_run.config.write_text("run: {steps: 80}\n")
    code = "import sys; from tracking.watch.command import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    command = [sys.executable, "-c", code, str(fp16_run.path)]
    options: dict[str, Any] = {"cwd": REPOSITORY, "capture_output": True, "text": True, "check": True}
    done = subprocess.run(command, env=os.environ | {"COLUMNS": "120"}, **options)
    assert "step 60 of 80" in done.stdout and "\x1b" not in done.stdout and not done.stderr
    plain = os.environ | {"COLUMNS": "120", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([*command, "--once"], env=plain, **options)
    assert done.stdout.isascii() and "step 60 of 80" in done.stdout


def test_a_folder_that_is_not_there_is_one_line(refusal: Any) -> None:
    assert refusal(main, ["/nowhere/run"]).startswith("error: /nowhere/run")


@contextmanager
def watching(run: Path, **variables: str) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """The program on a real pseudo-terminal of 120 x 40."""
    master, slave = pty.openpty()
    ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 120, 0, 0))
    environment = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES")} | {"TERM": "xterm"} | variables
    options: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), slave) | {"start_new_session": True}
    options["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)  # a shell's background jobs ignore it
    command = [sys.executable, "-m", "tracking.watch", str(run)]
    child = subprocess.Popen(command, cwd=REPOSITORY, env=environment, **options)
    try:
        yield child, master
    finally:
        child.kill()
        child.wait()
        os.close(slave)
        os.close(master)


def until(master: int, pattern: str, seconds: float = 30.0) -> str:
    """The terminal's output without colours, up to the first match of a pattern."""
    text, deadline = "", time.monotonic() + seconds
    while not re.search(pattern, text):
        ready, _, _ = select.select([master], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, f"{pattern!r} did not come: {text[-2000:]!r}"
        text = _STYLE.sub("", text + os.read(master, 65536).decode(errors="replace"))
    return text


def test_a_live_run_is_followed_and_keys_work(run_dir: RunDir) -> None:
    with session(run_dir.path, time=time.time()) as run, watching(run_dir.path) as (child, master):
        before = termios.tcgetattr(master)
        until(master, "step 0")
        run.steps(1)
        until(master, "running")
        run.steps(6)
        until(master, "step 7")
        ioctl(master, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 90, 0, 0))
        child.send_signal(signal.SIGWINCH)
        until(master, "╭─ loss[^╮\r\n]{82}╮")  # as wide as the terminal is now
        os.write(master, b"x")
        os.write(master, b"q")
        assert child.wait(20) == 0
        rest = until(master, "\x1b\\[[?]25h")
        assert "\x1b[?1049l" in rest, "the screen that was there before is back, with its cursor"
        assert termios.tcgetattr(master)[3] == before[3], "and the terminal echoes again"


def test_ctrl_c_leaves(fp16_run: RunDir) -> None:
    with watching(fp16_run.path) as (child, master):
        until(master, "healthy")
        child.send_signal(signal.SIGINT)
        until(master, "\x1b\\[[?]25h")  # a terminal goes on taking what is written to it
        assert child.wait(20) == 0


def test_a_dumb_terminal_gets_plain_frames(fp16_run: RunDir) -> None:
    with watching(fp16_run.path, TERM="dumb") as (child, master):
        text = until(master, "exit code 0")
        assert child.wait(20) == 0 and "\x1b" not in text and text.isascii() and "step 60" in text


def test_a_config_that_cannot_be_read_costs_only_the_eta(fp16_run: RunDir, capsys: pytest.CaptureFixture[str]) -> None:
    fp16_run.config.write_text("run: [\n")
    with fp16_run.events.open("a") as file:
        file.write('{"event":"x"}\n')
    assert main([str(fp16_run.path), "--once"]) == 0
    text = capsys.readouterr().out
    assert "step 60 " in text and "1 damaged lines" in text


def test_a_step_without_its_fields_is_no_newest_step() -> None:
    start = whole_event("run_start")
    run = facts_of([start, whole_event("step", 1), {"event": "step", "step": 2, "time": 1.7e9 + 1, "tokens": 1}])
    assert run.newest == {} and "step 2 of 100" in shown(run) and "learning rate" not in shown(run)
