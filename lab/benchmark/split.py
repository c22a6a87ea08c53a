"""The time of a step by stage, and the bytes of its collectives. For a run of its own: on a GPU the device is
synchronized around every stage.

    torchrun --nproc_per_node 2 -m lab.benchmark.split RESULT WARM_UP STEPS --config FILE [key.sub=value ...]

starts Mantissa's own job with these timers. The other contestants' loops time DeepSpeed in the same way.
"""

from __future__ import annotations

import atexit
import functools
import json
import runpy
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from config.cli import is_rank_0
from launch.job import TRAIN
from training.tracing.follow import follow

# Collective -> position and keyword of the tensor (or list) whose bytes count, and the share of them that a rank sends
# in a ring of n ranks, as a factor on (n - 1) / n.
COLLECTIVES = {
    "all_reduce": (0, "tensor", 2),
    "broadcast": (0, "tensor", 1),
    "reduce": (0, "tensor", 1),
    "all_gather": (0, "tensor_list", 1),
    "all_gather_into_tensor": (0, "output_tensor", 1),
    "reduce_scatter": (1, "input_list", 1),
    "reduce_scatter_tensor": (1, "input", 1),
    "all_to_all_single": (0, "output", 1),
}


class Stages:
    """Wall-clock time by stage; the time of a stage inside another one counts for the inner one only."""

    def __init__(self, device: torch.device, *, warm_up: int, steps: int) -> None:
        """warm_up: steps that are not counted. steps: all, warm_up included; later ones are not counted either."""
        self._on_cuda = device.type == "cuda"
        self._warm_up, self._last, self._done = warm_up, steps, 0
        self._open: list[str] = []
        self._since = time.perf_counter()
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._bytes: defaultdict[str, float] = defaultdict(float)
        self._calls: defaultdict[str, int] = defaultdict(int)

    @contextmanager
    def of(self, name: str) -> Iterator[None]:
        """Count the time inside as `name`'s."""
        self._switch()
        self._open.append(name)
        try:
            yield
        finally:
            self._switch()
            self._open.pop()

    def sent(self, collective: str, size: float) -> None:
        """Count a call of a collective in which this rank sends `size` bytes."""
        if self._counts:
            self._bytes[collective] += size
            self._calls[collective] += 1

    def step_done(self) -> None:
        """Close a step."""
        self._switch()
        self._done += 1

    def result(self) -> dict[str, Any]:
        """A step's seconds by stage, and by collective the bytes that this rank sends and how often it is called."""
        steps = self._last - self._warm_up
        return {
            "steps": steps,
            "seconds": {name: seconds / steps for name, seconds in self._seconds.items()},
            "bytes_sent": {name: size / steps for name, size in self._bytes.items()},
            "calls": {name: count / steps for name, count in self._calls.items()},
        }

    @property
    def _counts(self) -> bool:
        return self._warm_up <= self._done < self._last

    def _switch(self) -> None:
        if self._on_cuda:
            torch.cuda.synchronize()
        now = time.perf_counter()
        if self._counts:
            self._seconds[self._open[-1] if self._open else "other"] += now - self._since
        self._since = now


def time_calls(stages: Stages, calls: Sequence[tuple[Any, str, str]]) -> Callable[[], None]:
    """Count the time inside methods as stages. calls: (object or class, method, stage). Returns what undoes it."""
    return follow([(owner, name, partial(stages.of, stage), None) for owner, name, stage in calls])


def time_deepspeed(stages: Stages) -> None:
    """Time every DeepSpeed engine of this process, and every collective. Before the process group is joined."""
    import torch.distributed as dist

    for name, (world, keyword, factor) in COLLECTIVES.items():
        _time_collective(stages, dist, name, world, keyword, factor)
    import deepspeed

    time_calls(stages, [(deepspeed.DeepSpeedEngine, name, name) for name in ("forward", "backward", "step")])


def _time_collective(stages: Stages, dist: Any, name: str, world: int, keyword: str, factor: int) -> None:
    before = getattr(dist, name)

    @functools.wraps(before)
    def call(*arguments: Any, **options: Any) -> Any:
        payload = arguments[world] if len(arguments) > world else options[keyword]
        tensors = payload if isinstance(payload, list | tuple) else [payload]
        ranks = dist.get_world_size(options.get("group"))
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        stages.sent(name, size * factor * (ranks - 1) / ranks)
        with stages.of("collectives"):
            return before(*arguments, **options)

    setattr(dist, name, call)


def _time_context(stages: Stages, owner: Any, name: str, stage: str) -> None:
    """Count the time inside the context that a method returns as a stage."""
    before: Callable[..., Any] = getattr(owner, name)

    @contextmanager
    def around(*arguments: Any, **options: Any) -> Iterator[Any]:
        with stages.of(stage), before(*arguments, **options) as value:
            yield value

    setattr(owner, name, around)


def time_mantissa(stages: Stages) -> None:
    """Time Mantissa's own stages of a step."""
    from data.batches.loader import Batches
    from precision.guard import Guard
    from tracking.record import Record
    from training import loop
    from training.engine import Engine
    from training.engine.gradients import ReducedGradients
    from training.engine.work_time import WorkTime

    calls: list[tuple[Any, str, str]] = [
        (Batches, "next_step", "data"),
        (ReducedGradients, "norm", "step"),
        (ReducedGradients, "apply", "step"),
        (Engine, "health", "health"),
        (Guard, "judge", "health"),
        (Guard, "note", "health"),
        (Record, "event", "tracking"),
    ]
    time_calls(stages, calls)
    _time_context(stages, WorkTime, "measured", "forward")
    follow([(loop, "train_step", None, lambda _: stages.step_done())])


def main(arguments: Sequence[str]) -> None:
    """Run Mantissa's own job with timers; rank 0 writes the split."""
    # the deepspeed launcher adds --local_rank in front, which the environment has, too
    target, warm_up, steps, *rest = [text for text in arguments if not text.startswith("--local_rank")]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    stages = Stages(device, warm_up=int(warm_up), steps=int(steps))
    time_deepspeed(stages)
    time_mantissa(stages)
    sys.argv = [TRAIN[0], *rest]
    if is_rank_0():  # at exit: train.py leaves without returning
        atexit.register(lambda: Path(target).write_text(json.dumps(stages.result()) + "\n", encoding="utf-8"))
    runpy.run_path(TRAIN[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
