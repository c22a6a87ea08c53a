"""Format numbers for consoles, pages, pictures and reports. `pages/numbers.js` follows the same rules.

Non-finite numbers are `nan`, `inf` or `-inf`; numbers that were not recorded (None) are `-`.
"""

import math

_PLAIN = (1e-3, 1e7)
_ALL = 1e-6  # a share this close to 1 counts as all: FP32 measurements are no more precise
_LEAST = 1e-5
_LARGE = 1e6


def number(value: float | None, digits: int = 4, *, plain_from: float = _PLAIN[0]) -> str:
    """A number with `digits` significant digits: 0.25, 12,346, 5e-5, 1.2e8; scientific below `plain_from`."""
    if value is None or not math.isfinite(value):
        return "-" if value is None else str(value)
    size = abs(value)
    if size and not plain_from <= size < _PLAIN[1]:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{_stripped(mantissa)}e{int(exponent)}"
    return _stripped(f"{value:,.{max(0, digits - 1 - math.floor(math.log10(size or 1)))}f}")


def loss(value: float | None) -> str:
    """A loss with four decimals, so that columns align; very small or large ones as in `number`."""
    plain = value is not None and (value == 0 or _PLAIN[0] <= abs(value) < 1e4)
    return f"{value:.4f}" if plain else number(value)


def perplexity(value: float) -> str:
    """A perplexity; `> 1e6` above a million, where the value is meaningless."""
    return "> 1e6" if value > _LARGE else f"{value:.2f}" if value < 1e3 else number(value)


def rate(value: float) -> str:
    """A learning rate with up to five significant digits: 1.25e-3, 3e-4, 0.3."""
    return number(value, 5, plain_from=1e-2)


def percent(share: float, digits: int = 4) -> str:
    """A share in percent; rounding never makes it 100% unless it is all, nor 0% unless it is none."""
    value = 100 * share
    if 0 < value < 100 * _LEAST:
        return f"< {number(100 * _LEAST)}%"
    text = number(value, digits, plain_from=0.0)
    if text == "100" and 1 - share > _ALL:
        return f"> {_stripped('99.' + '9' * (digits - 2))}%"
    return f"{text}%"


def change(share: float) -> str:
    """A relative change in percent, with its sign: +1.2%, -0.05%, 0%."""
    return f"{'+' if share > _LEAST else ''}{percent(round(share, 5), 3)}"


def scale(value: float | None) -> str:
    """A loss scale; powers of two from 1,024 on are written as 2^16."""
    if value is not None and 1024 <= value < math.inf and math.frexp(value)[0] == 0.5:
        return f"2^{math.frexp(value)[1] - 1}"
    return number(value, 5)


def mib(size: float | None) -> str:
    """A size in bytes as `612 MiB`; empty if 0 or unknown."""
    if not size or not math.isfinite(size):
        return ""
    return "< 0.1 MiB" if size < 0.1 * 2**20 else f"{number(size / 2**20, 3)} MiB"


def human(value: float) -> str:
    """A count in at most six characters: 950, 12.3k, 4.6M."""
    if not math.isfinite(value):
        return str(value)
    for bound, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= 0.99995 * bound:
            return f"{value / bound:.1f}{unit}"
    return f"{value:.0f}"


def duration(seconds: float) -> str:
    """Seconds as 42s, 3m20s, 2h05m or 4d03h."""
    if not math.isfinite(seconds):
        return "?"
    whole = round(seconds)
    for bound, unit, below, small in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if whole >= bound:
            return f"{whole // bound}{unit}{whole % bound // below:02d}{small}"
    return f"{whole}s"


def precise_duration(seconds: float) -> str:
    """Seconds with three significant digits below 100 s, else as in `duration`."""
    return f"{number(seconds, 3)} s" if seconds < 100 else duration(seconds)


def _stripped(text: str) -> str:
    return text.rstrip("0").rstrip(".") if "." in text else text
