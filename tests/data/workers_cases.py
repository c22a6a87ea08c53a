"""Code run in the processes of test_workers.py. They import only this file, so its imports are their start-up cost."""

_value = 0


def set_up(value: int, *_: object) -> None:
    global _value
    _value = value


def times(factor: int) -> int:
    if factor < 0:
        raise ValueError("negative")
    return _value * factor
