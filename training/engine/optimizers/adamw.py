"""AdamW (Loshchilov and Hutter 2019): decoupled weight decay."""

import os
import sys
from pathlib import Path
from typing import Any

import torch
from deepspeed.accelerator import get_accelerator

from config.errors import UserError, one_line
from config.machine import op_builds
from training.engine.optimizers.rule import UNIT, UpdateInputs, adam_averages


def build(groups: list[dict[str, Any]], options: dict[str, Any], *, offload_to_host: bool) -> torch.optim.Optimizer:
    """DeepSpeed's CPU kernel when a GPU run offloads its state, else torch's fused one, as fast and without a build."""
    if offload_to_host:
        from deepspeed.ops.adam import DeepSpeedCPUAdam

        load_cpu_adam()
        return DeepSpeedCPUAdam(groups, adamw_mode=True, **options)
    return torch.optim.AdamW(groups, fused=True, **options)


def load_cpu_adam() -> None:
    """Build or load the op of DeepSpeed's CPU kernel before DeepSpeed does. Raises UserError."""
    programs, path = str(Path(sys.executable).parent), os.environ.get("PATH", "").split(os.pathsep)
    if path[0] != programs:  # another environment's ninja would consider every op outdated and rebuild it
        os.environ["PATH"] = os.pathsep.join([programs, *path])
    op_builds.use_own_folder()
    op = get_accelerator().create_op_builder("CPUAdamBuilder")
    try:
        with op_builds.exclusive_build(op.name, lambda line: print(line, flush=True)):
            op.load(verbose=False)
    except Exception as error:  # from the compiler, torch or the loader
        raise UserError(
            f"zero_optimization.offload_optimizer: DeepSpeed's op {op.name} cannot be built in "
            f"{op_builds.extensions_folder()} ({one_line(error)}); install a C++ compiler (apt-get install g++) and "
            "ninja (pip install ninja), set TORCH_EXTENSIONS_DIR to a folder that may be written, or train without "
            "offload"
        ) from error


def update(given: UpdateInputs) -> torch.Tensor:
    """Algorithm 2 of the paper, with the schedule included in `lr`."""
    first, second = adam_averages(given)
    return -given.lr * (given.weight_decay * given.master + first / (second.sqrt() + given.section.eps))


def averages_after(given: UpdateInputs) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The `after` of an optimizer with Adam's averages whose step depends on whole parameters."""
    expected, (of_master, *slack) = after(given)
    return expected, [torch.full_like(of_master, torch.inf), *slack]


def after(given: UpdateInputs) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Master and both averages after the step, FP64, and how far a computation in FP32 may be from each. Each bound is
    a number of roundings times the unit round-off times the size of what is rounded, plus the effect of an average's
    error on the quotient. torch's fused kernel on a CPU stays within 0.53 of them (docs/corruption.md)."""
    first, second = given.states
    (beta1, beta2), gradient, eps = given.section.betas, given.gradient, given.section.eps
    master = given.master + update(given)
    averages = [beta1 * first + (1 - beta1) * gradient, beta2 * second + (1 - beta2) * gradient.square()]
    slack = [8 * UNIT * (first.abs() + gradient.abs()), 16 * UNIT * averages[1]]
    corrected = (averages[1] / (1 - beta2**given.step)).sqrt() + eps
    of_quotient = (slack[0] + 32 * UNIT * averages[0].abs()) / (1 - beta1**given.step) / corrected
    change = given.lr * (of_quotient + 4 * UNIT * given.weight_decay * given.master.abs())
    return [master, *averages], [2 * UNIT * (given.master.abs() + master.abs()) + change, *slack]
