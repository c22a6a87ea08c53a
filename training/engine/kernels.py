"""The kernels of a run: `model.kernels` and `precision.fp8.kernel`, the same on every rank."""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from transformers import PreTrainedModel

from config.errors import UserError
from config.resolved import Resolved
from config.rules import liger_conflicts
from modeling.kernels import Plan, cannot_run_on, plan_liger
from precision.dtypes import DTYPES
from precision.fp8 import kernel_problem, no_kernel, round_rows_by
from precision.regions import Regions
from training.distributed import World

FALLEN_BACK = "on every rank, because of rank"
"""Text in each note on a kernel that is not available on a GPU."""


def choose_kernels(model: PreTrainedModel, resolved: Resolved, world: World) -> list[str]:
    """Let the model compute with Liger's kernels if the config asks for them, or is `auto` and they are available;
    returns the decision, for the record, if there was one. A collective. Raises UserError if the kernels that the
    config asks for are not available."""
    wanted, device = resolved.config.model.kernels, world.device
    if wanted == "torch" or (wanted == "auto" and cannot_run_on(device)):
        return []
    if wanted == "liger":
        return [plan_liger(model, dtype=DTYPES[resolved.compute], device=device).apply()]
    problem = next((f"liger {problem}" for problem, _ in liger_conflicts(resolved.config)), None)
    if resolved.offload != "none":
        problem = problem or f"liger is not verified with offload of the {resolved.offload}"
    plan: Plan | None = None
    try:
        plan = plan_liger(model, dtype=DTYPES[resolved.compute], device=device) if problem is None else None
    except UserError as error:
        problem = str(error)
    where, first = _first_problem(problem, world)
    if plan is not None and first is None:
        return [plan.apply()]
    return [f"model.kernels = auto: torch's {FALLEN_BACK} {where}: {first}"]


def _first_problem(problem: str | None, world: World) -> tuple[int, str | None]:
    """The first rank with a problem: kernels round differently, so all ranks use the same. A collective."""
    problems = world.gather_objects(problem)
    return next(((rank, each) for rank, each in enumerate(problems) if each), (0, None))


def choose_softmax(resolved: Resolved, world: World) -> tuple[Callable[..., torch.Tensor] | None, list[str]]:
    """The kernel for the softmax of a chunked loss, tested on this GPU, and the decision, for the record. None, on
    every rank, for torch's operators: on CPUs, with `model.kernels = torch`, and if one rank cannot run it. A
    collective."""
    config = resolved.config
    if config.model.kernels == "torch" or cannot_run_on(world.device):
        return None, []
    compute = "bf16" if config.precision.path == "manifest" else resolved.compute
    kernel, problem = _tried("modeling.loss_kernel", world, DTYPES[compute])
    if kernel is None:
        return None, [f"the chunked loss: torch's operators {problem}"]
    return kernel.fused_softmax, ["the chunked loss: one kernel computes the softmax and its gradient"]


def _tried(module: str, world: World, *given: Any) -> tuple[Any, str | None]:
    """A module with a Triton kernel; None, with rank and reason, if a rank finds it missing or wrong. A collective."""
    kernel, problem = None, "triton is not installed, which comes with torch for CUDA"
    if find_spec("triton") is not None:
        kernel = import_module(module)
        problem = kernel.kernel_problem(world.device, *given)
    where, first = _first_problem(problem, world)
    return (kernel, None) if first is None else (None, f"{FALLEN_BACK} {where}: {first}")


def choose_fp8_kernel(regions: Regions | None, world: World) -> list[str]:
    """Test torch._scaled_mm on the shapes of the FP8 layers that can use it, and on a GPU the kernel that rounds for
    it.

    If it departs from FP8's definition on any rank, `auto` becomes `emulate` on all. Returns the decision, for the
    record; nothing if there is no choice. A collective. Raises UserError if `scaled_mm` is set and a layer cannot use
    it.
    """
    if regions is None:
        return []
    device, asked, notes = world.device, regions.fp8.kernel == "scaled_mm", []
    if device.type == "cuda" and regions.uses("fp8"):
        kernel, without = _tried("precision.fp8_kernel", world)
        round_rows_by(kernel and kernel.quantise_rows)
        notes = [f"rounding to FP8: torch's operators {without}"] if kernel is None else []
    tried: set[tuple[tuple[int, ...], torch.dtype]] = set()
    problem: str | None = None
    for name in regions.names_in("fp8"):
        shape, ambient = regions.fp8_layer(name)
        wrong = no_kernel(shape, device, ambient, regions.fp8)
        if not wrong and (shape, ambient) not in tried:
            tried.add((shape, ambient))
            wrong = kernel_problem(shape, device, ambient, regions.fp8) or ""
        elif wrong and not asked:  # this layer is emulated, the others need not be
            wrong = ""
        problem = problem or (f"torch._scaled_mm for {name} on {device}: {wrong}" if wrong else None)
    where, first = _first_problem(problem, world)
    if first is None:
        shapes = f"it matches FP8's definition on {len(tried)} weight shapes"
        return [f"precision.fp8.kernel: torch._scaled_mm; {shapes}", *notes] if tried else []
    if asked:
        raise UserError(f"precision.fp8.kernel = scaled_mm: rank {where}: {first}; set it to auto or emulate")
    regions.fp8 = replace(regions.fp8, kernel="emulate")
    return [f"precision.fp8.kernel = auto: emulated {FALLEN_BACK} {where}: {first}"]
