"""Parameters that ZeRO-3 holds whole on each rank, by DeepSpeed 0.19.8 (partitioned_param_coordinator.py).

Parameters of at most `stage3_param_persistence_threshold` elements stay whole. The others are gathered when a module is
about to compute, those of the next modules with them, a bucket at a time in one piece. What the backward pass uses
again stays, up to `stage3_max_live_parameters`, where DeepSpeed recorded the order of a forward and a backward pass.
Where a forward pass alone came first, such as an evaluation at the start, it remembers for each place in the order to
release all there, and does not forget it with the order (`functools.lru_cache`). Where a forward pass comes with each
step, as that of a reference, the order is dropped within each step: modules gather what is their own and release it.
"""

from __future__ import annotations

from dataclasses import dataclass

from launch.plan.layout import ZERO_DEFAULTS, Layout
from launch.plan.model import Shape


@dataclass(frozen=True)
class Gathered:
    """[bytes] Whole parameters on one rank, by the part of the step."""

    first: float = 0.0
    """While the first modules compute, before anything is kept for the backward pass."""
    forward: float = 0.0
    """While the last modules compute."""
    loss: float = 0.0
    backward: float = 0.0
    staying: float = 0.0
    """The part that is still there when the last gradients are reduced."""
    step: float = 0.0
    """During the optimizer's update."""


def gathered(shape: Shape, layout: Layout) -> Gathered:
    """Sizes for a rank of `layout`; all zero below stage 3."""
    if layout.stage < 3:
        return Gathered()
    threshold, most, bucket = (float(layout.zero.get(key, ZERO_DEFAULTS[key])) for key in _KEYS)
    persistent = whole = elements = largest = 0.0
    for module in shape.modules:
        own = 0.0
        for tensor in module:
            size = float(tensor.elements * (tensor.width or layout.width))
            if tensor.elements <= threshold:
                persistent += size
            else:
                own, whole, elements = own + size, whole + size, elements + tensor.elements
        largest = max(largest, own)
    each = whole / elements if elements else 0.0
    live, arriving = (each * min(elements, size) for size in (most, bucket))
    if layout.reference_pass:
        # those in flight when the order turns out to be another one are copied from their piece, then released
        alone = persistent + largest
        return Gathered(persistent + live + arriving, alone, alone, alone, alone, persistent)
    if layout.passes_before and elements <= most:
        alone = persistent + largest
        return Gathered(alone + live, alone + arriving, alone, alone, alone, persistent)
    # where all may stay gathered, none arrives on the way back
    kept, more = persistent + live, arriving if elements > most else 0.0
    return Gathered(kept + arriving, kept + arriving, kept, kept + more, kept, persistent)


def bytes_gathered(shape: Shape, layout: Layout, *, experts: bool = False, second_copy: bool = False) -> float:
    """[bytes] Whole parameters that all gathers of one optimizer step make on a rank at stage 3.

    experts: of those that ranks share, which a group of its own gathers; of all others if not. second_copy: gathered
    from hpZ's copy, which a parameter has from its first release to the update. Small ones are gathered once, after the
    update, the others in each micro-batch, and again for the backward pass where they were released.
    """
    threshold, most, _ = (float(layout.zero.get(key, ZERO_DEFAULTS[key])) for key in _KEYS)
    small = large = elements = 0.0
    for module in shape.modules:
        for tensor in module:
            size = float(tensor.elements * (tensor.width or layout.width))
            whole = tensor.elements > threshold
            elements += tensor.elements * whole
            if tensor.shared == experts:
                small, large = small + size * (not whole), large + size * whole
    every, again = layout.accumulation, 1.0
    if not (layout.passes_before or layout.reference_pass or layout.counting_pass):
        again = max(0.0, 1 - most / elements) if elements else 0.0
    passes = 1 + again + layout.reference_pass + layout.counting_pass
    first = 1 if layout.secondary > 1 else every * passes
    return large * (every * passes - first) if second_copy else small + large * first


_KEYS = ("stage3_param_persistence_threshold", "stage3_max_live_parameters", "stage3_prefetch_bucket_size")
