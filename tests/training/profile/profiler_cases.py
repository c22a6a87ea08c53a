"""Code run inside the processes of test_profiler.py."""

import gc
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.nn.modules import module as hooks

from tests.support.models.small_run import VOCABULARY, RandomBatches, engine_of, manifest_of, masters_of, resolve
from training.distributed import World
from training.engine import Engine
from training.profile.profiler import Profiling

STEPS = 4
MODEL = (
    "model.config={hidden_size: 64, intermediate_size: 128, num_hidden_layers: 2, num_attention_heads: 4, "
    "num_key_value_heads: 4, tie_word_embeddings: false%s}"
)


class Repeated(RandomBatches):
    """`seconds` is what each batch lets one wait."""

    def __init__(self, world: World, seconds: float) -> None:
        super().__init__(world, micro=2)
        self._seconds = seconds
        self.waits: list[float] = []

    def next_step(self) -> Any:
        """The next one."""
        started = time.perf_counter()
        time.sleep(self._seconds)
        batch = super().next_step()
        self.waits.append(time.perf_counter() - started)
        return batch


def profiled(
    world: World,
    *,
    folder: str,
    start: int = 3,
    steps: int = 2,
    stage: int = 2,
    compute: str = "fp32",
    wait: float = 0.0,
    vocabulary: int = VOCABULARY,
    manifest: dict | None = None,
    planted: str | None = None,
    overrides: Sequence[str] = (),
) -> dict[str, Any]:
    """Four steps, by default the last two profiled: the summary, and what a clock saw from outside.

    wait: seconds that the last rank, and no other, waits for each batch.
    planted: name of a module that computes in FP32 without anybody having asked for it.
    """
    given = [MODEL % f", vocab_size: {vocabulary}", *overrides]
    if manifest is not None:
        given += manifest_of(folder, manifest)
    resolved = resolve(world, stage=stage, compute=compute, micro=2, overrides=given)
    notes: list[str] = []
    with engine_of(world, resolved) as engine:
        batches = Repeated(world, wait if world.rank == world.world_size - 1 else 0.0)
        if planted is not None:
            _compute_in_fp32(engine.model.get_submodule(planted))
        watched = Profiling(engine, batches, Path(folder) / "profile", start=start, steps=steps, note=notes.append)
        clocked = [_step(engine, batches, watched.step, step) for step in range(1, STEPS + 1)]
        watched.close()
        left = [name for name in ("forward_backward", "health", "step") if name in vars(engine)]
        left += [name for name in vars(batches) if name == "next_step"]
        masters = masters_of(engine)
    written = Path(folder) / "profile/step-3-4" / f"rank-{world.rank}.json"
    return {
        "summary": json.loads(written.read_text()) if written.exists() else None,
        "page": written.with_suffix(".md").read_text() if written.exists() else None,
        "clocked": clocked[2:],
        "waited": sum(batches.waits[2:]),
        "notes": notes,
        "left": left + [str(hook) for hook in hooks._global_forward_hooks.values()],
        "masters": {name: tensor.double().sum().item() for name, tensor in masters.items()},
    }


def unwritable(world: World, *, folder: str) -> dict[str, Any]:
    """A profile whose folder cannot be made: a file is in the way."""
    (Path(folder) / "profile").write_text("in the way")
    return profiled(world, folder=folder)


def _step(engine: Engine, batches: Repeated, watch: Callable[[int], Any], step: int) -> float:
    """Seconds of one step, without what the profiler does before and after it."""
    gc.collect()
    with watch(step):
        started = time.perf_counter()
        batch = batches.next_step()
        health = engine.health(engine.forward_backward(batch, step=step))
        engine.step(health, 0.001)
        return time.perf_counter() - started


def _compute_in_fp32(module: torch.nn.Module) -> None:
    """The effect of a careless `.float()` in model code."""

    def forward(inputs: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", enabled=False):
            found = torch.nn.functional.linear(inputs.float(), module.weight.float())
        return found.to(inputs.dtype)

    module.forward = forward
