"""Profile a few steps: a torch.profiler trace of each chosen rank, and a summary of it (docs/profiling.md).

Steps before the first profiled one are only timed; in the profiled ones hooks make each module and each stage of the
step a range in the trace, by which, with autograd's sequence numbers, every operator's module is known.
"""

import json
import os
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.profiler import ProfilerActivity, profile, record_function

from config.cli import REPOSITORY
from config.printable import tell
from config.resolved import Resolved
from tracking.profile.timeline import MODULE, STAGE, STEP
from tracking.tracing.follow import follow
from training.engine import Engine

_UNPROFILED_STEPS = 20


def open_profiling(
    resolved: Resolved, folder: Path, *, engine: Engine, batches: Any, note: Callable[[str], None]
) -> "Profiling | None":
    """The profiling configured for this rank, or None. folder: the run's. note: called with a line about the files."""
    section = resolved.config.profile
    if not section.steps or engine.world.rank not in section.ranks:
        return None
    return Profiling(engine, batches, folder / "profile", start=section.start, steps=section.steps, note=note)


class Profiling:
    """Profiles steps `start` to `start + steps - 1` on this rank, once in a session."""

    def __init__(
        self, engine: Engine, batches: Any, folder: Path, *, start: int, steps: int, note: Callable[[str], None]
    ) -> None:
        self._engine, self._batches, self._folder = engine, batches, folder
        self._start, self._steps, self._note = start, steps, note
        self._before: deque[float] = deque(maxlen=_UNPROFILED_STEPS)  # seconds of steps without a profiler
        self._profiler: profile | None = None
        self._ranges = ExitStack()
        self._profiled: list[int] = []
        self._over = False

    def close(self) -> None:
        """Write the profile if its last step was not reached."""
        if self._profiler is not None:
            self._finish()

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        if self._over or (self._profiler is None and step >= self._start + self._steps):
            yield
            return
        if step < self._start:
            started = time.perf_counter()
            yield
            self._before.append(time.perf_counter() - started)
            return
        if self._profiler is None:
            self._begin()
        self._profiled.append(step)
        last = len(self._profiled) == self._steps
        with record_function(f"{STEP}{step}"):
            yield
            if last and self._engine.world.device.type == "cuda":
                torch.cuda.synchronize(self._engine.world.device)
        if last:
            self._finish()

    def _begin(self) -> None:
        kinds = [ProfilerActivity.CPU]
        if self._engine.world.device.type == "cuda":
            kinds.append(ProfilerActivity.CUDA)
        with profile(activities=kinds):  # the first start of the profiler in a process takes longer than a step
            torch.ones(1, device=self._engine.world.device).add_(1)
        stages = {"data": (self._batches, "next_step"), "optimizer": (self._engine, "step")}
        stages |= {name: (self._engine, name) for name in ("forward_backward", "health")}
        ranges = [(*method, partial(record_function, STAGE + name), None) for name, method in stages.items()]
        self._ranges.callback(follow(ranges))
        _open_module_ranges(self._engine.model, self._ranges)
        self._profiler = profile(activities=kinds, record_shapes=True)
        self._profiler.start()

    def _finish(self) -> None:
        """Stop, write, and report where. Training continues when the files cannot be written."""
        profiler, self._profiler, self._over = self._profiler, None, True
        assert profiler is not None
        self._ranges.close()
        profiler.stop()
        started = time.perf_counter()
        folder = self._folder / f"step-{self._profiled[0]}-{self._profiled[-1]}"
        trace = folder / f"rank-{self._engine.world.rank}.pt.trace.json.gz"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            profiler.export_chrome_trace(str(trace))
            facts = folder / f"rank-{self._engine.world.rank}.json"
            facts.write_text(json.dumps(self._facts()), encoding="utf-8")
            headline = _summarise(trace)
        except OSError as error:
            self._report(f"the profile could not be written: {error}")
            return
        self._report(f"{headline}; {trace.parent} ({time.perf_counter() - started:.1f} s to write)")

    def _report(self, text: str) -> None:
        tell(text)
        self._note(text)

    def _facts(self) -> dict[str, Any]:
        """Facts that the trace lacks."""
        engine, world = self._engine, self._engine.world
        cuda = world.device.type == "cuda"
        return {
            "steps": self._profiled,
            "rank": world.rank,
            "world_size": world.world_size,
            "device": torch.cuda.get_device_name(world.device) if cuda else "cpu",
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "compute": engine.compute,
            "regions": engine.regions.dtypes if engine.regions is not None else None,
            "tf32": torch.backends.cuda.matmul.allow_tf32 if cuda else False,
            "unprofiled_step_seconds": median(self._before) if self._before else None,
            "unprofiled_steps": len(self._before),
        }


def _summarise(trace: Path) -> str:
    """Summarise the trace in a separate process, since its events may need more memory than is free beside a model;
    returns the headline. Raises OSError when it fails."""
    path = os.pathsep.join(filter(None, [str(REPOSITORY), os.environ.get("PYTHONPATH")]))
    variables = {**os.environ, "PYTHONPATH": path}
    command = [sys.executable, "-P", "-m", "training.profile", str(trace)]
    done = subprocess.run(command, env=variables, capture_output=True, encoding="utf-8", errors="replace", check=False)
    if done.returncode != 0:
        raise OSError(done.stderr.strip().rpartition("\n")[2] or f"exit code {done.returncode}")
    return done.stdout.partition("\n")[0]


def _open_module_ranges(model: torch.nn.Module, hooks: ExitStack) -> None:
    """Open a range around each forward pass of each module until `hooks` is closed."""
    names = {module: name for name, module in model.named_modules() if name}
    open_ranges: list[tuple[torch.nn.Module, Any]] = []

    def enter(module: torch.nn.Module, inputs: Any) -> None:
        if module in names:
            entered = record_function(MODULE + names[module])
            entered.__enter__()
            open_ranges.append((module, entered))

    def leave(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        # Also called when the forward pass raises, as recomputation does to stop early.
        while module in names and open_ranges:
            opened, entered = open_ranges.pop()
            entered.__exit__(None, None, None)
            if opened is module:
                return

    hooks.enter_context(register_module_forward_pre_hook(enter))
    hooks.enter_context(register_module_forward_hook(leave, always_call=True))
