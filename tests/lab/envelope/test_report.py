"""The heat map and the page of a stability envelope, from rows that nobody had to train for."""

from pathlib import Path
from typing import Any

import pytest

from lab.envelope.page import draw_envelope, envelope_page

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


@pytest.mark.parametrize("rates", [[0.001], RATES])
def test_one_cell_and_one_rate_can_be_drawn(tmp_path: Path, rates: list[float]) -> None:
    png = draw_envelope([row("fp32", 2, 8, 0.001)], rates, tmp_path / "envelope.png", title="Envelope")
    assert png.read_bytes().startswith(b"\x89PNG")


def test_the_page_says_rates_skips_divergence_steps_and_conditions() -> None:
    page = envelope_page(ROWS, RATES, {"device": "0", "command": "a | b"}, "run: {seed: 0}", picture="x.png")
    lines = page.splitlines()
    assert "| fp16/adaptive | 2 | 16 | 0.004 | 0.5 | 1 | 2 of 40 | 0.008 fails at step 7 |" in lines
    assert "| fp16/adaptive | 4 | 8 | none |  |  |  | 0.001 fails at step 7 |" in lines
    assert "| fp32 | 2 | 8 | 0.008 | 1 | 2 | 2 of 40 | all tried passed |" in lines
    assert "| fp16/adaptive | 4 | 16 | 0.008 | 1 | 2 | 2 of 40 | FP32 fails next |" in lines
    assert "| fp16/adaptive | 2 | 16 | 0.008 | 7 | the loss is nan | 2 of 7 |" in lines
    assert "- fp16/adaptive, 4 layers, batch 8: 0.004" in lines
    assert "run: {seed: 0}" in lines and "| device | 0 |" in lines and "| command | a \\| b |" in lines
    assert "0.001, 0.002, 0.004, 0.008" in page and "(x.png)" in page


def test_the_verdict_compares_with_the_control_where_there_is_one() -> None:
    page = envelope_page(ROWS, RATES, {}, "{}", picture="x.png")
    assert (
        "- **fp16/adaptive** takes 0.25 of the control's largest learning rate at its worst (0.125 of FP32's), 0.001 "
        "with 2 layers and batch 8; at none in 1 of 4 places"
    ) in page
    alone = envelope_page([{**item, "control": None} for item in ROWS[4:6]], RATES, {}, "{}", picture="x.png")
    assert "takes 0.125 of FP32's largest learning rate at its worst, 0.001 with 2 layers" in alone
