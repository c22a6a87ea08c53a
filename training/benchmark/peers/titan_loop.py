"""torchtitan's own Trainer: its Llama, its FSDP2, its optimizer, its train_step.

torchrun --nproc_per_node 2 -m training.benchmark.peers.titan_loop SPEC RESULT [--compile]

It is given the work (weights, tokens, learning rates, AdamW's settings) and runs with its defaults otherwise: its loss
in eight chunks of the sequence, `torch.compile` off (but for FlexAttention, which is always compiled, with autotuning)
unless `--compile` asks for what its recipes for speed have, each block and the loss compiled,
CUDA graphs on, FlexAttention on a GPU, a line of metrics every ten steps and its trace of spans. Not its default is the
`partial_dtensor` backend; see `titan_trainer`. On a CPU CUDA graphs are off and attention is SDPA.
"""

from __future__ import annotations

import tempfile
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.distributed import distributed_c10d, fsdp

from training.benchmark.peers.common import Job


def main() -> None:
    """Train the work of the command line."""
    job = Job()
    complete_torch()
    if not job.on_cuda:
        find_a_cpu()
    titan = import_module("training.benchmark.peers.titan_trainer")
    logs, tracing = (
        import_module(f"torchtitan.{name}") for name in ("tools.logging", "observability.structured_logger")
    )
    with tempfile.TemporaryDirectory() as folder:
        logs.init_logger()
        tracing.init_structured_logger(source="training", output_dir=folder, enable=True)
        trainer = titan.trainer_of(job, Path(folder))
        trainer.train()
        trainer.close()
        job.finish(titan.what_trained(trainer))


def complete_torch() -> None:
    """Give this torch two names that torchtitan 0.3.0 takes from later ones, where they are not there yet."""
    names = vars(torch.distributed)
    # a public name for a function that 2.13 has under this one
    names.setdefault("set_timeout", distributed_c10d._set_pg_timeout)
    # 2.11: a class that is imported, and used with `spmd_types` alone
    vars(fsdp).setdefault("DataParallelMeshDims", type(None))


def find_a_cpu() -> None:
    """Let torchtitan find a CPU where there is no accelerator: it takes CUDA for granted then, and has no option.

    Its modules copy these two names when they are imported, so they are set before all others are.
    """
    cpu = SimpleNamespace(
        # of torch.cpu
        set_device=torch.cpu.set_device,
        device_count=torch.cpu.device_count,
        synchronize=torch.cpu.synchronize,
        # what torch.cpu has otherwise or not at all, for the lines of its log
        current_device=lambda: 0,
        get_device_name=lambda _: "cpu",
        get_device_properties=lambda _: SimpleNamespace(total_memory=1),
        memory_stats=lambda _: {},
        reset_peak_memory_stats=lambda: None,
        empty_cache=lambda: None,
    )
    vars(import_module("torchtitan.tools.utils")).update(device_type="cpu", device_module=cpu)


if __name__ == "__main__":
    main()
