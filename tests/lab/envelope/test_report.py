"""The heat map and the page of a stability envelope, from rows that nobody had to train for."""

from pathlib import Path
from typing import Any

import pytest

from lab.envelope.plot import draw_envelope, envelope_page

RATES = [0.001, 0.002, 0.004, 0.008]


def row(label: str, depth: int, batch: int, largest: float | None, *, lucky: tuple[float, ...] = ()) -> dict[str, Any]:
    tried = []
    for rate in RATES:
        passed = (largest is not None and rate <= largest) or rate in lucky
        why = None if passed else "the loss is nan"
        step = None if passed else 7
        tried.append({"rate": rate, "step": step, "why": why, "skipped": 2, "steps": 40 if passed else 7})
    return {
        "depth": depth, "batch": batch, "label": label, "largest": largest, "fp32": 0.008, "control": 0.004,
        "lucky": list(lucky), "tried": tried,
    }  # fmt: skip


ROWS = [
    *(row("fp32", depth, batch, 0.008) for depth in (2, 4) for batch in (8, 16)),
    row("fp16/adaptive", 2, 8, 0.001),
    row("fp16/adaptive", 2, 16, 0.004),
    row("fp16/adaptive", 4, 8, None, lucky=(0.004,)),
    row("fp16/adaptive", 4, 16, 0.008),
]


def _pixels(png: Path) -> Any:
    from matplotlib.image import imread

    return (imread(png)[..., :3] * 255).round().astype(int)


def _share(png: Path, colour: tuple[int, int, int]) -> float:
    return float((_pixels(png) == colour).all(axis=-1).mean())


def test_the_heat_map_shows_each_rate_in_its_colour_and_a_gap_in_grey(tmp_path: Path) -> None:
    from matplotlib import colormaps

    png = draw_envelope(ROWS, RATES, tmp_path / "sub" / "envelope.png", title="Envelope")
    assert list(png.parent.iterdir()) == [png]
    viridis = [tuple(round(255 * part) for part in colormaps["viridis"](value)[:3]) for value in (0.0, 2 / 3, 1.0)]
    low, middle, high = (_share(png, colour) for colour in viridis)
    assert low > 0.02 and middle > 0.02, "0.001 and 0.004, one cell each"
    assert high > 4 * low, "0.008, five cells"
    assert _share(png, (0xD9, 0xD9, 0xD9)) > 0.02, "one cell has no rate"
    without = draw_envelope(ROWS[:4], RATES, tmp_path / "fp32.png", title="Envelope")
    assert _share(without, (0xD9, 0xD9, 0xD9)) < 0.001


@pytest.mark.parametrize("rates", [[0.001], RATES])
def test_one_cell_and_one_rate_can_be_drawn(tmp_path: Path, rates: list[float]) -> None:
    png = draw_envelope([row("fp32", 2, 8, 0.001)], rates, tmp_path / "envelope.png", title="Envelope")
    assert png.read_bytes().startswith(b"\x89PNG")


def test_the_page_says_rates_skips_divergence_steps_and_conditions() -> None:
    page = envelope_page(ROWS, RATES, {"seed": "0", "command": "a | b"}, "What passing means.", picture="x.png")
    lines = page.splitlines()
    assert "| fp16/adaptive | 2 | 16 | 0.004 | 0.5 | 1 | 2 of 40 | 0.008 fails at step 7 |" in lines
    assert "| fp16/adaptive | 4 | 8 | none |  |  |  | 0.001 fails at step 7 |" in lines
    assert "| fp32 | 2 | 8 | 0.008 | 1 | 2 | 2 of 40 | all tried passed |" in lines
    assert "| fp16/adaptive | 4 | 16 | 0.008 | 1 | 2 | 2 of 40 | FP32 fails next |" in lines
    assert "| fp16/adaptive | 2 | 16 | 0.008 | 7 | the loss is nan | 2 of 7 |" in lines
    assert "- fp16/adaptive, 4 layers, batch 8: 0.004" in lines
    assert "What passing means." in lines and "| seed | 0 |" in lines and "| command | a \\| b |" in lines
    assert "0.001, 0.002, 0.004, 0.008" in page and "(x.png)" in page


def test_a_page_without_failures_says_so() -> None:
    page = envelope_page(ROWS[:4], RATES, {}, "", picture="x.png")
    assert "None of the rates that were tried." in page and "luck" not in page


def test_the_verdict_compares_with_the_control_where_there_is_one() -> None:
    page = envelope_page(ROWS, RATES, {}, "", picture="x.png")
    assert (
        "- **fp16/adaptive** takes 0.25 of the control's largest learning rate at its worst (0.125 of FP32's), 0.001 "
        "with 2 layers and batch 8; at none in 1 of 4 places"
    ) in page
    alone = envelope_page([{**item, "control": None} for item in ROWS[4:6]], RATES, {}, "", picture="x.png")
    assert "takes 0.125 of FP32's largest learning rate at its worst, 0.001 with 2 layers" in alone
