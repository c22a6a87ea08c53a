"""Converters for `type=` of command-line options, except those of train.py."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def comma_separated(one: Callable[[str], T]) -> Callable[[str], list[T]]:
    """An option's `type=` for comma-separated values, each parsed by `one`."""
    return lambda text: [one(item) for item in text.split(",")]


def positive_int(text: str) -> int:
    """A whole number of 1 or more, for `type=` of an option."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of 1 or more")
    return int(text)


def port(text: str) -> int:
    """The number of a TCP port, for `type=` of an option."""
    if positive_int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text} is no port; the last one is 65535")
    return int(text)


def _number(expected: str, holds: Callable[[float], bool]) -> Callable[[str], float]:
    """A converter for an option's `type=`: the number in a text, if it `holds`."""

    def convert(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not holds(value):
            raise argparse.ArgumentTypeError(f"{text} is not {expected}")
        return value

    return convert


share = _number("a share between 0 and 1", lambda value: 0 <= value <= 1)
positive_share = _number("a share above 0 and at most 1", lambda value: 0 < value <= 1)
share_below_1 = _number("a share of 0 or more and below 1", lambda value: 0 <= value < 1)
not_negative = _number("a number of 0 or more", lambda value: 0 <= value < math.inf)
positive_number = _number("a number above 0", lambda value: 0 < value < math.inf)
