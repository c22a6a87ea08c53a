"""The picture of a run is a real PNG of the promised size, and shows what happened."""

import math
import struct
from pathlib import Path

import numpy as np

from tests.support.refusals import refused
from tests.support.runs.report_runs import session
from tracking.plots import plot_run
from tracking.report.page import results
from tracking.run_dir import RunDir
from tracking.run_facts import read_facts
from tracking.summary import read_run


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
