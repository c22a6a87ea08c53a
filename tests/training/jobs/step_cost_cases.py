"""Work that one step does beside training itself, counted: run on real ranks by test_step_costs.py."""

import os
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch.overrides import TorchFunctionMode

from config.cli import REPOSITORY
from data.batches.loader import Batch
from lab.benchmark.overhead import bare_step
from precision import half_on_cpu
from tests.support.models.small_run import batch_of, engine_of, resolve
from tests.training.checkpoint.checkpoint_cases import RandomBatches
from tracking.jsonl import JsonlSink
from tracking.record import Record
from training.build import assemble, checks_wanted
from training.checkpoint.checkpoints import Checkpoints
from training.checkpoint.retention import Retention
from training.corruption.checks import Checks
from training.distributed import World
from training.parts import Parts
from training.progress import Progress
from training.step import train_step

_WAITS = ("item", "tolist", "numpy", "cpu", "__bool__", "__float__", "__int__", "__index__", "nonzero", "allclose")
"""Methods that make the host wait for the device when the tensor lives on one."""
_COPIES = ("tensor", "as_tensor", "new_tensor", "to", "copy_", "cuda")
"""Methods that do so when they bring something from the host's pageable memory to a device."""
_COLLECTIVES = (
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_object", "all_to_all_single"),
    *("broadcast", "broadcast_object_list", "reduce", "reduce_scatter_tensor", "barrier"),
)
_FOLDERS = ("config", "data", "modeling", "precision", "tracking", "training", "lab")
_OURS = tuple(f"{REPOSITORY}/{folder}/" for folder in _FOLDERS)
_ARITHMETIC = half_on_cpu.__file__
"""Takes the place of torch's kernels on a CPU without instructions for half precision: the model's own work."""


def _copies_and_waits(name: str, args: Any, kwargs: dict[str, Any]) -> bool:
    named = kwargs.get("device") is not None or any(isinstance(value, torch.device) for value in args)
    return name in _COPIES and (named or name in ("new_tensor", "cuda")) and not kwargs.get("non_blocking")


class _Waits(TorchFunctionMode):
    """Counts the calls of `_WAITS` and `_COPIES` by the file they come from: Mantissa's, or upstream's."""

    def __init__(self) -> None:
        super().__init__()
        self.ours: list[str] = []
        self.upstream: list[str] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(function, "__name__", "")
        if name in _WAITS or _copies_and_waits(name, args, kwargs or {}):
            frame: FrameType | None = sys._getframe(1)
            while frame is not None and "/torch/" in frame.f_code.co_filename:
                frame = frame.f_back
            assert frame is not None
            where = self.ours if frame.f_code.co_filename.startswith(_OURS) else self.upstream
            where.append(f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}")
        return function(*args, **(kwargs or {}))


@contextmanager
def collectives(size_of: Callable[..., int] = lambda *args: 1) -> Iterator[Counter[str]]:
    """Counts torch.distributed's collectives, DeepSpeed's too, or adds what `size_of` says of their arguments."""
    counted: Counter[str] = Counter()

    def counting(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            counted[name] += size_of(*args)
            return own(*args, **kwargs)

        return call

    with patch.multiple(dist, **{name: counting(name, getattr(dist, name)) for name in _COLLECTIVES}):
        yield counted


@contextmanager
def parts_of(world: World, folder: Path, *, overrides: tuple[str, ...] = (), **options: Any) -> Iterator[Parts]:
    """A run with the guard, spikes included, and its events on disk."""
    resolved = resolve(world, overrides=["guard.spike_sigmas=6", "schedule.warmup_steps=2", *overrides], **options)
    with engine_of(world, resolved) as engine:
        record = Record([JsonlSink(folder / "events.jsonl")]) if world.is_main else Record.silent()
        checkpoints = Checkpoints(folder, keep=Retention(1), identity={}, world=world)
        checks = Checks(engine, resolved) if checks_wanted(resolved.config.guard) else None
        parts, _ = assemble(
            resolved, engine, RandomBatches(world), record=record, checkpoints=checkpoints, checks=checks
        )
        yield parts


TWO_SOURCES = "data.sources=[{source: stdlib, name: a, weight: 1}, {source: stdlib, name: b, weight: 1}]"


def waits_and_collectives(world: World, *, stage: int, compute: str, further: tuple[str, ...] = ()) -> dict[str, Any]:
    """Counts of one bare and one guarded step, both warm, on batches of two sources. further: overrides."""
    overrides = (TWO_SOURCES, "data.tokenizer=bytes", *further)
    options: dict[str, Any] = {"stage": stage, "compute": compute, "overrides": overrides}
    with tempfile.TemporaryDirectory() as folder, parts_of(world, Path(folder), **options) as parts:
        own = parts.batches.next_step

        def of_two_sources() -> Batch:
            batch = own()
            sources = torch.arange(batch.labels.shape[:2].numel()).remainder_(2).view(batch.labels.shape[:2])
            known = {"source_names": ("a", "b"), "labels_by_source": {"a": 1, "b": 1}, "counts_by_source": (1.0, 1.0)}
            return replace(batch, sources=sources, **known)

        parts.batches.next_step = of_two_sources  # type: ignore[method-assign]
        progress = Progress()
        for _ in range(3):
            progress, _, _ = train_step(parts, progress)
        with collectives() as bare, _Waits() as bare_waits:
            bare_step(parts)
        drained: list[str] = []

        def synchronize(*args: Any) -> None:
            drained.append(sys._getframe(1).f_code.co_name)

        with (
            patch.object(get_accelerator(), "synchronize", synchronize),
            collectives() as guarded,
            _Waits() as guarded_waits,
        ):
            train_step(parts, progress)
    return {
        "bare": dict(bare),
        "guarded": dict(guarded),
        "ours": guarded_waits.ours,
        "upstream": (bare_waits.upstream, guarded_waits.upstream),
        "drained": drained,
    }


def known_and_asked_label_tokens(world: World) -> list[dict[str, float]]:
    """Loss, norm and all-reduces of the same forward and backward pass, the number of all labels told and not told."""
    batch = batch_of(world, 2, seed=1)
    found = []
    with engine_of(world, resolve(world, stage=2, compute="bf16", micro=2)) as engine:
        for known in (int(world.sum(torch.tensor(batch.label_tokens))), None):
            with collectives() as counted:
                outcome = engine.forward_backward(replace(batch, label_tokens_of_all=known), step=1)
            health = engine.health(outcome)
            engine.discard_gradients()
            found.append({"loss": health.loss, "norm": health.grad_norm, "all_reduce": counted["all_reduce"]})
    return found


@contextmanager
def lines_of_python() -> Iterator[Counter[str]]:
    """Counts the lines of Mantissa's own Python that run inside, by file."""
    lines: Counter[str] = Counter()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(_OURS) or frame.f_code.co_filename == _ARITHMETIC:
            return None
        if event == "line":
            lines[Path(frame.f_code.co_filename).name] += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)


def lines_of_a_step(world: World, *, layers: int, stage: int, before: int) -> int:
    """Lines of Mantissa's own Python of the guarded step after `before` others; the guard looks back 16 steps."""
    overrides = (f"model.config.num_hidden_layers={layers}", "guard.spike_window=16")
    with (
        tempfile.TemporaryDirectory() as folder,
        parts_of(world, Path(folder), overrides=overrides, stage=stage, compute="bf16") as parts,
    ):
        progress = Progress()
        for _ in range(before):
            progress, _, _ = train_step(parts, progress)
        with lines_of_python() as lines:
            train_step(parts, progress)
    return lines.total()


def files_of_a_step(world: World) -> tuple[int, int]:
    """Lines that 20 steps append to the event file, and how often anything was forced to the disk meanwhile."""
    forced = 0
    own = os.fsync

    def counted(handle: int) -> None:
        nonlocal forced
        forced += 1
        own(handle)

    with tempfile.TemporaryDirectory() as folder, parts_of(world, Path(folder), stage=2, compute="bf16") as parts:
        events, progress = Path(folder) / "events.jsonl", Progress()
        progress, _, _ = train_step(parts, progress)
        before = _lines(events)
        with patch.object(os, "fsync", counted):
            for _ in range(20):
                progress, _, _ = train_step(parts, progress)
        return _lines(events) - before, forced


def _lines(path: Path) -> int:
    return len(path.read_bytes().splitlines()) if path.exists() else 0
