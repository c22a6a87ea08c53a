"""Parameters that ZeRO-3 gathers whole on each rank, as in DeepSpeed 0.19.8 (partitioned_param_coordinator.py).

Parameters of at most `stage3_param_persistence_threshold` elements are never partitioned. Others are gathered when
their module is about to compute, with prefetching of the next modules one contiguous bucket at a time. Those that the
backward pass needs again stay gathered, up to `stage3_max_live_parameters`, if DeepSpeed traced a forward and backward
pass. If a forward pass alone came first, such as an initial evaluation, it caches for each position of the trace to
release everything there, and keeps that when the trace is discarded (`functools.lru_cache`). If every step has an extra
forward pass, as for a reference, the trace is discarded within each step: modules gather and release only their own.
"""

from dataclasses import dataclass

from launch.plan.layout import Layout
from launch.plan.model import Shape


@dataclass(frozen=True)
class Gathered:
    """[bytes] Gathered parameters on one rank, by part of the step."""

    first: float = 0.0
    """While the first modules compute, before anything is kept for the backward pass."""
    forward: float = 0.0
    """While the last modules compute."""
    loss: float = 0.0
    backward: float = 0.0
    staying: float = 0.0
    """The part that remains when the last gradients are reduced."""
    step: float = 0.0
    """During the optimizer's update."""


def gathered(shape: Shape, layout: Layout) -> Gathered:
    """Sizes on a rank of `layout`; all zero below stage 3."""
    if layout.stage < 3:
        return Gathered()
    threshold, most, bucket = map(layout.size, _KEYS)
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
        # parameters in flight when the trace turns out to be wrong are copied out of their bucket, then released
        alone = persistent + largest
        return Gathered(persistent + live + arriving, alone, alone, alone, alone, persistent)
    if layout.passes_before and elements <= most:
        alone = persistent + largest
        return Gathered(alone + live, alone + arriving, alone, alone, alone, persistent)
    # if all may stay gathered, the backward pass gathers none
    kept, more = persistent + live, arriving if elements > most else 0.0
    return Gathered(kept + arriving, kept + arriving, kept, kept + more, kept, persistent)


def bytes_gathered(shape: Shape, layout: Layout, *, experts: bool = False, second_copy: bool = False) -> float:
    """[bytes] Total size of the parameters that all gathers of one optimizer step produce on a rank at stage 3.

    experts: count experts shared among ranks, which have their own process group, instead of everything else.
    second_copy: count gathers from hpZ's copy, which exists from a parameter's first release to the update. Small
    parameters are gathered once, after the update; others in each micro-batch, and again for backward if released.
    """
    threshold, most, _ = map(layout.size, _KEYS)
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
