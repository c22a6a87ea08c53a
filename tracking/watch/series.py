"""A curve of any length in bounded memory: neighbouring steps share a bucket with their lowest, highest and mean."""

from __future__ import annotations

import math
from dataclasses import dataclass

MOST_BUCKETS = 2048  # more than any terminal has columns of dots


@dataclass(slots=True)
class Bucket:
    """Finite values of neighbouring steps."""

    first: int
    """First of its steps that has a value."""
    last: int
    """Last of its steps that has a value."""
    low: float
    high: float
    total: float
    """Sum of the values."""
    count: int

    def merge(self, later: Bucket) -> None:
        """Add the values of a later bucket."""
        self.last = later.last
        self.low, self.high = min(self.low, later.low), max(self.high, later.high)
        self.total += later.total
        self.count += later.count


class Series:
    """Values over ascending steps. Thinning out keeps the spike of a single step."""

    def __init__(self) -> None:
        self.buckets: list[Bucket] = []
        self.width = 1
        """Steps that share a bucket: a power of two."""

    def add(self, step: int, value: float) -> None:
        """Append a value; a non-finite one is left out. step: not below the ones before."""
        if not math.isfinite(value):
            return
        buckets = self.buckets
        if buckets and buckets[-1].first // self.width == step // self.width:
            bucket = buckets[-1]
            bucket.last = step
            bucket.total += value
            bucket.count += 1
            if value < bucket.low:
                bucket.low = value
            elif value > bucket.high:
                bucket.high = value
            return
        buckets.append(Bucket(step, step, value, value, value, 1))
        if len(buckets) > MOST_BUCKETS:
            self._thin_out()

    def _thin_out(self) -> None:
        """Double the width, as often as it takes to halve the buckets."""
        while len(self.buckets) > MOST_BUCKETS // 2:
            self.width *= 2
            merged: list[Bucket] = []
            for bucket in self.buckets:
                if merged and merged[-1].first // self.width == bucket.first // self.width:
                    merged[-1].merge(bucket)
                else:
                    merged.append(bucket)
            self.buckets = merged

    def cut(self, step: int) -> None:
        """Drop values after `step`: a resumed or rolled-back run attempts those steps again.

        The bucket that contains `step` keeps its numbers, dropped steps included.
        """
        while self.buckets and self.buckets[-1].first > step:
            self.buckets.pop()
        if self.buckets and self.buckets[-1].last > step:
            self.buckets[-1].last = step
