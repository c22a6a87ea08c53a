"""torchtitan's own Trainer: its Llama, its FSDP2, its optimizer, its train_step.

torchrun --nproc_per_node 2 -m lab.benchmark.peers.titan_loop SPEC RESULT [--compile]

It is given the work (weights, tokens, learning rates, AdamW's settings) and otherwise runs with its defaults
(docs/performance.md). `--compile` compiles each block and the loss, as its performance recipes do. The
`partial_dtensor` backend is not its default; see `titan_trainer`. On a CPU, CUDA graphs are off and attention is SDPA.
"""

import tempfile
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.distributed import distributed_c10d

from lab.benchmark.peers.common import Job


def main() -> None:
    """Train the work named on the command line."""
    job = Job()
    add_missing_name()
    if not job.on_cuda:
        use_cpu()
    titan = import_module("lab.benchmark.peers.titan_trainer")
    logs = import_module("torchtitan.tools.logging")
    tracing = import_module("torchtitan.observability.structured_logger")
    with tempfile.TemporaryDirectory() as folder:
        logs.init_logger()
        tracing.init_structured_logger(source="training", output_dir=folder, enable=True)
        trainer = titan.trainer_of(job, Path(folder))
        trainer.train()
        trainer.close()
        job.finish(titan.trained_with(trainer))


def add_missing_name() -> None:
    """Add a function to this torch that torchtitan 0.3.0 imports: torch 2.13 has it only under a private name."""
    vars(torch.distributed).setdefault("set_timeout", distributed_c10d._set_pg_timeout)


def use_cpu() -> None:
    """Make torchtitan run on a CPU: without an accelerator it assumes CUDA, and it has no option.

    Its modules copy these two names on import, so they are set before any other module is imported.
    """
    cpu = SimpleNamespace(
        # from torch.cpu
        set_device=torch.cpu.set_device,
        device_count=torch.cpu.device_count,
        synchronize=torch.cpu.synchronize,
        # different or missing in torch.cpu, used for logging
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
