"""Finds the constant of the config for which a run used a different value, and that value.

Constants are fitted one at a time, with the others as configured: if another value gives the run's numbers, that value
is named. A defect that is not a constant stays about as far off after every fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from training.engine.optimizer import IMPLEMENTATIONS
from training.engine.optimizers.rule import UpdateInputs

Make = Callable[[float], torch.Tensor]
"""A computation with a given value of the constant; its result as a vector in FP64."""
_EXPLAINED = 0.05
"""[fraction] Largest share of the distance that may be left for a constant to be named."""
_MOST = 0.5
"""[fraction] The same if rounding is a large part of the distance."""
_ITERATIONS = 20


def named(found: torch.Tensor, makes: Mapping[str, tuple[float, Make]], *, rounding: float) -> str:
    """The constants that explain `found`, with the fitted and the configured value; empty if none does.

    makes: by key, the configured value, and the computation with another. rounding: norm that rounding leaves. Several
    explain it if they have the same effect, as a learning rate and betas on the size of Adam's first step.
    """
    fits = {key: (asked, *_fitted(found, asked, make)) for key, (asked, make) in makes.items()}
    start = max((float((found - make(asked)).norm()) for asked, make in makes.values()), default=0.0)
    least = min((left for _, _, left in fits.values()), default=1.0)
    most = min(_MOST, max(_EXPLAINED, 2.0 * rounding / start)) if start else 0.0
    good = {key: fit for key, fit in fits.items() if fit[2] <= min(most, 1.5 * least + 1e-3)}
    return " or ".join(f"{key} {value:.5g} where {asked:g} is asked" for key, (asked, value, _) in good.items())


def variants(section: Any, keys: tuple[str, ...], make: Callable[[Any], torch.Tensor]) -> dict[str, tuple[float, Make]]:
    """`makes` for numbers of a dataclass, such as a config's section; of a pair separately. make: computes from one."""

    def with_value(key: str, place: int | None, value: float) -> torch.Tensor:
        whole = getattr(section, key)
        return make(replace(section, **{key: value if place is None else (*whole[:place], value, *whole[place + 1 :])}))

    found: dict[str, tuple[float, Make]] = {}
    for key in keys:
        asked = getattr(section, key)
        if isinstance(asked, tuple):
            found |= {f"{key}[{place}]": (one, partial(with_value, key, place)) for place, one in enumerate(asked)}
        elif asked is not None:
            found[key] = asked, partial(with_value, key, None)
    return found


def of_update(given: UpdateInputs, master: torch.Tensor, states: Sequence[torch.Tensor] = ()) -> str:
    """The constants of an optimizer that explain an update, as `named` says them.

    given: before it, by the config. master, states: after it; without states, only the master is compared.
    """
    rule = IMPLEMENTATIONS[given.section.name]
    before = [given.master, *(given.states if states else [])]
    now = [tensor.double() for tensor in (master, *states)]
    sizes = [float((new - old).norm()) or 1.0 for new, old in zip(now, before, strict=True)]

    def moved(values: Sequence[torch.Tensor]) -> torch.Tensor:
        rows = zip(values, before, sizes, strict=True)
        return torch.cat([((new - old) / size).flatten() for new, old, size in rows])

    def vector(other: UpdateInputs) -> torch.Tensor:
        return moved([other.master + rule.update(other), *(rule.after(other)[0][1:] if states else [])])

    of_group = variants(given, ("lr", "weight_decay"), vector)
    in_section = variants(given.section, ("betas", "eps", "momentum"), lambda own: vector(replace(given, section=own)))
    makes = {"learning rate": of_group.pop("lr"), **of_group, **in_section}
    return named(moved(now), makes, rounding=2.0**-24 * float(now[0].norm()) / sizes[0])


def _fitted(found: torch.Tensor, asked: float, make: Make) -> tuple[float, float]:
    """The value that comes closest to `found` by Gauss-Newton steps, and the share of the distance that is left.

    Fits the value itself and its logarithm, as needed for an epsilon much smaller than what it is added to.
    """
    start = float((found - make(asked)).norm())
    best = asked, 1.0
    if not start or not math.isfinite(start):
        return best
    for logarithm in (False, True) if asked > 0 else (False,):
        value = asked
        for _ in range(_ITERATIONS):
            at, step = make(value), max(abs(value), 1e-3 if not asked else 0.0) * 2.0**-13
            slope = (make(value + step) - at) / step * (value if logarithm else 1.0)
            size = float(slope @ slope)
            left = float((found - at).norm()) / start
            if math.isfinite(left) and left < best[1]:
                best = value, left
            if not size or not math.isfinite(size):
                break
            change = float((found - at) @ slope) / size
            value = value * math.exp(max(-2.0, min(2.0, change))) if logarithm else value + change
    return best
