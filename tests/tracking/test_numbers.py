"""Numbers as text, the picture of a run, and its progress on a console, plain or as one live line."""

import io
import math
import os
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from config.cli import REPOSITORY
from tests.support.jobs.launches import on_a_terminal
from tests.support.refusals import refused
from tests.support.runs.compare_runs import start_fields, step_fields, whole_event
from tests.support.runs.report_runs import session
from tracking import numbers
from tracking.compare.differences import format_value
from tracking.console import ConsoleSink, sparkline
from tracking.plots import plot_run
from tracking.record import Record
from tracking.report.page import results
from tracking.run_dir import RunDir
from tracking.run_facts import read_facts
from tracking.summary import read_run

GiB = 2**30
TEXTS: dict[str, list[tuple[float | None, str]]] = {
    "number": [
        *((0.0, "0"), (5e-5, "5e-5"), (0.001, "0.001"), (0.00099999, "1e-3"), (1 / 3, "0.3333"), (12345.6, "12,346")),
        *((99999.6, "100,000"), (1e7, "1e7"), (-1234567.0, "-1,234,567"), (85.09, "85.09"), (1e-30, "1e-30")),
        *((math.nan, "nan"), (-math.inf, "-inf"), (None, "-")),
    ],
    "percent": [
        *((1.0, "100%"), (0.99999994, "100%"), (0.999999, "> 99.99%"), (0.9999, "99.99%"), (0.0, "0%"), (0.05, "5%")),
        *((1e-7, "< 0.001%"), (0.0254, "2.54%"), (12.5, "1,250%"), (0.123456, "12.35%"), (-0.2, "-20%")),
    ],
    "scale": [
        *((2.0**20, "2^20"), (65536.0, "2^16"), (1024.0, "2^10"), (512.0, "512"), (1.5, "1.5"), (0.25, "0.25")),
        *((3e6, "3,000,000"), (1.0, "1"), (2.0**100, "2^100"), (math.inf, "inf"), (math.nan, "nan"), (None, "-")),
    ],
    "rate": [
        *((1.25e-3, "1.25e-3"), (3e-4, "3e-4"), (0.0, "0"), (1.5e-5, "1.5e-5"), (3e-3, "3e-3"), (0.3, "0.3")),
        (3.0, "3"),
    ],
}
"""Function to values and texts, in both languages."""
ONLY_PYTHON: dict[str, list[tuple[float | None, str]]] = {
    "change": [(0.0123, "+1.23%"), (-0.5, "-50%"), (0.0, "0%"), (1e-9, "0%"), (-0.00001, "-0.001%")],
    "perplexity": [
        *((1e6, "1,000,000"), (1e7, "> 1e6"), (math.inf, "> 1e6"), (28.978, "28.98"), (math.nan, "nan")),
        (8000.4, "8,000"),
    ],
    "loss": [(3.45, "3.4500"), (85.0, "85.0000"), (1e30, "1e30"), (5e-5, "5e-5"), (math.nan, "nan"), (None, "-")],
    "mib": [(612306944, "584 MiB"), (80 * GiB, "81,920 MiB"), (43, "< 0.1 MiB"), (0, ""), (None, "")],
    "human": [(950, "950"), (999_960, "1.0M"), (12_345, "12.3k"), (4.56e6, "4.6M")],
    "precise_duration": [(0.00005, "5e-5 s"), (4.25, "4.25 s"), (200, "3m20s")],
}
CASES = [(name, *case) for table in (TEXTS, ONLY_PYTHON) for name, cases in table.items() for case in cases]


@pytest.mark.parametrize(("function", "value", "text"), CASES)
def test_a_number_has_one_text(function: str, value: float | None, text: str) -> None:
    assert getattr(numbers, function)(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        *((5e-05, "5e-5"), (0.0003, "3e-4"), (0.95, "0.95"), (1e22, "1e22"), (16777216.0, "16777216")),
        *((1.25e-07, "1.25e-7"), (-2.0, "-2"), (0.0, "0"), (0.001, "0.001"), (math.inf, "inf"), (123456, "123456")),
    ],
)
def test_a_setting_keeps_its_digits(value: float, text: str) -> None:
    assert format_value(value) == text


def test_no_file_of_tracking_formats_floats_its_own_way() -> None:
    """Shares, exponents and `g` are numbers.py's: a format of one's own is how 99.9999% and 5e-05 came onto pages."""
    own = re.compile(r"\{[^{}\n]*:[-+,.0-9]*[ge%]\}")
    kept = {"numbers.py"}
    found = {
        f"{path.relative_to(REPOSITORY)}: {hit[0]}"
        for path in Path(REPOSITORY, "tracking").rglob("*.py")
        if kept.isdisjoint(path.relative_to(REPOSITORY).parts)
        for hit in own.finditer(path.read_text(encoding="utf-8"))
    }
    assert found == set()


def _size(png: Path) -> tuple[int, int]:
    """Width and height from the PNG header."""
    content = png.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n" and content[-8:-4] == b"IEND"
    return struct.unpack(">II", content[16:24])


def _colours(png: Path) -> set[tuple[int, int, int]]:
    from matplotlib.image import imread

    red, green, blue = (imread(png)[..., :3] * 255).round().astype(int).reshape(-1, 3).T
    found = np.unique(red << 16 | green << 8 | blue).tolist()
    return {(colour >> 16, colour >> 8 & 0xFF, colour & 0xFF) for colour in found}


def test_an_fp16_run(fp16_run: RunDir) -> None:
    png = plot_run(read_facts(fp16_run.events, "demo"), fp16_run.plots / "run.png")
    assert _size(png) == (1560, 975) and png.stat().st_size > 30_000
    colours = _colours(png)
    assert (0xC0, 0, 0) in colours, "overflows are marked on the loss scale"
    assert (0xD1, 0x66, 0x0F) in colours, "the validation loss is drawn"
    assert list(fp16_run.plots.iterdir()) == [png]


def test_a_run_of_nothing_but_trouble_can_be_drawn(run_dir: RunDir) -> None:
    with session(run_dir.path) as run:
        run.steps(299, loss=math.nan, grad_norm=math.inf, clip_coefficient=None, applied=False)
    assert _size(plot_run(read_facts(run_dir.events, "demo"), run_dir.plots / "run.png")) == (1560, 975)


def test_metrics_of_a_task_are_drawn_and_reported(run_dir: RunDir) -> None:
    with session(run_dir.path) as run:
        for step in range(0, 12, 4):
            for at in range(step + 1, step + 5):
                run.steps(1, metrics={"rewards/accuracy": 0.5, "kl_k1/chosen": 0.01 * at})
            metrics = {"rewards/accuracy": 0.1 * step, "kl_k1/chosen": None if step else 0.25}
            run.event("eval", loss=0.5, perplexity=None, metrics=metrics, by_source={"chats": step})
    png = plot_run(read_facts(run_dir.events, "demo"), run_dir.plots / "run.png")
    assert _size(png) == (1560, 1430)
    assert {(0x1F, 0x77, 0xB4)} <= _colours(png)
    rows = dict(results(read_run(run_dir.path)))
    assert rows["validation rewards/accuracy"] == "0.0000 -> 0.8000"
    assert rows["validation kl_k1/chosen"] == "0.2500 -> -"
    assert rows["validation loss, chats"] == "0.0000 -> 8.0000"
    assert "training loss" in rows and "validation loss" in rows, "not in nats per token"


def test_nothing_to_draw_is_a_user_error(run_dir: RunDir) -> None:
    with session(run_dir.path):
        pass
    assert "nothing to draw" in refused(plot_run, read_facts(run_dir.events, "demo"), run_dir.plots / "run.png")
    assert not list(run_dir.plots.iterdir())


def _shown(total: int, every: int, skip_at: int = 0, encoding: str = "utf-8", compute: str = "bf16") -> list[str]:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    record = Record([ConsoleSink(total, log_every_steps=every, stream=stream)])
    record.event("run_start", step=0, tokens=0, **start_fields(compute=compute))
    for step in range(1, total + 1):
        fields = step_fields(step, applied=step != skip_at, skipped_total=int(0 < skip_at <= step))
        record.event("step", step=step, tokens=step, **fields)
    record.event("eval", step=total, tokens=total, loss=2.0, perplexity=math.exp(2.0))
    record.event("run_end", step=total, tokens=total, status="done", exit_code=0)
    record.close()
    stream.flush()
    return raw.getvalue().decode(encoding).splitlines()


def _steps(lines: list[str]) -> list[int]:
    of_steps = [line for line in lines if line.startswith("step") and "loss " in line and "/" in line[:14]]
    return [int(line.split("/")[0].split()[1]) for line in of_steps]


def test_plain_lines_come_as_often_as_asked_and_for_every_skip() -> None:
    lines = _shown(40, 10, skip_at=17)
    assert _steps(lines) == [10, 20, 30, 40]
    assert any("step 17: skipped" in line for line in lines)
    assert any("validation loss 2.0000, perplexity 7.39" in line for line in lines)
    assert lines[-1].startswith("done after 40 steps")
    assert not any("\x1b" in line for line in lines), "no terminal codes in a log file"


def test_the_scale_is_shown_for_fp16_only() -> None:
    assert "scale 2^16" in _shown(2, 1, compute="fp16")[1]
    assert "scale" not in _shown(2, 1, compute="bf16")[1]


BROKEN = {"loss": math.nan, "applied": False, "skipped_total": 2, "grad_norm": math.nan}
INCIDENT = {
    "verdict": "SKIP",
    "reason": "the loss is nan",
    "modules": [],
    "replay": "python -m tools.replay runs/a --step 3",
}


def _start(**facts: int) -> tuple[str, int, dict[str, Any]]:
    return ("run_start", 0, start_fields() | facts)


def _scaled(step: int, before: float, after: float, reason: str, in_a_row: int) -> tuple[str, int, dict[str, Any]]:
    fields = {"from": before, "to": after, "reason": reason, "consecutive_overflows": in_a_row}
    return ("scale", step, {**fields, "lr": 1e-3, "momentum_norm": None})


def _nan(rank: int, module: str, tensor: str, kind: str, count: int) -> tuple[str, int, dict[str, Any]]:
    return ("nonfinite", 3, {"rank": rank, "module": module, "tensor": tensor, "kind": kind, "count": count})


INNER = {
    "computed": {"softmax": {"fp32": 23, "bf16": 1}, "norm statistics": {"fp32": 49}},
    "lower": [{"what": "softmax", "computed": "bf16", "promised": "fp32", "modules": ["a", "b", "c", "d", "e"]}],
    "unobserved": [{"what": "loss", "why": "a kernel", "modules": []}],
}
OBSERVED = ((1, {"inner": INNER}), (2, {"inner": INNER}), (3, {}))
LOW = "softmax in bf16 where fp32 is promised: a, b, c and 2 more"
OVERFLOW = {"applied": False, "skipped_total": 1, "grad_norm": math.inf, "clip_coefficient": None}
EARLY = {"signal": "gradient_jump", "module": "a", "value": 9.0, "bound": 1.0, "modules": ["a"], "reason": "it jumped"}
ABORT = INCIDENT | {"verdict": "ABORT", "reason": "the loss spikes", "replay": ""}
SETS = {"metrics": {"token_accuracy": 0.25, "kl": None}, "by_source": {"maths": 1.5, "prose": 2.25}}
TOLD: dict[str, tuple[list[tuple[str, int, dict[str, Any]]], list[str]]] = {
    "all that is trained": (
        [_start(parameters=1000, trained_parameters=1000)],
        ["training 1,000 parameters in bf16, ZeRO-2, 2 processes"],
    ),
    "the start of an older version": (
        [_start(parameters=1000)],
        ["training 1,000 parameters in bf16, ZeRO-2, 2 processes"],
    ),
    "a part that is trained": (
        [_start(parameters=1000, trained_parameters=30)],
        ["training 30 of 1,000 parameters in bf16, ZeRO-2, 2 processes"],
    ),
    "the loss of each set": (
        [("eval", 3, {"loss": 2.0, "perplexity": None, **SETS})],
        ["step 3: validation loss 2.0000, token_accuracy 0.25, kl -; loss of maths 1.5, prose 2.25"],
    ),
    "dtypes when they change, a low one each time": (  # the last is of a version that did not look
        [("precision", step, {"flop_share": {"bf16": 1.0}, **inner}) for step, inner in OBSERVED],
        [
            "step 1: dtypes observed: softmax fp32 and bf16; norm statistics fp32",
            f"step 1: {LOW}",
            f"step 2: {LOW}",
        ],
    ),
    "a change of the scale and mere hysteresis": (
        [_scaled(3, 4.0, 4.0, "hysteresis", 1), _scaled(3, 4.0, 2.0, "overflow", 2)],
        ["step 3: loss scale stays 4 (hysteresis, 1 in a row)", "step 3: loss scale 4 -> 2 (overflow, 2 in a row)"],
    ),
    "an overflow in one line, the first tensor of all": (
        [
            ("step", 3, step_fields(3, loss_scale=2.0**25, **OVERFLOW)),
            _scaled(3, 2.0**25, 2.0**24, "overflow", 1),
            *(_nan(0, f"layers.{7 - number}.down_proj", "gradient", "inf", 4) for number in range(8)),
            ("step", 4, step_fields(4, loss_scale=2.0**24, skipped_total=1)),
        ],
        [
            "step 3: skipped, the weights are unchanged (1 skipped so far); "
            "loss scale 2^25 -> 2^24 (overflow, 1 in a row); "
            "4 inf in the gradient of layers.7.down_proj on rank 0 and 7 more tensors, see events.jsonl"
        ],
    ),
    "an incident once, with its cause and its replay": (
        [
            ("step", 3, step_fields(3) | BROKEN),
            _nan(1, "layers.2", "activation", "nan", 1),
            ("warning", 3, EARLY),
            ("incident", 3, INCIDENT),
            ("incident", 5, ABORT),
        ],
        [
            "step 3: early warning: it jumped",
            "step 3: SKIP: the loss is nan; 1 nan in the activation of layers.2 on rank 1",
            "  replay: python -m tools.replay runs/a --step 3",
            "step 5: ABORT: the loss spikes",
        ],
    ),
    "a skip without an incident": (
        [("step", 3, step_fields(3) | BROKEN)],
        ["step 3: skipped, the weights are unchanged (2 skipped so far); loss nan, gradient norm nan"],
    ),
}


@pytest.mark.parametrize("what", TOLD)
def test_what_happened_is_told_in_lines(what: str) -> None:
    events, lines = TOLD[what]
    stream = io.StringIO()
    record = Record([ConsoleSink(9, log_every_steps=5, stream=stream)])
    for kind, step, fields in events:
        record.event(kind, step=step, tokens=3, **fields)
    record.close()
    assert stream.getvalue().splitlines() == lines


def test_the_speed_of_a_line_is_the_median_since_the_line_before() -> None:
    """Every tenth step measures telemetry and is slower; a line that showed it alone would be 10% low."""
    stream = io.StringIO()
    record = Record([ConsoleSink(20, log_every_steps=10, stream=stream)])
    for step in range(1, 21):
        rate = 900.0 if step % 10 == 0 else 1000.0 if step < 10 else 2000.0
        record.event("step", step=step, tokens=step, **step_fields(step, tokens_per_second=rate))
    assert [line.split()[2] for line in stream.getvalue().splitlines()] == ["1.0k", "2.0k"]


def test_a_stream_without_unicode_is_no_trouble() -> None:
    assert len(_steps(_shown(20, 5, encoding="ascii"))) == 4


def test_losses_that_are_not_finite_are_shown_as_they_are() -> None:
    stream = io.StringIO()
    sink = ConsoleSink(3, log_every_steps=1, stream=stream)
    for step, loss in ((1, math.nan), (2, 4.0), (3, math.inf)):
        sink.write(whole_event("step", step, loss=loss))
    sink.close()
    shown = stream.getvalue().splitlines()
    assert "nan" in shown[0] and "from 4 " in shown[1] and "inf" in shown[2]


PLAYED = """
import math, sys; sys.path[:0] = sys.argv[1:]
from tests.support.jobs.launches import on_a_terminal
from tests.support.runs.compare_runs import start_fields, step_fields
from tests.tracking.test_numbers import BROKEN, INCIDENT
from tracking.console import ConsoleSink; from tracking.record import Record
console = ConsoleSink(30, log_every_steps=10); record = Record([console])
record.event('run_start', step=0, tokens=0, **start_fields(compute='fp16'))
for n in range(1, 31):
    record.event('step', step=n, tokens=n, **step_fields(n) | (BROKEN if n == 3 else {}))
    if n == 3: record.event('incident', step=3, tokens=3, **INCIDENT | {'reason': 'the loss is nan ' * 9})
    if n == 4: record.event('incident', step=4, tokens=4, **INCIDENT | {'verdict': 'ABORT'})
console.print_line('a [bold]line[/bold] above'); raise SystemError('crash')
"""
"""A run that ends by an exception, as by a crash."""


def _on_a_terminal(columns: int, folder: Path, **variables: str) -> str:
    """The output of PLAYED on a real pseudo-terminal."""
    known = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "COLUMNS")}
    known |= {"TERM": "xterm", "COLUMNS": str(columns), **variables}
    command = [sys.executable, "-c", PLAYED, str(REPOSITORY)]
    code, output = on_a_terminal(command, stderr=subprocess.DEVNULL, env=known, cwd=folder)
    assert code == 1
    return output


@pytest.mark.parametrize("columns", [80, 120])
def test_on_a_terminal_lines_stay_fit_and_are_coloured_and_the_cursor_comes_back(columns: int, tmp_path: Path) -> None:
    text = _on_a_terminal(columns, tmp_path)
    lines = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "\n").splitlines()
    kept = [line for line in lines if re.match(r"step \d+/| *step \d", line)]
    assert _steps(kept) == [10, 20, 30], "the history of the loss stays"
    assert all("grad norm" in line and "lr " in line and "scale 2^16" in line for line in kept if "/30" in line)
    assert max(map(len, lines)) <= columns
    assert sum("SKIP" in line for line in lines) == 1 and "  replay: python -m tools.replay runs/a --step 3" in lines
    assert "30/30" in text and "a [bold]line[/bold] above" in text
    for cell in ("tok/s", "ETA", "MiB", "grad norm", "lr "):
        assert cell in text, cell
    assert "\x1b[33mstep 3: SKIP" in text and "\x1b[1;31mstep 4: ABORT" in text
    assert text.rindex("\x1b[?25h") > text.rindex("\x1b[?25l"), "the cursor is hidden while live, and shown again"


def test_no_color_is_obeyed(tmp_path: Path) -> None:
    text = _on_a_terminal(80, tmp_path, NO_COLOR="1")
    assert "step 3: SKIP" in text and not re.search(r"\x1b\[[0-9;]*3[0-9][0-9;]*m", text)


def test_sparkline_falls_when_the_loss_falls() -> None:
    assert sparkline([4.0, 3.0, 2.0, 1.0], 4) == "█▆▃▁"
    assert len(sparkline([float(n) for n in range(1000)], 12)) == 12
    assert sparkline([1.0, 1.0], 12) == "▁▁" and sparkline([1.0], 12) == ""
