"""Code run in the processes of test_workers.py. They import only this file, so its imports are their start-up cost."""

import time
from collections.abc import Callable


def multiplier(value: int, *_: object) -> Callable[[float], float]:
    """A function that multiplies by a value; a number above 1,000 takes a minute."""

    def times(factor: float) -> float:
        if factor < 0:
            raise ValueError("negative")
        time.sleep(60 * (factor > 1000))
        return value * factor

    return times
