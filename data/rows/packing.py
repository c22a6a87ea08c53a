"""Rows arranged into sequences: best-fit decreasing packing, or a fixed number of rows each."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

BETWEEN_REPORTS = 1 << 16
"""[rows] Packed between two reports, some tenths of a second."""


def best_fit(
    lengths: np.ndarray, capacity: int, report: Callable[[int], object] | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Pack rows of (n,) int `lengths` into sequences of `capacity`: (rows, ends). Raises ValueError for one too long.

    Best-fit decreasing (Johnson 1973: at most 11/9 of the fewest possible, and a constant). rows: (n,) int64, the row
    numbers in the order of the sequences. ends: (sequences,) int64, where in `rows` each sequence ends.
    """
    if len(lengths) and not 0 < int(lengths.min()) <= int(lengths.max()) <= capacity:
        raise ValueError(f"rows of {lengths.min()} to {lengths.max()} tokens in sequences of {capacity}")
    filled: list[list[int]] = []
    open_with: dict[int, list[int]] = {}  # room that is left -> sequences
    rooms = 0  # bit r is set where a sequence has room r
    packed = 0
    for count, row in enumerate(np.argsort(-lengths, kind="stable").tolist(), 1):
        length = int(lengths[row])
        packed += length
        if report is not None and not count % BETWEEN_REPORTS:
            report(packed)
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            number = open_with[room].pop()
            if not open_with[room]:
                rooms &= ~(1 << room)
        else:
            room, number = capacity, len(filled)
            filled.append([])
        filled[number].append(row)
        if room > length:
            open_with.setdefault(room - length, []).append(number)
            rooms |= 1 << (room - length)
    rows = np.array([row for sequence in filled for row in sequence], dtype=np.int64)
    return rows, np.cumsum([len(sequence) for sequence in filled], dtype=np.int64)


def by_number(lengths: np.ndarray, each: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """`best_fit`'s result for sequences of `each` rows in their given order."""
    rows = len(lengths)
    return np.arange(rows, dtype=np.int64), np.arange(each, rows + 1, each, dtype=np.int64)
