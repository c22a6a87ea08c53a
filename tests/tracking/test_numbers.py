"""Numbers as text: one table for Python, and the same values for the pages' script."""

import math
import re
from pathlib import Path

import pytest

from config.cli import REPOSITORY
from tracking import numbers
from tracking.compare.differences import format_value

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
